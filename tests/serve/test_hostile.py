"""Bad requests get a 4xx that says what was expected, and the service answers afterwards."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator
from typing import Any

import factories
import pytest
from fastapi.testclient import TestClient
from serve.requests import body_of

from otad.serve import create_app
from otad.serve.protocol import HEADER_LENGTH

PATH = "/v2/models/model/infer"
MODEL = factories.model()
X = factories.queries(MODEL, 2)
GOOD = body_of(X, "prediction", id="7")
VALUES: list[Any] = [
    None, True, -1, 0, 1, 2**62, 2**70, 1e308, -1e-308, "", "x", "FP16", "BYTES", "shape", [], [[]],
    {}, [None], [[1, [2]]], {"name": 1}, [0, 5], [2**62, 2**62], [-2, -5], [2, 5, 1], "input" * 99,
]  # fmt: skip
ODD_TEXTS = [
    "", "null", "[]", "7", "{", "{}", "NaN", '{"inputs": NaN}', "[" * 100_000, '{"a":' * 50_000,
    '{"inputs": [' + "1" * 5000 + "]}", '"\\ud800"', "\x00", '{"inputs": 1e999}', "Infinity",
]  # fmt: skip


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(create_app(MODEL, max_request_bytes=2**20))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a request."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items if isinstance(value, (dict, list)) else ():
        yield from places(item, (*path, key)) if isinstance(item, (dict, list)) else [(*path, key)]


def changed(path: tuple[Any, ...], new: Any) -> Any:
    copy = json.loads(json.dumps(GOOD))
    if not path:
        return new
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    if new is places:  # removed
        del inner[path[-1]]
    else:
        inner[path[-1]] = new
    return copy


def is_refused(answer: Any) -> bool:
    """Whether this is a clear refusal; a change that happens to be legal is answered."""
    if answer.status_code == 200:
        return False
    assert 400 <= answer.status_code < 500, (answer.status_code, answer.text)
    message = answer.json()["error"]
    assert "expected" in message
    assert "got" in message
    assert len(message) < 2000
    return True


def test_the_number_of_rows_has_to_be_stated(client: TestClient) -> None:
    answer = client.post(PATH, json=changed(("inputs", 0, "shape", 0), -1))
    expected = "shape: expected [-1, 5] with the number of rows for -1, got [-1, 5]"
    assert is_refused(answer)
    assert expected in answer.json()["error"]


def test_changed_requests(client: TestClient) -> None:
    """Every value of a request is removed, or replaced by values of every kind."""
    drawn = random.Random(0)
    before = client.post(PATH, json=GOOD).json()
    count = 0
    for path in places(GOOD):
        removed = [places] if path else []
        for new in [*removed, *drawn.sample(VALUES, 7)]:
            count += is_refused(client.post(PATH, content=json.dumps(changed(path, new))))
    assert count > 120
    assert client.post(PATH, json=GOOD).json() == before


def test_texts_that_are_no_request(client: TestClient) -> None:
    for path in (PATH, "/explain"):
        for text in ODD_TEXTS:
            assert is_refused(client.post(path, content=text.encode())), text[:40]
        assert is_refused(client.post(path, content=b"\xff\xfe{}"))
    assert client.post(PATH, json=GOOD).status_code == 200


def test_binary_bodies(client: TestClient) -> None:
    head = json.loads(json.dumps(GOOD))
    head["inputs"][0].pop("data")
    head["inputs"][0]["parameters"] = {"binary_data_size": 40}
    text, data = json.dumps(head).encode(), X.numpy().tobytes()

    def send(length: object, body: bytes) -> Any:
        return client.post(PATH, content=body, headers={HEADER_LENGTH: str(length)})

    assert send(len(text), text + data).status_code == 200
    for length in (-1, 0, 1, len(text) - 1, len(text) + 41, 10**30, "a", "", "1e2", "²", "+5"):
        raw = {HEADER_LENGTH: str(length).encode()}
        assert is_refused(client.post(PATH, content=text + data, headers=raw)), length
    for body in (text, text + data[:-1], text + data + b"x", text + data[:20]):
        assert is_refused(send(len(text), body))
    nan = struct.pack("<10f", *[float("nan")] * 10)
    assert is_refused(send(len(text), text + nan))
    for size in (-1, 39, 41, 2**62, "40", True, None, 40.0):
        head["inputs"][0]["parameters"] = {"binary_data_size": size}
        text = json.dumps(head).encode()
        assert is_refused(send(len(text), text + data)), size


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"outputs": [{"name": "color"}]}, "expected some of prediction, label"),
        ({"outputs": [{"name": "label"}, {"name": "label"}]}, "each output once"),
        ({"outputs": [{"name": "label", "parameters": {"classification": 2}}]}, "classification"),
        ({"parameters": {"binary_data_output": "yes"}}, "true or false"),
        ({"id": 5}, "expected a text, got int"),
    ],
)
def test_what_is_wrong_is_said(client: TestClient, more: dict[str, Any], message: str) -> None:
    answer = client.post(PATH, json=GOOD | more)
    assert is_refused(answer)
    assert message in answer.json()["error"]
