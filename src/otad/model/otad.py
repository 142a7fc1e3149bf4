"""OTAD: a backbone whose features are interpolated from its training points.

The backbone embeds an input x. An answerer solves a convex integration problem, which gives the
feature of a Lipschitz map through pairs (x_i, z_i) of training points: the K nearest of each input
(local scope) or all of them (global scope). The backbone's own linear head reads that feature.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from otad.arguments import check_options, checked
from otad.checks import check_evaluation, check_positive, check_shape, require
from otad.cip import BankProblem
from otad.cip.protocols import Solver
from otad.cip.whole_bank.map import WholeBank
from otad.cip.whole_bank.potential import BankPotential
from otad.errors import InputError
from otad.io.codec import to_plain
from otad.model.answerer_options import make_answerer
from otad.model.answerers import Answer
from otad.model.bank import BankModule, FeatureBank
from otad.model.compiled import answer_compiled
from otad.model.folder import Block, write_model
from otad.model.model_card import EvaluationLike, add_evaluation
from otad.nets import Backbone, Metric
from otad.nets.features import parts_of_user

SAMPLE = 64  # training inputs that are embedded again
SAME = 1e-2  # of their lengths, for banks in half precision
METRIC_VERSION = 2  # the least version of a model card with a metric


@dataclass(frozen=True, eq=False, kw_only=True)
class Trace(Answer):
    """A prediction and all it rests on, one row per input. `outputs`: logits (B,C), or values (B,)
    in regression. `labels` (B,K): those of the neighbors, which for a global map are the points
    with weight, most weight first, padded with points of weight 0. `distance` (B,) float64: how far
    the inputs are from the bank, see `OTAD.distance`. Outputs are NaN where the model abstains."""

    outputs: Tensor
    labels: Tensor
    distance: Tensor
    __repr__ = Answer.__repr__


class OTAD(BankModule):
    """A classifier or regressor x (B,*input_shape) -> logits (B,C) or values (B,).

    Inputs are in the backbone's own domain (pixels, raw features). Differentiable in x for fixed
    neighbors. The bank moves with the module (`to`, `state_dict`) unless `resident` is False: then
    it stays where it is, for instance mapped from a file, and only neighbors are read.

    The bank belongs to the nets as they were when it was made. So `train()` leaves all parts in
    evaluation mode, and nets that are trained further must be defended anew.

    - `n_neighbors` (K), `smoothness` (L, None), `strong_convexity` (l, 0): the map asked for.
    - `scope`: "local", each input by its own K neighbors, L = 2 by default; or "global", the same
      map for all inputs, by default of the least L that all bank points allow. For a smaller L
      points that contradict others are left out: see `potential`, which is found here, by
      sweeps over all pairs, unless it is given; `sweep_progress` is called after each with (sweeps
      done, largest raise of a level). K is then that of k-NN baselines and attacks alone.
    - `solver`: how eq. (2) and (3) are solved in local scope. The default answers every row: where
      neighbors contradict each other beyond repair, by the nearest one alone (see `trace`). A
      trained `otad.cip.surrogate.CipNet` estimates the answers instead (the paper's OTAD-T-NN).
    - `search`: "torch", or "faiss" (extra `index`), by which neighbors or the support are found.
    - `metric`: a network x (B,*input_shape) -> keys (B,m) in whose space neighbors are searched,
      with the `keys` (N,m) of the bank; None for the embedded space itself.
    - `abstain_beyond`: inputs at a larger `distance` from the bank get no answer (NaN); None for
      no limit. `otad.distance_threshold` chooses it on held-out data. May be set later, too.

    The first four are `answering`: they make the `answerer`, see `otad.model.answerers`.
    """

    _abstain_beyond: float | None = None

    def __init__(
        self,
        backbone: Backbone,
        bank: FeatureBank,
        *,
        n_neighbors: int = 10,
        search: str = "torch",
        resident: bool = True,
        metric: nn.Module | None = None,
        keys: Tensor | None = None,
        abstain_beyond: float | None = None,
        **answering: Any,
    ) -> None:
        expected = f"features of dimension {backbone.dim} like the backbone's"
        require(bank.dim == backbone.dim, "bank", expected, bank.dim)
        most = None if bank.labels.is_floating_point() else int(bank.labels.max())
        is_value, count = backbone.task == "regression", backbone.n_outputs
        expected = "values" if is_value else f"labels from 0 to {count - 1}, one for each output"
        fits = most is None if is_value else most is not None and most < count
        require(fits, "bank", expected, "values" if most is None else f"labels up to {most}")
        asked = {"n_neighbors": n_neighbors, "metric": metric, **answering}
        answerer = make_answerer(bank, lift=backbone.lift, **asked)
        paired = (metric is None) == (keys is None)
        require(paired, "metric", "together with the bank's keys", "one of the two")
        super().__init__(bank, n_neighbors, search, resident, keys)
        self.n_searched += answerer.spares
        self.backbone, self.answerer, self.metric = backbone, answerer, metric
        self.notes: dict[str, Any] = {}
        self.abstain_beyond = abstain_beyond
        self.eval()

    def train(self, mode: bool = True) -> OTAD:
        """Stay in evaluation mode: nets that use statistics of batches would not fit the bank."""
        super().train(False)
        return self

    @property
    def abstain_beyond(self) -> float | None:
        """The distance from the bank beyond which inputs get no answer; None for no limit."""
        return self._abstain_beyond

    @abstain_beyond.setter
    def abstain_beyond(self, value: float | None) -> None:
        check_options({"abstain_beyond": float | None}, {"abstain_beyond": value})
        if value is not None:
            check_positive(value := float(value), "abstain_beyond")
        self._abstain_beyond = value

    @property
    def scope(self) -> str:
        return self.answerer.scope

    @property
    def smoothness(self) -> float:
        return self.answerer.smoothness

    @property
    def strong_convexity(self) -> float:
        return self.answerer.strong_convexity

    @property
    def solver(self) -> Solver | None:
        """What solves small problems; None in global scope."""
        return self.answerer.solver

    @property
    def potential(self) -> BankPotential | None:
        """The potential of the bank in global scope, where it is now; else None."""
        return self.answerer.potential

    @property
    def whole_bank(self) -> WholeBank:
        """The global map."""
        return self.answerer.whole_bank(self)

    @checked
    def query_keys(self, x: Tensor) -> Tensor:
        """Inputs (B,*input_shape) in the space in which neighbors are searched (B,m)."""
        check_evaluation(self, "model")
        self.backbone.check_inputs(x, dtype=x.dtype)  # the shape alone
        require(x.is_floating_point(), "x", "floating-point numbers", x.dtype)
        return self.backbone.embed(x) if self.metric is None else keys_of(x, self.metric)

    @checked
    def solve(
        self, embedded: Tensor, keys: Tensor | None = None, *, exclude: Tensor | None = None
    ) -> Answer:
        """The answer to embedded inputs (B,d), with their query keys (B,m) if there is a metric."""
        known = keys is not None or self.metric is None
        require(known, "keys", "query keys, as neighbors are searched by a metric", None)
        return self.answerer.answer(self, embedded, embedded if keys is None else keys, exclude)

    def problem(self, embedded: Tensor, indices: Tensor) -> BankProblem:
        """The convex integration problem of embedded inputs (B,d) with these bank points (B,K)."""
        return self.answerer.problem(self, embedded, indices)

    @checked
    def trace(self, x: Tensor, *, exclude: Tensor | None = None) -> Trace:
        """The prediction and what it rests on. `exclude` (B,), for local scope alone: bank rows
        that are copies of x."""
        found, keys = self._answer(x, exclude)
        distance = self._distance(found, keys, exclude)
        indices = found.neighbors.indices.to(self.bank_labels.device)
        labels = self.bank_labels[indices].to(x.device)
        outputs = self._outputs(found.solution.image, distance)
        return Trace(**vars(found), outputs=outputs, labels=labels, distance=distance)

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # the numbers of x are not checked then
            shape, expected = tuple(x.shape[1:]), self.backbone.input_shape
            require(shape == expected, "x", f"inputs of shape {expected}", shape)
            embedded = self.backbone.embed(x)
            keys = embedded if self.metric is None else keys_of(x, self.metric)
            return self._outputs(*answer_compiled(self, self.answerer, embedded, keys))
        found, keys = self._answer(x)
        limited = self.abstain_beyond is not None
        distance = self._distance(found, keys) if limited else None
        return self._outputs(found.solution.image, distance)

    def _answer(self, x: Tensor, exclude: Tensor | None = None) -> tuple[Answer, Tensor]:
        """With the query keys (B,m)."""
        check_evaluation(self, "model")
        embedded = self.backbone.embed(self.backbone.check_inputs(x))
        keys = embedded if self.metric is None else self.query_keys(x)
        return self.solve(embedded, keys, exclude=exclude), keys

    def _outputs(self, image: Tensor, distance: Tensor | None) -> Tensor:
        outputs: Tensor = self.backbone.head(image)
        if self.abstain_beyond is None or distance is None:
            return outputs
        foreign = (distance > self.abstain_beyond).view(-1, *[1] * (outputs.dim() - 1))
        return outputs.masked_fill(foreign, torch.nan)

    @checked
    @torch.no_grad()
    def distance(self, x: Tensor) -> Tensor:
        """How far inputs (B,*input_shape) are from the bank (B,), in float64: the distance to the
        nearest bank point, in the space in which neighbors are searched. It grows by no more than
        an input moves in that space."""
        nearest: Tensor = self.neighbors(self.query_keys(x).detach(), 1).distances[:, 0]
        return nearest

    def _distance(self, found: Answer, keys: Tensor, exclude: Tensor | None = None) -> Tensor:
        near = found.neighbors
        if not self.answerer.rests_on_neighbors:
            near = self.neighbors(keys.detach(), 1, exclude=exclude)
        return near.distances[:, 0]

    def replace(self, **changes: Any) -> OTAD:
        """The same model with some arguments of the constructor changed. Another scope starts from
        its defaults; with another bank or curvature a global potential that is not given is found
        anew, and a metric needs the `keys` of another bank."""
        options = self.answerer.options()
        if changes.get("scope", self.scope) != self.scope:
            options = {}
        elif "potential" in changes:
            options = {"scope": self.scope}
        elif "potential" in options and {"bank", "smoothness", "strong_convexity"} & set(changes):
            options = {"scope": self.scope, "smoothness": self.smoothness}
            if not self.backbone.lift:
                options["strong_convexity"] = self.strong_convexity
        same = ("backbone", "bank", "n_neighbors", "search", "resident", "metric", "abstain_beyond")
        current = {name: getattr(self, name) for name in same} | {"keys": self.bank_keys}
        model = OTAD(**(current | options | changes))
        model.notes = dict(self.notes)
        return model

    @checked
    def save(
        self, folder: str | Path, *, evaluation: EvaluationLike | None = None, **notes: Any
    ) -> Path:
        """Write the model to a folder (safetensors, card.json, and a model card in README.md); the
        path of card.json. `notes` (data, classes, metrics, ... in plain JSON) are added to those
        the model has; the model card shows the figures of an `otad.evaluate` of this model."""
        answerer, metric, keys = self.answerer, self.metric, self.bank_keys
        own = ("n_neighbors", "smoothness", "strong_convexity", "search")
        settings = {name: getattr(self, name) for name in own} | answerer.settings()
        if self.abstain_beyond is not None:
            settings["abstain_beyond"] = self.abstain_beyond
        about: dict[str, Any] = {"version": answerer.card_version, "settings": settings}
        about["interface"] = self.interface()
        about["notes"] = add_evaluation(self.notes | notes, evaluation, self.describe())
        for part in parts_of_user(self.backbone):
            about["probe"] = part.probe()
        config = {"config": self.backbone.config()}
        blocks = {"backbone": Block("backbone", self.backbone.state_dict(), config, config)}
        if metric is not None and keys is not None:
            if not isinstance(metric, Metric):
                found = type(metric).__name__
                raise InputError(f"metric: expected an otad.nets.Metric to save it, got {found}")
            about["version"] = max(METRIC_VERSION, answerer.card_version)
            about["metric"] = {"config": metric.config()}
            blocks["metric.metric"] = Block("metric", metric.state_dict())
            blocks["metric.keys"] = Block("keys", {"keys": keys})
        if answerer.card_entry is not None and (block := answerer.block()) is not None:
            blocks[answerer.card_entry] = block
        return write_model(folder, about, self.bank, blocks)

    def interface(self) -> dict[str, Any]:
        """What goes in and what comes out, in plain values."""
        names = ("task", "input_shape", "n_outputs", "bounds")
        plain: dict[str, Any] = to_plain({name: getattr(self.backbone, name) for name in names})
        return plain

    def describe(self) -> dict[str, Any]:
        """The settings and the bank in plain values, as records of evaluations name the model."""
        own = ("n_neighbors", "smoothness", "strong_convexity", "search")
        settings = {name: getattr(self, name) for name in own} | {
            "bank": {"points": len(self.bank_inputs), "fingerprint": self.bank_fingerprint},
            **self.answerer.describe(),
            **({} if self.abstain_beyond is None else {"abstain_beyond": self.abstain_beyond}),
        }
        plain: dict[str, Any] = to_plain(settings)
        return plain

    def __repr__(self) -> str:
        """A few lines, without all the layers: those are in `repr(model.backbone)`."""
        net, metric = self.backbone, self.metric
        classes = "" if net.task == "regression" else f" of {net.n_outputs} classes"
        used = f"backbone={_named(net)}" + ("" if metric is None else f", metric={_named(metric)}")
        lines = f"{net.task}{classes}, inputs {net.input_shape}", self.extra_repr(), used
        return "OTAD(" + ",\n  ".join(lines) + ")"

    def extra_repr(self) -> str:
        curvature = f"smoothness={self.smoothness:g}, strong_convexity={self.strong_convexity:g}, "
        bank = f"bank={len(self.bank_inputs)} points, "
        if self.abstain_beyond is not None:
            bank += f"abstain_beyond={self.abstain_beyond:g}, "
        if (potential := self.potential) is not None:
            return f"{bank}scope=global, {curvature}left_out={len(potential.left_out)}"
        return f"{bank}n_neighbors={self.n_neighbors}, {curvature}mode={self.answerer.mode}"


def _named(net: nn.Module) -> str:
    return f"{type(net).__name__} with {sum(one.numel() for one in net.parameters()):,} weights"


def keys_of(x: Tensor, metric: nn.Module) -> Tensor:
    """(B,m). A user's layers may work in place; a `Metric` normalizes first."""
    keys: Tensor = metric(x if isinstance(metric, Metric) else x.clone())
    return keys


@torch.no_grad()
def check_training_inputs(model: OTAD, train_x: object, rows: Tensor | None = None) -> Tensor:
    """Refuse inputs (N,*) other than those the bank was made from, in the order of the bank; these
    rows, or else a sample, are embedded again."""
    backbone, points = model.backbone, len(model.bank_labels)
    if not isinstance(train_x, Tensor) or train_x.dtype != backbone.mean.dtype:
        got = train_x.dtype if isinstance(train_x, Tensor) else type(train_x).__name__
        raise InputError(f"train_x: expected a tensor of dtype {backbone.mean.dtype}, got {got}")
    check_shape(train_x, "train_x", (points, *backbone.input_shape), "with a row per bank point")
    if rows is None:
        rows = torch.linspace(0, points - 1, min(SAMPLE, points)).long()
    again = backbone.embed(train_x[rows.to(train_x.device)].to(backbone.mean.device))
    known = model.bank_inputs[rows.to(model.bank_inputs.device)].to(again)
    off = (again - known).norm(dim=1) > SAME * (again.norm(dim=1) + known.norm(dim=1))
    found = f"others in row {rows[int(off.int().argmax())]}"
    require(not off.any(), "train_x", "the inputs the bank was made from, in its order", found)
    return train_x
