"""The application: paths of the Open Inference Protocol, explanations and metrics."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import metadata
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse
from torch import Tensor

from otad.arguments import checked
from otad.checks import check_count, check_positive, require
from otad.errors import InputError, OtadError
from otad.model.conversion import Estimator
from otad.model.otad import OTAD
from otad.serve import openapi, protocol
from otad.serve.compute import ComputeQueue
from otad.serve.explore import add_explorer
from otad.serve.gate import Gate, refusal
from otad.serve.metrics import Metrics
from otad.serve.served import ServedModel

JSON, BINARY = "application/json", "application/octet-stream"


@checked
def create_app(
    model: OTAD | Estimator,
    *,
    name: str = "model",
    token: str | None = None,
    hosts: tuple[str, ...] | None = None,
    max_batch: int = 256,
    max_queue: int = 256,
    timeout: float = 30.0,
    max_request_bytes: int = 16 * 2**20,
) -> FastAPI:
    """Return an ASGI application that answers requests with a model.

    It speaks the Open Inference Protocol, version 2, with JSON and binary tensors, below
    `/v2/models/NAME`. `/explain` explains answers, `/` is the explorer, a page to try the model in
    a browser, `/metrics` is for Prometheus, and `/docs` lists all paths. `otad serve` runs it; any
    ASGI server can.

    Parameters
    ----------
    model : OTAD or estimator
        A defended model, or a fitted estimator. Do not use it elsewhere while the application runs,
        because only one thread may compute.
    name : str
        The name of the model in paths.
    token : str or None
        A bearer token that every request has to bring, except probes of health. If None, everyone
        who reaches the service may use it.
    hosts : tuple of str or None
        The only names by which the service may be called, such as "localhost". If None, any.
    max_batch : int
        The most rows that are computed at once. Larger requests are computed in parts.
    max_queue : int
        The most requests that are read, wait or are computed at once. Others get the status 429.
    timeout : float
        Seconds within which a request must arrive, and within which it must be answered.
    max_request_bytes : int
        The largest body of a request.

    Returns
    -------
    FastAPI
        The application. `app.state.queue` runs functions in the one compute thread, and
        `app.state.served` describes the model.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> from otad.serve import create_app
    >>> model = otad.defend(None, torch.eye(3), torch.arange(3), inputs="pixels", n_neighbors=2)
    >>> app = create_app(model, name="corners")
    >>> "/v2/models/corners/infer" in app.openapi()["paths"]
    True
    """
    for count, what in ((max_batch, "max_batch"), (max_queue, "max_queue")):
        check_count(count, what)
    check_count(max_request_bytes, "max_request_bytes")
    check_positive(timeout, "timeout", most=86400.0)
    plain = token is None or (token.isascii() and token.isprintable() and token.strip() == token)
    require(plain and token != "", "token", "ASCII letters, digits and signs", "other text")
    served, metrics = ServedModel(model, name), Metrics()
    queue = ComputeQueue(max_batch, timeout, metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(queue.close)

    app = FastAPI(
        title=f"otad: {name}",
        version=metadata.version("otad"),
        lifespan=lifespan,
        docs_url=None,  # its page loads scripts from another server
        redoc_url=None,
    )
    app.state.queue, app.state.served, app.state.metrics = queue, served, metrics
    limits: dict[str, Any] = {"max_queue": max_queue, "max_request_bytes": max_request_bytes}
    limits |= {"token": token, "hosts": hosts, "timeout": float(timeout)}
    app.add_middleware(Gate, queue=queue, metrics=metrics, **limits)
    _add_errors(app, timeout, paths_of(served)[0])
    _add_health(app, served)
    _add_inference(app, served, queue, metrics)
    add_explorer(app, served, queue)
    return app


def _add_errors(app: FastAPI, timeout: float, example: str) -> None:
    def misplaced(request: Request, error: HTTPException) -> str:
        if allowed := (error.headers or {}).get("Allow"):
            return f"method: expected {allowed}, got {request.method}"
        got = repr(request.url.path[:80])
        return f"path: expected one that /docs lists, such as {example}, got {got}"

    answers: dict[Any, Callable[[Request, Any], JSONResponse]] = {
        InputError: lambda _, error: refusal(400, str(error)),
        OtadError: lambda _, error: refusal(422, str(error)),  # rows that cannot be solved
        TimeoutError: lambda _, error: refusal(
            504, f"timeout: expected an answer within {timeout:g} seconds, got none"
        ),
        HTTPException: lambda request, error: refusal(error.status_code, misplaced(request, error)),
        Exception: lambda _, error: refusal(500, "internal error"),
    }
    for kind, answer in answers.items():

        async def handle(request: Request, error: Exception, answer: Any = answer) -> Response:
            return answer(request, error)  # type: ignore[no-any-return]

        app.add_exception_handler(kind, handle)


def _add_health(app: FastAPI, served: ServedModel) -> None:
    def add(path: str, summary: str, content: dict[str, Any]) -> None:
        async def answer() -> dict[str, Any]:
            return content

        app.get(path, summary=summary)(answer)

    extensions = ["binary_tensor_data"]
    about = {"name": "otad", "version": app.version, "extensions": extensions}
    add("/v2", "The server and its version", about)
    add("/v2/health/live", "Whether the server runs", {"live": True})
    add("/v2/health/ready", "Whether the server can answer", {"ready": True})
    for base in paths_of(served):
        add(base, "The inputs and outputs of the model", served.describe())
        ready = {"name": served.name, "ready": True}
        add(f"{base}/ready", "Whether the model can answer", ready)


def paths_of(served: ServedModel) -> tuple[str, str]:
    """Return the paths of the model, without and with its version."""
    base = f"/v2/models/{served.name}"
    return base, f"{base}/versions/{served.version}"


def _add_inference(
    app: FastAPI, served: ServedModel, queue: ComputeQueue, metrics: Metrics
) -> None:
    async def read(request: Request) -> tuple[protocol.Request, Tensor]:
        body, length = await request.body(), request.headers.get(protocol.HEADER_LENGTH)

        def parse() -> tuple[protocol.Request, Tensor]:
            asked = protocol.read_request(body, length, served.inputs)
            return asked, served.as_inputs(asked.inputs)

        return await run_in_threadpool(parse)  # a large body must not hold up other requests

    def about(asked: protocol.Request) -> dict[str, Any]:
        found = {"model_name": served.name, "model_version": served.version}
        return found if asked.id is None else found | {"id": asked.id}

    async def infer(request: Request) -> Response:
        asked, x = await read(request)
        wanted = served.check_outputs(tuple(asked.outputs))
        parts = await queue.join(served.answer, x, wanted)
        metrics.rows.inc(len(x))
        binary = {name: asked.outputs.get(name, asked.binary) for name in wanted}

        def encode() -> tuple[bytes, int | None]:
            return protocol.write_response(about(asked), served.finish(parts, wanted), binary)

        body, length = await run_in_threadpool(encode)
        if length is None:
            return Response(body, media_type=JSON)
        return Response(body, headers={protocol.HEADER_LENGTH: str(length)}, media_type=BINARY)

    async def explain(request: Request) -> Response:
        asked, x = await read(request)
        most = queue.max_batch
        require(len(x) <= most, "inputs", f"at most {most} rows to explain", len(x))
        found = await queue.run(served.explain, x)
        body = json.dumps(about(asked) | {"explanations": found}, allow_nan=False)
        return Response(body, media_type=JSON)

    def scrape() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    def page() -> HTMLResponse:
        return HTMLResponse(openapi.page_of(app.openapi()))

    schema = openapi.request_of(served)
    for base in paths_of(served):
        app.post(f"{base}/infer", summary="Answer rows", openapi_extra=schema)(infer)
    app.post("/explain", summary="Explain the answers to rows", openapi_extra=schema)(explain)
    app.get("/metrics", summary="Numbers for Prometheus")(scrape)
    app.get("/docs", include_in_schema=False)(page)
