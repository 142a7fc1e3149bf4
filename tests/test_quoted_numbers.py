"""What the pages on evaluation quote, numbers and names, is what the records and the code have."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import bank_size
from PIL import Image

from otad.cip.whole_bank import pairs, pricing
from otad.evaluate import ATTACKS, PRESETS, Evaluation
from otad.evaluate.flags import HIDDEN
from otad.report import evaluation_report as report_module
from otad.report.evaluation_report import evaluation_report
from otad.search import projection

ROOT = Path(__file__).parents[1]
PROTOCOL = (ROOT / "docs/protocol.md").read_text(encoding="utf-8")
REPORT = (ROOT / "docs/how_to/read_a_report.md").read_text(encoding="utf-8")
BANK_SIZE = (ROOT / "docs/how_to/bank_size.md").read_text(encoding="utf-8")
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
    assert f"{projection.FEWEST_ROWS:,} points of dimension {projection.FEWEST_COLUMNS}" in page


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


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def test_sizes_of_banks() -> None:
    found = record("benchmarks/bank_size")
    by_size: dict[int, dict[str, Any]] = {}
    for row in found["rows"]:
        by_size.setdefault(row["points"], {})[row["kind"]] = row
    for size, kinds in by_size.items():
        cells = [
            f"{percent(row['accuracy'])} / {percent(row['certified'])}" if row else "-"
            for row in map(kinds.get, ("random", "means", "learned"))
        ]
        assert f"| {size:,} | {' | '.join(cells)} |" in BANK_SIZE
    whole, few = by_size[max(by_size)]["random"], by_size[200]["learned"]
    assert whole["per_class"] is None
    assert few["certified"] > whole["certified"]
    said = f"200 learned [prototypes](../glossary.md#prototype) prove {percent(few['certified'])} %"
    assert said in BANK_SIZE
    said = f"all {whole['points']:,} training points as they are, which prove "
    assert f"{said}{percent(whole['certified'])} %" in BANK_SIZE
    assert f"{percent(few['accuracy'])} % beside {percent(whole['accuracy'])} %" in BANK_SIZE
    drawn, means = by_size[1000]["random"], by_size[100]["means"]
    said = (
        f"1,000 points drawn at random prove {percent(drawn['certified'])} %, and 100 means prove "
    )
    assert f"{said}{percent(means['certified'])} %." in BANK_SIZE
    trained = [trial for trial in found["trials"] if trial["margin"] is not None]
    best = max(trained, key=lambda trial: trial["certified"])["margin"]
    assert {row["margin"] for row in found["rows"]} == {None, best}, "chosen on held-out data"


def test_estimates_of_large_banks() -> None:
    found = record("benchmarks/bank_size")
    assert found["estimates"] == bank_size.estimates(found["bytes_per_second"])
    for row in found["estimates"]:
        cells = [
            row["layout"], f"{row['points']:.0e}".replace("+0", ""),
            f"{row['stored_bytes'] / 1e12:.2f} TB", f"{row['searched_bytes'] / 1e9:,.0f} GB",
            str(row["nodes"]), f"{row['batch_seconds']:.0f}", f"{row['verify_seconds']:.0f}",
        ]  # fmt: skip
        assert f"| {' | '.join(cells)} |" in BANK_SIZE
    rates = {name: f"{rate / 1e9:.2f}" for name, rate in found["bytes_per_second"].items()}
    assert f"in memory {rates['search_float32']}," in BANK_SIZE
    assert f"mapped from shards {rates['search_mapped_float16']}," in BANK_SIZE
    assert f"keys {found['bytes_per_second']['search_keys'] / 1e9:.3f}," in BANK_SIZE
    assert f"checksums {rates['verify']}. The disk gave {rates['disk']}." in BANK_SIZE
    assert f"a bank of {found['timed_points']:,} points" in BANK_SIZE
    nodes = (
        f"nodes with {found['node_bytes'] / 1e9:.0f} GB of memory and {found['node_cores']} cores"
    )
    assert nodes in BANK_SIZE
    assert found["environment"]["device_name"] in BANK_SIZE
    assert f"seconds for {found['queries']} queries" in BANK_SIZE


def test_proofs_of_neighbors() -> None:
    found = record("benchmarks/ivf")
    assert not any(row["wrong_but_proved"] for row in found["rows"])
    for row in found["rows"]:
        cells = "as many as a proof needs" if row["n_probe"] == "all" else row["n_probe"]
        shares = " | ".join(percent(row[name]) for name in ("read", "proved", "right"))
        if row["n_probe"] not in (1, 4):
            assert f"| {row['space']} | {cells} | {shares} |" in BANK_SIZE
        if (row["space"], row["n_probe"]) == ("8-dimensional keys", "all"):
            assert f"takes {row['scan_milliseconds']:.1f} ms a query on one core" in BANK_SIZE
            assert f"search of cells takes {row['milliseconds']:.0f} ms" in BANK_SIZE
    about = f"{found['queries']} test images and {found['points']:,} training images of MNIST"
    assert f"{about} in {found['rows'][0]['cells']} cells, with K = 10" in BANK_SIZE
