"""OTAD: a backbone whose features are interpolated from its training points.

For an input x the backbone embeds it, the convex integration problem gives the feature of a
Lipschitz map through pairs (x_i, z_i) of training points, and the backbone's own linear head reads
that feature. The pairs are those of the K nearest training points, sought for each input (local
scope), or of all of them, by one map for every input (global scope).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from otad.checks import check_choice, check_evaluation, check_shape, check_tensor
from otad.cip import BankProblem, CipSolution, ExactCip
from otad.cip.protocols import Solver
from otad.cip.surrogate import CipNet
from otad.cip.whole_bank.potential import BankPotential
from otad.errors import InputError
from otad.model.answerers import (
    LOCAL_SMOOTHNESS,
    Answer,
    answer_by,
    check_settings,
    describe_solver,
    potential_of,
)
from otad.model.bank import FeatureBank
from otad.model.bank_module import Banked
from otad.model.folder import ModelParts, read_model, write_model
from otad.nets import Backbone, Metric
from otad.search.neighbors import FaissSearch, Neighbors, NeighborSearch, TorchSearch

SEARCHES: dict[str, type[NeighborSearch]] = {"torch": TorchSearch, "faiss": FaissSearch}


@dataclass(frozen=True, eq=False)
class Trace:
    """A prediction and all it rests on, one row per input.

    `outputs`: logits (B,C), or values (B,) in regression. `neighbors`: the training points found,
    `labels` (B,K) theirs. `solution`: the convex integration answer, with the weight of each
    neighbor, the curvature used, the residual and the status.

    In global scope the neighbors are the support of the answer, most weight first, padded with
    points of weight 0, and `gap` (B,) bounds how far its feature is from the exact one:
    |z' - exact|^2 <= 2 (L - l) gap. In local scope it is None.
    """

    outputs: Tensor
    neighbors: Neighbors
    labels: Tensor
    solution: CipSolution
    gap: Tensor | None = None


class OTAD(Banked):
    """A classifier or regressor x (B,*input_shape) -> logits (B,C) or values (B,).

    Inputs are in the backbone's own domain (pixels, raw features). Differentiable in x for fixed
    neighbors. The bank travels with the module (`to`, `state_dict`) unless `resident` is False:
    then it stays where it is, for instance mapped from a file, and only neighbors are read.

    The bank is that of the nets as they were: `train()` leaves all parts in evaluation mode, while
    gradients reach inputs, and nets that are trained further must be defended anew.

    - `n_neighbors` (K), `smoothness` (L), `strong_convexity` (l): the map asked for.
    - `scope`: "local", each input by its own K neighbors, L = 2 by default; or "global", one map
      for the whole bank, by default of the least L that all its points allow. For a smaller L
      points that contradict the others are left out: see `potential`, which is found here, by
      sweeps over all pairs, unless it is given. K then is that of k-NN twins and attacks alone.
    - `solver`: how eq. (2) and (3) are solved in local scope. The default answers every row: where
      neighbors contradict each other beyond repair, by the nearest one alone (see `trace`). A
      trained `otad.cip.surrogate.CipNet` estimates the answers instead (the paper's OTAD-T-NN): a
      part of this module, as differentiable in x, and without weights, residuals or proofs.
    - `search`: "torch", or "faiss" (extra `index`), by which neighbors or the support are found.
    - `metric`: a network x (B,*input_shape) -> keys (B,m) in whose space neighbors are sought, with
      the `keys` (N,m) of the bank; None for the embedded space itself.
    """

    bank_keys: Tensor | None
    solver: Solver

    def __init__(
        self,
        backbone: Backbone,
        bank: FeatureBank,
        *,
        n_neighbors: int = 10,
        scope: str = "local",
        smoothness: float | None = None,
        strong_convexity: float = 0.0,
        potential: BankPotential | None = None,
        solver: Solver | None = None,
        search: str = "torch",
        resident: bool = True,
        metric: nn.Module | None = None,
        keys: Tensor | None = None,
    ) -> None:
        if bank.dim != backbone.dim:
            raise InputError(
                f"bank: expected features of dimension {backbone.dim} like the backbone's, "
                f"got {bank.dim}"
            )
        asked = n_neighbors, smoothness, strong_convexity, solver, scope
        check_settings(len(bank), *asked, dim=bank.dim)
        check_keys(metric, keys, len(bank), scope)
        if scope == "local" and potential is not None:
            raise InputError("potential: expected with scope 'global' alone, got scope 'local'")
        if scope == "global":
            if potential is None:
                potential = potential_of(bank, smoothness, strong_convexity, lift=backbone.lift)
            elif smoothness is not None and not math.isclose(smoothness, potential.smoothness):
                raise InputError(
                    f"smoothness: expected {potential.smoothness}, that of the potential, or None, "
                    f"got {smoothness}"
                )
            smoothness, strong_convexity = potential.smoothness, potential.strong_convexity
        super().__init__(
            bank,
            resident=resident,
            search=check_choice(search, "search", tuple(SEARCHES)),
            smoothness=LOCAL_SMOOTHNESS if smoothness is None else smoothness,
            strong_convexity=strong_convexity,
            potential=potential,
        )
        self.backbone = backbone
        self.solver = solver or ExactCip(on_failure="fallback")
        self.n_neighbors = n_neighbors
        self.notes: dict[str, Any] = {}
        self.metric = metric
        self.register_buffer("bank_keys", keys)
        self.eval()

    def train(self, mode: bool = True) -> OTAD:
        """Evaluation mode, whatever is asked for: others would move statistics of batches, and so
        inputs away from the bank."""
        super().train(False)
        return self

    @property
    def n_sought(self) -> int:
        """Neighbors looked up per input: K and the solver's spares."""
        return self.n_neighbors + self.solver.spares

    @property
    def bank_points(self) -> Tensor:
        """The bank (N,m) in the space where neighbors are sought."""
        return self.bank_inputs if self.bank_keys is None else self.bank_keys

    def locate(self, x: Tensor) -> Tensor:
        """Inputs (B,*input_shape) in the space where neighbors are sought (B,m)."""
        check_evaluation(self, "model")
        return self.backbone.embed(x) if self.metric is None else keys_of(x, self.metric)

    def neighbors(self, points: Tensor, *, exclude: Tensor | None = None) -> Neighbors:
        """The training points nearest to located inputs (B,m), nearest first."""
        bank = self.bank_points
        if self._found is None or self._found[0] is not bank:
            self._found = bank, SEARCHES[self.search](bank)
        return self._found[1](points, self.n_sought, exclude=exclude)

    def solve(
        self, embedded: Tensor, located: Tensor | None = None, *, exclude: Tensor | None = None
    ) -> Answer:
        """The convex integration answer to embedded inputs (B,d): what the scopes differ in.

        `located` (B,m): the same inputs where neighbors are sought, if that is another space.
        """
        if self.scope == "global":
            if exclude is not None:
                raise InputError(
                    "exclude: expected None in global scope, where one map passes through all "
                    "bank points, got rows to leave out"
                )
            return answer_by(self.whole_bank, self.bank_inputs, embedded)
        if located is None and self.metric is not None:
            raise InputError("located: expected keys, as neighbors are sought by a metric")
        points = embedded if located is None else located
        neighbors = self.neighbors(points, exclude=exclude)
        problem = BankProblem(
            embedded,
            self.bank_inputs,
            self.bank_features,
            neighbors.indices,
            self.smoothness,
            self.strong_convexity,
        )
        return Answer(neighbors, self.solver(problem))

    def trace(self, x: Tensor, *, exclude: Tensor | None = None) -> Trace:
        """The prediction with its account. `exclude` (B,): bank rows that are x's own copies, for
        local scope alone."""
        check_evaluation(self, "model")
        embedded = self.backbone.embed(self.backbone.check_inputs(x))
        located = None if self.metric is None else self.locate(x)
        found = self.solve(embedded, located, exclude=exclude)
        indices = found.neighbors.indices.to(self.bank_labels.device)
        labels = self.bank_labels[indices].to(x.device)
        outputs = self.backbone.head(found.solution.image)
        return Trace(outputs, found.neighbors, labels, found.solution, found.gap)

    def forward(self, x: Tensor) -> Tensor:
        return self.trace(x).outputs

    def with_solver(self, solver: Solver) -> OTAD:
        """The same net and bank, answered by another solver; in local scope."""
        model = OTAD(
            self.backbone,
            self.bank,
            n_neighbors=self.n_neighbors,
            scope=self.scope,
            smoothness=self.smoothness,
            strong_convexity=self.strong_convexity,
            solver=solver,
            search=self.search,
            resident=self.resident,
            metric=self.metric,
            keys=self.bank_keys,
        )
        model.notes = dict(self.notes)
        return model

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
        }
        surrogate = self.solver if isinstance(self.solver, CipNet) else None
        if self.scope == "global":
            settings["scope"] = self.scope
        elif surrogate is None:
            settings["solver"] = describe_solver(self.solver)
        parts = ModelParts(
            self.backbone,
            self.bank,
            settings,
            self.notes | notes,
            self.metric,
            self.bank_keys,
            self.potential,
            surrogate,
        )
        return write_model(folder, parts)

    def extra_repr(self) -> str:
        curvature = f"smoothness={self.smoothness:g}, strong_convexity={self.strong_convexity:g}, "
        bank = f"bank={len(self.bank_inputs)} points, "
        if self.bank_levels is not None:
            left_out = int(self.bank_levels.isnan().sum())
            return f"{bank}scope=global, {curvature}left_out={left_out}"
        return f"{bank}n_neighbors={self.n_neighbors}, {curvature}mode={self.solver.mode}"


