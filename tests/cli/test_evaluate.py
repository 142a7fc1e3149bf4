"""`otad attack` and `otad evaluate`: figures, files, exit codes, resuming, and refusals."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli.small import terminal

import otad
from otad import progress
from otad.attacks import L2
from otad.cli.attack import read_options
from otad.cli.sources import Kept, bank_part
from otad.data import Dataset
from otad.errors import InputError
from otad.evaluate import PRESETS, Evaluation, make_attack, runner
from otad.evaluate.records import CERTIFICATE_CHECK
from otad.evaluate.suite import Choice
from otad.report.verdict import verdict
from otad.scores import wilson_interval

pytestmark = pytest.mark.usefixtures("brief_reports")
FAST = ("--option", "steps=5")


def test_the_figures_and_inputs_are_those_of_the_attack(
    workshop: Path, digits: Dataset, digits_model: otad.OTAD
) -> None:
    options = ("--eps", 1.5, "--seed", 3, *FAST)
    command = ("attack", workshop / "digits-model", "test", *options)
    record = terminal.json(*command, "--out", "found.npz")
    model, x, y = digits_model, digits.test_x, digits.test_y
    generator, ball = torch.Generator().manual_seed(3), L2(1.5, bounds=(0.0, 1.0))
    expected = make_attack("pgd", model, steps=5)(model, x, y, ball, generator=generator)
    with torch.no_grad():
        clean = int((model(x).argmax(1) == y).sum())
    remaining = int((~expected.broken).sum())
    assert remaining < clean  # else the two scores could not be told apart
    for name, count in (("clean", clean), ("attacked", remaining)):
        bounds = [100 * bound for bound in wilson_interval(count, len(x))]
        found = [record[name][key] for key in ("value", "low", "high")]
        assert found == pytest.approx([100 * count / len(x), *bounds])
    assert (record["rows"], record["options"]) == (len(x), {"steps": 5})
    for name in ("forwards", "backwards"):
        assert record[name] == int(getattr(expected, name).sum())
    assert record["threat"]["bounds"] == [0.0, 1.0]

    arrays = np.load("found.npz", allow_pickle=False)
    np.testing.assert_array_equal(arrays["adversarial"], expected.inputs.numpy())
    assert arrays["y"].tolist() == [str(label) for label in y.tolist()]
    assert arrays["row"].tolist() == [str(row) for row in range(40)]
    step = (arrays["adversarial"] - arrays["x"]).reshape(len(x), -1).astype(np.float64)
    length = np.linalg.norm(step, axis=1)
    assert length.max() <= 1.5
    np.testing.assert_allclose(length, arrays["distance"], rtol=1e-6)
    with torch.no_grad():
        wrong = model(torch.from_numpy(arrays["adversarial"])).argmax(1) != y
    np.testing.assert_array_equal(wrong.numpy(), arrays["broken"])

    again = terminal.json("attack", workshop / "digits-model", "found.npz", *options)
    for name in ("clean", "attacked", "forwards"):
        assert again[name] == record[name]
    assert terminal.json(*command, "--batch-size", 7)["clean"] == record["clean"]


def test_a_regression_is_reported_in_squared_errors(workshop: Path, body_model: otad.OTAD) -> None:
    options = ("--norm", "linf", "--eps", 0.3, "--unit", "std", "--immutable", "age,sex", *FAST)
    command = ("attack", workshop / "body-model", "test", *options)
    record = terminal.json(*command, "--out", "found.npz")
    found = np.load("found.npz", allow_pickle=False)
    step = found["adversarial"].astype(np.float64) - found["x"].astype(np.float64)
    assert not step[:, :2].any()
    assert np.abs(step / body_model.backbone.std.numpy()).max() <= 0.3
    with torch.no_grad():
        for name, inputs in (("clean", "x"), ("attacked", "adversarial")):
            errors = body_model(torch.from_numpy(found[inputs])).numpy() - found["y"]
            assert record[name]["value"] == pytest.approx(float(np.square(errors).mean()), rel=1e-5)
    assert record["attacked"]["value"] > record["clean"]["value"]
    assert record["attacked"]["metric"] == "mse"
    shown = terminal.text(*command, "--rows", 1)  # a single error has no interval
    for text in ("linf, eps = 0.3", "mse without attack", "mse under pgd", "n = 1", "gradients"):
        assert text in shown
    assert "inf]" not in shown


def test_options_are_read_as_json_or_text() -> None:
    given = ["steps=3", "step_size=0.5", "loss=margin", "random_start=false", "sigmas=[1, 2]"]
    values = {"steps": 3, "step_size": 0.5, "loss": "margin", "random_start": False}
    assert read_options(given) == values | {"sigmas": [1, 2]}
    for texts in (["steps"], ["=3"], ["a b=3"], ["steps=3", "steps=5"]):
        with pytest.raises(InputError, match=f"option: .*{texts[0].partition('=')[0]}"):
            read_options(texts)


def test_a_net_without_a_defense_is_attacked_and_evaluated(workshop: Path, digits: Dataset) -> None:
    options = ("--eps", 0.5, "--seed", 3)
    record = terminal.json("attack", workshop / "digits-net", "test", *options, *FAST)
    net, x, y = otad.load(workshop / "digits-model").backbone, digits.test_x, digits.test_y
    generator, ball = torch.Generator().manual_seed(3), L2(0.5, bounds=(0.0, 1.0))
    expected = make_attack("pgd", net, steps=5)(net, x, y, ball, generator=generator)
    assert record["attacked"]["value"] == 100 * float((~expected.broken).double().mean())
    more = ("--attack", "noise", "--rows", 6, "--no-flags")
    printed = terminal.json("evaluate", workshop / "digits-net", "test", *options, *more)
    assert printed["verdict"][0].endswith("; this network has no defense.")
    assert (printed["undefended"], list(printed["clean"])) == (None, ["net"])
    assert "bank" in terminal.refuse(
        "attack", workshop / "digits-net", "test", *options, "--attack", "straight"
    )
    Path("link.html").symlink_to(workshop / "digits-net" / "training.json")
    assert "overwrite" in terminal.refuse(
        "report", "evaluation", "--model", workshop / "digits-net", "--out", "link.html", "--force"
    )
    assert "out: expected a name that ends in .html or .md, got again" in terminal.refuse(
        "report", "evaluation", "--out", "again"
    )
    expected = "expected evaluation.json of `otad evaluate`, or its folder, got"
    assert f"none: {expected} no such file or folder" in terminal.refuse("report", "none")
    Path("empty").mkdir()
    assert f"empty: {expected} a folder without evaluation.json" in terminal.refuse(
        "report", "empty"
    )


def test_what_is_gained_is_printed_and_reported_again(
    workshop: Path, nearest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PRESETS, "quick", [Choice("pgd", {"steps": 5})])
    more = ("--suite", "quick", "--rows", 6, "--seed", 2, "--no-flags")
    command = ("evaluate", nearest, "test", "--eps", "1,0.5", *more)
    shown = terminal.text(*command)
    written = Evaluation.read(Path("evaluation/evaluation.json"))
    alone = written.undefended
    assert alone is not None
    first, second = verdict(written, "test examples")
    assert first in shown
    assert second in shown
    for eps in (0.5, 1.0):
        value = alone.worst_case(eps).value
        assert f"undefended network at {eps:g} {value:.1f}%" in shown
    page = Path("evaluation/report.html").read_text(encoding="utf-8")

    assert "--force" in terminal.refuse("report", "evaluation")
    printed = terminal.json("report", "evaluation", "--model", nearest, "--out", "again.html")
    assert printed["verdict"] == [first, second]
    again = Path(printed["report"]).read_text(encoding="utf-8")
    plots = re.compile(r"data:image/svg[^\"]*")  # which have random identifiers
    assert plots.sub("", again) == plots.sub("", page)
    assert 'class="moved"' in again
    alone_page = terminal.succeed("report", "evaluation/evaluation.json", "--out", "-").stdout
    assert alone_page.startswith("<!DOCTYPE")
    assert 'class="moved"' not in alone_page
    other = ("report", "evaluation", "--out", "new.html", "--model")
    assert "model that was evaluated" in terminal.refuse(*other, workshop / "digits-model")
    np.savez("few.npz", x=np.zeros((2, 8, 8)), y=[0, 1])
    refused = terminal.refuse(*other, nearest, "--input", "few.npz")
    assert "the 6 examples of the evaluation, which --input names, got 'few.npz': rows" in refused
    given = ("--input", workshop / "digits.npz")
    assert "the 6 examples of the evaluation, which --input" in terminal.refuse(
        *other, nearest, *given
    )
    assert "net.safetensors" in terminal.refuse(
        "report", workshop / "digits-net" / "net.safetensors"
    )


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Two short attacks that know the bank."""
    near = {"singles": 5, "classes": 1, "sizes": (1,), "rounds": 1, "polish": 0}
    attacks = [Choice("straight", {"points": 5}), Choice("region", near)]
    monkeypatch.setitem(PRESETS, "quick", attacks)
    return "--suite", "quick"


