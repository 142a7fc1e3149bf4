"""`otad serve`: answers requests over HTTP with a model.

This process only watches over its workers, so it does not import torch, nor the options of other
commands, which do.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from otad.errors import InputError, printable
from otad.serve.workers import loopback_names, run


def option(help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, **more)


def limit(help: str, **more: Any) -> Any:
    return option(help, rich_help_panel="Limits", **more)


def remark(message: str) -> None:
    typer.echo(f"otad: {printable(message)}", err=True)


def serve(
    model_dir: Annotated[
        Path, typer.Argument(metavar="MODEL_DIR", help="Model folder written by `otad defend`.")
    ],
    name: Annotated[
        str | None, option("Name of the model in paths.", show_default="the folder's name")
    ] = None,
    host: Annotated[str, option("Address to listen on; 0.0.0.0 is all.")] = "127.0.0.1",
    port: Annotated[int, option("Port; the system chooses one for 0.", min=0, max=65535)] = 8000,
    workers: Annotated[int, option("Processes that answer, over one bank.", min=1)] = 1,
    token_file: Annotated[
        Path | None,
        option(
            "File with a token that requests have to bring.",
            show_default="OTAD_TOKEN",
            dir_okay=False,
        ),
    ] = None,
    max_batch: Annotated[int, limit("Most rows that are computed at once.", min=1)] = 256,
    max_queue: Annotated[int, limit("Most requests at once; others get 429.", min=1)] = 256,
    timeout: Annotated[float, limit("Seconds to receive, and to answer, a request.")] = 30.0,
    max_request_bytes: Annotated[int, limit("Largest request in bytes.", min=1)] = 16 * 2**20,
    device: Annotated[str, option("Where to compute: cpu, cuda or cuda:1.")] = "cpu",
    as_json: Annotated[
        bool, option("Print the URL as a JSON object to stdout when it listens.", "--json")
    ] = False,
) -> None:
    """Answer requests over HTTP with a model, by the Open Inference Protocol.

    Clients of KServe and Triton work as they are, with JSON and binary tensors. A
    request gets predictions and probabilities. Neighbors, weights, contributions,
    distances and certified radii are outputs that it can ask for by name. /explain
    explains predictions, /metrics is for Prometheus, and /docs lists all paths. Open
    the address in a browser to explore the model.

    Requests that wait are computed together. SIGTERM and Ctrl-C end the service after
    it has answered what it took. Put a proxy in front for encryption.

    Example: otad serve digits-model --port 8000 --workers 2

    Example: OTAD_TOKEN=secret otad serve digits-model --host 0.0.0.0
    """
    token = os.environ.get("OTAD_TOKEN")
    if token_file is not None:
        token = token_file.read_text(encoding="utf-8").strip()
    if token == "":
        raise InputError("token: expected a token, got an empty text")
    if token is None and loopback_names(host) is None:
        remark(f"{host} can be reached from other machines, and no token is set")
    name = name or model_dir.resolve().name

    def announce(url: str) -> None:
        if as_json:
            typer.echo(json.dumps({"url": url, "model": name}))
        else:
            remark(f"serving {name} on {url}; all paths are listed at {url}/docs")

    run(
        model_dir,
        name=name,
        host=host,
        port=port,
        workers=workers,
        device=device,
        token=token,
        max_batch=max_batch,
        max_queue=max_queue,
        timeout=timeout,
        max_request_bytes=max_request_bytes,
        announce=announce,
    )
