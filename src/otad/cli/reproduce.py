"""`otad reproduce`: recorded experiments, run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from otad.cli.console import remark
from otad.cli.options import check_device, seed_option
from otad.errors import InputError
from otad.io.codec import read_json

ALL = "all"


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME...",
            help=f"Experiments, {ALL!r}, or paths of your own .toml; without any, lists them.",
        ),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of the data sets, by default the one in OTAD_DATA.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for records.", file_okay=False)] = Path(
        "results"
    ),
    work: Annotated[
        Path | None,
        typer.Option(help="Folder for nets and finished parts; by default --out/.work."),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Processes at once; measurements of speed still run alone.")
    ] = 1,
    max_seconds: Annotated[
        float | None,
        typer.Option(help="Stop a training that takes longer; the same command resumes it."),
    ] = None,
    seed: Annotated[int, seed_option("Seed of training and draws.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small data: a test run without meaningful results.")
    ] = False,
    page: Annotated[
        Path | None, typer.Option(help="Then render all records of --out to this Markdown page.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the record as JSON, several as a list.")
    ] = False,
) -> None:
    """Reproduce published tables, with the published figures beside ours.

    Trained nets and finished parts are stored: a killed run resumes, and experiments share the
    parts they have in common.

    Example: otad reproduce mnist --data-dir data --device cuda --page docs/results.md
    """
    from otad import experiments

    known = experiments.names()
    if not names:
        for name in known:
            typer.echo(name)
    else:
        if ALL in names and len(names) > 1:
            raise InputError(f"names: expected {ALL!r} alone, got {', '.join(names)}")
        records = experiments.reproduce_together(
            list(known) if names == [ALL] else names,
            jobs=jobs,
            data_dir=data_dir,
            device=str(check_device(device)),
            out=out,
            work=work,
            max_seconds=max_seconds,
            seed=seed,
            quick=quick,
            progress=True,
        )
        paths = [out / f"{record.experiment.stem}.json" for record in records]
        if as_json:
            found = [read_json(path) for path in paths]
            typer.echo(json.dumps(found[0] if len(found) == 1 else found, indent=1))
        for path in paths:
            remark(f"wrote {path}")
    if page is not None:
        experiments.write_page(out, page)
        remark(f"wrote {page}")
