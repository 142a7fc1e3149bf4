"""A Ray cluster as an executor, and as the home of a bank's shards.

This is the only module that imports Ray (extra `cluster`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from otad.arguments import guard
from otad.checks import check_count
from otad.errors import OtadError, import_extra
from otad.io.mapped_rows import block_of
from otad.io.sharing import Bytes
from otad.model.bank import FeatureBank
from otad.model.bank_shards import read_index
from otad.search.neighbors import WORKING_BYTES, Candidates, Search, TorchSearch
from otad.search.sharded import ShardedSearch

__all__ = ["RayExecutor", "cluster_search"]
EXTRA = "cluster"
RETRIES = 3  # of a task whose worker or node is lost


class RayExecutor(Executor):
    """The workers of a Ray cluster, for the argument `executor` of `otad.evaluate` and others.

    Every machine of the cluster needs the same versions of otad and torch. A model is sent to each
    machine once, where all workers read it from Ray's shared memory. Ray starts a task again whose
    worker or machine is lost. Classes of your own travel with `cloudpickle`.

    Parameters
    ----------
    address : str
        "auto" for the cluster that this machine belongs to, `ray://head:10001` for another one, or
        "local" for a new one on this machine. If your program is connected already, that cluster is
        used, and the address is not.
    num_gpus : int
        The GPUs that each task takes for itself.

    Raises
    ------
    OtadError
        If no cluster can be reached.

    Examples
    --------
    >>> import otad
    >>> from otad.cluster import RayExecutor
    >>> digits = otad.data.load("digits")
    >>> net = otad.nets.fc_resnet((1, 8, 8), 10, blocks=1, hidden=16)
    >>> model = otad.defend(net, digits.train_x[:200], digits.train_y[:200])
    >>> with RayExecutor("auto") as cluster:  # doctest: +SKIP
    ...     otad.predict(model, digits.test_x, executor=cluster).shape
    torch.Size([360, 10])
    """

    def __init__(self, address: str = "auto", *, num_gpus: int = 0) -> None:
        check_count(num_gpus, "num_gpus", least=0)
        self._ray = ray = import_extra("ray", EXTRA)
        self._owns = not ray.is_initialized()
        if self._owns:
            try:
                ray.init(address, log_to_driver=False, logging_level="ERROR")
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise OtadError(
                    f"address: expected a Ray cluster at {address!r}, got: {error}"
                ) from error
        self.pickler = ray.cloudpickle.CloudPickler
        self._call = ray.remote(_call).options(max_retries=RETRIES, num_gpus=num_gpus)

    @property
    def workers(self) -> int:
        """The number of CPUs of the cluster now."""
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def submit(self, function: Any, /, *args: Any, **options: Any) -> Future[Any]:
        """Run a function on the cluster, and return a `concurrent.futures.Future`."""
        reference = self._call.remote(function, args, options)
        found: Future[Any] = Future()

        def deliver(done: Future[Any]) -> None:
            # A cancelled task runs to its end, unheard: `ray.cancel` can crash the caller when a
            # task finishes at the same moment.
            if not found.set_running_or_notify_cancel():
                return
            if (error := done.exception()) is None:
                found.set_result(done.result())
            elif isinstance(error, self._ray.exceptions.RayTaskError):
                found.set_exception(error.cause)
            else:
                what = f"the cluster lost a task {RETRIES + 1} times or cannot be reached"
                found.set_exception(OtadError(f"{what}: {error}"))

        reference.future().add_done_callback(deliver)
        return found

    def share(self, arrays: Sequence[Bytes]) -> Callable[[], Sequence[Bytes]]:
        """Put arrays into the shared memory of the cluster, and return how a worker reads them."""
        return _Object(self._ray.put(list(arrays)))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster, if it was entered here."""
        if self._owns:
            self._ray.shutdown()


@dataclass(frozen=True)
class _Object:
    """Arrays in the shared memory of a cluster, which every machine receives once."""

    reference: Any

    def __call__(self) -> Sequence[Bytes]:
        found: Sequence[Bytes] = import_extra("ray", EXTRA).get(self.reference)
        return found


def _call(function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return function(*args, **options)


def cluster_search(folder: str | Path, *, resident: bool = True) -> ShardedSearch:
    """Search the inputs of a bank of shards, each on a worker of the Ray cluster.

    The neighbors, their distances and their proof are those of the whole bank on one machine. Ray
    starts a worker again that is lost, which then reads its shard again. Connect to the cluster
    first, by `RayExecutor` or by `ray.init`.

    Parameters
    ----------
    folder : path
        The folder of the shards, which all machines can read, such as `bank-...` in the folder of a
        model that was saved with `shards`.
    resident : bool
        Whether workers read their shard into memory. If False, they map it from its file.

    Returns
    -------
    ShardedSearch
        The search. `model.use_search` lets a model use it.

    Examples
    --------
    >>> from otad.cluster import RayExecutor, cluster_search
    >>> with RayExecutor("auto"):  # doctest: +SKIP
    ...     search = cluster_search("large-model/bank-3f1b8c0d9a2e4f56")
    ...     search(queries, 10).indices.shape
    torch.Size([100, 10])
    """
    ray, folder = import_extra("ray", EXTRA), Path(folder).absolute()
    lasting = ray.remote(_Shard).options(max_restarts=-1, max_task_retries=-1)
    index = read_index(folder)
    shards = [
        RemoteShard(
            lasting.remote(str(folder / name), resident), entry["points"], index["metadata"]["dim"]
        )
        for name, entry in index["shards"].items()
    ]
    return ShardedSearch(shards, ThreadPoolExecutor(len(shards)))


class _Shard:
    """What a worker holds: the search of one shard."""

    def __init__(self, path: str, resident: bool) -> None:
        self._search = TorchSearch(FeatureBank.load(path, mmap=not resident).inputs)

    def candidates(self, *asked: Any) -> Candidates:
        return self._search.candidates(*asked)

    def block(self, start: int, stop: int) -> Tensor:
        return block_of(self._search.points, start, stop).clone()  # a view would be sent whole


class RemoteShard(Search):
    """The search of a shard with so many points of dimension `dim`, by a worker."""

    def __init__(self, worker: Any, points: int, dim: int) -> None:
        self.worker, self._points, self.dim = worker, points, dim

    def __len__(self) -> int:
        return self._points

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        for indices in torch.arange(self._points).split(max(1, WORKING_BYTES // (8 * self.dim))):
            ends = int(indices[0]), int(indices[-1]) + 1
            yield indices, self._result(self.worker.block.remote(*ends))

    def candidates(self, queries: Tensor, k: int, size: int, exclude: Tensor) -> Candidates:
        asked = self.worker.candidates.remote(queries.cpu(), k, size, exclude.cpu())
        return Candidates(*(one.to(queries.device) for one in self._result(asked)))

    def _result(self, asked: Any) -> Any:
        try:
            return import_extra("ray", EXTRA).get(asked)
        except Exception as error:  # of Ray, which has no class for all of them
            raise OtadError(f"the cluster cannot search a shard: {error}") from error


guard(globals(), __all__)
