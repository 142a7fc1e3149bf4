"""OTAD: a backbone whose features are interpolated from its training points.

For an input x the backbone embeds it, the K nearest training points are found in the embedded
space, the convex integration problem gives the feature of a Lipschitz map through their pairs
(x_i, z_i), and the backbone's own linear head reads that feature.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from otad.checks import check_choice, check_count, check_shape, check_tensor
from otad.cip import BankProblem, CipSolution, ExactCip
from otad.errors import InputError
from otad.model_files import ModelParts, read_model, write_model
from otad.neighbors import FaissSearch, Neighbors, NeighborSearch, TorchSearch
from otad.nets import Backbone, Metric, adapt
from otad.transport.bank import FeatureBank, fingerprint_of

SEARCHES: dict[str, type[NeighborSearch]] = {"torch": TorchSearch, "faiss": FaissSearch}


@dataclass(frozen=True, eq=False)
class Trace:
    """A prediction and all it rests on, one row per input.

    `outputs`: logits (B,C), or values (B,) in regression. `neighbors`: the training points found,
    `labels` (B,K) theirs. `solution`: the convex integration answer, with the weight of each
    neighbor, the curvature used, the residual and the status.
    """

    outputs: Tensor
    neighbors: Neighbors
    labels: Tensor
    solution: CipSolution


class OTAD(nn.Module):
    """A classifier or regressor x (B,*input_shape) -> logits (B,C) or values (B,).

    Inputs are in the backbone's own domain (pixels, raw features). Differentiable in x for fixed
    neighbors. The bank travels with the module (`to`, `state_dict`) unless `resident` is False:
    then it stays where it is, for instance mapped from a file, and only neighbors are read.

    - `n_neighbors` (K), `smoothness` (L), `strong_convexity` (l): the map asked for.
    - `solver`: how eq. (2) and (3) are solved. The default answers every row: where neighbors
      contradict each other beyond repair, by the nearest one alone (see `trace`).
    - `search`: "torch", or "faiss" (extra `index`).
    - `metric`: a network x (B,*input_shape) -> keys (B,m) in whose space neighbors are sought, with
      the `keys` (N,m) of the bank; None for the embedded space itself.
    """

    bank_inputs: Tensor
    bank_features: Tensor
    bank_labels: Tensor
    bank_keys: Tensor | None
    _found: tuple[Tensor, NeighborSearch] | None

    def __init__(
        self,
        backbone: Backbone,
        bank: FeatureBank,
        *,
        n_neighbors: int = 10,
        smoothness: float = 2.0,
        strong_convexity: float = 0.0,
        solver: ExactCip | None = None,
        search: str = "torch",
        resident: bool = True,
        metric: nn.Module | None = None,
        keys: Tensor | None = None,
    ) -> None:
        super().__init__()
        if bank.dim != backbone.dim:
            raise InputError(
                f"bank: expected features of dimension {backbone.dim} like the backbone's, "
                f"got {bank.dim}"
            )
        self.backbone = backbone
        self.solver = solver or ExactCip(on_failure="fallback")
        check_settings(len(bank), n_neighbors, smoothness, strong_convexity, self.solver)
        self.n_neighbors = n_neighbors
        self.smoothness = float(smoothness)
        self.strong_convexity = float(strong_convexity)
        self.search = check_choice(search, "search", tuple(SEARCHES))
        self.resident = resident
        self.notes: dict[str, Any] = {}
        self.bank_fingerprint = bank.fingerprint
        for name in ("inputs", "features", "labels"):
            tensor = getattr(bank, name)
            if resident:
                self.register_buffer(f"bank_{name}", tensor)
            else:
                setattr(self, f"bank_{name}", tensor)
        _check_keys(metric, keys, len(bank))
        self.metric = metric
        self.register_buffer("bank_keys", keys)
        self._found = None

    @property
    def n_sought(self) -> int:
        """Neighbors looked up per input: K and the solver's spares."""
        return self.n_neighbors + self.solver.spares

    @property
    def bank(self) -> FeatureBank:
        """The bank where it is now."""
        return FeatureBank(
            self.bank_inputs,
            self.bank_features,
            self.bank_labels,
            self.bank_fingerprint,
            verify=False,
        )

    @property
    def bank_points(self) -> Tensor:
        """The bank (N,m) in the space where neighbors are sought."""
        return self.bank_inputs if self.bank_keys is None else self.bank_keys

    def locate(self, x: Tensor) -> Tensor:
        """Inputs (B,*input_shape) in the space where neighbors are sought (B,m)."""
        located: Tensor = self.backbone.embed(x) if self.metric is None else self.metric(x)
        return located

    def neighbors(self, points: Tensor, *, exclude: Tensor | None = None) -> Neighbors:
        """The training points nearest to located inputs (B,m), nearest first."""
        bank = self.bank_points
        if self._found is None or self._found[0] is not bank:
            self._found = bank, SEARCHES[self.search](bank)
        return self._found[1](points, self.n_sought, exclude=exclude)

    def trace(self, x: Tensor, *, exclude: Tensor | None = None) -> Trace:
        """The prediction with its account. `exclude` (B,): bank rows that are x's own copies."""
        embedded = self.backbone.embed(self.backbone.check_inputs(x))
        located = embedded if self.metric is None else self.locate(x)
        neighbors = self.neighbors(located, exclude=exclude)
        problem = BankProblem(
            embedded,
            self.bank_inputs,
            self.bank_features,
            neighbors.indices,
            self.smoothness,
            self.strong_convexity,
        )
        solution = self.solver(problem)
        labels = self.bank_labels[neighbors.indices.to(self.bank_labels.device)].to(x.device)
        return Trace(self.backbone.head(solution.image), neighbors, labels, solution)

    def forward(self, x: Tensor) -> Tensor:
        return self.trace(x).outputs

    def save(self, folder: str | Path, **notes: Any) -> Path:
        """Write the model to a folder (safetensors + JSON card); the path of the card.

        `notes` (data, classes, metrics, ... in plain JSON) are added to those the model has.
        """
        if not (self.metric is None or isinstance(self.metric, Metric)):
            raise InputError(
                "metric: expected an otad.nets.Metric, which can describe itself, to save the "
                f"model, got {type(self.metric).__name__}"
            )
        settings = {
            "n_neighbors": self.n_neighbors,
            "smoothness": self.smoothness,
            "strong_convexity": self.strong_convexity,
            "search": self.search,
            "solver": asdict(self.solver),
        }
        parts = ModelParts(
            self.backbone, self.bank, settings, self.notes | notes, self.metric, self.bank_keys
        )
        return write_model(folder, parts)

    def get_extra_state(self) -> Tensor:
        """The bank's fingerprint: a state dict tells which bank it belongs to."""
        return torch.tensor(list(self.bank_fingerprint.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        fingerprint = bytes(state.tolist()).decode()
        if not self.resident and fingerprint != self.bank_fingerprint:
            raise InputError(
                f"state_dict: expected the state of a model with the bank {self.bank_fingerprint}, "
                f"which is not resident and cannot be replaced, got one with {fingerprint}"
            )
        self.bank_fingerprint = fingerprint
        self._found = None  # the points of the bank may be others now

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_found": None}  # a copy makes its own search when it needs one

    def extra_repr(self) -> str:
        return (
            f"bank={len(self.bank_inputs)} points, n_neighbors={self.n_neighbors}, "
            f"smoothness={self.smoothness:g}, strong_convexity={self.strong_convexity:g}, "
            f"mode={self.solver.mode}"
        )


def _check_keys(metric: nn.Module | None, keys: Tensor | None, points: int) -> None:
    if (metric is None) != (keys is None):
        raise InputError("metric: expected together with the keys of the bank, got one of the two")
    if keys is not None:
        check_tensor(keys, "keys", "N,m")
        check_shape(keys, "keys", (points, keys.shape[1]), "with one key per bank point")


def check_settings(
    points: int,
    n_neighbors: int,
    smoothness: float,
    strong_convexity: float,
    solver: ExactCip,
) -> None:
    """Refuse what cannot be asked of a bank of so many points, before any long work is done."""
    sought = check_count(n_neighbors, "n_neighbors") + solver.spares
    if sought > points:
        raise InputError(
            f"n_neighbors: expected at most the {points} points of the bank, got {n_neighbors} "
            f"and {solver.spares} spares"
        )
    if not -math.inf < strong_convexity < smoothness < math.inf or smoothness <= 0:
        raise InputError(
            "smoothness: expected a finite value above 0 and above strong_convexity "
            f"({strong_convexity}), got {smoothness}"
        )
    if solver.max_smoothness is not None and solver.max_smoothness < smoothness:
        raise InputError(
            f"max_smoothness: expected at least the smoothness {smoothness}, "
            f"got {solver.max_smoothness}"
        )


def defend(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    n_neighbors: int = 10,
    smoothness: float = 2.0,
    strong_convexity: float = 0.0,
    solver: ExactCip | None = None,
    search: str = "torch",
    resident: bool = True,
    bank_dtype: torch.dtype = torch.float32,
    bank_path: str | None = None,
    metric: nn.Module | None = None,
    batch_size: int = 1024,
    progress: Callable[[int, int], None] | None = None,
) -> OTAD:
    """Turn a trained network into an OTAD model with the bank of its training data.

    `net` is a `Backbone`, or an `nn.Sequential` that ends in a Linear layer and keeps the size of
    its flattened input up to there (see `otad.nets.adapt`; other nets are given in parts, by
    `otad.nets.SequentialBackbone`); it is put in evaluation mode. `x` (N,*input_shape) and `y` (N,)
    are the training data. With `bank_path` the bank is written there as it is made and mapped from
    the file. With a `metric` (see `OTAD`), which is put in evaluation mode too, neighbors are
    sought among its keys.
    """
    solver = solver or ExactCip(on_failure="fallback")
    shape = x.shape[1:] if isinstance(x, Tensor) else None
    is_value = isinstance(y, Tensor) and y.is_floating_point()
    task = "regression" if is_value else "classification"
    backbone = adapt(net, input_shape=shape, task=task).eval()
    inputs = backbone.check_inputs(x)
    targets = backbone.check_targets(y, len(inputs))
    check_settings(len(inputs), n_neighbors, smoothness, strong_convexity, solver)

    def transport(batch: Tensor) -> tuple[Tensor, Tensor]:
        embedded = backbone.embed(batch.to(backbone.mean.device))
        return embedded, backbone.transport(embedded)[0]

    bank = FeatureBank.build(
        transport,
        inputs,
        targets,
        fingerprint=fingerprint_of(backbone, {"x": inputs, "y": targets}),
        batch_size=batch_size,
        dtype=bank_dtype,
        path=bank_path,
        progress=progress,
    )
    model = OTAD(
        backbone,
        bank.to(backbone.mean.device) if resident else bank,
        n_neighbors=n_neighbors,
        smoothness=smoothness,
        strong_convexity=strong_convexity,
        solver=solver,
        search=search,
        resident=resident,
        metric=None if metric is None else metric.to(backbone.mean.device).eval(),
        keys=None if metric is None else _keys(metric, inputs, backbone.mean.device, batch_size),
    )
    return model.eval()


@torch.no_grad()
def _keys(metric: nn.Module, x: Tensor, device: torch.device, batch_size: int) -> Tensor:
    """The keys (N,m) of training inputs."""
    return torch.cat([metric(batch.to(device)) for batch in x.split(batch_size)])


def load(
    folder: str | Path, *, device: str = "cpu", resident: bool = True, verify: bool = True
) -> OTAD:
    """The model of a folder written by `OTAD.save`; its card's notes are in `model.notes`.

    With `resident=False` the bank stays mapped from its file. `verify=False` skips reading the
    whole bank for its checksum.
    """
    parts = read_model(folder, verify=verify, mmap=not resident)
    settings = dict(parts.settings)
    try:
        solver = dict(settings.pop("solver"))
        if solver.get("climb") is not None:
            solver["climb"] = tuple(solver["climb"])  # JSON knows lists only
        model = OTAD(
            parts.backbone,
            parts.bank,
            solver=ExactCip(**solver),
            resident=resident,
            metric=parts.metric,
            keys=parts.keys,
            **settings,
        )
    except (KeyError, TypeError) as error:
        raise InputError(f"{folder}: expected the settings of a model, got: {error}") from error
    model.notes = parts.notes
    return model.to(device).eval()
