"""An account of how a model found its answers, for evaluations, experiments and reports."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from otad.cip import Status
from otad.model.diagnostics import Distribution, changed_by_potential, neighborhood_smoothness
from otad.model.otad import OTAD
from otad.model.trace import Trace


@dataclass(frozen=True)
class SolverAccount:
    """How the answers of a model were found.

    Attributes
    ----------
    statuses : dict of str to float
        The share of answers with each status: see `otad.cip.Status`.
    smoothness : Distribution or None
        The L that was used.
    residual : float or None
        The largest residual in float64 of the answers that are not estimates.
    relative_error : Distribution or None
        The squared difference between the features of the network and of the answers, relative to
        the former, if it was asked for.
    changed_by_potential : float or None
        The share of class predictions that differ between the two extreme potentials, if it was
        asked for and there is a choice of a potential.
    least_smoothness : Distribution or None
        The least L for the K neighbors of an input, if it was asked for.
    share_raised : float or None
        The share of answers that needed a larger L than the model asks for.
    n : int
        The number of answers.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> from otad.model.account import AccountBuilder
    >>> model = otad.defend(None, torch.eye(3), torch.arange(3), inputs="pixels", n_neighbors=2)
    >>> builder = AccountBuilder(model)
    >>> trace = builder.add(torch.eye(3))
    >>> account = builder.account()
    >>> account.n, account.counts
    (3, {'solved': 3})
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
        """How many answers have each status that occurs."""
        return {name: round(share * self.n) for name, share in self.statuses.items() if share}


@dataclass(eq=False)
class AccountBuilder:
    """Answers batches and gathers the account of all of them."""

    model: OTAD
    _: KW_ONLY
    potentials: bool = False
    relative_error: bool = False
    least_smoothness: bool = False

    def __post_init__(self) -> None:
        is_class = self.model.backbone.task == "classification"
        self.potentials &= is_class and self.model.answerer.exact_solver is not None
        self._rows: defaultdict[str, list[Tensor]] = defaultdict(list)

    def rows(self, name: str) -> Tensor | None:
        """Return one value per answer (n,) of a measure, or None if it was not asked for."""
        return torch.cat(self._rows[name]) if name in self._rows else None

    @torch.no_grad()
    def add(self, x: Tensor, trace: Trace | None = None) -> Trace:
        """Add inputs (B,*input_shape) to the account and return their trace.

        If the trace is given, the model does not answer them again."""
        model, backbone = self.model, self.model.backbone
        trace = model.trace(x) if trace is None else trace
        embedded, solution = backbone.embed(x), trace.solution
        found = {
            "status": solution.status,
            "smoothness": solution.smoothness,
            "residual": model.answerer.residual(model, embedded, trace),
        }
        if self.potentials:
            found["changed_by_potential"] = changed_by_potential(model, embedded, trace.neighbors)
        if self.relative_error:
            learned = backbone.transport(embedded)[0]
            error = (learned - solution.image).square().sum(1)
            found["relative_error"] = error / learned.square().sum(1)
        if self.least_smoothness:
            found["least_smoothness"] = neighborhood_smoothness(model, x)
        for name, values in found.items():
            self._rows[name].append(values.cpu())
        return trace

    def account(self) -> SolverAccount:
        """Return the account of all batches."""
        found = {name: torch.cat(values) for name, values in self._rows.items()}
        status, smoothness = found["status"], found["smoothness"]
        exact, asked = found["residual"][status < int(Status.ESTIMATED)], self.model.smoothness
        changed, nothing = self.rows("changed_by_potential"), torch.empty(0)
        return SolverAccount(
            statuses={one.name.lower(): float((status == one).double().mean()) for one in Status},
            smoothness=Distribution.of(smoothness),
            residual=float(exact.max()) if len(exact) else None,
            relative_error=Distribution.of(found.get("relative_error", nothing)),
            changed_by_potential=None if changed is None else float(changed.double().mean()),
            least_smoothness=Distribution.of(found.get("least_smoothness", nothing)),
            share_raised=float((smoothness > asked * (1 + 1e-9)).double().mean()),
            n=len(status),
        )
