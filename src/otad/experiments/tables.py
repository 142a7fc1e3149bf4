"""The page of results in Markdown, records rendered by the template `page/record.md`; figures."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from pathlib import Path
from string import ascii_lowercase
from typing import Any, NamedTuple

import matplotlib
from jinja2 import Environment, FileSystemLoader, Template, Undefined
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from otad.checks import require
from otad.evaluate import Evaluation
from otad.experiments.records import CostRecord, RowRecord, RunRecord, SuiteRecord, read_records
from otad.experiments.spec import WORST, EvaluateSpec, RowSpec, name_of
from otad.io.files import replacing
from otad.scores import Score
from otad.threat import L2

GIGABYTE = 1e9
SVG: Any = {"svg.hashsalt": "otad", "svg.fonttype": "none"}  # reproducible, with searchable text
HEADINGS = {"accuracy": "accuracy % (95 %)", "mse": "mean squared error (95 %)"}
HEADER = """# Results

Rendered from the records in `{results}` by `otad reproduce NAME... --page PAGE`; do not edit.
An interval is the 95 % interval (Wilson's for accuracies).
"""


def write_page(results: str | Path, page: str | Path) -> Path:
    """Render every record of a folder to one Markdown page, and return its path.

    Quick runs are not results and are left out.

    Parameters
    ----------
    results : str or Path
        The folder of the records.
    page : str or Path
        The file to write.

    Examples
    --------
    >>> from pathlib import Path
    >>> from otad.experiments import reproduce, write_page
    >>> _ = Path("digits.toml").write_text('''
    ... title = "Handwritten digits"
    ... data.digits.name = "digits"
    ... nets.small = {data = "digits", train.epochs = 1}
    ... rows.otad = {net = "small", method = "otad"}
    ... ''')
    >>> _ = reproduce("digits.toml", out="results")
    >>> write_page("results", "results.md").read_text().splitlines()[0]
    '# Results'
    """
    results, page = Path(results), Path(page)
    records = [record for record in read_records(results) if not record.quick]
    require(records, str(results), "records of experiments (NAME.json)", "none")
    link = Path(os.path.relpath(results, page.parent)).as_posix()
    sections = [HEADER.format(results=link), *(render(one, results, link) for one in records)]
    with replacing(page) as partial:
        partial.write_text("\n".join(sections), encoding="utf-8")
    return page


def render(record: RunRecord, results: Path, link: str = ".") -> str:
    """Return one record in the folder `results` as Markdown; `link` is the path from the page."""
    spec = record.experiment
    rows = [Row(row, record.rows[key]) for key, row in spec.rows.items()]
    sources = dict.fromkeys(row.spec.published_in for row in rows if row.spec.published_in)
    text = _template().render(
        record=record,
        spec=spec,
        where=record.environment,
        link=link,
        headings=HEADINGS,
        rows=rows,
        letters=dict(zip(sources, ascii_lowercase, strict=False)),
        attacked=[
            {"key": key, "row": row, "spec": row.spec.attacks[key], "found": found}
            for key in names_of(rows, "found.attacks")
            for row in rows
            if (found := row.found.attacks.get(key)) is not None
        ],
        suites=[
            Suite(one, spec.evaluate, Evaluation.read(results / one.folder / "evaluation.json"))
            for one in record.suites
            if spec.evaluate is not None
        ],
        cost_goals=lambda one: _cost_goals(one, record),
        speed_goals=lambda one: _speed_goals(one, record),
    )
    blocks = (_block(block) for block in re.split(r"^%%$", text, flags=re.MULTILINE))
    return "\n\n".join(block for block in blocks if block) + "\n"


def _block(text: str) -> str:
    """Return a block of the page; a table gets a rule below its head."""
    if not text.strip().startswith("|"):
        return text.strip()
    lines = [line for line in text.splitlines() if line.strip()]
    rows = " ".join(f"{line.strip()}\n" if line.rstrip().endswith("|") else line for line in lines)
    cells = [re.split(r"(?<!\\)\|", row.strip())[1:-1] for row in rows.strip().splitlines()]
    cells = [[cell.strip() for cell in row] for row in cells]
    body = [cells[0], ["---"] * len(cells[0]), *cells[1:]] if len(cells) > 1 else []
    return "\n".join(f"| {' | '.join(row)} |" for row in body)


class Row(NamedTuple):
    """A row of the experiment, what was measured, and which goals are met."""

    spec: RowSpec
    found: RowRecord

    @property
    def goals(self) -> dict[str, bool]:
        found, metric = self.found, self.found.score.metric
        scores = {metric: found.score}
        scores |= {f"certified {radius}": score for radius, score in found.certified.items()}
        scores |= {name: attacked.score for name, attacked in found.attacks.items()}
        goals = {}
        for name, bound in self.spec.at_least.items():
            goal = f"{name} at least {bound:g}".removeprefix(f"{metric} ")
            goals[goal] = name in scores and scores[name].value >= bound
        return goals


class Suite(NamedTuple):
    """A row under the whole suite."""

    record: SuiteRecord
    spec: EvaluateSpec
    found: Evaluation

    @property
    def threat(self) -> str:
        bounds = self.found.threat["bounds"]
        return L2(self.found.headline_eps, bounds=bounds and tuple(bounds)).describe()

    def goals(self, eps: float) -> dict[str, bool]:
        key, goals, worst = name_of(eps), {}, self.found.worst_case(eps).value
        if self.record.row != self.spec.row:
            return {}
        if (most := self.spec.at_most.get(key)) is not None:
            goals[f"worst case at most {most:g}"] = worst <= most
        for row, bounds in self.spec.at_least.items():
            if key in bounds:
                value = worst if row == WORST else self.record.certified[row][key].value
                what = "worst case" if row == WORST else f"certified, {row}"
                goals[f"{what} at least {bounds[key]:g}"] = value >= bounds[key]
        return goals


def _cost_goals(one: CostRecord, record: RunRecord) -> dict[str, bool]:
    spec, largest = record.experiment.cost, max(cost.bank for cost in record.costs)
    if spec is None or not spec.seconds_at_most or not spec.gigabytes_at_most or one.bank < largest:
        return {}
    is_small = one.resident <= spec.gigabytes_at_most * GIGABYTE
    is_fast = one.seconds is not None and one.seconds <= spec.seconds_at_most
    goal = f"at most {spec.seconds_at_most:g} s and {spec.gigabytes_at_most:g} GB"
    return {goal: is_small and is_fast}


def _speed_goals(one: CostRecord, record: RunRecord) -> dict[str, bool]:
    spec, first = record.experiment.speed, record.speeds[0].milliseconds
    if spec is None or one.row is None or one.milliseconds is None or first is None:
        return {}
    if one.place == "memory" and (most := spec.ratio_at_most.get(one.row)) is not None:
        return {f"at most {most:g} times the first": one.milliseconds <= most * first}
    if one.place == "disk" and (most := spec.gigabytes_at_most.get(one.row)) is not None:
        return {f"at most {most:g} GB resident": one.resident <= most * GIGABYTE}
    return {}


@cache
def _template() -> Template:
    loader = FileSystemLoader(Path(__file__).parent / "page")
    made = Environment(loader=loader, trim_blocks=True, lstrip_blocks=True)
    made.finalize = lambda value: "-" if value is None else value
    made.filters |= {
        "fmt": _fmt,
        "score": lambda found: found and "{} ({} to {})".format(*_digits(found)),
        "value": lambda score: _digits(score)[0],
        "percent": lambda share: _fmt(100 * share if share or share == 0 else None, ".2f"),
        "giga": lambda count: _fmt(None if count is None else count / GIGABYTE, ".2f"),
        "spread": lambda found: " / ".join(f"{one:.3g}" for one in found.marks) if found else None,
        "median_most": lambda found: found and f"{found.median:.2f} / {found.most:.2f}",
        "brackets": _brackets,
        "met": lambda goals: ", ".join("yes" if met else "NO" for met in goals) or None,
        "cell": lambda text: text.replace("|", "\\|"),
        "names": names_of,
    }
    return made.get_template("record.md")


def names_of(items: Iterable[Any], attribute: str) -> list[str]:
    """Return all keys of a dict that each item has, in order."""
    return list(dict.fromkeys(key for one in items for key in attrgetter(attribute)(one)))


def _fmt(value: Any, form: str = "g") -> str | None:
    return None if value is None or isinstance(value, Undefined) else f"{value:{form}}"


def _digits(score: Score) -> list[str]:
    form = ".2f" if score.metric == "accuracy" else ".3f"
    return [f"{number:{form}}" for number in (score.value, score.low, score.high)]


def _brackets(options: Mapping[str, object]) -> str:
    listed = ", ".join(f"{name} = {value}" for name, value in options.items())
    return f" ({listed})" if listed else ""


def draw_costs(costs: Sequence[CostRecord], threads: int, path: Path) -> None:
    """Draw time and memory against the size of the bank, a line for each device, as SVG."""
    figure = Figure((8.0, 3.4), layout="constrained")
    seconds, memory = figure.subplots(1, 2)
    for device in dict.fromkeys(cost.device for cost in costs):
        part = sorted((cost for cost in costs if cost.device == device), key=attrgetter("bank"))
        banks = [cost.bank for cost in part]
        name = f"{device}, {threads} threads" if device == "cpu" else device
        seconds.plot(banks, [cost.seconds or 0.0 for cost in part], marker="o", label=name)
        resident = [cost.resident / GIGABYTE for cost in part]
        memory.plot(banks, resident, marker="o", label=f"{name}, resident")
        on_device = [cost.device_memory / GIGABYTE for cost in part if cost.device_memory]
        if len(on_device) == len(banks):
            memory.plot(banks, on_device, marker="s", linestyle="--", label=f"{name}, on it")
    for axes, title in ((seconds, "seconds"), (memory, "gigabytes beyond the imports")):
        axes.set(xscale="log", yscale="log", xlabel="points in the bank", title=title)
    _save(figure, f"{costs[0].queries:,} predictions", path)


def draw_curve(record: RunRecord, title: str, path: Path) -> None:
    """Draw rows of OTAD over L - l, as SVG."""
    specs = record.experiment.rows
    curvature = {
        key: spec.smoothness - spec.strong_convexity
        for key, spec in specs.items()
        if spec.method == "otad" and spec.smoothness
    }
    rows = {key: record.rows[key] for key in sorted(curvature, key=curvature.__getitem__)}
    figure = Figure((11.0, 3.6), layout="constrained")
    accuracy, lipschitz, error = figure.subplots(1, 3)

    def plot(axes: Axes, label: str, marker: str, value: str, points: Mapping[str, Any]) -> None:
        known = {key: attrgetter(value)(one) for key, one in points.items() if one is not None}
        axes.plot([curvature[key] for key in known], [*known.values()], marker=marker, label=label)

    for name in dict.fromkeys(name for row in rows.values() for name in row.attacks):
        found = {key: row.attacks[name] for key, row in rows.items() if name in row.attacks}
        label = specs[next(iter(found))].attacks[name].label
        plot(accuracy, label, "s", "score.value", found)
    plot(accuracy, "clean", "o", "score.value", rows)
    local = {key: row.lipschitz for key, row in rows.items()}
    plot(lipschitz, "median", "o", "median", local)
    plot(lipschitz, "99 %", "o", "quantile_99", local)
    accounts = {key: row.account for key, row in rows.items() if row.account is not None}
    plot(error, "mean", "o", "mean", {key: one.relative_error for key, one in accounts.items()})
    titles = ("accuracy %", "local Lipschitz constant", "relative error")
    for axes, name in zip((accuracy, lipschitz, error), titles, strict=True):
        axes.set(xlabel="L - l", title=name)
    _save(figure, title, path)


def _save(figure: Figure, title: str, path: Path) -> None:
    for axes in figure.axes:
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small")
    figure.suptitle(title)
    with matplotlib.rc_context(SVG), replacing(path) as partial:
        figure.savefig(partial, format="svg", metadata={"Date": None})
