"""The README.md of a model folder: a model card in the style of Hugging Face, for people and hubs.

Its text comes from card.json alone, so that both always agree."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from otad.checks import require
from otad.data.encoding import TableEncoding
from otad.io.codec import digest_of, from_plain, to_plain
from otad.io.files import replacing

README = "README.md"
MARK = (
    "# otad writes this file. Remove this line to keep your own text when the model is saved again."
)
_LIMITS = """\
- The figures hold for the data, the norm and the size of change named above. Other changes, such
  as rotations or other lighting, were not tried.
- An attack that nobody ran may do better than those listed. Only the share that is proved holds
  for every attack of that size.
- The model contains its training points: whoever has the folder can read them. Do not share it
  where the data are confidential.
- Inputs unlike the training data get an answer too, unless the model was made with
  `abstain_beyond`. The distance of an input from the training points shows how foreign it is."""


@dataclass(frozen=True)
class Figures:
    """The figures of an evaluation on a model card.

    `model` is a digest of the model that was evaluated, and `measure` is "accuracy" (from 0 to 1)
    or "mean absolute error". `worst`, `undefended` and `proved` have one value for each eps, or are
    empty."""

    model: str
    measure: str
    rows: int
    norm: str
    unit: str
    eps: tuple[float, ...]
    clean: float
    worst: tuple[float, ...]
    undefended: tuple[float, ...]
    proved: tuple[float | None, ...]
    attacks: tuple[str, ...]
    checks: int
    failed_checks: int


class EvaluationLike(Protocol):
    """The part of an evaluation that a model card needs."""

    @property
    def model(self) -> dict[str, Any]: ...

    def figures(self, model: str) -> Figures: ...


def add_evaluation(
    notes: Mapping[str, Any], evaluation: EvaluationLike | None, described: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the notes with the figures of an evaluation.

    Figures of models with another description are dropped from the notes, and an evaluation of
    another model is refused."""
    own = digest_of(described)
    known = from_plain(tuple[Figures, ...], notes.get("evaluations", ()), "notes.evaluations")
    kept = [one for one in known if one.model == own]
    if evaluation is not None:
        other = [name for name in described if evaluation.model.get(name) != described[name]]
        require(
            not other, "evaluation", "one of this model", f"one with another {', '.join(other)}"
        )
        new = evaluation.figures(own)
        kept = [one for one in kept if _measured(one) != _measured(new)] + [new]
    rest = {name: note for name, note in notes.items() if name != "evaluations"}
    return rest | ({"evaluations": to_plain(kept)} if kept else {})


def _measured(one: Figures) -> tuple[object, ...]:
    """Return what was measured: a newer evaluation of the same replaces the older one."""
    return one.norm, one.unit, one.eps, one.attacks


def write_readme(folder: Path, card: Mapping[str, Any]) -> None:
    """Write the model card, unless the folder has a README.md that the user wrote."""
    path = folder / README
    if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        return
    with replacing(path) as partial:
        partial.write_text(readme_of(folder.resolve().name, card), encoding="utf-8")


def readme_of(name: str, card: Mapping[str, Any]) -> str:
    """Return the text of the model card; `card` is the content of card.json."""
    net, notes = card["interface"], card["notes"]
    name = _printable(name)
    evaluations = from_plain(tuple[Figures, ...], notes.get("evaluations", ()), "notes.evaluations")
    sections = {
        "How to use it": _use(net, notes),
        "Model": _facts(_model(card)),
        "Data": _facts(_data(card)),
        "Intended use": _intended(net),
        "Figures": "\n\n".join(map(_figures, evaluations)) or _no_figures(notes),
        "Limits": _LIMITS,
        "Citation": _CITATION,
    }
    front = {
        "library_name": "otad",
        "pipeline_tag": _pipeline(net),
        "tags": ["adversarial-robustness", "optimal-transport", "nearest-neighbors"],
        "model-index": _index(name, card, evaluations),
    }
    # YAML reads JSON values, so that no name can break the header.
    header = "\n".join(f"{key}: {json.dumps(value)}" for key, value in front.items() if value)
    body = "\n".join(f"\n## {title}\n\n{text}" for title, text in sections.items())
    return f"---\n{MARK}\n{header}\n---\n\n# {_inline(name)}\n{body}\n"


_CITATION = """\
The method is OTAD: Kuo Gai, Sicong Wang, Shihua Zhang, "OTAD: An Optimal Transport-Induced Robust
Model for Agnostic Adversarial Attack", 2024, arXiv:2408.00329."""


def _use(net: Mapping[str, Any], notes: Mapping[str, Any]) -> str:
    shape = ", ".join(map(str, net["input_shape"]))
    answer = "values" if net["task"] == "regression" else "logits"
    load, call, x = "load", f"{answer} = model(x)", "x"
    takes = f"a float tensor of shape (batch, {shape})"
    estimator = notes.get("estimator")
    kind = estimator.get("class") if isinstance(estimator, Mapping) else None
    if kind in ("OTADClassifier", "OTADRegressor"):
        load, call, x = f"{kind}.load", "answers = model.predict(X)", "X"
        encoding = TableEncoding.of(notes)
        columns = notes.get("feature_names") if encoding is None else encoding.names
        takes = f"an array of shape (rows, {shape})"
        if columns:
            takes = f"a DataFrame with the columns {_first(map(_printable, columns))}"
    return (
        "```python\nimport otad\n\n"
        f'model = otad.{load}("FOLDER")  # this folder\n'
        f"{call}  # {x}: {takes}\n"
        f"print(otad.explain(model, {x}[:1])[0])  # the training points behind an answer\n```"
    )


