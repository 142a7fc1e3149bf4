"""What every request has to pass first: host, token, size, and a free place."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from otad.serve.compute import ComputeQueue
from otad.serve.metrics import Metrics

# Probes have no token. The page at / holds no data and asks for the token itself.
OPEN = ("/", "/v2/health/live", "/v2/health/ready")
MOST_DROPPED = 4  # how many times the largest body is read of one that is too large
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def refusal(status: int, message: str, **headers: str) -> JSONResponse:
    """Return an error as the Open Inference Protocol has it."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return JSONResponse({"error": message}, status, named)


class Gate:
    """Refuses requests early, reads the others whole, and counts all of them.

    All requests but `OPEN` ones must bring the `token`, if there is one. `hosts` are the only names
    by which the service may be called, None for any: they protect a service without a token from
    web pages that let their own name point to this machine. At most `max_queue` requests with a
    body are read, wait or are computed at once. A body has at most `max_request_bytes` and must
    arrive within `timeout` seconds."""

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        *,
        queue: ComputeQueue,
        metrics: Metrics,
        token: str | None,
        hosts: tuple[str, ...] | None,
        max_queue: int,
        max_request_bytes: int,
        timeout: float,
    ) -> None:
        self.app, self.queue, self.metrics = app, queue, metrics
        self.secret = None if token is None else f"Bearer {token}".encode()
        self.hosts, self.max_queue, self.timeout = hosts, max_queue, timeout
        self.max_bytes, self.taken = max_request_bytes, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.perf_counter(), "none"

        async def noting(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            refused = self._refusal(scope)
            if refused is not None:
                await refused(scope, receive, noting)
            elif scope["method"] == "POST":
                await self._pass_body(scope, receive, noting)
            else:
                await self.app(scope, receive, noting)
        finally:
            path = getattr(scope.get("route"), "path", "none")
            self.metrics.requests.labels(path, status).inc()
            self.metrics.seconds.labels(path).observe(time.perf_counter() - start)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "").rpartition(":")
        name = host[0] if host[2].isdigit() else "".join(host)
        if self.hosts is not None and name not in self.hosts:
            expected = f"host: expected one of {', '.join(self.hosts)}, got {name!r}"
            return refusal(400, f"{expected}; set a token to be called by other names")
        if self.secret is not None and scope["path"] not in OPEN:
            given = headers.get("authorization", "").encode("latin-1", "replace")
            if not hmac.compare_digest(given, self.secret):
                got = "another token" if given else "none"
                message = f"authorization: expected the bearer token of this service, got {got}"
                return refusal(401, message, WWW_Authenticate="Bearer")
        coding = headers.get("content-encoding", "identity")
        if coding != "identity":
            return refusal(415, f"content-encoding: expected none, got {coding!r}")
        return None

    async def _pass_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, if there is a place for it, and pass the request on."""
        full = self.taken >= self.max_queue
        self.taken += not full
        try:
            try:
                reading = self._read(receive, keep=not full)
                body, size = await asyncio.wait_for(reading, self.timeout)
            except TimeoutError:
                message = f"body: expected within {self.timeout:g} seconds, got a part of it"
                await refusal(408, message, Connection="close")(scope, receive, send)
                return
            if full:
                message = f"queue: expected at most {self.max_queue} requests at once, got more"
                again = str(self.queue.retry_after)
                await refusal(429, message, Retry_After=again)(scope, receive, send)
            elif size > self.max_bytes:
                message = f"body: expected at most {self.max_bytes} bytes, got more"
                await refusal(413, message)(scope, receive, send)
            else:
                await self.app(scope, _once(body, receive), send)
        finally:
            self.taken -= not full

    async def _read(self, receive: Receive, keep: bool) -> tuple[bytes, int]:
        """Return the body and its size.

        The body of a refused request is read too, and dropped, so that its client is not cut off
        while it sends and sees the answer. Of a body that is much too large only a part is read.
        """
        chunks, size = [], 0
        while True:
            message = await receive()
            chunk = message.get("body", b"")
            size += len(chunk)
            if keep and size <= self.max_bytes:
                chunks.append(chunk)
            else:
                chunks.clear()
            over = size > MOST_DROPPED * self.max_bytes
            if over or not message.get("more_body", False):  # a client that is gone sends no more
                return b"".join(chunks), size


def _once(body: bytes, receive: Receive) -> Receive:
    """Return a function that gives the whole body first."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def given() -> MutableMapping[str, Any]:
        return messages.pop() if messages else await receive()

    return given
