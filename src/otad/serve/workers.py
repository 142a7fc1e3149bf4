"""The processes of the service: a parent that holds the listening socket, and workers that answer.

All workers accept connections from one socket of the parent. A connection that waits there when a
worker dies is accepted by another one. A pipe leads from the parent to each worker. When the parent
closes it, or dies, the worker answers what it took and ends. A worker says through it when it is
ready. A worker that ends otherwise is started again.
"""

from __future__ import annotations

import ipaddress
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import uvicorn

from otad.arguments import checked
from otad.errors import InputError, OtadError
from otad.serve.metrics import SHARED_FOLDER, forget_process

REFUSED = 3  # the exit code of a worker that cannot start, so that starting it again is useless
IDLE_SECONDS = 75  # how long a connection may be idle; longer than clients keep theirs
BACKLOG = 2048
SHORT_LIFE = PAUSE = 1.0  # seconds; a worker that dies at once is started again after a pause
PRELOADED = ["otad.serve.app", "otad.model.loading"]
Worker = Callable[[socket.socket, Connection], None]
Announce = Callable[[str], None]


@checked
def run(
    folder: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    workers: int = 1,
    device: str = "cpu",
    announce: Announce | None = None,
    **options: Any,
) -> None:
    """Serve the model of a folder until the process gets SIGTERM or SIGINT.

    Requests that were taken are answered before the workers end. A worker that dies is started
    again.

    Parameters
    ----------
    folder : path
        The folder that `OTAD.save` wrote. On a CPU, workers read its bank from one mapped file.
    host, port : str, int
        Where to listen. Port 0 is one that the system chooses.
    workers : int
        How many processes answer. Each computes one batch at a time.
    device : str
        Where to compute.
    announce : callable or None
        A function that is called with the URL of the service when the first worker is ready.
    **options
        Arguments of `create_app`.

    Raises
    ------
    InputError
        If the folder has no model, or an option is refused.

    Examples
    --------
    >>> from otad.serve import run
    >>> try:
    ...     run("no-such-folder")
    ... except ValueError as error:
    ...     print(error)
    no-such-folder: expected a model folder with card.json, got none
    """
    if not (Path(folder) / "card.json").is_file():
        from otad.model.folder import read_card  # imports torch, which a parent does without

        read_card(folder)  # says what the folder is instead
    if workers < 1 or not 0 <= port < 2**16:
        expected = "at least one worker and a port from 0 to 65535"
        raise InputError(f"workers, port: expected {expected}, got {workers}, {port}")
    if options.get("token") is None:
        options["hosts"] = loopback_names(host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
    # Connections inherit this. Otherwise the body of an answer waits 40 ms behind its headers.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with listening, tempfile.TemporaryDirectory() as shared:
        os.environ[SHARED_FOLDER] = shared
        try:
            threads = max(1, (os.cpu_count() or 1) // workers)
            served = _Serve(Path(folder), device, threads if workers > 1 else None, options)
            address = f"[{host}]" if ":" in host else host
            url = f"http://{address}:{listening.getsockname()[1]}"
            keep_running(served, listening, workers, partial(announce, url) if announce else None)
        finally:
            del os.environ[SHARED_FOLDER]


def loopback_names(host: str) -> tuple[str, ...] | None:
    """Return the names of this machine for itself if `host` is one of them, else None."""
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    names = "localhost", "127.0.0.1", "[::1]", host
    return tuple(dict.fromkeys(names)) if is_loopback else None


class _Serve:
    """What a worker does. It can be sent to another process."""

    def __init__(
        self, folder: Path, device: str, threads: int | None, options: dict[str, Any]
    ) -> None:
        self.folder, self.device, self.threads, self.options = folder, device, threads, options

    def __call__(self, listening: socket.socket, parent: Connection) -> None:
        import torch

        from otad.model.loading import load
        from otad.serve.app import create_app

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        try:
            on_disk = self.device == "cpu"  # one mapped file for all workers
            model = load(self.folder, device=self.device, resident=not on_disk)
            app = create_app(model, **self.options)
        except (OtadError, OSError) as error:
            sys.stderr.write(f"otad: {error}\n")
            sys.exit(REFUSED)
        timeout = float(self.options.get("timeout", 30.0))
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=IDLE_SECONDS,
                timeout_graceful_shutdown=int(2 * timeout) + 5,  # to arrive, and to be answered
            )
        )

        parent.send(None)  # ready: connections are accepted in a moment

        def stop() -> None:
            wait([parent])  # until the parent closes its end
            server.should_exit = True

        threading.Thread(target=stop, daemon=True).start()
        server.run([listening])


def keep_running(
    work: Worker, listening: socket.socket, count: int, ready: Callable[[], None] | None = None
) -> None:
    """Run `work` in `count` processes until a signal comes, and start those again that die.

    `ready` is called once, when the first worker has sent something.

    Raises
    ------
    InputError
        If a worker ends with `REFUSED`.
    """
    # A fork server imports once what all workers need, so a worker starts in a moment.
    kind = "forkserver" if sys.platform == "linux" else "spawn"
    context: Any = multiprocessing.get_context(kind)
    context.set_forkserver_preload(PRELOADED)
    waking, waker = Pipe(duplex=False)
    wanted = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: waker.send(None)) for number in wanted}
    running: dict[int, tuple[Any, Connection, float]] = {}

    def start() -> None:
        given, held = Pipe()
        process = context.Process(target=work, args=(listening, given))
        process.start()
        given.close()
        running[process.sentinel] = process, held, time.monotonic()

    try:
        for _ in range(count):
            start()
        while True:
            watched = [held for _, held, _ in running.values()] if ready is not None else []
            events = wait([waking, *watched, *running])
            if waking in events:
                return
            if ready is not None and any(held in events and _spoke(held) for held in watched):
                ready()
                ready = None
            for sentinel in [event for event in events if isinstance(event, int)]:
                process, held, since = running.pop(sentinel)
                held.close()
                process.join()
                forget_process(process.pid)
                if process.exitcode == REFUSED:
                    raise InputError("worker: expected one that starts, got the error above")
                if time.monotonic() - since < SHORT_LIFE:
                    wait([waking], PAUSE)
                start()
    finally:
        for _, held, _ in running.values():
            held.close()
        for process, *_ in running.values():
            process.join()
        for number, handler in before.items():
            signal.signal(number, handler)


def _spoke(worker: Connection) -> bool:
    """Whether the worker said that it is ready; one that died said nothing."""
    try:
        worker.recv()
    except EOFError:
        return False
    return True