def check_keys(metric: nn.Module | None, keys: Tensor | None, points: int, scope: str) -> None:
    if metric is not None and scope == "global":
        raise InputError(
            "metric: expected none in global scope, where no neighbors are sought, got "
            f"{type(metric).__name__}"
        )
    if (metric is None) != (keys is None):
        raise InputError("metric: expected together with the keys of the bank, got one of the two")
    if keys is not None:
        check_tensor(keys, "keys", "N,m")
        check_shape(keys, "keys", (points, keys.shape[1]), "with one key per bank point")


def keys_of(x: Tensor, metric: nn.Module) -> Tensor:
    """(B,m). A user's layers may work in place; a `Metric` normalizes first."""
    keys: Tensor = metric(x if isinstance(metric, Metric) else x.clone())
    return keys


@torch.inference_mode(False)  # tensors made in that mode could never be differentiated through
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
        if parts.surrogate is not None:
            settings["solver"] = parts.surrogate
        elif parts.potential is None:
            solver = dict(settings.pop("solver"))
            if solver.get("climb") is not None:
                solver["climb"] = tuple(solver["climb"])  # JSON knows lists only
            settings["solver"] = ExactCip(**solver)
        model = OTAD(
            parts.backbone,
            parts.bank,
            potential=parts.potential,
            resident=resident,
            metric=parts.metric,
            keys=parts.keys,
            **settings,
        )
    except (KeyError, TypeError) as error:
        raise InputError(f"{folder}: expected the settings of a model, got: {error}") from error
    model.notes = parts.notes
    return model.to(device)
