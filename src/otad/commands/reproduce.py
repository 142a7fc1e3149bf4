"""`otad reproduce`: one recorded experiment, repeated by one command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from otad.commands.console import remark
from otad.commands.options import check_device, seed_option


def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(help="The experiment, or the path of your own .toml; none lists them."),
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
    json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
) -> None:
    """Repeat a published table, with the published figure beside ours.

    Trained nets and finished parts are kept: a killed run goes on where it stopped.

    Example: otad reproduce mnist --data-dir data --device cuda --page docs/results.md
    """
    from otad.experiments import names, write_page
    from otad.experiments import reproduce as run

    if name is None:
        for known in names():
            typer.echo(known)
    else:
        record = run(
            name,
            data_dir=data_dir,
            device=str(check_device(device)),
            out=out,
            work=work,
            max_seconds=max_seconds,
            seed=seed,
            quick=quick,
            progress=True,
        )
        path = out / f"{record.file_stem}.json"
        if json:
            typer.echo(path.read_text(encoding="utf-8"), nl=False)
        remark(f"wrote {path}")
    if page is not None:
        write_page(out, page)
        remark(f"wrote {page}")
