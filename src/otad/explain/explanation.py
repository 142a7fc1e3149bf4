"""A prediction and the training points it rests on, as text, table, picture and JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from otad.checks import check_count
from otad.cip import Status
from otad.errors import InputError, printable
from otad.explain.neighbor import (
    ClassPart,
    Label,
    Neighbor,
    finite,
    label_text,
    signed_text,
    weight_text,
)
from otad.explain.picture import Panel, draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AGREES, DIFFERS, NEUTRAL = "#1b7f5c", "#d1495b", "#3a444c"
LONGEST_NAME = 20  # letters below an image
N_FEATURES = 5  # that differ the most, in a text
ROUNDING = 1e-6  # the difference, in units of std, of equal features after they were normalized


@dataclass(frozen=True, eq=False)
class Explanation:
    """One prediction and the training points it rests on.

    Print it, or show `table()` or `figure()`.

    Attributes
    ----------
    prediction : label, float or None
        The label or the value; None where the model abstained.
    probabilities : dict or None
        The probability of each class; None in regression.
    neighbors : tuple of Neighbor
        The neighbors, nearest first. For a global map, the training points with weight, largest
        weight first.
    status, smoothness, residual, gap
        How the problem was solved: the status, the smoothness L used, the residual, and for a
        global map the duality gap.
    inputs : Tensor (*input_shape)
        The query.
    feature_names, bounds, name
        The names of the features, the legal range of inputs, and the name of the query, if known.
    runner_up : label or None
        The class with the second largest logit.
    margin : float or None
        How far the logit of the prediction is above the logit of the runner-up. The prediction
        changes exactly where the margin becomes 0. It is the sum of the contributions of the
        training points.
    std : Tensor or None
        The units in which the features of the query and of training points are compared.
    space : str
        What distances are measured between, in words.

    Examples
    --------
    >>> import otad
    >>> digits = otad.data.load("digits")
    >>> net = otad.nets.fc_resnet((1, 8, 8), 10, blocks=1, hidden=16, bounds=(0.0, 1.0))
    >>> model = otad.defend(net, digits.train_x[:200], digits.train_y[:200])
    >>> found = otad.explain(model, digits.test_x[:1])[0]
    >>> found.scope, len(found.heaviest(3))
    ('local', 3)
    >>> abs(found.remainder) < 1e-4
    True
    >>> sorted(found.to_dict())[:4]
    ['by_class', 'distances_between', 'gap', 'margin']
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
    runner_up: Label | None = None
    margin: float | None = None
    std: Tensor | None = None
    name: str | None = None
    space: str = ""

    @property
    def scope(self) -> str:
        """ "local" for an answer from the nearest neighbors, "global" for a global map."""
        return "local" if self.gap is None else "global"

    @property
    def n_weighted(self) -> int | None:
        """How many neighbors have weight; None where the answer has no weights."""
        known = [it.weight for it in self.neighbors if it.weight is not None]
        return sum(weight > 0 for weight in known) if len(known) == len(self.neighbors) else None

    @property
    def total(self) -> float | None:
        """What the contributions sum to: the margin, or in regression the prediction.

        It is None where the answer has no weights.
        """
        if self.prediction is None or self.n_weighted is None:
            return None
        return float(self.prediction) if self.probabilities is None else self.margin

    @property
    def remainder(self) -> float | None:
        """What is left of `total` after all contributions are subtracted: rounding."""
        if self.total is None:
            return None
        return self.total - math.fsum(it.contribution or 0.0 for it in self.neighbors)

    @property
    def by_class(self) -> dict[Label, ClassPart]:
        """The part of each class in the answer, largest contribution first.

        It is empty in regression and where the answer has no weights.
        """
        if self.probabilities is None or self.total is None:
            return {}
        found: dict[Label, ClassPart] = {}
        for it in self.neighbors:
            if it.weight and it.contribution is not None:
                points, weight, share = found.get(it.label, (0, 0.0, 0.0))
                found[it.label] = ClassPart(points + 1, weight + it.weight, share + it.contribution)
        return dict(sorted(found.items(), key=lambda item: -item[1].contribution))

    @property
    def reasons(self) -> list[str]:
        """Sentences that say what the contributions sum to, and what each class contributes."""
        if self.total is None:
            return []
        if self.probabilities is None:
            return [f"the contributions sum to the value {self.total:.5g}"]
        rival = f"{label_text(self.prediction)} over {label_text(self.runner_up)}"
        found = [f"the contributions sum to {self.total:.3g}, the margin of {rival} in logits"]
        for label, part in self.by_class.items():
            points = f"{part.points} training point{'s' if part.points > 1 else ''}"
            weight = f"with weight {part.weight:.3f}"
            found.append(
                f"{label_text(label)}: {signed_text(part.contribution)} by {points} {weight}"
            )
        against = [it for it in self.neighbors if it.label == self.runner_up and it.weight]
        if wrong := sum((it.alone or 0.0) > 0 for it in against):
            label, answer = label_text(self.runner_up), label_text(self.prediction)
            found.append(
                f"the network itself classifies {wrong} of the points labeled {label} as {answer}"
            )
        return found

    @property
    def differences(self) -> Tensor | None:
        """How much each feature of the training points differs from the query.

        It is the mean squared difference in units of `std`, weighted like the training points; None
        where their inputs are not known.
        """
        known = [it.inputs for it in self.neighbors if it.inputs is not None]
        if not known or len(known) < len(self.neighbors) or self.std is None:
            return None
        squares = ((torch.stack(known).double() - self.inputs.double()) / self.std).square()
        return torch.einsum("k,k...->...", self._shares(), squares)

    def _shares(self) -> Tensor:
        """The weights of the training points, or equal ones where the answer gives none."""
        weights = [it.weight for it in self.neighbors if it.weight is not None]
        if len(weights) < len(self.neighbors):
            weights = [1 / len(self.neighbors)] * len(self.neighbors)
        return torch.tensor(weights, dtype=torch.float64)

    @property
    def account(self) -> str:
        """How the problem was solved, as text."""
        level = f"{self.smoothness:.3g}"
        if self.gap is not None:
            exact = "" if self.status == Status.SOLVED else ", which is larger than it should be"
            return f"global map, smoothness {level}, duality gap {max(self.gap, 0.0):.1e}{exact}"
        return {
            Status.SOLVED: f"solved with smoothness {level}, as asked",
            Status.RAISED: f"solved with smoothness raised to {level}: the neighbors need it",
            Status.REPAIRED: f"solved with smoothness {level} without a contradicting neighbor",
            Status.ESTIMATED: "estimated by a network instead of the solver",
            Status.INFEASIBLE: "not solved: the neighbors contradict each other",
            Status.UNSOLVED: "not solved: the numbers are out of range",
        }[self.status]

    def heaviest(self, count: int) -> list[Neighbor]:
        """Return the `count` neighbors with the largest weights.

        Among neighbors without weight, the nearest come first.
        """
        check_count(count, "count")
        return sorted(self.neighbors, key=lambda neighbor: -(neighbor.weight or 0.0))[:count]

    def to_dict(self, *, inputs: bool = False) -> dict[str, Any]:
        """Return plain JSON values, with raw inputs if asked for."""
        shares = self.probabilities
        found: dict[str, Any] = {
            "prediction": self.prediction,
            "probabilities": shares and {str(label): share for label, share in shares.items()},
            "status": self.status.name.lower(),
            "smoothness": finite(self.smoothness),
            "residual": finite(self.residual),
            "scope": self.scope,
            "gap": None if self.gap is None else finite(self.gap),
            "n_weighted": self.n_weighted,
            "name": self.name,
            "distances_between": self.space,
            "runner_up": self.runner_up,
            "margin": self.margin,
            "remainder": self.remainder,
            "by_class": {str(label): part._asdict() for label, part in self.by_class.items()},
            "neighbors": [neighbor.to_dict(inputs=inputs) for neighbor in self.neighbors],
        }
        if inputs:
            names = self.feature_names
            found |= {"inputs": self.inputs.tolist(), "feature_names": names and list(names)}
            found["differences"] = None if self.differences is None else self.differences.tolist()
        return found

    def __repr__(self) -> str:
        weighted = "no weights" if self.n_weighted is None else f"{self.n_weighted} with weight"
        found = f"{len(self.neighbors)} training points, {weighted}"
        return f"Explanation({self._answer()}, {found}, {self.scope}, {self.status.name.lower()})"

    def __str__(self) -> str:
        graded = "" if math.isnan(self.residual) else f"; residual {self.residual:.1e}"
        count = len(self.neighbors)
        shown = count if self.n_weighted is None else max(self.n_weighted, 1)
        if self.n_weighted is None:
            weighing = f"{count} neighbors; the answer has no weights"
        elif self.gap is not None:
            weighing = f"{self.n_weighted} training points have weight"
        else:
            weighing = f"{self.n_weighted} of {count} neighbors have weight"
        lines = [f"prediction: {self._answer()}", f"{self.account}{graded}", weighing]
        columns = f"{'weight':>8}  {'alone':>8}  {'contribution':>12}  {'distance':>8}  {'row':>8}"
        columns += "  label"
        lines += [*self.reasons, *self._units, columns]
        for it in self.heaviest(shown):
            parts = f"{signed_text(it.alone):>8}  {signed_text(it.contribution):>12}"
            numbers = f"{weight_text(it):>8}  {parts}  {it.distance:8.4g}"
            name = "" if it.name is None else f"  {it.title}"
            lines.append(f"{numbers}  {it.index:8d}  {label_text(it.label)}{name}")
        return "\n".join(lines + self._features_text())

    def _features_text(self) -> list[str]:
        """The features that differ most, of the query and of the mean training point."""
        if self.inputs.dim() != 1 or self.std is None or self.differences is None:
            return []
        known = torch.stack([it.inputs for it in self.neighbors if it.inputs is not None])
        mean = self._shares() @ known.double()
        apart = ((mean - self.inputs.double()) / self.std).abs()
        order: list[int] = apart.argsort(descending=True, stable=True).tolist()
        lines = [
            f"  {self._feature_name(k)}: {float(self.inputs[k]):.4g}, {mean[k]:.4g}"
            for k in order[:N_FEATURES]
            if apart[k] > ROUNDING
        ]
        heading = "features that differ most: the query, and the mean training point by weight"
        return [heading, *lines] if lines else []

    def _feature_order(self) -> list[int]:
        """Features from the largest difference to the smallest, or in file order."""
        if (differences := self.differences) is None:
            return list(range(len(self.inputs)))
        order: list[int] = differences.argsort(descending=True, stable=True).tolist()
        return order

    @property
    def _units(self) -> list[str]:
        shown = self.inputs.dim() == 1 and self.differences is not None
        values = "; features in input units" if shown else ""
        return [f"distances between {self.space}{values}"] if self.space else []

    def _feature_name(self, k: int) -> str:
        return f"feature {k}" if self.feature_names is None else printable(self.feature_names[k])

    def table(self, *, top: int = 5, max_features: int = 40) -> Table:
        """Return a rich table of the query beside its `top` heaviest neighbors.

        For vectors it lists the features, from the one that differs most between the query and its
        training points to the one that differs least.
        """
        shown = self.heaviest(top)
        caption = escape("\n".join([self.account, *self.reasons, *self._units]))
        table = Table(title=escape(f"prediction: {self._answer()}"), caption=caption)
        table.add_column("")
        table.add_column(
            "query" if self.name is None else escape(printable(self.name)), justify="right"
        )
        for neighbor in shown:
            table.add_column(escape(neighbor.title), justify="right")
        table.add_row("weight", "", *(f"[bold]{weight_text(it)}" for it in shown))
        if self.total is not None:
            alone = "value alone" if self.probabilities is None else "margin alone"
            table.add_row(alone, "", *(signed_text(it.alone) for it in shown))
            parts = (signed_text(it.contribution) for it in shown)
            table.add_row("contribution", f"{self.total:.3g}", *parts)
        labels = (f"[{self._color(it)}]{escape(label_text(it.label))}" for it in shown)
        table.add_row("label", escape(label_text(self.prediction)), *labels)
        table.add_row("distance", "", *(f"{it.distance:.4g}" for it in shown), end_section=True)
        known = [it.inputs for it in shown if it.inputs is not None]
        if self.inputs.dim() != 1 or len(known) < len(shown):
            return table
        order = self._feature_order()
        for k in order[:max_features]:
            values = (f"{float(values[k]):.4g}" for values in (self.inputs, *known))
            table.add_row(escape(self._feature_name(k)), *values)
        if len(order) > max_features:
            table.add_row(f"... {len(order) - max_features} more, which differ less")
        return table

    def figure(self, *, top: int = 6) -> Figure:
        """Return a matplotlib figure of the query image beside its `top` heaviest neighbors.

        Frames show whether labels agree. Gray levels follow `bounds`, or else the range of the
        values.

        Raises
        ------
        InputError
            If the inputs are not images, or the images of the training points are not known.
        """
        panels = [Panel(self.inputs, label_text(self.prediction), self._certainty(), NEUTRAL)]
        for it in self.heaviest(top):
            if it.inputs is None:
                raise InputError(f"train_x: expected the image of row {it.index}, got none")
            lines = [] if it.weight is None else [f"weight {it.weight:.3f}"]
            if it.contribution is not None:
                lines.append(f"contributes {signed_text(it.contribution)}")
            lines.append(f"distance {it.distance:#.3g}")
            lines += [] if it.name is None else [_short(it.title)]
            color = self._color(it)
            panels.append(
                Panel(it.inputs, label_text(it.label), "\n".join(lines), color, it.weight)
            )
        order = "nearest first" if self.n_weighted is None else "by weight"
        heading = f"training points behind the answer, {order}"
        return draw(panels, heading, [*self.reasons[:1], self.account], self.bounds)

    def _certainty(self) -> str:
        if self.prediction is None or self.probabilities is None:
            return ""
        return f"probability {self.probabilities[self.prediction]:.1%}"

    def _answer(self) -> str:
        certainty = self._certainty()
        return label_text(self.prediction) + (f" ({certainty})" if certainty else "")

    def _color(self, neighbor: Neighbor) -> str:
        if self.probabilities is None:
            return NEUTRAL
        return AGREES if neighbor.label == self.prediction else DIFFERS


def _short(name: str) -> str:
    """The end of a long name, which is what differs between files."""
    return name if len(name) <= LONGEST_NAME else f"...{name[3 - LONGEST_NAME :]}"
