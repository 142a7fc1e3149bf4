"""Processes that work on one task together, such as those that `torchrun` starts.

They are the processes of the default group of `torch.distributed`, if the program has one. Each
process computes a share of the rows, and all of them get the results of all rows. So decisions that
depend on results are the same everywhere."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch import distributed as dist

from otad.checks import check_device, require

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])
Item = TypeVar("Item")


@dataclass(frozen=True)
class Processes:
    """`count` processes, of which this one is number `rank`.

    They exchange tensors on `device`. One process alone exchanges nothing."""

    rank: int = 0
    count: int = 1
    device: torch.device | str = "cpu"

    @classmethod
    def joined(cls, device: torch.device | str) -> Processes:
        """Return the processes of the default group, or this one alone if there is no group."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls(device=device)
        return cls(dist.get_rank(), dist.get_world_size(), device)

    def sizes(self, rows: int) -> list[int]:
        """Return the number of rows in the share of each process."""
        return [rows // self.count + (rank < rows % self.count) for rank in range(self.count)]

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """Return the consecutive items, of a list of all, that are the share of this process."""
        sizes = self.sizes(len(items))
        start = sum(sizes[: self.rank])
        return items[start : start + sizes[self.rank]]

    def share_rows(self, whole: Tensor) -> Tensor:
        """Return the share (b,...) of a batch (B,...), or its first row if the share is empty.

        So every process has a row to compute with, and calls the same layers."""
        own = whole if self.count == 1 else cast(Tensor, self.share(cast(Any, whole)))
        return own if len(own) else whole[:1]

    def gather_rows(self, own: Tensor, rows: int) -> Tensor:
        """Return the results (B,...) of a batch of B = `rows` from the results of shares.

        If each row has m results, `own` is (m b,...) and the result is (m B,...), with the first
        results of all rows first. Every process is expected to compute the same loss from the
        result. Its gradient is then the mean over processes, as `average` computes it."""
        if self.count == 1:
            return own
        sizes = self.sizes(rows)
        at_once = max(1, sizes[self.rank])
        parts = own.unflatten(0, (-1, at_once)).transpose(0, 1)
        whole: Tensor = _Gather.apply(parts, self, sizes)  # type: ignore[no-untyped-call]
        return whole.transpose(0, 1).flatten(0, 1)

    def gather(self, own: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Return the concatenated tensors of all processes, without gradients.

        `sizes` are their lengths, which are exchanged first if they are not given."""
        if self.count == 1:
            return own
        if sizes is None:
            length = torch.tensor([len(own)], device=self.device)
            sizes = self.gather(length, [1] * self.count).tolist()
        padded = own.new_zeros(max(sizes), *own.shape[1:])
        padded[: sizes[self.rank]] = own[: sizes[self.rank]]
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def sum(self, own: Tensor) -> Tensor:
        """Return the sum over all processes, with gradients as in `gather_rows`."""
        return own if self.count == 1 else _Sum.apply(own)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def average(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by their means over all processes, with one message for each dtype."""
        if self.count == 1:
            return
        groups: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            groups.setdefault(tensor.dtype, []).append(tensor)
        for group in groups.values():
            packed = torch.cat([tensor.reshape(-1) for tensor in group])
            dist.all_reduce(packed)
            packed /= self.count
            numbers = packed.split([tensor.numel() for tensor in group])
            for tensor, mean in zip(group, numbers, strict=True):
                tensor.copy_(mean.view_as(tensor))

    def first_says(self, answer: bool) -> bool:
        """Return the answer of the first process, for questions that each may answer otherwise."""
        if self.count == 1:
            return answer
        own = torch.tensor([int(answer)], device=self.device)
        return bool(self.gather(own, [1] * self.count)[0])

    def require_same(self, content: Iterable[Tensor | str], name: str) -> None:
        """Refuse arguments whose content is not the same in all processes."""
        if self.count == 1:
            return
        digest = hashlib.sha256()
        for part in content:
            text = part if isinstance(part, str) else part.cpu().numpy().tobytes()
            digest.update(text.encode() if isinstance(text, str) else text)
        own = torch.tensor([list(digest.digest())], dtype=torch.uint8, device=self.device)
        others = (self.gather(own, [1] * self.count) != own).any(1).nonzero()[:, 0].tolist()
        got = f"others in process {others} than in process {self.rank}"
        require(not others, name, "the same in all processes", got)


ALONE = Processes()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, processes: Processes, sizes: Sequence[int]) -> Tensor:
        ctx.processes, ctx.sizes, ctx.rows = processes, sizes, len(own)
        return processes.gather(own, sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        rank, count = ctx.processes.rank, ctx.processes.count
        start, size = sum(ctx.sizes[:rank]), ctx.sizes[rank]
        own = gradient.new_zeros(ctx.rows, *gradient.shape[1:])
        own[:size] = count * gradient[start : start + size]  # the mean has 1 / count of it
        return own, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        total = own.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _Sum.forward(ctx, gradient)


def is_first() -> bool:
    """Return whether this process reports and writes files: the first, or the only one."""
    return Processes.joined("cpu").rank == 0


@contextmanager
def group_of(device: str) -> Iterator[str]:
    """Join the processes that `torchrun` started, if it did, and yield the device of this one.

    For "cuda" this is the GPU of its number on the machine."""
    if not (dist.is_available() and dist.is_torchelastic_launched()):
        yield device
        return
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(check_device(device))
    dist.init_process_group()
    try:
        yield device
    finally:
        dist.destroy_process_group()


def works_together(command: AnyFunction) -> AnyFunction:
    """Decorate a command with an option `device`, so that `torchrun` can start it several times."""

    @wraps(command)
    def call(**options: Any) -> Any:
        with group_of(options["device"]) as device:
            return command(**options | {"device": device})

    return cast(AnyFunction, call)
