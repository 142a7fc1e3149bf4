"""`otad reproduce`: run published experiments again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from otad.checks import check_device, require
from otad.cli import options as opt
from otad.cli.console import describe_score, remark, show
from otad.cli.outputs import check_out
from otad.io.codec import read_json, to_plain

if TYPE_CHECKING:  # it imports torch
    from otad.experiments import ExperimentInfo, RunRecord

HOW = ("data_dir", "out", "work", "max_seconds", "seed", "quick")


def reproduce(
    names: Annotated[
        opt.Names,
        opt.argument(
            "NAME...",
            "Experiments, labels of the paper such as tab:cw, 'all', or your own .toml file.",
        ),
    ] = None,
    listing: Annotated[
        bool, opt.option("List the experiments and what is recorded of them in --out.", "--list")
    ] = False,
    data_dir: opt.DataDir = None,
    device: opt.Device = "cpu",
    out: opt.OutFolder = Path("results"),
    force: opt.Force = False,
    work: Annotated[
        Path | None,
        opt.option("Folder for networks and finished parts.", show_default="--out/.work"),
    ] = None,
    jobs: opt.Jobs = 1,
    cluster: opt.Cluster = None,
    max_seconds: opt.MaxSeconds = None,
    seed: opt.Seed = 0,
    quick: Annotated[bool, opt.option("Use small data, for a test run.", "--quick")] = False,
    pages: Annotated[
        Path | None, opt.option("Folder for pages of tables, made of all records of --out.")
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Reproduce published tables, and show the published figures beside ours.

    A label of the paper, such as tab:cw, runs everything that this table needs. Trained
    networks and finished parts are saved. A stopped run resumes from them, and
    experiments share the parts that they have in common. Timings are measured by one
    process alone. A cluster needs --data-dir, --out and --work on all its machines. Use
    --force to replace a record or a page that exists.

    Example: otad reproduce tab:cw --data-dir data --device cuda
    """
    how = opt.given(locals(), HOW)
    from otad import experiments
    from otad.experiments.listing import experiments_for
    from otad.experiments.pages import layout

    if pages is not None:
        check_out(pages, force, results=[f"{name}.md" for name in layout().pages])
    if listing or not (names or pages):
        require(not names, "names", "none with --list", ", ".join(names or ()))
        show_experiments(experiments.list_experiments(out), as_json)
    elif names:
        require("all" not in names or len(names) == 1, "names", "'all' alone", ", ".join(names))
        how |= {"device": str(check_device(device)), "progress": True}
        chosen = experiments.names() if names == ["all"] else experiments_for(names)
        ending = "-quick.json" if quick else ".json"
        paths = [out / (Path(name).stem + ending) for name in chosen]
        done = [path for path in paths if path.exists() and not force]
        if len(done) == len(paths):
            check_out(out, force, results=[path.name for path in paths])
        for path in done:
            remark(f"note: {path} exists and is not changed; --force computes it again")
        missing = [name for name, path in zip(chosen, paths, strict=True) if path not in done]
        with opt.executor_of(jobs, cluster, device) as executor:
            experiments.reproduce_together(missing, executor=executor, **how)
        if as_json:
            found = [read_json(path) for path in paths]
            typer.echo(json.dumps(found[0] if len(found) == 1 else found, indent=1))
        else:
            for path in paths:
                show_rows(experiments.RunRecord.read(path))
        for path in paths:
            remark(f"{'found' if path in done else 'wrote'} {path}")
    if pages is not None:
        for path in experiments.write_pages(out, pages):
            remark(f"wrote {path}")


def show_rows(record: RunRecord) -> None:
    """Show what was measured of each row of an experiment, as a table."""
    spec, facts = record.experiment, {}
    for key, row in record.rows.items():
        attacks = spec.rows[key].attacks
        scores = {"": row.score} | {
            f"{attacks[k].label}: ": a.score for k, a in row.attacks.items()
        }
        scores |= {f"certified at {radius}: ": one for radius, one in row.certified.items()}
        lines = [f"{name}{describe_score(score)}" for name, score in scores.items()]
        facts[spec.rows[key].label] = "\n".join(lines)
    if facts:
        show({}, False, title=spec.title, facts=facts)


def show_experiments(listed: Sequence[ExperimentInfo], as_json: bool) -> None:
    """One line for each: those of the paper, then our own."""
    if as_json:
        typer.echo(json.dumps(to_plain(listed), indent=1))
        return
    for title, is_ours in (("Of the paper", False), ("Beyond the paper", True)):
        typer.echo(title)
        for one in (one for one in listed if is_ours == (not one.labels)):
            minutes = "-" if one.minutes is None else f"{max(1, round(one.minutes))} min"
            recorded = f"{one.recorded}/{one.cells} cells recorded"
            known = f"{recorded:22} {minutes:>6}  {one.device or '-':12} {', '.join(one.data)}"
            labels = f" ({', '.join(one.labels)})" if one.labels else ""
            typer.echo(f"  {one.name:22} {known:70} {one.title}{labels}")
