"""A record names the commit it was made from, and an old Triton is not used."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from otad.errors import InputError
from otad.io import environment
from otad.io.environment import Environment, has_triton


def commit() -> str | None:
    return Environment.now(torch.device("cpu"), 1).commit


def test_the_commit_of_the_repository_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (Path(__file__).parents[2] / ".git").exists():
        pytest.skip("no repository")
    monkeypatch.setenv("OTAD_COMMIT", "0123abc")
    assert re.fullmatch("[0-9a-f]{40}(-dirty)?", commit() or "")


def test_without_a_repository_the_variable_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_output", lambda *command: None)
    monkeypatch.delenv("OTAD_COMMIT", raising=False)
    assert commit() is None
    for given in ("0123abc", "0123456789" * 4):
        monkeypatch.setenv("OTAD_COMMIT", given)
        assert commit() == given
    for wrong in ("main", "0123ab", "0" * 41, "0123abc-dirty"):
        monkeypatch.setenv("OTAD_COMMIT", wrong)
        with pytest.raises(InputError, match=f"OTAD_COMMIT: .*7 to 40.*{wrong}"):
            commit()


@pytest.mark.parametrize(
    ("version", "fits"), [("3.2.0", False), ("3.3.0", True), ("3.10.1+git1", True), ("odd", False)]
)
def test_an_old_triton_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, fits: bool
) -> None:
    (tmp_path / "triton.py").write_text(f"__version__ = {version!r}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    assert has_triton.__wrapped__() is fits
    del sys.modules["triton"]  # which monkeypatch would bring back
