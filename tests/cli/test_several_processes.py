"""`torchrun -m otad`: processes with the variables that torchrun sets, of which one reports."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import pytest
from together import TIMEOUT, forked, needs_gloo
from torch.distributed import TCPStore
from typer.testing import CliRunner

from otad.cli.main import main
from otad.model.loading import load

pytestmark = needs_gloo


def run(folder: Path, *commands: list[str], processes: int) -> list[list[str]]:
    """Run commands as `torchrun -m otad` does, and return what each process printed."""
    folder.mkdir()
    stores = [TCPStore("127.0.0.1", 0, is_master=True, timeout=TIMEOUT) for _ in commands]

    def work(rank: int) -> None:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_USE_AGENT_STORE": "True", "OTAD_PROGRESS": "0",
        }  # fmt: skip
        with (folder / str(rank)).open("w") as sys.stdout:
            for store, arguments in zip(stores, commands, strict=True):
                os.environ["MASTER_PORT"] = str(store.port)
                sys.argv = ["otad", *arguments]
                sys.stderr = sys.stdout
                with pytest.raises(SystemExit) as ended:
                    runpy.run_module("otad", run_name="__main__")
                sys.stdout.write(f"exit {ended.value.code}\n")

    assert forked(work, processes) == [0] * processes
    return [(folder / str(rank)).read_text().splitlines() for rank in range(processes)]


def test_train_and_defend(tmp_path, monkeypatch) -> None:
    rows = [f"{i % 7},{i * i % 11},{'ab'[(i % 7 + i * i % 11) > 7]}" for i in range(57)]
    (tmp_path / "data.csv").write_text("\n".join(["p,q,kind", *rows]))
    monkeypatch.chdir(tmp_path)
    how = ["--target", "kind", "--task", "classification", "--epochs", "2", "--batch-size", "10"]
    train = ["train", "data.csv", *how, "--blocks", "1", "--json", "--out"]
    defend = ["defend", "train", "--scope", "global", "--json", "--out"]
    alone = [CliRunner().invoke(main, [*one, one[0]]).stdout for one in (train, defend)]
    others = [*train, "net"], [*defend, "model"], ["report", "model"]
    first, second = run(tmp_path / "two", *others, processes=2)
    refused = "torchrun: expected the command train or defend, got report"
    assert second == ["exit 0", "exit 0", f"otad: {refused}", "exit 2"]
    record, expected = json.loads(first[0]), json.loads(alone[0])
    assert [epoch["loss"] for epoch in record["history"]] == pytest.approx(
        [epoch["loss"] for epoch in expected["history"]], rel=1e-4
    )
    assert json.loads(first[2])["potential"] == json.loads(alone[1])["potential"]
    levels = [load(tmp_path / model).potential.levels for model in ("defend", "model")]
    assert levels[0].tolist() == levels[1].tolist()
