"""The load test, tiny: the command `otad serve` as it is used, with a worker that is killed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve")
if sys.platform != "linux":
    pytest.skip("reads /proc", allow_module_level=True)
from serve import load

TINY = ["--seconds", "0.1", "--minutes", "0.005", "--requests", "30", "--workers", "1"]
TINY += ["--batches", "1", "3", "--clients", "2", "--points", "60", "--epochs", "1"]


def test_no_request_is_lost_when_a_worker_dies(tmp_path: Path, capsys) -> None:
    out = tmp_path / "found" / "serve.json"
    load.main([*TINY, "--out", str(out)])
    record = json.loads(out.read_text())
    killed = record["killed"]
    assert (killed["requests"], killed["answered"], killed["wrong"]) == (30, 30, 0)
    assert killed["sent_again"] >= 1  # the worker that answered was killed
    assert killed["workers_after"] == record["workers"] == 1
    assert [(row["batch"], row["clients"]) for row in record["rows"]] == [(1, 2), (3, 2)]
    for row in record["rows"] + record["direct"]:
        assert row["rows_per_second"] == pytest.approx(row["batch"] * row["requests_per_second"])
        assert 0 < row["p50_ms"] <= row["p99_ms"]
    assert record["memory"]["largest"] > 10  # megabytes
    assert record["memory"]["requests"] > 0
    assert "direct" in capsys.readouterr().out
