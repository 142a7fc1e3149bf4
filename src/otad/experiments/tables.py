"""The page of results, rendered from the records and from nothing else."""

from __future__ import annotations

import os
from pathlib import Path

from otad.errors import InputError
from otad.experiments import account_tables, attack_tables, cells, learned_tables, score_tables
from otad.experiments.records import RunRecord, read_records
from otad.io.files import replacing

HEADER = """# Results

Rendered from the records in `{results}` by `otad.experiments.write_page`: do not edit, run the
command above a table and render again. An interval is the 95 % interval (Wilson's for accuracies).
"""


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
    plot = f"{results}/{record.file_stem}.svg"
    parts = [f"## {title}", _origin(record), _data(record)]
    if record.note:
        parts.append(record.note.strip())
    if record.rows:
        parts += [score_tables.scores(record), attack_tables.attacks(record)]
        parts.append(score_tables.sources(record))
    if record.suite is not None:
        parts += [attack_tables.suite(one, results) for one in (record.suite, *record.beside)]
    if "curve" in record.config:
        parts.append(f"![{record.config['curve']['title']}]({plot})")
    parts += [account_tables.potentials(record), account_tables.accounts(record)]
    parts += [score_tables.choices(record), score_tables.nets(record)]
    parts += [learned_tables.metrics(record), learned_tables.surrogates(record)]
    parts += [learned_tables.speeds(record)]
    if record.costs:
        parts += [account_tables.costs(record), f"![time and memory]({plot})"]
    parts += [f"Not run: {what}: {why}." for what, why in record.missing.items()]
    return "\n\n".join(part for part in parts if part) + "\n"


def _origin(record: RunRecord) -> str:
    where = record.environment
    commit = where.commit or f"unknown, source {record.code[:12]}"
    machine = " and ".join(dict.fromkeys((where.device_name, where.cpu)))
    shared = ""
    if record.jobs > 1:
        shared = f", by up to {record.jobs} processes at once, each slower for the others"
    return (
        f"`otad reproduce {record.name} --seed {record.seed}` on {machine}, "
        f"torch {where.versions.get('torch')}, Python {where.python}, commit {commit}, "
        f"{where.started}; {sum(record.seconds.values()):.0f} s in all{shared}."
    )


def _data(record: RunRecord) -> str:
    lines = []
    for key, data in record.data.items():
        shape = " x ".join(map(str, data.input_shape))
        kind = f"{data.classes} classes" if data.classes else "regression"
        lines.append(
            f"- {key}: {data.name}{cells.in_brackets(data.options)}, {data.train_size:,} train and "
            f"{data.test_size:,} test points, {shape}, {kind}; {data.source}"
        )
    return "\n".join(lines)
