"""What the service refuses before it computes, and how it ends."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import factories
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from serve.requests import body_of, outputs_of
from serve.running import PATIENCE, running, until

import otad
from otad.serve import create_app

PATH = "/v2/models/model/infer"


@pytest.fixture(scope="module")
def model() -> otad.OTAD:
    return factories.model()


def refused(answer: Any, status: int, message: str) -> None:
    assert answer.status_code == status, answer.text
    assert message in answer.json()["error"]


def test_a_token_opens_everything_but_health_probes(model: otad.OTAD) -> None:
    client = TestClient(create_app(model, token="open-sesame"))
    for path in ("/v2", "/v2/models/model", "/metrics", "/docs", "/openapi.json", "/nothing"):
        refused(client.get(path), 401, "expected the bearer token of this service, got none")
    for wrong in ("Bearer open", "Bearer open-sesames", "open-sesame", "Bearer öpen-sesame"):
        answer = client.get("/v2", headers={"Authorization": wrong.encode("latin-1")})
        refused(answer, 401, "got another token")
    assert client.get("/v2/health/ready").json() == {"ready": True}
    assert client.get("/v2/health/live").json() == {"live": True}
    client.headers["Authorization"] = "Bearer open-sesame"
    assert client.get("/metrics").status_code == 200
    for bad in ("", " ", "two\nlines"):
        factories.refuses(create_app, model, token=bad, match="token: expected")


def test_foreign_hosts_large_bodies_and_codings(model: otad.OTAD) -> None:
    client = TestClient(create_app(model, hosts=("localhost", "[::1]"), max_request_bytes=1000))
    for name in ("localhost", "localhost:8000", "[::1]:80"):
        assert client.get("/v2", headers={"Host": name}).status_code == 200
    for name in ("evil.example", "evil.example:8000", "localhost.evil.example"):
        refused(client.get("/v2", headers={"Host": name}), 400, "expected one of localhost, [::1]")
    client.headers["Host"] = "localhost"
    refused(client.post(PATH, content=b"x" * 1001), 413, "expected at most 1000 bytes, got more")
    refused(client.post(PATH, content=b"x" * 9999), 413, "expected at most 1000 bytes, got more")
    chunks = (b"x" * 400 for _ in range(3))  # without a length
    refused(client.post(PATH, content=chunks), 413, "expected at most 1000 bytes, got more")
    refused(client.post(PATH, headers={"Content-Encoding": "gzip"}), 415, "expected none")
    refused(client.get(PATH), 405, "method: expected POST, got GET")
    refused(client.get("/v2/models/other"), 404, "such as /v2/models/model, got '/v2/models/other'")
    assert client.get("/docs").text.count("POST") >= 2
    assert "http" not in client.get("/docs").text  # loads nothing


class Held:
    """Holds up the answers of an application until they are let go."""

    def __init__(self, app: FastAPI) -> None:
        self.inside, self.go = threading.Semaphore(0), threading.Event()
        self.app, served = app, app.state.served
        self.answer, served.answer = served.answer, self

    def __call__(self, *given: Any) -> Any:
        self.inside.release()
        assert self.go.wait(PATIENCE)
        return self.answer(*given)


def post(address: str, body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
    link = HTTPConnection(address, timeout=PATIENCE)
    link.request("POST", PATH, json.dumps(body))
    answer = link.getresponse()
    found = answer.status, {k.lower(): v for k, v in answer.getheaders()}, json.load(answer)
    link.close()
    return found


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def test_a_full_queue_says_when_to_come_again(model: otad.OTAD, pool: ThreadPoolExecutor) -> None:
    app = create_app(model, max_queue=3)
    held, x = Held(app), factories.queries(model, 3)
    with running(app) as address:
        bodies = [body_of(x[k : k + 1], "neighbors", "weights", id=str(k)) for k in range(3)]
        taken = [pool.submit(post, address, body) for body in bodies]
        until(lambda: _gate(app).taken == 3)
        status, headers, answer = post(address, body_of(x))
        assert (status, headers["retry-after"]) == (429, "1")
        assert "expected at most 3 requests at once" in answer["error"]
        held.go.set()
        for k, future in enumerate(taken):
            status, _, answer = future.result(PATIENCE)
            assert (status, answer["id"]) == (200, str(k))
            trace = model.trace(x[k : k + 1])  # computed alone, with the same bits
            assert outputs_of(answer)["neighbors"] == trace.neighbors.indices[0].tolist()
            assert outputs_of(answer)["weights"] == trace.solution.multipliers[0].tolist()
        assert post(address, body_of(x))[0] == 200
        counted = TestClient(app).get("/metrics").text
    assert f'otad_requests_total{{path="{PATH}",status="200"}} 4.0' in counted
    assert 'otad_requests_total{path="none",status="429"} 1.0' in counted
    assert "otad_rows_total 6.0" in counted
    assert "otad_batch_rows_sum 6.0" in counted


def _gate(app: FastAPI) -> Any:
    layer = app.middleware_stack
    while type(layer).__name__ != "Gate":
        layer = layer.app  # type: ignore[union-attr]
    return layer


def test_a_stop_answers_what_was_taken(model: otad.OTAD, pool: ThreadPoolExecutor) -> None:
    app = create_app(model)
    held, x = Held(app), factories.queries(model, 2)
    with running(app) as address:
        taken = [pool.submit(post, address, body_of(row[None])) for row in x]
        until(lambda: _gate(app).taken == 2)
        stopping = threading.Timer(0.2, held.go.set)
        stopping.start()
    # The service has ended.
    for row, future in zip(x, taken, strict=True):
        status, _, answer = future.result(PATIENCE)
        assert status == 200
        assert outputs_of(answer)["prediction"] == model(row[None]).argmax(1).tolist()
    with pytest.raises(OSError, match="refused"):
        post(address, body_of(x))


def test_a_late_answer_is_a_time_out(model: otad.OTAD) -> None:
    app = create_app(model, timeout=PATIENCE)
    app.state.queue.timeout = 0.05
    held, client = Held(app), TestClient(app, raise_server_exceptions=False)
    x = factories.queries(model, 1)
    refused(client.post(PATH, json=body_of(x)), 504, "expected an answer within")
    held.go.set()
    app.state.served.answer = lambda *_: 1 / 0
    app.state.queue.timeout = PATIENCE
    refused(client.post(PATH, json=body_of(x)), 500, "internal error")
    app.state.served.answer = held.answer
    assert client.post(PATH, json=body_of(x)).status_code == 200


def test_a_body_that_never_ends_is_given_up(model: otad.OTAD) -> None:
    with running(create_app(model, timeout=0.1)) as address:
        host, _, port = address.partition(":")
        with socket.create_connection((host, int(port)), PATIENCE) as link:
            link.sendall(f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{{".encode())
            answer = link.makefile("rb").read().decode()
    assert answer.startswith("HTTP/1.1 408")
    assert "expected within 0.1 seconds, got a part of it" in answer


@pytest.mark.parametrize(
    "options",
    [{"max_batch": 0}, {"timeout": -1.0}, {"max_queue": 0}, {"name": "a/b"}, {"name": ""}],
)
def test_bad_options_are_refused(model: otad.OTAD, options: dict[str, Any]) -> None:
    factories.refuses(create_app, model, **options, match=f"{next(iter(options))}: expected")
