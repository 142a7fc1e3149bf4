"""`otad serve`: what it passes on, and what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli.small import terminal

pytest.importorskip("fastapi", reason="needs the extra serve")
from otad.cli import serve


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of all services, which say where they listen and end at once."""
    calls: list[dict[str, Any]] = []

    def run(folder: Path, **options: Any) -> None:
        options.pop("announce")("http://127.0.0.1:1")
        calls.append({"folder": folder, **options})

    monkeypatch.setattr(serve, "run", run)
    monkeypatch.delenv("OTAD_TOKEN", raising=False)
    return calls


def test_the_options_are_passed_on(started: list[dict[str, Any]]) -> None:
    Path("some-model").mkdir()
    shown = terminal.succeed("serve", "some-model", "--workers", 3, "--max-batch", 9).stderr
    assert "otad: serving some-model on http://127.0.0.1:1;" in shown
    (call,) = started
    assert (call["name"], call["host"], call["token"]) == ("some-model", "127.0.0.1", None)
    assert (call["workers"], call["max_batch"]) == (3, 9)
    printed = terminal.succeed("serve", "some-model", "--name", "digits", "--json").stdout
    assert json.loads(printed) == {"url": "http://127.0.0.1:1", "model": "digits"}


def test_a_token_comes_from_a_file_or_the_environment(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("token.txt").write_text("from-file\n")
    monkeypatch.setenv("OTAD_TOKEN", "from-environment")
    terminal.succeed("serve", ".")
    shown = terminal.succeed("serve", ".", "--token-file", "token.txt", "--host", "0.0.0.0").stderr
    assert [call["token"] for call in started] == ["from-environment", "from-file"]
    assert "no token" not in shown
    monkeypatch.delenv("OTAD_TOKEN")
    assert "no token is set" in terminal.succeed("serve", ".", "--host", "0.0.0.0").stderr
    Path("token.txt").write_text(" \n")
    message = terminal.refuse("serve", ".", "--token-file", "token.txt")
    assert "token: expected a token, got an empty text" in message


def test_a_folder_without_a_model_is_refused() -> None:
    message = terminal.refuse("serve", "nothing")
    assert "nothing: expected a model folder with card.json, got none" in message
