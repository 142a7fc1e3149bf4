"""Options that commands refuse, before they write anything."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cli.small import Terminal

COMMANDS = {
    "attack": "attack digits-model test --eps 0.5",
    "certify": "certify digits-model test --out radii.csv",
    "certify values": "certify body-model test --out intervals.csv",
    "defend": "defend digits-net --out model",
    "defend values": "defend body-net --out model",
    "evaluate": "evaluate digits-model test --eps 0.5,1",
    "explain": "explain digits-model test",
    "explain values": "explain body-model test",
    "imitate": "imitate digits-model --out nn --width 32 --blocks 1 --heads 2 --epochs 2",
}


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("attack", "--attack magic", "attack: expected one of"),
        ("attack", "--option speed=3", "options of pgd"),
        ("attack", "--option metric=l2", "option: .*metric"),
        ("attack", "--option train_x=0", "option: .*train_x"),
        ("attack", "--option steps=0", "steps: .*1, got 0"),
        ("attack", "--norm l7", "norm: .*l2, linf, got 'l7'"),
        ("attack", "--out found.csv", r"out: .*\.npz, got found.csv"),
        ("attack", "--rows 41", "rows: .*40.*41"),
        ("attack", "--immutable age", "immutable: .*tables"),
        ("attack", "--targets y", "targets: .*test"),
        ("attack", "--eps -1", "eps: .*0, got -1"),
        ("certify", "--eps little", "eps: .*'little'"),
        ("certify", "--embedding-lipschitz -1", "embedding_lipschitz"),
        ("certify values", "--embedding-lipschitz 2", "embedding_lipschitz: .*None"),
        ("certify", "--metric-lipschitz 2", "metric_lipschitz: .*None"),
        ("certify", "--unit inch", "unit: .*1, std"),
        ("certify", "--rows 99", "rows: .*40.*99"),
        ("defend", "--climb 0.2", "climb: .*two.*'0.2'"),
        ("defend", "--climb 0.2,x", "climb: .*'0.2,x'"),
        ("defend", "--climb=-1,0", "climb: .*two.*-1"),
        ("defend", "--mode loose", "mode: .*consistent, paper, got 'loose'"),
        ("defend", "--neighbors 5000", "n_neighbors: .*160"),
        ("defend", "--smoothness 0", "smoothness: "),
        ("defend", "--scope regional", "scope: .*local, global, got 'regional'"),
        ("defend", "--scope global --spares 2", "scope: .*'local'.*spares.*'global'"),
        ("defend", "--scope global --smoothness 0.01", "160 points"),
        ("defend", "--bank-dtype int8", "bank_dtype: .*float32, float16, bfloat16"),
        ("defend", "--per-class 1000", "per_class: .*1000"),
        ("defend values", "--per-class 5", "per_class: .*regression"),
        ("defend", "--device cuda:99", "device: .*'cuda:99'"),
        ("defend", "--device quantum", "device: .*'quantum'"),
        ("evaluate", "--headline 2", "headline: .*0.5,1, got 2"),
        ("evaluate", "--suite huge", "suite: .*quick, standard, full, got 'huge'"),
        ("evaluate", "--attack magic", "magic"),
        ("evaluate", "--norm l0", "norm: .*l2, linf"),
        ("evaluate", "--embedding-lipschitz 2", "embedding_lipschitz: .*None"),
        ("evaluate", "--targets y", "targets: .*test"),
        ("explain", "--row 40", "row: expected 0 to 39, got 40"),
        ("explain", "--row -1", "row: expected 0 to 39, got -1"),
        ("explain", "--out why.bmp", r"out: .*\.png, \.svg.*why.bmp"),
        ("explain values", "--out why.png", "only images can be drawn, got why.png"),
        ("imitate", "--heads 3", "heads: .*32, got 3"),
        ("imitate", "--readout loose", "readout: .*free, hull, got 'loose'"),
        ("imitate", "--alpha 2", "alpha: .*0 to 1, got 2"),
        ("imitate", "--held-out 500", "held_out: .*160.*500"),
        ("imitate", "--device cuda:99", "device: .*'cuda:99'"),
    ],
)
def test_refusals_write_nothing(
    terminal: Terminal, workshop: Path, command: str, options: str, message: str
) -> None:
    name, folder, *given = f"{COMMANDS[command]} {options}".split()
    assert re.search(message, terminal.refuse(name, workshop / folder, *given))
    assert not list(Path().iterdir())
