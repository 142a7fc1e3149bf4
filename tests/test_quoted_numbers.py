"""What the pages on evaluation quote, numbers and names, is what the records and the code have."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

from PIL import Image

from otad.cip.whole_bank import pairs, pricing
from otad.evaluate import ATTACKS, PRESETS, Evaluation
from otad.evaluate.flags import HIDDEN
from otad.report import evaluation_report as report_module
from otad.report.evaluation_report import evaluation_report

ROOT = Path(__file__).parents[1]
PROTOCOL = (ROOT / "docs/protocol.md").read_text(encoding="utf-8")
REPORT = (ROOT / "docs/how_to/read_a_report.md").read_text(encoding="utf-8")
CERTIFY = (ROOT / "docs/how_to/certify.md").read_text(encoding="utf-8")
DEMO = Evaluation.read(ROOT / "results/demo/evaluation.json")


def record(name: str) -> Any:
    return json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))


def left(name: str, row: str, attack: str) -> str:
    return f"{record(name)['rows'][row]['attacks'][attack]['score']['value']:.1f}"


def test_accuracies_under_attack() -> None:
    suite = Evaluation.read(ROOT / "results/suite/evaluation.json")
    row = "OTAD consistent, tuned"
    for eps in (2, 3):
        weak = (left("mnist_attacks", row, f"{name} {eps}") for name in ("bpda best", "square"))
        cells = [*weak, f"{suite.worst_case(eps).value:.1f}"]
        assert f"| MNIST, 10 neighbors, l2 eps {eps} | {' | '.join(cells)} |" in PROTOCOL
    bpda = left("cifar10", "OTAD-T", "bpda best 0.5")
    metric = left("cifar10_metrics", "3-block ResNet", "metric best 0.5")
    assert f"| CIFAR-10, neighbors by a ResNet, l2 eps 0.5 | {bpda} | - | {metric} |" in PROTOCOL


def test_audits() -> None:
    proved = record("benchmarks/audit-certificates")
    assert proved["violations"] == 0
    assert f"{proved['models']} small models" in CERTIFY
    assert f"{proved['inputs']:,} inputs" in CERTIFY
    assert f"at {proved['nearest_change']:.8f} radii" in CERTIFY
    runs = sorted((ROOT / "results/benchmarks").glob("audit-suite*.json"))
    found = [json.loads(path.read_text(encoding="utf-8")) for path in runs]
    suite, own, both = (
        sum(run[f"left_by_{name}"] for run in found) for name in ("suite", "own", "both")
    )
    assert f"{suite} of {100 * len(runs)} digits" in PROTOCOL
    assert f"leaves {own}, and both together {both}" in PROTOCOL


def test_memory_of_several_processes() -> None:
    measured = record("benchmarks/several-processes")
    assert measured["equal"]
    own = {
        count: [f"{it / 2**20:.0f}" for it in each] for count, each in measured["memory"].items()
    }
    page = (ROOT / "docs/how_to/several_processes.md").read_text(encoding="utf-8")
    assert f"For {measured['size']:,} points of dimension {measured['dim']}, one" in page
    assert f"one process took {own['1'][0]} MiB of its own" in page
    assert f"and two took {' and '.join(own['2'])} MiB" in page
    assert f"blocks of up to {math.isqrt(pairs.BLOCK_BYTES // 8):,}" in page
    assert f"at most {pricing.CACHE_BYTES // 2**30} GiB" in page


def test_every_flag_and_attack_is_explained() -> None:
    others = record("suite_full/evaluation")["flags"]  # with AutoAttack
    assert DEMO.undefended is not None
    flags = {HIDDEN, *(flag.name for flag in (*DEMO.flags, *DEMO.undefended.flags))}
    flags |= {flag["name"] for flag in others} - {"certificate sandwich"}  # its name in old records
    assert len(flags) == 15
    for page in (PROTOCOL, REPORT):
        assert {name for name in flags if name not in page} == set()
    assert {name for name in ATTACKS if f"`{name}`" not in PROTOCOL + REPORT} == set()
    assert {name for name in PRESETS if f"`{name}`" not in REPORT} == set()


def test_the_report_is_the_one_that_is_shown(monkeypatch) -> None:
    monkeypatch.setattr(report_module, "plot_uri", lambda figure: "")  # pictures take seconds
    shown = evaluation_report(DEMO)
    said = " ".join(shown.verdict)
    assert f"> {said}\n" in REPORT
    with Image.open(ROOT / "docs/images/report.png") as picture:
        assert picture.text["Description"] == said
    titles = {section.title for section in shown.sections} | {"Adversarial examples"}
    assert {title for title in titles if f"| {title} |" not in REPORT} == set()
    assert {it.name for it in fields(Evaluation) if f"`{it.name}`" not in REPORT} <= {
        "task", "n", "attacker_knows", "clean_errors", "skipped_proved", "undefended_reason",
        "format",
    }  # fmt: skip
