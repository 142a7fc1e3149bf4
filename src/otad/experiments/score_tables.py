"""Tables of the clean scores: ours beside the published, what was tried, and the nets."""

from __future__ import annotations

from collections.abc import Iterable
from string import ascii_lowercase

from otad.experiments import cells
from otad.experiments.cells import NONE, table
from otad.experiments.records import NetRecord, RowRecord, RunRecord


def scores(record: RunRecord) -> str:
    """One table, or one of the accuracies and one of the errors."""
    metrics = dict.fromkeys(row.score.metric for row in record.rows.values())
    return "\n\n".join(_scores(record, metric) for metric in metrics)


def _scores(record: RunRecord, metric: str) -> str:
    letters = _letters(record.rows.values())
    several = len(record.data) > 1
    rows = [row for row in record.rows.values() if row.score.metric == metric]
    errors = any("relative_error" in row.published for row in rows)
    head = ["", *(["data"] if several else []), "K", cells.heading(metric), "n", "published"]
    head += ["relative error", "published"] if errors else []
    radii = list(dict.fromkeys(key for row in rows for key in row.certified))
    head += [f"proved at {key}: {cells.heading(metric)}" for key in radii]
    head += ["asked for", "met"]
    body = []
    for row in rows:
        letter = f" [{letters[row.published_in]}]" if row.published_in else ""
        line = [row.label, *([row.data] if several else [])]
        line += [str(row.settings.get("n_neighbors", NONE)), cells.score(row.score)]
        line += [f"{row.score.n:,}", cells.number(row.published.get(row.score.metric), letter)]
        if errors:
            line += [mean_error(row), cells.number(row.published.get("relative_error"))]
        line += [_proved(row, key) for key in radii]
        wanted = "; ".join(row.goals) or NONE
        body.append([*line, wanted, ", ".join(map(cells.met, row.goals.values())) or NONE])
    return table(head, body)


def sources(record: RunRecord) -> str:
    """Where the published figures stand."""
    letters = _letters(record.rows.values())
    return "\n".join(f"- [{letter}] {where}" for where, letter in letters.items())


def choices(record: RunRecord) -> str:
    parts = []
    for key, net in record.nets.items():
        if net.candidates:
            choice = record.config["nets"][key]["choose"]
            metric = cells.heading(net.candidates[0].score.metric)
            proved = f"proved at {choice['certified']:g}, " if "certified" in choice else ""
            head = [f"{choice['setting']} of {key}", f"validation: {proved}{metric}", "chosen"]
            chosen = net.train[choice["setting"]]
            body = [
                [f"{one.value:g}", cells.score(one.score), "yes" if one.value == chosen else ""]
                for one in net.candidates
            ]
            parts.append(table(head, body))
    return "\n\n".join(parts)


def nets(record: RunRecord) -> str:
    head = ["net", "data", "blocks", "shortcuts", "alpha", "epochs", "train score", "energy"]
    head += ["least L: least / median / 90 % / 99 % / most", "backward pairs %", "seconds"]
    return table(head, [_net(key, net) for key, net in record.nets.items()])


def mean_error(row: RowRecord) -> str:
    error = None if row.account is None else row.account.relative_error
    return NONE if error is None else f"{error.mean:.4f}"


def _proved(row: RowRecord, radius: str) -> str:
    if radius not in row.certified:
        return NONE
    published = row.published.get(f"certified {radius}")
    beside = "" if published is None else f" (published {published:g})"
    return cells.score(row.certified[radius]) + beside


def _net(key: str, net: NetRecord) -> list[str]:
    is_plain = net.kind == "fc"
    line = [key if is_plain else f"{key}: {net.kind}{cells.in_brackets(net.options)}", net.data]
    line += [str(net.blocks) if net.kind != "prototypes" else NONE]
    line += [("yes" if net.residual else "no") if is_plain else NONE]
    if net.train_score is None:
        line += [NONE, "0", NONE]
    else:
        line += [f"{net.train['energy_weight']:g}", str(net.train["epochs"])]
        line += [f"{net.train_score:.4f}"]
    if net.regularity is None:
        line += [NONE] * 3
    else:
        energy = net.regularity.energy
        line += [
            NONE if energy is None else f"{energy.mean:.3g}",
            cells.spread(net.regularity.least_smoothness),
            cells.percent(net.regularity.violations),
        ]
    return [*line, f"{net.seconds:.0f}"]


def _letters(rows: Iterable[RowRecord]) -> dict[str, str]:
    found = dict.fromkeys(row.published_in for row in rows if row.published_in)
    return dict(zip(found, ascii_lowercase, strict=False))