def test_record_and_report_then_resumed_with_flags(nearest: Path, two: tuple[str, str]) -> None:
    options = ("--eps", "1.5,0.2", "--rows", 10, "--seed", 2, "--batch-size", 10, "--all-rows")
    command = ("evaluate", nearest, "test", *options, *two)
    printed = terminal.json(*command, "--no-flags")
    parts = {path: path.stat().st_mtime_ns for path in Path("evaluation/parts").iterdir()}
    written = Evaluation.read(Path(printed["evaluation"]))
    assert (written.n, written.seed, written.eps) == (10, 2, (0.2, 1.5))
    assert (written.headline_eps, written.threat["bounds"]) == (1.5, [0.0, 1.0])
    assert {record.attack for record in written.attacks} == {"straight", "region"}
    assert {record.attacked for record in written.attacks} == {written.clean_right}
    assert any(record.broken for record in written.attacks)  # else all rows would be survivors
    for eps in (0.2, 1.5):
        assert printed["worst_case"][f"{eps:g}"]["value"] == written.worst_case(eps).value
        proved = written.certified_accuracy(eps)
        assert proved is not None
        assert printed["certified"][f"{eps:g}"]["value"] == proved.value
        assert proved.value <= written.worst_case(eps).value
    assert printed["certified"]["0.2"]["value"] > 0
    assert printed["per_attack"] == written.per_attack
    assert printed["flags"][CERTIFICATE_CHECK] == "PASS"
    assert printed["is_sound"]
    for name in ("report.html", "report.md"):
        page = Path("evaluation", name).read_text(encoding="utf-8")
        assert f"{written.worst_case().value:.1f}%" in page

    for name in ("evaluation.json", "report.md"):  # as if killed before the end
        Path("evaluation", name).unlink()
    shown = terminal.text(*command)
    for path, modified in parts.items():
        assert path.stat().st_mtime_ns == modified
    again = Evaluation.read(Path("evaluation/evaluation.json"))
    assert (again.clean, again.per_attack) == (written.clean, written.per_attack)
    assert again.certificate.radius == written.certificate.radius
    failing = [flag.name for flag in again.flags if flag.verdict == "FAIL"]
    assert len(again.flags) > 5
    assert failing  # one neighbor: no gradient to follow, which is reported
    expected = [f"{len(failing)} FAIL", "worst case at 1.5 (headline)", "evaluation/report.html"]
    for text in (*expected, *(f"FAIL: {name}" for name in failing)):
        assert text in shown


