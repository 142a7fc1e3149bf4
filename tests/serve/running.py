"""A service that runs in a thread of the test, on a port that the system chooses."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

PATIENCE = 300  # seconds; a loaded machine is slow


@contextmanager
def running(app: FastAPI) -> Iterator[str]:
    """Serve the application; yields its address, such as 127.0.0.1:4711."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=PATIENCE)
        server = uvicorn.Server(config)
        server.capture_signals = _nothing  # type: ignore[method-assign]  # not the main thread
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            until(lambda: server.started)
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def until(condition: Any) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.01)
