"""Answerers find the feature of an embedded query.

Each one solves, describes, saves and loads itself, and declares what applies to it."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from otad.checks import check_choice, require
from otad.cip import BankProblem, CipSolution, ExactCip, Status
from otad.cip.protocols import Solver
from otad.cip.surrogate import CipNet
from otad.cip.whole_bank.map import WholeBank
from otad.cip.whole_bank.potential import BankPotential
from otad.errors import InputError
from otad.io.codec import parse_json, to_plain
from otad.io.mapped_rows import changes_of, gathered
from otad.io.tensor_files import fingerprint
from otad.model.bank_module import BankModule
from otad.model.folder import Block
from otad.nets.inputs import restored
from otad.search.neighbors import Neighbors

SCOPES = ("local", "global")
LOCAL_SMOOTHNESS = 2.0  # the default of local scope
CURVATURE = ("smoothness", "strong_convexity", "sweeps", "violation")  # the numbers of a potential
Plain = Mapping[str, Any]
Options = dict[str, Any]  # arguments of `OTAD`


@dataclass(frozen=True, eq=False)
class Answer:
    """What an answerer finds for B queries, and the training points (B,K) it is based on.

    `gap` (B,) is the duality gap of a global map: |z' - exact|^2 <= (L - l) gap."""

    neighbors: Neighbors
    solution: CipSolution
    gap: Tensor | None = None

    def __repr__(self) -> str:
        rows, count = self.neighbors.indices.shape
        sizes = f"{rows} inputs, {count} training points each"
        return f"{type(self).__name__}({sizes}: {self.solution.status_text})"


