"""`otad reproduce`: recorded experiments, run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from otad.checks import check_device, require
from otad.cli import options as opt
from otad.cli.console import remark
from otad.cli.outputs import check_out
from otad.io.codec import read_json

HOW = ("jobs", "data_dir", "out", "work", "max_seconds", "seed", "quick")


def reproduce(
    names: Annotated[
        opt.Names, opt.argument("NAME...", "Experiments, 'all' or your own .toml; none lists them.")
    ] = None,
    data_dir: opt.DataDir = None,
    device: opt.Device = "cpu",
    out: opt.OutFolder = Path("results"),
    force: opt.Force = False,
    work: Annotated[
        Path | None, opt.option("Folder for nets and finished parts.  [default: --out/.work]")
    ] = None,
    jobs: Annotated[int, opt.option("Processes at once; timings still run alone.", min=1)] = 1,
    max_seconds: opt.MaxSeconds = None,
    seed: opt.Seed = 0,
    quick: Annotated[bool, opt.option("Small data, for a test run.", "--quick")] = False,
    page: Annotated[Path | None, opt.option("Markdown page for all records of --out.")] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Reproduce published tables, with the published figures beside ours.

    Trained nets and finished parts are stored: a killed run resumes, and experiments share the
    parts they have in common. A record or page that exists is replaced with --force alone.

    Example: otad reproduce mnist --data-dir data --device cuda --page docs/results.md
    """
    how = opt.given(locals(), HOW)
    from otad import experiments

    if page is not None:
        check_out(page.parent, force, results=[page.name])
    known = experiments.names()
    if not names:
        typer.echo("\n".join(known))
    else:
        require("all" not in names or len(names) == 1, "names", "'all' alone", ", ".join(names))
        how |= {"device": str(check_device(device)), "progress": True}
        chosen = list(known) if names == ["all"] else names
        ending = "-quick.json" if quick else ".json"
        paths = [out / (Path(name).stem + ending) for name in chosen]
        done = [path for path in paths if path.exists() and not force]
        if len(done) == len(paths):
            check_out(out, force, results=[path.name for path in paths])
        for path in done:
            remark(f"note: {path} exists and stays as it is; --force computes it again")
        missing = [name for name, path in zip(chosen, paths, strict=True) if path not in done]
        experiments.reproduce_together(missing, **how)
        if as_json:
            found = [read_json(path) for path in paths]
            typer.echo(json.dumps(found[0] if len(found) == 1 else found, indent=1))
        for path in paths:
            remark(f"{'found' if path in done else 'wrote'} {path}")
    if page is not None:
        experiments.write_page(out, page)
        remark(f"wrote {page}")
