"""Explanations: a prediction and the training points it rests on, as text, table, picture, JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from otad.arguments import guard
from otad.checks import check_count, require
from otad.cip import Status
from otad.data.dataset import refuse_repeats
from otad.errors import InputError, printable
from otad.model.otad import OTAD, check_training_inputs
from otad.nets import Backbone, only_normalizes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Explanation", "Neighbor", "explain"]
Label = str | int | float | bool
Prediction = tuple[Label | None, dict[Label, float] | None]  # with the probabilities of all classes
AGREES, DIFFERS, NEUTRAL = "#1b7f5c", "#d1495b", "#3a444c"
TEXT, SOFT, FAINT = "#22282d", "#69737b", "#e4e7ea"
# In inches: an image, the space between two, the wider one after the query, and the edges.
SIDE, GAP, BREAK, EDGE = 1.25, 0.2, 0.55, 0.2
ABOVE, BELOW = 0.5, 1.2
BAR = 0.07


@dataclass(frozen=True, eq=False)
class Neighbor:
    """A training point: its row in the bank, the weight of its feature in the answer (None where
    this is no weighted mean of features), its label, its distance to the query where neighbors are
    searched, and its raw inputs where they are known."""

    index: int
    weight: float | None
    label: Label
    distance: float
    inputs: Tensor | None

    def to_dict(self, *, inputs: bool = False) -> dict[str, Any]:
        found = {name: value for name, value in vars(self).items() if name != "inputs"}
        if inputs and self.inputs is not None:
            found["inputs"] = self.inputs.tolist()
        return found


@dataclass(frozen=True, eq=False)
class Explanation:
    """One prediction and what it rests on.

    `prediction` is a label or a value (None where the solver abstained), `probabilities` those of
    all classes (None in regression), `neighbors` the training points found, nearest first; for a
    global map those with weight, most weight first. `status`, `smoothness` (the L used), `residual`
    and the duality `gap` of a global map say how the problem was solved; `inputs` is the query.
    """

    prediction: Label | None
    probabilities: dict[Label, float] | None
    neighbors: tuple[Neighbor, ...]
    status: Status
    smoothness: float
    residual: float
    inputs: Tensor
    feature_names: tuple[str, ...] | None = None
    bounds: tuple[float, float] | None = None
    gap: float | None = None

    @property
    def scope(self) -> str:
        return "local" if self.gap is None else "global"

    @property
    def n_weighted(self) -> int | None:
        """How many neighbors have weight; None where the answer gives no weights."""
        known = [it.weight for it in self.neighbors if it.weight is not None]
        return sum(weight > 0 for weight in known) if len(known) == len(self.neighbors) else None

    @property
    def account(self) -> str:
        """How the problem was solved, as text."""
        level = f"{self.smoothness:.3g}"
        if self.gap is not None:
            exact = "" if self.status == Status.SOLVED else ", not as small as it should be"
            return f"global map, smoothness {level}, gap {max(self.gap, 0.0):.1e}{exact}"
        return {
            Status.SOLVED: f"solved with smoothness {level}, as asked",
            Status.RAISED: f"solved with smoothness raised to {level}: the neighbors need it",
            Status.REPAIRED: f"solved with smoothness {level} without a contradicting neighbor",
            Status.ESTIMATED: "estimated by a network that imitates the solver, not solved",
            Status.INFEASIBLE: "not solved: the neighbors contradict each other",
            Status.UNSOLVED: "not solved: the numbers are out of range",
        }[self.status]

    def heaviest(self, count: int) -> list[Neighbor]:
        """The neighbors of most weight, and of those without any the nearest."""
        check_count(count, "count")
        return sorted(self.neighbors, key=lambda neighbor: -(neighbor.weight or 0.0))[:count]

    def to_dict(self, *, inputs: bool = False) -> dict[str, Any]:
        """Plain JSON, with the raw values of query and neighbors if asked for."""
        shares = self.probabilities
        found: dict[str, Any] = {
            "prediction": self.prediction,
            "probabilities": shares and {str(label): share for label, share in shares.items()},
            "status": self.status.name.lower(),
            "smoothness": _finite(self.smoothness),
            "residual": _finite(self.residual),
            "scope": self.scope,
            "gap": None if self.gap is None else _finite(self.gap),
            "n_weighted": self.n_weighted,
            "neighbors": [neighbor.to_dict(inputs=inputs) for neighbor in self.neighbors],
        }
        if inputs:
            names = self.feature_names
            found |= {"inputs": self.inputs.tolist(), "feature_names": names and list(names)}
        return found

    def __str__(self) -> str:
        graded = "" if math.isnan(self.residual) else f"; residual {self.residual:.1e}"
        count = len(self.neighbors)
        shown = count if self.n_weighted is None else max(self.n_weighted, 1)
        if self.n_weighted is None:
            weighing = f"{count} neighbors, to which the answer gives no weights"
        elif self.gap is not None:
            weighing = f"{self.n_weighted} training points have weight"
        else:
            weighing = f"{self.n_weighted} of {count} neighbors have weight"
        lines = [f"prediction: {self._answer()}", f"{self.account}{graded}", weighing]
        lines.append(f"{'weight':>8}  {'distance':>8}  {'row':>8}  label")
        for it in self.heaviest(shown):
            lines.append(f"{_weight(it):>8}  {it.distance:8.4g}  {it.index:8d}  {_text(it.label)}")
        return "\n".join(lines)

    def table(self, *, top: int = 5, max_features: int = 40) -> Table:
        """The query beside its `top` heaviest neighbors; feature by feature if vectors."""
        shown = self.heaviest(top)
        table = Table(title=escape(f"prediction: {self._answer()}"), caption=self.account)
        table.add_column("")
        table.add_column("query", justify="right")
        for neighbor in shown:
            table.add_column(f"row {neighbor.index}", justify="right")
        table.add_row("weight", "", *(f"[bold]{_weight(it)}" for it in shown))
        labels = (f"[{self._color(it)}]{escape(_text(it.label))}" for it in shown)
        table.add_row("label", escape(_text(self.prediction)), *labels)
        table.add_row("distance", "", *(f"{it.distance:.4g}" for it in shown), end_section=True)
        known = [it.inputs for it in shown if it.inputs is not None]
        if self.inputs.dim() != 1 or len(known) < len(shown):
            return table
        names = self.feature_names or [f"feature {k}" for k in range(len(self.inputs))]
        for number, name in enumerate(names[:max_features]):
            values = (f"{float(values[number]):.4g}" for values in (self.inputs, *known))
            table.add_row(escape(printable(name)), *values)
        if len(names) > max_features:
            table.add_row(f"... {len(names) - max_features} more")
        return table

    def figure(self, *, top: int = 6) -> Figure:
        """The query image beside its `top` heaviest neighbors, framed by whether labels agree; gray
        levels as `bounds` say, or else over the range of the values shown."""
        from matplotlib.figure import Figure

        panels = [_Panel(self.inputs, _text(self.prediction), self._certainty(), NEUTRAL)]
        for it in self.heaviest(top):
            if it.inputs is None:
                raise InputError(f"train_x: expected the image of row {it.index}, got none")
            detail = "" if it.weight is None else f"weight {it.weight:.3f}\n"
            detail += f"distance {it.distance:#.3g}"
            panels.append(_Panel(it.inputs, _text(it.label), detail, self._color(it), it.weight))
        width = 2 * EDGE + len(panels) * SIDE + (len(panels) - 2) * GAP + BREAK
        height = ABOVE + SIDE + BELOW
        figure = Figure(figsize=(width, height), facecolor="white")
        low = min(float(panel.image.min()) for panel in panels)
        high = max(float(panel.image.max()) for panel in panels)
        for number, panel in enumerate(panels):
            left = EDGE + number * (SIDE + GAP) + (BREAK - GAP if number else 0.0)
            _draw_panel(figure, panel, left, *(self.bounds or (low, high)))
        order = "nearest first" if self.n_weighted is None else "by weight"
        heading = f"training points behind the answer, {order}"
        beside, top_line = EDGE + SIDE + BREAK, height - 0.2
        texts = (EDGE, top_line, "query"), (beside, top_line, heading), (beside, 0.16, self.account)
        for left, bottom, text in texts:
            figure.text(left / width, bottom / height, text, color=SOFT, fontsize=8.5, va="center")
        return figure

    def _certainty(self) -> str:
        if self.prediction is None or self.probabilities is None:
            return ""
        return f"probability {self.probabilities[self.prediction]:.3f}"

    def _answer(self) -> str:
        certainty = self._certainty()
        return _text(self.prediction) + (f" ({certainty})" if certainty else "")

    def _color(self, neighbor: Neighbor) -> str:
        if self.probabilities is None:
            return NEUTRAL
        return AGREES if neighbor.label == self.prediction else DIFFERS


def explain(
    model: OTAD,
    x: Tensor,
    *,
    classes: Sequence[Any] | None = None,
    feature_names: Sequence[str] | None = None,
    train_x: Tensor | None = None,
) -> list[Explanation]:
    """One explanation for each input x (B,*input_shape), by a single trace of the batch.

    `classes` names the C classes, `feature_names` the d features of a vector. The raw inputs of
    training points are computed from the bank where the backbone only normalizes and flattens; for
    another one, give the `train_x` (N,*input_shape) of the bank.
    """
    backbone, labels = model.backbone, _class_labels(model.backbone, classes)
    names = None if feature_names is None else tuple(map(str, feature_names))
    fits = names is None or (len(names),) == backbone.input_shape
    require(fits, "feature_names", f"one for each input {backbone.input_shape}", len(names or ()))
    with torch.no_grad():
        trace = model.trace(x)
    raw = _raw_inputs(model, trace.neighbors.indices, train_x)
    solution, outputs = trace.solution, trace.outputs.double().cpu()
    weights, neighbors = solution.multipliers.double(), trace.neighbors
    parts = neighbors.indices, weights, trace.labels, neighbors.distances
    found = []
    for row, answer in enumerate(zip(*(part.tolist() for part in parts), raw, strict=True)):
        points = [
            Neighbor(index, _finite(weight), labels[label] if labels else label, distance, inputs)
            for index, weight, label, distance, inputs in zip(*answer, strict=True)
            if model.answerer.rests_on_neighbors or weight > 0  # others pad a narrow support
        ]
        found.append(
            Explanation(
                *_prediction(outputs[row], labels),
                neighbors=tuple(points),
                status=Status(int(solution.status[row])),
                smoothness=float(solution.smoothness[row]),
                residual=float(solution.residual[row]),
                gap=None if trace.gap is None else float(trace.gap[row]),
                inputs=x[row].cpu(),
                feature_names=names,
                bounds=backbone.bounds,
            )
        )
    return found


def _class_labels(backbone: Backbone, classes: Sequence[Any] | None) -> list[Label] | None:
    """The name of each class, as plain values; None in regression."""
    if backbone.task == "regression":
        return None
    count = backbone.n_outputs
    given = range(count) if classes is None else classes
    require(len(given) == count, "classes", f"{count} names, one for each output", len(given))
    refuse_repeats(map(str, given), "classes")
    return [label.item() if isinstance(label, np.generic) else label for label in given]


def _prediction(output: Tensor, labels: list[Label] | None) -> Prediction:
    """From logits (C,) or a value; None where it abstained."""
    if not bool(output.isfinite().all()):
        return None, None
    if labels is None:
        return float(output), None
    return labels[int(output.argmax())], dict(zip(labels, output.softmax(0).tolist(), strict=True))


def _raw_inputs(model: OTAD, indices: Tensor, train_x: Tensor | None) -> Any:
    """Inputs (B,K,*input_shape) of the training points, or (B,K) times None."""
    backbone, points = model.backbone, model.bank_inputs
    if train_x is not None:
        check_training_inputs(model, train_x, indices.unique())
        return train_x[indices.to(train_x.device)].cpu()
    if not only_normalizes(backbone):
        return [[None] * indices.shape[1]] * len(indices)
    embedded = points[indices.to(points.device)].to(backbone.mean)
    embedded = embedded[..., : backbone.dim - backbone.lift]
    shape = (*indices.shape, *backbone.input_shape)
    return (embedded.reshape(shape) * backbone.std + backbone.mean).cpu()


def _weight(neighbor: Neighbor) -> str:
    return "none" if neighbor.weight is None else f"{neighbor.weight:.3f}"


def _text(label: Label | None) -> str:
    if label is None:
        return "none (abstained)"
    return f"{label:.5g}" if isinstance(label, float) else printable(str(label))


def _finite(value: float) -> float | None:
    """JSON has neither NaN nor infinity."""
    return value if math.isfinite(value) else None


@dataclass(frozen=True, eq=False)
class _Panel:
    """An image (C,H,W) or (H,W), its label, further lines of text, the color of its frame, and its
    weight from 0 to 1, drawn as a bar; an image of weight 0 is drawn pale."""

    image: Tensor
    label: str
    detail: str
    color: str
    weight: float | None = None


def _draw_panel(figure: Figure, panel: _Panel, left: float, low: float, high: float) -> None:
    width, height = figure.get_size_inches()

    def place(bottom: float, tall: float) -> tuple[float, float, float, float]:
        return left / width, bottom / height, SIDE / width, tall / height

    alpha = 0.4 if panel.weight == 0 else 1.0
    image = figure.add_axes(place(BELOW, SIDE), xticks=[], yticks=[], anchor="S")
    image.imshow(_pixels(panel.image, low, high), cmap="gray", vmin=0, vmax=1, alpha=alpha)
    for spine in image.spines.values():
        spine.set(color=panel.color, linewidth=2.5, alpha=alpha)
    middle = (left + SIDE / 2) / width
    figure.text(
        middle, (BELOW - 0.2) / height, panel.label,
        ha="center", va="center", color=panel.color, alpha=alpha, fontweight="bold",
        fontsize=min(11, 130 / max(len(panel.label), 1)), parse_math=False,
    )  # fmt: skip
    figure.text(
        middle, (BELOW - 0.47) / height, panel.detail,
        ha="center", va="top", color=TEXT, alpha=alpha, fontsize=8, linespacing=1.4,
    )  # fmt: skip
    if panel.weight is not None:
        bar = figure.add_axes(place(BELOW - 0.42, BAR), xlim=(0, 1))
        bar.set_axis_off()
        bar.barh(0, 1, color=FAINT)
        bar.barh(0, panel.weight, color=panel.color)


def _pixels(image: Tensor, low: float, high: float) -> NDArray[np.float32]:
    """(H,W) in gray or (H,W,3) in color, from 0 to 1."""
    is_image = image.dim() == 2 or (image.dim() == 3 and image.shape[0] in (1, 3))
    expected, found = "images (1,H,W), (3,H,W) or (H,W)", f"inputs of shape {tuple(image.shape)}"
    require(is_image, "figure", expected, f"{found}; a table shows vectors")
    scaled = ((image.detach().float().cpu() - low) / max(high - low, 1e-12)).clamp(0, 1)
    return (scaled if scaled.dim() == 2 else scaled.movedim(0, -1).squeeze(-1)).numpy()


guard(globals(), __all__)
