"""The adversarial examples that a report shows, and how it reads them back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from factories import refuses
from report.evaluations import Attacked, Small, by_hand, of_values, section, tables
from torch import nn

from otad.io.tensor_files import write_tensors
from otad.model.defend import defend
from otad.nets import fc_resnet
from otad.report import plots
from otad.report.evaluation_report import evaluation_report
from otad.report.examples import Adversarial, finder_of, spread
from otad.report.page import Comparison

pytestmark = pytest.mark.usefixtures("brief_reports")


def test_examples_show_input_change_and_neighbors(small: Small, attacked: Attacked) -> None:
    evaluation, y, adversarial = attacked.evaluation, *map(attacked.known.get, ("y", "adversarial"))
    blocks = section(attacked.report, "examples").blocks
    found = [it for it in blocks if isinstance(it, Comparison)]
    assert len({it.title for it in found}) == len(blocks) == 4
    lengths = [float(it.title.rpartition(" ")[2]) for it in found]
    assert lengths == sorted(lengths)
    assert max(lengths) <= evaluation.headline_eps
    for it in found:
        row = int(re.search(r"\d+", it.title)[0])  # type: ignore[index]
        place = adversarial.rows.tolist().index(row)
        with torch.no_grad():
            answer = int(small.model(adversarial.inputs[place, None]).argmax())
        assert it.after.prediction == str(answer) != it.before.prediction == str(int(y[row]))
        assert it.before.right
        assert not it.after.right
        for vote in (*it.before.votes, *it.after.votes):
            assert vote.agrees is (vote.label == it.after.truth)
        assert len(it.before.votes) == len(it.after.votes) == 5
        assert finder_of(evaluation, row) in it.title
        assert re.search(r"amplified \d+ times", it.difference_note)


def test_any_torch_model_has_examples_without_neighbors(attacked: Attacked) -> None:
    other = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).eval()
    known = attacked.known | {"model": other}
    rows, inputs = known.pop("adversarial")
    found, none = Adversarial(rows[:1], inputs[:1] / 2), Adversarial(rows[:0], inputs[:0])
    examples, empty = (
        section(evaluation_report(attacked.evaluation, **known, adversarial=it), "examples")
        for it in (found, none)
    )
    assert (empty.lead, empty.blocks) == ("No adversarial example was found.", [])
    (block, *_) = examples.blocks
    assert isinstance(block, Comparison)
    assert block.after.votes == ()
    assert block.after.uri == plots.pixels_uri(found.inputs[0], (0.0, 1.0)), "not rescaled"
    assert "training points" not in examples.lead


def test_a_table_shows_the_features_that_changed(generator: torch.Generator) -> None:
    x, y = torch.randn(30, 2, generator=generator), torch.randn(30, generator=generator)
    model = defend(fc_resnet((2,), 1, task="regression"), x, y, n_neighbors=4)
    changed = x[:4] + torch.tensor([[0.5, 0.0], [0.6, 0.0], [0.7, 0.0], [0.8, 0.0]])
    report = evaluation_report(
        of_values(), model=model, x=x[:4], y=y[:4],
        adversarial=Adversarial(torch.arange(4), changed), feature_names=("acid", "sugar"),
    )  # fmt: skip
    (table, *_) = tables(report, "examples")
    answer, acid, sugar = table.rows
    with torch.no_grad():
        assert answer[:3] == ("answer", f"{model(x[:1])[0]:.5g}", f"{model(changed[:1])[0]:.5g}")
    assert table.columns == ["", "before", "attacked", "change", "unit", "change in units"]
    assert acid == ("acid", f"{x[0, 0]:.4g}", f"{changed[0, 0]:.4g}", "+0.5", "1", "+0.5")
    assert sugar[0] == "sugar"
    assert sugar[3] == "+0"
    assert f"The right answer is {y[0]:.5g}" in table.note
    assert "green" not in section(report, "examples").lead, "no card shows training points"


def test_examples_are_spread_over_the_ball() -> None:
    distances = torch.tensor([0.9, 0.1, 3.0, 0.5, 0.3, 0.7, torch.inf])
    assert spread(distances, 1.0, 3) == [1, 3, 0]
    assert spread(distances, 0.4, 4) == [1, 4, 3, 5]
    assert spread(distances, 1.0, 10) == [1, 4, 3, 5, 0, 2]


def test_examples_are_read_back_and_must_be_those_of_the_record(tmp_path: Path) -> None:
    refuses(evaluation_report, by_hand(), x=torch.zeros(3, 2), match=r"x: .*10.*got 3")
    path = tmp_path / "adversarial.safetensors"
    write_tensors(path, {"rows": torch.tensor([4, 2]), "inputs": torch.rand(2, 3)}, {})
    read = Adversarial.read(path)
    assert read.rows.tolist() == [4, 2]
    assert read.inputs.shape == (2, 3)
    write_tensors(path, {"rows": torch.tensor([4, 2])}, {})
    refuses(Adversarial.read, path, match="got no inputs")
