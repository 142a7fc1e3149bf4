"""Tables of scores under attack: by row and attack, and of the whole suite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from otad.experiments import cells
from otad.experiments.attack_records import WORST, AttackedScore, SuiteLine, SuiteRecord
from otad.experiments.cells import NONE, table
from otad.experiments.records import RowRecord, RunRecord
from otad.experiments.shifts import SMAPE, E


def attacks(record: RunRecord) -> str:
    """What the attacks are, and what is left under each, one line for each row they were run on; of
    accuracies and of errors in tables of their own."""
    lines = list(_by_attack(record))
    if not lines:
        return ""
    metrics = dict.fromkeys(found.score.metric for _, _, found in lines)
    return "\n\n".join([_meanings(record), *(_table(lines, metric) for metric in metrics)])


def _table(lines: Sequence[tuple[str, RowRecord, AttackedScore]], metric: str) -> str:
    is_value = metric == "mse"
    head = ["under attack", "", "n", f"clean {'MSE' if is_value else '%'}"]
    head += [cells.heading(metric), "published"]
    head += ["E", "published", "SMAPE", "published"] if is_value else ["distance: median / most"]
    head += ["answers a point", "gradients a point", "seconds"]
    return table(head, [_line(*one, is_value) for one in lines if one[2].score.metric == metric])


def _by_attack(record: RunRecord) -> Iterator[tuple[str, RowRecord, AttackedScore]]:
    for key in _attacks_of(record):
        for row in record.rows.values():
            if key in row.attacks:
                yield key, row, row.attacks[key]


def _attacks_of(record: RunRecord) -> dict[str, AttackedScore]:
    """Every attack once, as it is in the first row that has it."""
    found: dict[str, AttackedScore] = {}
    for row in record.rows.values():
        found = row.attacks | found
    order = dict.fromkeys(key for row in record.rows.values() for key in row.attacks)
    return {key: found[key] for key in order}


def _line(key: str, row: RowRecord, found: AttackedScore, is_value: bool) -> list[str]:
    n = found.score.n
    line = [found.label or key, row.label, f"{n:,}", cells.value_of(found.clean)]
    line += [cells.score(found.score), cells.number(row.published.get(key))]
    if is_value:
        for name in (E, SMAPE):
            line += [f"{found.metrics[name]:.3f}", cells.number(row.published.get(f"{key} {name}"))]
    else:
        far = found.distance
        line.append(NONE if far is None else f"{far.median:.2f} / {far.most:.2f}")
    return [
        *line,
        f"{found.forwards / n:.0f}",
        f"{found.backwards / n:.0f}",
        f"{found.seconds:.0f}",
    ]


def _meanings(record: RunRecord) -> str:
    lines = []
    for key, found in _attacks_of(record).items():
        names = [name + cells.in_brackets(how) for name, how in found.settings["attacks"].items()]
        how = " and ".join(names)
        how += ", for each point the worst" if len(names) > 1 else ""
        how += "; found on the net alone" if found.settings["on"] == "net" else ""
        threat = "anywhere in the box" if found.eps is None else found.threat
        lines.append(f"- {found.label or key}: {threat}; {how}")
    return "\n".join(lines)


def suite(found: SuiteRecord, results: str) -> str:
    """The whole suite: by radius, by attack, and the flags."""
    clean = ", ".join(f"{name} {cells.score(one)}" for name, one in found.clean.items())
    whole = f"[the whole evaluation]({results}/{found.folder}/report.html)"
    about = (
        f"{found.row} under the whole suite of attacks: {found.threat}. The attacker knows "
        f"{found.attacker_knows}. Clean accuracy % on these {_size(found):,} points: {clean}. "
        f"{found.seconds:.0f} s in all; {whole}."
    )
    parts = [about, _radii(found), _costs(found), _flags(found)]
    parts += [f"Not run: {what}: {why}." for what, why in found.missing.items()]
    return "\n\n".join(part for part in parts if part)


def _size(found: SuiteRecord) -> int:
    return found.lines[0].worst.n


def _radii(found: SuiteRecord) -> str:
    certified = list(found.lines[0].certified)
    head = ["eps", "clean %", "worst case % (95 %)"]
    head += [*(f"certified %: {row}" for row in certified), "asked for", "met", "seconds"]
    clean = cells.value_of(found.clean["otad"])
    body = []
    for line in found.lines:
        cut = [cells.score(line.certified[row]) for row in certified]
        body.append([f"{line.eps:g}", clean, cells.score(line.worst), *cut, *_goals(line)])
        body[-1].append(f"{line.seconds:.0f}")
    return table(head, body)


def _goals(line: SuiteLine) -> tuple[str, str]:
    wanted, answers = [], []
    for key, goal in line.goals.items():
        bound = f"{'at most' if goal.at_most else 'at least'} {goal.value:g}"
        wanted.append(f"{'worst case' if key == WORST else f'certified, {key}'} {bound}")
        score = line.worst if key == WORST else line.certified[key]
        answers.append(cells.met(goal.is_met(score)))
    return "; ".join(wanted) or NONE, ", ".join(answers) or NONE


def _costs(found: SuiteRecord) -> str:
    head = ["attack", "family", "attacked", "broken", "answers", "gradients", "seconds"]
    body = []
    for one in found.costs:
        counts = (one.attacked, one.broken, one.forwards, one.backwards)
        line = [one.attack, one.family, *(f"{count:,}" for count in counts)]
        body.append([*line, f"{one.seconds:.1f}"])
    return table(head, body)


def _flags(found: SuiteRecord) -> str:
    body = [[flag.name, flag.verdict, flag.found] for flag in found.flags]
    return table(["flag", "verdict", "found"], body)
