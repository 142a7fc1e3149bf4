"""`otad reproduce`: recorded experiments, repeated by one command."""

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
            help=f"Experiments, {ALL!r}, or paths of your own .toml; none lists them.",
        ),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with the data sets; else OTAD_DATA.")
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
        int, typer.Option(min=1, help="Processes at once; what measures speed still runs alone.")
    ] = 1,
    max_seconds: Annotated[
        float | None,
        typer.Option(help="Stop a training that would last longer; the same command goes on."),
    ] = None,
    seed: Annotated[int, seed_option("Seed of training and draws.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small data: tries the machinery, gives no result.")
    ] = False,
    page: Annotated[
        Path | None, typer.Option(help="Then render all records of --out to this Markdown page.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the record as JSON, several as a list.")
    ] = False,
) -> None:
    """Repeat published tables, with the published figure beside ours.

    Trained nets and finished parts are kept: a killed run goes on where it stopped, and experiments
    share what they have in common.

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
        paths = [out / f"{record.file_stem}.json" for record in records]
        if as_json:
            found = [read_json(path) for path in paths]
            typer.echo(json.dumps(found[0] if len(found) == 1 else found, indent=1))
        for path in paths:
            remark(f"wrote {path}")
    if page is not None:
        experiments.write_page(out, page)
        remark(f"wrote {page}")
