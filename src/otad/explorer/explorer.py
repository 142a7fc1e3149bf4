"""The explorer page, which loads nothing from elsewhere, and its data: a model in a few numbers,
and one query with an attack on it.

Nothing here needs a web server, so `otad demo` can write a page that holds its examples.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from typing import Any

import torch
from markupsafe import Markup
from torch import Tensor

from otad.attacks import L2
from otad.certify import certify, certify_values
from otad.checks import check_shape, require
from otad.data.encoding import TableEncoding
from otad.errors import InputError
from otad.explain import Explanation, explain
from otad.explorer.path import STEPS, attacked, line_to
from otad.io.mapped_rows import gathered
from otad.model.names import class_names_of
from otad.model.otad import OTAD
from otad.nets import only_normalizes
from otad.nets.adapt import denormalized
from otad.report.page import page_templates
from otad.report.plots import pixels_uri

SCRIPTS = ("draw.js", "inputs.js", "main.js")
N_CLASSES = 10  # most classes with a bar
N_POINTS = 10  # training points of one answer
N_COLUMNS = 8  # columns of a training point's row
N_EXAMPLES, MOST_NUMBERS = 10, 200_000  # which all examples have together, at most
N_MAP, N_FIT = 500, 1000  # bank points that are shown, and those that the projection is fitted to


class Explorer:
    """Answers queries with all that the explorer page shows about them.

    The notes of the model name its classes and columns. The page begins with the `examples`
    (n, *input_shape) and their labels or targets, the `truths` (n,); if there are none, with some
    training points, where the bank knows their inputs."""

    def __init__(
        self,
        model: OTAD,
        name: str,
        *,
        examples: Tensor | None = None,
        truths: Tensor | None = None,
    ) -> None:
        self.model, self.name, backbone = model, name, model.backbone
        self.shape, self.is_value = backbone.input_shape, backbone.task == "regression"
        self.is_image = len(self.shape) == 3 and self.shape[0] in (1, 3)
        encoding = TableEncoding.of(model.notes)
        self.encoding = None if encoding is None or encoding.is_plain else encoding
        self.is_held_out = examples is not None
        if examples is None and only_normalizes(backbone):
            most = max(1, MOST_NUMBERS // math.prod(self.shape))
            rows = example_rows(model.bank_labels, min(N_EXAMPLES, most))
            examples, truths = self._raw(rows), model.bank_labels[rows.to(model.bank_labels.device)]
        if examples is not None:
            check_shape(examples, "examples", (len(examples), *self.shape), "like the inputs")
        self.examples, self.truths = examples, truths
        # Pixels share a unit; the columns of a table are measured in their standard deviations.
        wide = torch.ones(self.shape, dtype=backbone.std.dtype, device=backbone.std.device)
        self.unit = wide if self.is_image else wide * backbone.std
        self.center, self.axes, self.share = self._projection()

    def _raw(self, rows: Tensor) -> Tensor:
        """The inputs (n,*input_shape) of bank rows, for an embedding that only normalizes."""
        backbone = self.model.backbone
        embedded = gathered(self.model.bank_inputs, rows).to(backbone.mean)
        return self._within_bounds(denormalized(backbone, embedded))

    def _within_bounds(self, inputs: Tensor) -> Tensor:
        """By rounding, inputs may be just outside the bounds, where the model refuses them."""
        bounds = self.model.backbone.bounds
        return inputs if bounds is None else inputs.clamp(*bounds)

    def _projection(self) -> tuple[Tensor, Tensor, float]:
        """Principal components of the bank where neighbors are searched: the mean (m,), two axes
        (m,2), and their share of the variance."""
        points = gathered(self.model.bank_points, _evenly(len(self.model.bank_labels), N_FIT))
        points = points.double().cpu()
        center = points.mean(0)
        points = points - center
        wide = points.shape[1] > len(points)  # then the smaller matrix has the same eigenvalues
        values, vectors = torch.linalg.eigh(points @ points.T if wide else points.T @ points)
        axes = vectors.flip(1)[:, :2]
        axes = torch.nn.functional.normalize(points.T @ axes if wide else axes, dim=0)
        axes = torch.nn.functional.pad(axes, (0, 2 - axes.shape[1]))
        largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))
        axes = axes * torch.where(largest < 0, -1.0, 1.0)  # else the sign depends on the library
        total = float(values.sum())
        return center, axes, float(values[-2:].sum()) / total if total > 0 else 1.0

    def _places(self, keys: Tensor) -> list[list[float]]:
        """Where keys (n,m) are in the 2-D view."""
        places: list[list[float]] = _plain((keys.double().cpu() - self.center) @ self.axes)
        return places

    def setup(self) -> dict[str, Any]:
        """Return what the page knows before the first query, in plain JSON."""
        model, backbone = self.model, self.model.backbone
        shown = _evenly(len(model.bank_labels), N_MAP)
        labels = model.bank_labels[shown.to(model.bank_labels.device)].tolist()
        places = self._places(gathered(model.bank_points, shown))
        known = [] if self.examples is None else list(self.examples)
        truths = [None] * len(known) if self.truths is None else self.truths.tolist()
        levels = backbone.bounds or (0.0, 1.0)
        if backbone.bounds is None and known:
            low, high = torch.aminmax(torch.stack(known))
            levels = float(low), float(high)
        return {
            "name": self.name,
            "shape": list(self.shape),
            "kind": "image" if self.is_image else "row",
            "levels": list(levels),
            "bounds": None if backbone.bounds is None else list(backbone.bounds),
            "classes": list(class_names_of(self.model)) or None,
            "fields": None if self.is_image else self._fields(),
            "unit": "standard deviations" if bool((self.unit != 1).any()) else "",
            "units": None if self.is_image else _plain(self.unit.flatten()),
            "bank": len(model.bank_labels),
            "start": _plain(self._within_bounds(backbone.mean.expand(self.shape)).flatten()),
            "map": {
                "points": [[*xy, one] for xy, one in zip(places, labels, strict=True)],
                "share": _rounded(self.share),
                "dim": len(self.center),
            },
            "examples": [
                {"input": _plain(one.flatten()), "truth": truth}
                for one, truth in zip(known, truths, strict=True)
            ],
            "held_out": self.is_held_out,
        }

    def _fields(self) -> list[dict[str, Any]]:
        """The fields of the row editor: a number, or a choice between one-hot positions."""
        if self.encoding is None:
            count, noted = math.prod(self.shape), self.model.notes.get("feature_names")
            fits = isinstance(noted, list) and len(noted) == count
            names = noted if isinstance(noted, list) and fits else range(count)
            return [{"name": str(name), "at": place} for place, name in enumerate(names)]
        found: list[dict[str, Any]] = []
        places = self.encoding.positions()
        for column in self.encoding.columns:
            at = list(places[column.name])
            if column.categories:
                options = [one or "missing" for one in column.categories]
                found.append({"name": column.name, "choice": at, "options": options})
            else:
                named = zip(column.features, at, strict=True)
                found += [{"name": name, "at": place} for name, place in named]
        return found

    def read(self, body: object) -> Tensor:
        """Return the input (*input_shape) of a request, or raise `InputError`."""
        is_right = isinstance(body, dict) and set(body) == {"input"}
        got = sorted(map(str, body))[:5] if isinstance(body, dict) else type(body).__name__
        require(is_right, "body", 'an object {"input": [numbers]}', got)
        assert isinstance(body, dict)
        values, count = body["input"], math.prod(self.shape)
        require(isinstance(values, list), "input", "a list of numbers", type(values).__name__)
        expected = f"{count} numbers, the input {self.shape} row by row"
        require(len(values) == count, "input", expected, f"{len(values)} values")
        for place, value in enumerate(values):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            is_small = is_number and -3e38 < value < 3e38  # also false for NaN
            require(is_small, f"input[{place}]", "a finite number", repr(value)[:40])
        like = self.model.backbone.mean
        flat = torch.tensor(values, dtype=like.dtype, device=like.device)
        x = self.model.backbone.check_inputs(flat.view(1, *self.shape), "input")
        L2(1.0, groups=self._groups()).check_inputs(x)
        return x[0]

    def _mutable(self) -> Tensor | None:
        """What an attack may change: categories do not move by fractions."""
        if self.encoding is None:
            return None
        groups, indicators = self.encoding.groups, self.encoding.indicators
        mutable = torch.ones(self.shape, dtype=torch.bool, device=self.unit.device)
        mutable[[*(it for one in groups for it in one), *indicators]] = False
        return mutable

    def _groups(self) -> tuple[tuple[int, ...], ...] | None:
        return None if self.encoding is None else self.encoding.groups or None

    def explore(self, x: Tensor) -> dict[str, Any]:
        """Return the answer to an input (*input_shape), and all answers on the path of an attack.

        Lists have one entry for each step of the path; the first step is the input itself.
        """
        model = self.model
        x = x.to(model.backbone.mean)
        end, reach = attacked(model, x, self.unit, self._mutable())
        times = torch.linspace(0, reach, STEPS).to(x) if bool((end != x).any()) else x.new_zeros(1)
        path = line_to(model, x, end, times)
        with torch.no_grad():
            numbers = range(model.backbone.n_outputs)  # the page knows their names
            answers, keys = explain(model, path, classes=numbers), model.query_keys(path)
            alone, from_bank = model.backbone(path), model.distance(path)
        distance = L2(1.0, scale=self.unit).distance(path, x.expand_as(path))
        columns = self._columns(answers, end - x)
        found = {
            "input": _plain(x.flatten()),
            "end": _plain(end.flatten()),
            "times": _plain(times),
            "distance": _plain(distance),
            "from_bank": _plain(from_bank),
            "space": answers[0].space.partition(",")[0],
            "places": self._places(keys),
            "neighbors": [[_neighbor(it) for it in one.heaviest(N_POINTS)] for one in answers],
            "weighted": [one.n_weighted for one in answers],
            "account": [one.account for one in answers],
            "columns": columns,
            "points": self._points(answers, columns),
            "certificate": self._certificate(x, float(distance[-1])),
            **self._answers(answers, alone),
        }
        others = [step for step, one in enumerate(found["answer"]) if one != found["answer"][0]]
        return found | {"answer_flip": None if self.is_value or not others else others[0]}

    def _answers(self, answers: list[Explanation], alone: Tensor) -> dict[str, Any]:
        """The answers of the model and of the network alone, classes as numbers; probabilities of
        the classes that reach the largest on the path."""
        given = [one.prediction for one in answers]
        if self.is_value:
            return {"answer": [_finite(one) for one in given], "undefended": _plain(alone)}
        defended = torch.tensor(
            [list((one.probabilities or {}).values()) or [0.0] * alone.shape[1] for one in answers]
        )
        bare = alone.softmax(1).cpu()
        order = torch.maximum(defended, bare).amax(0).argsort(descending=True, stable=True)
        shown = order[:N_CLASSES].sort().values
        return {
            "answer": given,
            "undefended": bare.argmax(1).tolist(),
            "shown": shown.tolist(),
            "probabilities": _plain(defended[:, shown]),
            "undefended_probabilities": _plain(bare[:, shown]),
        }

    def _columns(self, answers: list[Explanation], step: Tensor) -> list[int]:
        """The columns of a row in which the training points differ most from the input, at both
        ends of the path; where they are not known, those that the attack changes most."""
        if self.is_image:
            return []
        ends = [answers[0].differences, answers[-1].differences]
        known = [one for one in ends if one is not None]
        scores = sum(known) if known else (step / self.unit).square().cpu()
        order: list[int] = torch.as_tensor(scores).flatten().argsort(descending=True).tolist()
        return order[:N_COLUMNS]

    def _points(self, answers: list[Explanation], columns: list[int]) -> dict[str, Any]:
        """Every training point of the path, by its row in the bank."""
        found = {it.index: it for one in answers for it in one.heaviest(N_POINTS)}
        rows = torch.tensor(list(found))
        places = self._places(gathered(self.model.bank_points, rows))
        points: dict[str, Any] = {}
        for (index, it), place in zip(found.items(), places, strict=True):
            shown: dict[str, Any] = {"label": it.label, "place": place, "title": it.title}
            if it.inputs is not None and self.is_image:
                shown["picture"] = pixels_uri(it.inputs, self.model.backbone.bounds)
            elif it.inputs is not None:
                shown["row"] = _plain(it.inputs.flatten()[columns])
            points[str(index)] = shown
        return points

    def _certificate(self, x: Tensor, furthest: float) -> dict[str, Any]:
        """The certified radius, in regression the proved interval at the end of the path, or the
        reason why nothing can be proved; `ring` is the radius in the 2-D view."""
        try:
            if self.is_value:
                kept = certify_values(self.model, x[None], furthest, unit=self.unit, progress=False)
                low, high = _finite(float(kept.low)), _finite(float(kept.high))
                return {"low": low, "high": high, "eps": _rounded(furthest)}
            radius = float(certify(self.model, x[None], unit=self.unit, progress=False).radius)
        except InputError as error:
            return {"refusal": str(error)}
        ring = None
        if self.model.metric is None and only_normalizes(self.model.backbone):
            low, high = map(float, torch.aminmax(self.unit / self.model.backbone.std))
            # With one scale for all features, the shadow of the ball is a disc.
            ring = _finite(radius * high) if math.isclose(low, high, rel_tol=1e-6) else None
        return {"radius": _finite(radius), "everywhere": math.isinf(radius), "ring": ring}


def explorer_page(explorer: Explorer | None = None, command: str = "") -> str:
    """Return the page as HTML.

    Without an explorer the page asks its server. With one it holds the examples of the explorer and
    their paths, works as a file, and names the `command` that serves the model.
    """
    data: dict[str, Any] | None = None
    if explorer is not None:
        known = [] if explorer.examples is None else list(explorer.examples)
        explored = [explorer.explore(one) for one in known]
        data = {"command": command, "setup": explorer.setup(), "explored": explored}
    templates = page_templates("otad.explorer")
    style, *scripts = (templates.get_template(it).render() for it in ("explorer.css", *SCRIPTS))
    # A tag within the JSON would end its element.
    plain = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", r"\u003c")
    given: dict[str, Any] = {"data": Markup(plain)}
    for name, text in (("style", style), ("script", "\n".join(scripts))):
        # The browser runs only the script and the style with these hashes.
        digest = hashlib.sha256(f"\n{text}\n".encode()).digest()
        given |= {name: Markup(text), f"{name}_hash": base64.b64encode(digest).decode()}
    return templates.get_template("explorer.html").render(given)


def example_rows(labels: Tensor, count: int) -> Tensor:
    """Return rows of as many classes as possible, or of values from the lowest to the highest."""
    order = labels.cpu().argsort(stable=True)
    if labels.is_floating_point():
        return order[_evenly(len(order), count)]
    _, sizes = labels.cpu().unique(return_counts=True)
    rank = torch.cat([torch.arange(size) for size in sizes.tolist()])  # within the class
    return order[rank.argsort(stable=True)[:count]]


def _neighbor(it: Any) -> list[float | int | None]:
    weight, contribution = it.weight, it.contribution
    return [
        it.index,
        None if weight is None else _rounded(weight),
        None if contribution is None else _rounded(contribution),
        _rounded(it.distance),
    ]


def _evenly(count: int, most: int) -> Tensor:
    """Up to `most` of so many rows, at equal steps."""
    return torch.linspace(0, count - 1, min(count, most), dtype=torch.float64).round().long()


def _finite(value: Any) -> Any:
    return None if value is None or not math.isfinite(value) else _rounded(value)


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _plain(values: Tensor | list[Any]) -> Any:
    """Nested lists of numbers with six digits, None for NaN and infinity."""
    listed = values.tolist() if isinstance(values, Tensor) else values
    return [_plain(it) if isinstance(it, list) else _finite(it) for it in listed]