def _no_figures(notes: Mapping[str, Any]) -> str:
    data = notes.get("data")
    examples = "data.csv --targets COLUMN" if notes.get("feature_names") else "data.npz"
    if isinstance(data, Mapping) and "choice" in data:  # `otad defend` noted where they are
        examples = "test"
    return (
        "This model was saved without an evaluation, so nothing is known about its robustness. To\n"
        f"add one: `otad evaluate FOLDER {examples} --eps 0.5 --card`, or in Python\n"
        "`model.save(folder, evaluation=otad.evaluate(model, x, y, threat=otad.L2(0.5)))`."
    )


def _first(names: Iterable[str]) -> str:
    """Return at most 20 names, and dots if there are more."""
    listed = list(names)
    return ", ".join(listed[:20]) + ", ..." * (len(listed) > 20)


def _model(card: Mapping[str, Any]) -> dict[str, str]:
    settings, net = card["settings"], card["backbone"]["config"]
    facts = {"Network": _inline(net["kind"])}
    if "potential" in card:
        facts["Answer"] = "one global Lipschitz map through the training points"
    elif "surrogate" in card:
        facts["Answer"] = f"a CIP-net over {settings['n_neighbors']} nearest training points"
    else:
        facts["Answer"] = (
            f"exact convex integration of {settings['n_neighbors']} nearest training points"
        )
    facts["Smoothness L and strong convexity l"] = (
        f"{settings['smoothness']:g} and {settings['strong_convexity']:g}"
    )
    if "metric" in card:
        facts["Neighbors by"] = (
            f"a learned metric ({_inline(card['metric']['config'].get('kind', 'own'))})"
        )
    if (limit := settings.get("abstain_beyond")) is not None:
        facts["Refuses to answer"] = f"beyond distance {limit:g} from the training points"
    return facts


def _data(card: Mapping[str, Any]) -> dict[str, str]:
    net, notes = card["interface"], card["notes"]
    data = notes["data"] if isinstance(notes.get("data"), Mapping) else {}
    facts = {name.capitalize(): _inline(data[name]) for name in ("name", "source") if name in data}
    facts["Training points"] = f"{card['bank']['points']:,}, all of them stored in the folder"
    facts["Inputs"] = f"shape {tuple(net['input_shape'])}" + (
        f", values from {net['bounds'][0]:g} to {net['bounds'][1]:g}" if net["bounds"] else ""
    )
    if net["task"] == "classification":
        listed = notes.get("classes")
        names = _first(map(_inline, listed if isinstance(listed, list) else ()))
        facts["Classes"] = f"{net['n_outputs']}: {names}".removesuffix(": ")
    return facts


def _intended(net: Mapping[str, Any]) -> str:
    kind = "Classification" if net["task"] == "classification" else "Regression"
    return (
        f"{kind} of inputs like the training data, where an attacker may change each input by a\n"
        "limited amount. Each answer names the training points it is interpolated from. Decisions\n"
        "about people, and uses in which an error does harm, need a review of the data first."
    )


def _figures(one: Figures) -> str:
    """Return a table of the figures for each eps, and the attacks that were run."""
    unit = f"{one.norm} {one.unit}".rstrip()
    columns: dict[str, Sequence[float | None]] = {"Worst case of all attacks": one.worst}
    columns |= {"Undefended network": one.undefended} if one.undefended else {}
    columns |= {"Proved": one.proved} if one.proved else {}
    lines = [[f"Size of change ({_inline(unit)})", *columns], ["---"] * (1 + len(columns))]
    for eps, *values in zip(one.eps, *columns.values(), strict=True):
        lines.append([f"{eps:g}", *(_number(value, one.measure) for value in values)])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    clean, attacks = _number(one.clean, one.measure), ", ".join(map(_inline, one.attacks))
    checks = f"Of {one.checks} checks of the attacks, {one.failed_checks} failed."
    if one.checks <= 1:  # the check of the certificate is always made
        checks = "The strength of the attacks was not checked."
    intro = f"{one.measure.capitalize()} on {one.rows:,} examples; without attack {clean}."
    return f"{intro}\n\n{table}\n\nAttacks: {attacks or 'none'}. {checks}"


def _number(value: float | None, measure: str) -> str:
    if value is None:
        return "-"
    return f"{value:.1%}" if measure == "accuracy" else f"{value:.4g}"


def _pipeline(net: Mapping[str, Any]) -> str:
    if len(net["input_shape"]) == 3 and net["task"] == "classification":
        return "image-classification"
    return f"tabular-{net['task']}"


def _index(name: str, card: Mapping[str, Any], evaluations: Iterable[Figures]) -> list[Any]:
    """Return the results in the form in which model hubs list them."""
    data = card["notes"].get("data")
    label = _printable(data.get("name", "own data")) if isinstance(data, Mapping) else "own data"
    results = []
    for one in evaluations:
        values: list[tuple[str, float | None]] = [("without attack", one.clean)]
        for title, column in (("under all attacks", one.worst), ("proved", one.proved)):
            at = [f"{title}, {one.norm} {eps:g} {one.unit}".rstrip() for eps in one.eps]
            values += zip(at, column, strict=False)
        metrics = [{"type": one.measure, "name": name, "value": value} for name, value in values]
        task = {"type": _pipeline(card["interface"])}
        results.append(
            {"task": task, "dataset": {"name": label, "type": label}, "metrics": metrics}
        )
    return [{"name": name, "results": results}] if results else []


def _facts(facts: Mapping[str, str]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in facts.items())


def _inline(value: object) -> str:
    """Return a name from the user's data on one line, without markup."""
    text = _printable(value)
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>#|{}!" else letter for letter in text)


def _printable(value: object) -> str:
    words = " ".join(str(value).split())[:300]
    return "".join(letter if letter.isprintable() else "?" for letter in words)