class Answerer(nn.Module, ABC):
    """How a model answers an embedded query, with the curvature (L, l) of its maps."""

    scope: ClassVar[str]  # "local" for a map of each query, "global" for one map of all queries
    card_entry: ClassVar[str | None] = None  # the entry of card.json about the saved tensors
    card_version: ClassVar[int]
    rules: tuple[str, ...] = ()  # the certificate rules that can apply
    refusal: str | None = None  # the reason if no rule can apply
    rests_on_neighbors: ClassVar[bool]  # if not, `Answer.neighbors` are the points with weight
    exact_solver: ExactCip | None = None  # of small problems; it chooses among potentials
    always_answers: bool = True  # whether no row raises an error or is left without an answer
    mode: str  # how the solver uses a raised L, in one word
    spares: int = 0  # substitutes for neighbors, which are searched in addition to the K
    solver: Solver | None  # no value here: it would hide a solver that is a module
    smoothness: float
    strong_convexity: float

    @property
    def potential(self) -> BankPotential | None:
        """The potential of a global map, else None."""
        return None

    def problem(self, bank: BankModule, embedded: Tensor, indices: Tensor) -> BankProblem:
        """Return the convex integration problem of embedded queries (B,d) and bank rows (B,K)."""
        pairs = bank.bank_inputs, bank.bank_features
        return BankProblem(embedded, *pairs, indices, self.smoothness, self.strong_convexity)

    @abstractmethod
    def answer(
        self, bank: BankModule, embedded: Tensor, keys: Tensor, exclude: Tensor | None
    ) -> Answer:
        """Answer queries, given as embedded inputs (B,d) and as keys (B,m) to search neighbors.

        `exclude` (B,) is a bank row for each query that must not be its neighbor."""

    def traced(
        self, bank: BankModule, embedded: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Return images (B,d) and distances (B,) from the bank by plain torch operations.

        These can be compiled and exported. None means that this is not possible."""
        return None

    @abstractmethod
    def residual(self, bank: BankModule, embedded: Tensor, answer: Answer) -> Tensor:
        """Return how far an answer is from exact (B,), in float64 and without a unit.

        It is infinite for an estimate and for a row without an answer."""

    def whole_bank(self, bank: BankModule) -> WholeBank:
        """Return the global map; local answerers raise `InputError`."""
        raise InputError(f"scope: expected 'global' for a global map, got {self.scope!r}")

    @abstractmethod
    def options(self) -> Options:
        """Return the arguments of `OTAD` that make this answerer again."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the settings in plain JSON, for records."""

    @abstractmethod
    def summary(self, n_neighbors: int) -> str:
        """Return the settings in a few words."""

    def settings(self) -> dict[str, Any]:
        """Return what card.json holds about it, beside L, l and the tensors."""
        return {}

    def block(self) -> Block | None:
        """Return the tensors that a model folder stores for it, or None."""
        return None

    @classmethod
    @abstractmethod
    def restore(cls, settings: Plain, entry: Plain, tensors: Mapping[str, Tensor]) -> Options:
        """Return the arguments of `OTAD` that make an answerer from the contents of a folder.

        `settings` come from card.json, `entry` and `tensors` from the answerer's own block."""


class NeighborAnswerer(Answerer):
    """Answers each query from its K nearest training points, with a potential of its own."""

    scope = "local"
    card_version = 1
    rests_on_neighbors = True
    solver: Solver

    def __init__(
        self, solver: Solver | None = None, smoothness: float | None = None, convexity: float = 0.0
    ) -> None:
        super().__init__()
        smoothness = LOCAL_SMOOTHNESS if smoothness is None else smoothness
        self.solver = solver = solver or ExactCip(on_failure="fallback")
        check_curvature(smoothness, convexity)
        cap = solver.max_smoothness
        expected = f"at least the smoothness {smoothness}"
        require(cap is None or cap >= smoothness, "max_smoothness", expected, cap)
        self.smoothness, self.strong_convexity = float(smoothness), float(convexity)
        self.mode, self.spares = solver.mode, solver.spares
        if not isinstance(solver, ExactCip):
            self.refusal = f"solver: expected ExactCip, got {type(solver).__name__}, an estimate"
            return
        self.exact_solver = solver
        self.always_answers = solver.on_failure == "fallback"
        if solver.on_failure == "abstain":
            self.refusal = "on_failure: expected 'fallback' or 'raise', got 'abstain'"
        elif solver.mode == "consistent" and solver.climb is not None and solver.climb[1] > 0:
            self.refusal = (
                "climb: expected None or (delta1, 0) in mode 'consistent', for a known strong "
                f"convexity, got {solver.climb!r}"
            )
        else:
            self.rules = ("hull", "pieces", "cell")

    def check_sizes(self, n_neighbors: int, dim: int | None) -> None:
        """Refuse a solver that was made for other sizes."""

    def answer(
        self, bank: BankModule, embedded: Tensor, keys: Tensor, exclude: Tensor | None
    ) -> Answer:
        return self.answer_from(bank, embedded, bank.neighbors(keys, exclude=exclude))

    def answer_from(self, bank: BankModule, embedded: Tensor, neighbors: Neighbors) -> Answer:
        """Answer queries whose neighbors are known, given as embedded inputs (B,d)."""
        return Answer(neighbors, self.solver(self.problem(bank, embedded, neighbors.indices)))

    def residual(self, bank: BankModule, embedded: Tensor, answer: Answer) -> Tensor:
        """Return the KKT residual, computed from the raw data."""
        solution = answer.solution
        if bool((solution.status >= int(Status.ESTIMATED)).all()):  # there is nothing to grade
            return torch.full_like(solution.residual, torch.inf)
        return self.problem(bank, embedded, answer.neighbors.indices).residual(solution)

    def options(self) -> Options:
        names = "scope", "solver", "smoothness", "strong_convexity"
        return {name: getattr(self, name) for name in names}

    def describe(self) -> dict[str, Any]:
        return {"scope": self.scope, **self.settings()}

    def summary(self, n_neighbors: int) -> str:
        return f"local: the {n_neighbors} nearest training points of each input"

    def settings(self) -> dict[str, Any]:
        given = type(self.solver).__name__
        require(self.exact_solver, "solver", "ExactCip or CipNet", given)
        return {"solver": to_plain(self.exact_solver)}

    @classmethod
    def restore(cls, settings: Plain, entry: Plain, tensors: Mapping[str, Tensor]) -> Options:
        solver = dict(settings["solver"])
        if solver.get("climb") is not None:
            solver["climb"] = tuple(solver["climb"])  # JSON has lists only
        return {**settings, "solver": ExactCip(**solver)}


class SurrogateAnswerer(NeighborAnswerer):
    """Estimates the answer of each query by a `CipNet` from its K nearest training points.

    There are no residuals and no certificates, and weights are known only if the answer is a mean
    of features."""

    card_entry = "surrogate"
    card_version = 4
    solver: CipNet

    def check_sizes(self, n_neighbors: int, dim: int | None) -> None:
        self.solver.check_sizes(n_neighbors, self.solver.dim if dim is None else dim)

    def traced(
        self, bank: BankModule, embedded: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Use only operations that runtimes other than torch have too, so no cdist."""
        points, found = bank.bank_points.double(), keys.detach().double()
        middle = points.mean(0)
        products = (found - middle) @ (points - middle).mT
        order = 2 * products - (points - middle).square().sum(1)
        indices = order.topk(self.solver.n_neighbors).indices
        nearest = (points[indices] - found[:, None]).square().sum(2).amin(1).sqrt()
        pairs = bank.bank_inputs[indices], bank.bank_features[indices]
        curvature = self.smoothness, self.strong_convexity
        return self.solver.estimate(embedded, *pairs, *curvature), nearest

    def describe(self) -> dict[str, Any]:
        return {"scope": self.scope, "solver": {"cip_net": self.solver.config()}}

    def settings(self) -> dict[str, Any]:
        return {}

    def block(self) -> Block:
        config = {"config": self.solver.config()}
        return Block("surrogate", self.solver.state_dict(), entry=config, header=config)

    @classmethod
    def restore(cls, settings: Plain, entry: Plain, tensors: Mapping[str, Tensor]) -> Options:
        return {**settings, "solver": restored(CipNet.from_config, entry["config"], tensors)}


class WholeBankAnswerer(Answerer):
    """Answers all queries by the global map, the gradient of one potential of the whole bank."""

    scope = "global"
    card_entry = "potential"
    card_version = 3
    rules = ("lipschitz",)
    rests_on_neighbors = False
    mode = "consistent"
    solver = None
    nan_buffers = ("levels",)  # NaN at points that are left out
    levels: Tensor

    def __init__(self, potential: BankPotential) -> None:
        super().__init__()
        self.register_buffer("levels", potential.levels)
        self.smoothness = float(potential.smoothness)
        self.strong_convexity = float(potential.strong_convexity)
        self.sweeps, self.violation = potential.sweeps, potential.violation
        self._map: tuple[tuple[Tensor, ...], list[int | None], WholeBank] | None = None

    @property
    def potential(self) -> BankPotential:
        return potential_from(self.levels, self._curvature())

    def _curvature(self) -> dict[str, Any]:
        """Return everything of the potential but its levels."""
        return {name: getattr(self, name) for name in CURVATURE}

    def whole_bank(self, bank: BankModule) -> WholeBank:
        made_of = bank.bank_inputs, bank.bank_features, self.levels
        changes, known = [changes_of(one) for one in made_of], self._map
        same = known is not None and all(a is b for a, b in zip(known[0], made_of, strict=True))
        if known is None or not same or changes != known[1]:
            pricing = "faiss" if bank.search == "faiss" else "exact"
            whole = WholeBank(*made_of[:2], self.potential, pricing=pricing)
            self._map = known = made_of, changes, whole
        return known[2]

    def answer(
        self, bank: BankModule, embedded: Tensor, keys: Tensor, exclude: Tensor | None
    ) -> Answer:
        """Answer queries; the neighbors are the bank points with weight (B,W), most weight first.

        Rows with fewer points repeat their first point with weight 0."""
        require(exclude is None, "exclude", "None for a global map", "rows to leave out")
        found = self.whole_bank(bank)(embedded)
        distances = distances_to(embedded.detach(), bank.bank_inputs, found.indices)
        return Answer(Neighbors(found.indices, distances), found.solution, found.gap)

    def residual(self, bank: BankModule, embedded: Tensor, answer: Answer) -> Tensor:
        """Return the duality gap over all bank points, relative to the size of its terms."""
        return answer.solution.residual

    def options(self) -> Options:
        return {"scope": self.scope, "potential": self.potential}

    def describe(self) -> dict[str, Any]:
        left_out, levels = self.potential.left_out.tolist(), fingerprint({"levels": self.levels})
        about = self._curvature() | {"left_out": left_out, "levels": levels}
        return {"scope": self.scope, "potential": about}

    def summary(self, n_neighbors: int) -> str:
        return (
            f"global: the same map for all inputs, L = {self.smoothness:.4g}, {self.sweeps} sweeps"
        )

    def settings(self) -> dict[str, Any]:
        return {"scope": self.scope}

    def block(self) -> Block:
        entry = self._curvature() | {"left_out": int(self.levels.isnan().sum())}
        return Block("levels", {"levels": self.levels}, entry=entry, of_bank=True)

    @classmethod
    def restore(cls, settings: Plain, entry: Plain, tensors: Mapping[str, Tensor]) -> Options:
        return {**settings, "potential": potential_from(tensors["levels"], entry)}

    def get_extra_state(self) -> Tensor:
        """Return the curvature that the levels belong to."""
        return torch.tensor(list(json.dumps(self._curvature()).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        found = parse_json(bytes(state.tolist()).decode(errors="replace"), "state_dict")
        numbers = isinstance(found, dict) and {type(value) for value in found.values()} <= {
            int,
            float,
        }
        good = numbers and found.keys() == self._curvature().keys()
        require(good, "state_dict", f"the numbers {', '.join(CURVATURE)}", found)
        for name, value in found.items():
            setattr(self, name, value)

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        self._map = None  # the levels and the bank may have changed in place

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the levels to another device; they stay float64, as sums along many pairs."""
        levels = self.levels
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.levels = levels.to(self.levels.device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_map": None}  # a copy makes its own map


ANSWERERS: tuple[type[Answerer], ...] = (NeighborAnswerer, SurrogateAnswerer, WholeBankAnswerer)


def is_global(scope: str) -> bool:
    """Return whether a scope asks for a global map, and refuse unknown scopes."""
    return check_choice(scope, "scope", SCOPES) == "global"


def check_curvature(smoothness: float, strong_convexity: float) -> None:
    ok = -math.inf < strong_convexity < smoothness < math.inf and smoothness > 0
    expected = f"a finite value above 0 and above strong_convexity ({strong_convexity})"
    require(ok, "smoothness", expected, smoothness)


def potential_from(levels: Tensor, about: Plain) -> BankPotential:
    curvature, left_out = {name: about[name] for name in CURVATURE}, levels.isnan().nonzero()[:, 0]
    return BankPotential(levels, left_out=left_out, **curvature)


def distances_to(query: Tensor, inputs: Tensor, indices: Tensor) -> Tensor:
    """Return |x_i - x'| (B,W) in float64, one column at a time to save memory."""
    columns = (gathered(inputs, column, query.device) for column in indices.unbind(1))
    return torch.stack([(points.double() - query).norm(dim=1) for points in columns], dim=1)
