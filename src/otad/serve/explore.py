"""The explorer behind HTTP: its page, what the page knows at the start, and queries."""

from __future__ import annotations

import functools
import json

from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse

from otad.explorer.explorer import Explorer, explorer_page
from otad.io.codec import parse_json
from otad.serve.compute import ComputeQueue
from otad.serve.served import ServedModel


def add_explorer(app: FastAPI, served: ServedModel, queue: ComputeQueue) -> None:
    """Add the page at `/`, and `/explore`, which the page asks."""

    @functools.cache
    def explorer() -> Explorer:  # made at the first use, in the thread that computes
        return Explorer(served.model, served.name)

    @functools.cache
    def setup() -> str:
        return json.dumps(explorer().setup(), allow_nan=False)

    def explore(body: object) -> str:
        return json.dumps(explorer().explore(explorer().read(body)), allow_nan=False)

    @functools.cache
    def page() -> str:
        return explorer_page()

    async def show() -> Response:
        return HTMLResponse(await run_in_threadpool(page))

    async def begin() -> Response:
        return Response(await queue.run(setup), media_type="application/json")

    async def query(request: Request) -> Response:
        text = (await request.body()).decode("utf-8", errors="replace")
        body = await run_in_threadpool(parse_json, text, "body")
        return Response(await queue.run(explore, body), media_type="application/json")

    app.get("/", include_in_schema=False)(show)
    app.get("/explore", summary="What the explorer page knows at the start")(begin)
    app.post("/explore", summary="Explore one input and an attack on it")(query)