def test_a_refuted_certificate_is_exit_code_1(
    nearest: Path, two: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prove = runner.prove

    def exaggerate(*arguments: Any, **named: Any) -> Any:
        proof = prove(*arguments, **named)
        return replace(proof, radius=tuple(radius + 2 for radius in proof.radius))

    monkeypatch.setattr(runner, "prove", exaggerate)
    options = ("--eps", "1.5", "--rows", 10, "--no-flags", *two)
    result = terminal.run("evaluate", nearest, "test", *options)
    assert result.exit_code == 1
    assert f"FAIL: {CERTIFICATE_CHECK}" in " ".join(result.stdout.split())
    assert not Evaluation.read(Path("evaluation/evaluation.json")).is_sound
    assert Path("evaluation/report.html").is_file()


def test_a_table_with_units_and_immutable_features(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PRESETS, "quick", [Choice("pgd", {"steps": 5}), Choice("square")])
    options = ("--norm", "linf", "--eps", "0.1,0.2", "--headline", 0.2, "--unit", "std")
    more = ("--immutable", "age,sex", "--suite", "quick", "--rows", 4, "--no-flags")
    command = ("evaluate", workshop / "body-model", "test", *options, *more)
    printed = terminal.json(*command)
    threat = printed["threat"]
    assert (threat["norm"], threat["eps"]) == ("linf", 0.2)
    assert threat["mutable"] == [False, False, True, True]
    errors = printed["mean_worst_error"]
    assert 0 < errors["0.1"] <= errors["0.2"] <= printed["mean_certified_error"]
    assert "images" in printed["missing"]["square"]
    shown = terminal.text(*command, "--force")
    for text in ("not run: square", "clean mse, defended model", "certified |f - y| at 0.2"):
        assert text in shown
    report = Path("evaluation/report.md").read_text(encoding="utf-8")
    assert "clean mse, k-NN by mean value" in shown
    assert "mean value of the same neighbors" in report
    assert "majority" not in shown + report


def test_training_inputs_a_vision_transformer_hides_are_read_from_its_data(
    workshop: Path, digits: Dataset
) -> None:
    shape = ["--net", "vit", "--patch", "4", "--width", "8", "--heads", "2", "--blocks", "1"]
    training = ["--epochs", "1", "--optimizer", "adamw", "--learning-rate", "0.01"]
    terminal.succeed("train", workshop / "digits.npz", "--out", "net", *shape, *training)
    terminal.succeed("defend", "net", "--out", "known", "--per-class", 6, "--seed", 1)
    model = otad.load("known")
    model.notes = {}
    model.save("unknown")
    options = ("--eps", 0.5, "--rows", 6, "--attack", "straight")
    printed = terminal.json("evaluate", "known", "test", "--no-flags", *options)
    assert list(printed["per_attack"]) == ["straight"]
    assert printed["is_sound"]
    page = Path("evaluation/report.html").read_text(encoding="utf-8")
    votes = re.findall(r'<ol class="votes.*?</ol>', page, re.DOTALL)
    assert votes, "examples are shown with their training points"
    assert all("<img" in each for each in votes)
    assert terminal.json("attack", "known", "test", *options)["forwards"] > 6 * 10
    refused = terminal.refuse("attack", "unknown", workshop / "digits.npz", *options)
    assert "or attack a model that `otad defend` made" in refused
    terminal.succeed("explain", "known", "test", "--out", "why.png")
    assert Path("why.png").read_bytes().startswith(b"\x89PNG")
    terminal.succeed("explain", "known", "test", "--out", "why.json")
    stored, *_ = bank_part(digits, Kept(per_class=6, seed=1))
    for neighbor in json.loads(Path("why.json").read_text())["neighbors"]:
        assert torch.equal(torch.tensor(neighbor["inputs"]), stored[neighbor["index"]])


def test_what_holds_within_bounds_is_reported_apart(nearest: Path) -> None:
    options = ("--eps", 0.5, "--attack", "noise", "--rows", 8, "--no-flags", "--within-bounds")
    record = terminal.json("evaluate", nearest, "test", *options, "--out", "both")
    found = Evaluation.read(Path("both/evaluation.json"))
    assert found.certificate is not None
    assert found.certificate_within_bounds is not None
    pairs = zip(found.certificate.radius, found.certificate_within_bounds.radius, strict=True)
    assert all(whole <= inside for whole, inside in pairs)
    assert found.certificate.radius != found.certificate_within_bounds.radius
    for name, within in (("certified", False), ("certified_within_bounds", True)):
        score = found.certified_accuracy(0.5, within_bounds=within)
        assert score is not None
        assert record[name]["0.5"]["value"] == score.value
    assert "proved within bounds" in Path("both/report.md").read_text(encoding="utf-8")


def test_progress_is_told_in_lines_without_a_terminal(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SHOW_AFTER", 0.0)
    model, few = workshop / "digits-model", ("--rows", 20, "--batch-size", 2)
    for command in (
        ("attack", model, "test", "--eps", 0.5, *FAST, *few),
        ("evaluate", model, "test", "--eps", 0.5, "--attack", "noise", "--out", "found", *few),
    ):
        lines = re.findall("otad: attacking.*, [0-9]+ of [0-9]+", terminal.run(*command).stderr)
        assert 2 < len(lines) <= 11


def test_examples_are_named_by_their_rows_in_the_input(
    workshop: Path, digits_model: otad.OTAD
) -> None:
    data, options = workshop / "digits.npz", ("--eps", 4, "--attack", "straight", "--rows", 9)
    terminal.succeed("evaluate", workshop / "digits-model", data, *options, "--no-flags")
    found = Evaluation.read(Path("evaluation/evaluation.json"))
    drawn = torch.tensor([int(name) for name in found.names])
    x, y = (torch.tensor(np.load(data)[name])[drawn] for name in "xy")
    with torch.no_grad():
        right = digits_model(x[:, None].float()).argmax(1) == y
    assert tuple(right.nonzero().flatten().tolist()) == found.clean_right
    assert 0 < len(found.clean_right) < 9 == len(drawn)
    report = Path("evaluation/report.md").read_text(encoding="utf-8")
    shown = {int(row) for row in re.findall(r"Example (\d+): straight", report)}
    assert shown
    assert shown <= {*drawn.tolist()} - {*range(9)}
