"""The page of results, rendered from the records and from nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import ascii_lowercase

from otad.errors import InputError
from otad.experiments.records import NetRecord, RowRecord, RunRecord, read_records
from otad.regularity import Distribution
from otad.scores import Score
from otad.transport.files import replacing

HEADER = """# Results

Rendered from the records in `{results}` by `otad.experiments.write_page`: do not edit, run the
command above a table and render again. An interval is the 95 % interval (Wilson's for accuracies).
"""
NONE = "-"
GIGABYTE = 1e9


def write_page(results: str | Path, page: str | Path) -> Path:
    """Render every record of a folder (quick runs are no results) to a Markdown page."""
    results, page = Path(results), Path(page)
    records = [record for record in read_records(results) if not record.quick]
    if not records:
        raise InputError(f"{results}: expected records of experiments (NAME.json), got none")
    way = Path(os.path.relpath(results, page.parent)).as_posix()
    sections = [HEADER.format(results=way), *(render(record, way) for record in records)]
    with replacing(page) as partial:
        partial.write_text("\n".join(sections), encoding="utf-8")
    return page


def render(record: RunRecord, results: str = ".") -> str:
    """One record as Markdown; `results` is the way from the page to the folder of its plot."""
    title = f"{record.title} (quick run, no result)" if record.quick else record.title
    parts = [f"## {title}", _origin(record), _data(record)]
    if record.note:
        parts.append(record.note.strip())
    if record.rows:
        parts += [_scores(record), _published(record)]
        parts.append(_accounts(record))
    parts += [_choices(record), _nets(record)]
    if record.costs:
        parts += [_costs(record), f"![time and memory]({results}/{record.name}.svg)"]
    parts += [f"Not run: {what}: {why}." for what, why in record.missing.items()]
    return "\n\n".join(part for part in parts if part) + "\n"


def _origin(record: RunRecord) -> str:
    where = record.environment
    commit = where.commit or f"unknown, source {record.code[:12]}"
    machine = " and ".join(dict.fromkeys((where.device_name, where.cpu)))
    return (
        f"`otad reproduce {record.name} --seed {record.seed}` on {machine}, "
        f"torch {where.versions.get('torch')}, Python {where.python}, commit {commit}, "
        f"{where.started}; {sum(record.seconds.values()):.0f} s in all."
    )


def _data(record: RunRecord) -> str:
    lines = []
    for key, data in record.data.items():
        shape = " x ".join(map(str, data.input_shape))
        kind = f"{data.classes} classes" if data.classes else "regression"
        lines.append(
            f"- {key}: {data.name}{_options(data.options)}, {data.train_size:,} train and "
            f"{data.test_size:,} test points, {shape}, {kind}; {data.source}"
        )
    return "\n".join(lines)


def _scores(record: RunRecord) -> str:
    letters = _letters(record.rows.values())
    several = len(record.data) > 1
    errors = any("relative_error" in row.published for row in record.rows.values())
    metric = next(iter(record.rows.values())).score.metric
    head = ["", *(["data"] if several else []), "K", _heading(metric), "n", "published"]
    head += ["relative error", "published"] if errors else []
    head += ["asked for", "met"]
    body = []
    for row in record.rows.values():
        letter = f" [{letters[row.published_in]}]" if row.published_in else ""
        asked = row.at_least.get(row.score.metric)
        cells = [row.label, *([row.data] if several else [])]
        cells += [str(row.settings.get("n_neighbors", NONE)), _score(row.score), f"{row.score.n:,}"]
        cells.append(_number(row.published.get(row.score.metric), letter))
        if errors:
            cells += [_mean_error(row), _number(row.published.get("relative_error"))]
        met = {None: NONE, True: "yes", False: "NO"}[row.is_met]
        body.append([*cells, NONE if asked is None else f"at least {asked:g}", met])
    return _table(head, body)


def _published(record: RunRecord) -> str:
    letters = _letters(record.rows.values())
    return "\n".join(f"- [{letter}] {where}" for where, letter in letters.items())


def _accounts(record: RunRecord) -> str:
    head = ["how OTAD answered", "mode", "L used: least / median / 90 % / 99 % / most", "solved %"]
    head += ["raised %", "nearest alone %", "residual", "relative error", "changed by potential %"]
    head += ["local Lipschitz: median / most"]
    body = []
    for row in record.rows.values():
        account = row.account
        if account is None and row.lipschitz is None:
            continue
        lipschitz = NONE
        if row.lipschitz is not None:
            lipschitz = f"{row.lipschitz.median:.2f} / {row.lipschitz.most:.2f}"
            if "lipschitz" in row.published:
                lipschitz += f" (published {row.published['lipschitz']:g})"
        if account is None:
            body.append([row.label, *[NONE] * 8, lipschitz])
            continue
        shares = account.statuses
        changed = account.changed_by_potential
        body.append(
            [
                row.label,
                _mode(row),
                _spread(account.smoothness),
                _percent(shares["solved"]),
                _percent(shares["raised"]),
                _percent(shares["infeasible"] + shares["unsolved"]),
                NONE if account.residual is None else f"{account.residual:.1e}",
                _mean_error(row),
                NONE if changed is None else _percent(changed),
                lipschitz,
            ]
        )
    return _table(head, body)


def _choices(record: RunRecord) -> str:
    parts = []
    for key, net in record.nets.items():
        if net.candidates:
            choice = record.config["nets"][key]["choose"]
            metric = _heading(net.candidates[0].score.metric)
            head = [f"{choice['setting']} of {key}", f"validation: {metric}", "chosen"]
            chosen = net.train[choice["setting"]]
            body = [
                [f"{one.value:g}", _score(one.score), "yes" if one.value == chosen else ""]
                for one in net.candidates
            ]
            parts.append(_table(head, body))
    return "\n\n".join(parts)


def _nets(record: RunRecord) -> str:
    head = ["net", "data", "blocks", "shortcuts", "alpha", "epochs", "train score", "energy"]
    head += ["least L: least / median / 90 % / 99 % / most", "backward pairs %", "seconds"]
    return _table(head, [_net(key, net) for key, net in record.nets.items()])


def _net(key: str, net: NetRecord) -> list[str]:
    cells = [key, net.data, str(net.blocks), "yes" if net.residual else "no"]
    cells += [f"{net.train['energy_weight']:g}", str(net.train["epochs"]), f"{net.train_score:.4f}"]
    if net.regularity is None:
        cells += [NONE] * 3
    else:
        energy = net.regularity.energy
        cells += [
            NONE if energy is None else f"{energy.mean:.3g}",
            _spread(net.regularity.least_smoothness),
            _percent(net.regularity.violations),
        ]
    return [*cells, f"{net.seconds:.0f}"]


def _costs(record: RunRecord) -> str:
    head = ["device", "threads", "bank", "predictions", "seconds", "resident GB", "on device GB"]
    head += ["accuracy %", "asked for", "met"]
    asked = record.config["cost"]
    seconds, memory = asked.get("seconds_at_most"), asked.get("gigabytes_at_most")
    largest = max(cost.bank for cost in record.costs)
    body = []
    for cost in record.costs:
        resident = cost.resident / GIGABYTE
        on_device = None if cost.device_memory is None else cost.device_memory / GIGABYTE
        wanted, met = NONE, NONE
        if cost.bank == largest and seconds is not None and memory is not None:
            wanted = f"at most {seconds:g} s and {memory:g} GB"
            met = "yes" if cost.seconds <= seconds and resident <= memory else "NO"
        body.append(
            [
                cost.device,
                str(cost.threads),
                f"{cost.bank:,}",
                f"{cost.queries:,}",
                f"{cost.seconds:.2f}",
                f"{resident:.2f}",
                NONE if on_device is None else f"{on_device:.2f}",
                f"{cost.accuracy:.2f}",
                wanted,
                met,
            ]
        )
    return _table(head, body)


def _letters(rows: Iterable[RowRecord]) -> dict[str, str]:
    sources = dict.fromkeys(row.published_in for row in rows if row.published_in)
    return dict(zip(sources, ascii_lowercase, strict=False))


def _heading(metric: str) -> str:
    return {"accuracy": "accuracy % (95 %)", "mse": "mean squared error (95 %)"}[metric]


def _score(score: Score) -> str:
    digits = 2 if score.metric == "accuracy" else 3
    value, low, high = (f"{one:.{digits}f}" for one in (score.value, score.low, score.high))
    return f"{value} ({low} to {high})"


def _mode(row: RowRecord) -> str:
    climb = row.settings.get("climb")
    steps = f", steps {climb[0]:g} and {climb[1]:g}" if climb else ""
    return f"{row.settings['mode']}{steps}"


def _mean_error(row: RowRecord) -> str:
    error = None if row.account is None else row.account.relative_error
    return NONE if error is None else f"{error.mean:.4f}"


def _spread(found: Distribution | None) -> str:
    if found is None:
        return NONE
    marks = (found.least, found.median, found.quantile_90, found.quantile_99, found.most)
    return " / ".join(f"{mark:.3g}" for mark in marks)


def _number(value: float | None, mark: str = "") -> str:
    return NONE if value is None else f"{value:g}{mark}"


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"


def _options(options: dict[str, object]) -> str:
    listed = ", ".join(f"{name} = {value}" for name, value in options.items())
    return f" ({listed})" if listed else ""


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    if not body:
        return ""
    rows = [head, ["---"] * len(head), *body]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows
    )
