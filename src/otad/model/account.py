"""One account of how a model found its answers, for evaluations, experiments and reports."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from otad.cip import Status, least_smoothness
from otad.model.diagnostics import Distribution, changed_by_potential
from otad.model.otad import OTAD, Trace


@dataclass(frozen=True)
class SolverAccount:
    """How `n` answers were found, in plain values.

    `statuses`: the share of the answers by status. `smoothness`: the L that was used, where there
    is one. `residual`: the largest, graded in float64, of the answers that are not estimates.
    `share_raised`: the share that needed a larger L than was asked for.

    Where asked for: `changed_by_potential`, the share of class predictions that differ between the
    two extreme potentials (None without a choice); `relative_error` between the features of the
    net and of the answers; `least_smoothness`, the least L for the K neighbors of an input.
    """

    statuses: dict[str, float]
    smoothness: Distribution | None
    residual: float | None
    relative_error: Distribution | None = None
    changed_by_potential: float | None = None
    least_smoothness: Distribution | None = None
    share_raised: float | None = None
    n: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """How many answers have each status; only those that occur."""
        return {name: round(share * self.n) for name, share in self.statuses.items() if share}


class AccountBuilder:
    """Answers batches and gathers the account of all of them."""

    def __init__(
        self,
        model: OTAD,
        *,
        potentials: bool = False,
        relative_error: bool = False,
        least_smoothness: bool = False,
    ) -> None:
        self.model = model
        chooses = model.answerer.chooses_potential and model.backbone.task == "classification"
        self._asks_potentials = potentials and chooses
        self._asks_error = relative_error
        self._asks_least = least_smoothness
        self._rows: defaultdict[str, list[Tensor]] = defaultdict(list)

    def rows(self, name: str) -> Tensor | None:
        """One value per answer (n,): "status", "smoothness", "residual", and what was asked for of
        "changed_by_potential", "relative_error", "least_smoothness"."""
        return torch.cat(self._rows[name]) if name in self._rows else None

    @torch.no_grad()
    def add(self, x: Tensor, trace: Trace | None = None) -> Trace:
        """Answer inputs (B,*input_shape), unless their trace is given, and keep the account."""
        model, backbone = self.model, self.model.backbone
        trace = model.trace(x) if trace is None else trace
        embedded, solution = backbone.embed(x), trace.solution
        found = {
            "status": solution.status,
            "smoothness": solution.smoothness,
            "residual": model.answerer.residual(model, embedded, trace),
        }
        if self._asks_potentials:
            found["changed_by_potential"] = changed_by_potential(model, embedded, trace.neighbors)
        if self._asks_error:
            learned = backbone.transport(embedded)[0]
            error = (learned - solution.image).square().sum(1)
            found["relative_error"] = error / learned.square().sum(1)
        if self._asks_least:
            indices = trace.neighbors.indices
            if not model.answerer.rests_on_neighbors:  # those are the points with weight
                indices = model.neighbors(model.query_keys(x)).indices
            nearest = model.problem(embedded, indices[:, : model.n_neighbors])
            found["least_smoothness"] = least_smoothness(nearest)
        for name, values in found.items():
            self._rows[name].append(values.cpu())
        return trace

    def account(self) -> SolverAccount:
        status, smoothness, residual = (
            torch.cat(self._rows[name]) for name in ("status", "smoothness", "residual")
        )
        exact, asked = residual[status < int(Status.ESTIMATED)], self.model.smoothness
        changed = self.rows("changed_by_potential")
        return SolverAccount(
            statuses={one.name.lower(): float((status == one).double().mean()) for one in Status},
            smoothness=Distribution.of(smoothness),
            residual=float(exact.max()) if len(exact) else None,
            relative_error=self._distribution("relative_error"),
            changed_by_potential=None if changed is None else float(changed.double().mean()),
            least_smoothness=self._distribution("least_smoothness"),
            share_raised=float((smoothness > asked * (1 + 1e-9)).double().mean()),
            n=len(status),
        )

    def _distribution(self, name: str) -> Distribution | None:
        values = self.rows(name)
        return None if values is None else Distribution.of(values)
