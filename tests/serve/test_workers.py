"""The parent starts workers again, stops them all, and gives up on those that cannot start."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading

import pytest
from factories import refuses
from serve import light
from serve.running import PATIENCE, until

from otad.serve import workers

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sends signals")


def test_a_killed_worker_is_replaced_and_all_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PRELOADED", [])
    seen: list[int] = []

    def worker(address: tuple[str, int]) -> int:
        with socket.create_connection(address, PATIENCE) as link:
            return int(link.recv(20))

    def kill_and_stop(address: tuple[str, int]) -> None:
        seen.append(worker(address))
        os.kill(seen[0], signal.SIGKILL)
        until(lambda: not is_alive(seen[0]))
        seen.append(worker(address))  # waits in the socket until another worker runs
        os.kill(os.getpid(), signal.SIGTERM)

    handler = signal.getsignal(signal.SIGTERM)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        user = threading.Thread(target=kill_and_stop, args=(listening.getsockname(),))
        user.start()
        told = list[str]()
        workers.keep_running(light.answer, listening, 1, lambda: told.append("ready"))
        user.join()
    assert told == ["ready"]
    assert len(set(seen)) == 2
    assert not any(map(is_alive, seen))
    assert signal.getsignal(signal.SIGTERM) is handler


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_worker_that_cannot_start_ends_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PRELOADED", [])
    assert light.REFUSED == workers.REFUSED
    with socket.create_server(("127.0.0.1", 0)) as listening:
        refuses(
            workers.keep_running, light.refuse, listening, 2, pytest.fail, match="one that starts"
        )


def test_only_the_loopback_has_names() -> None:
    names = workers.loopback_names("127.0.0.1")
    assert names is not None
    assert {"localhost", "127.0.0.1", "[::1]"} <= {*names}
    assert workers.loopback_names("::1") is not None
    assert workers.loopback_names("localhost") is not None
    for host in ("0.0.0.0", "192.0.2.1", "example.org"):
        assert workers.loopback_names(host) is None


@pytest.mark.parametrize(
    ("options", "match"),
    [({"workers": 0}, "workers"), ({"port": 70000}, "port"), ({"host": 5}, "host")],
)
def test_bad_options_are_refused_before_anything_starts(tmp_path, options, match) -> None:
    (tmp_path / "card.json").write_text("{}")
    refuses(workers.run, tmp_path, **options, match=match)
