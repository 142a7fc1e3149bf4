"""The network of a model alone is attacked beside it: what its record says, and who attacks it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import pytest
import torch
from evaluate import small
from evaluate.small import Walk, Wander, plane_data, timeless, two_sides
from torch import Tensor

from otad.attacks import L2, Attack, LpBall
from otad.attacks.adaptive import Straight
from otad.attacks.random_search import RandomNoise
from otad.attacks.target import Target
from otad.evaluate import PRESETS, Evaluation, evaluate, runner
from otad.evaluate.records import FAIL, NOT_RUN, PASS
from otad.evaluate.suite import Choice
from otad.model.otad import OTAD
from otad.model.prototypes import prototype_net
from otad.nets import lifted_net


@dataclass(frozen=True)
class Idle(Attack):
    """Said to follow the gradient, and stays where it is."""

    name, family = "idle", "white-box"

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        return x


def test_the_network_alone_loses_what_the_closed_form_says(tmp_path: Path) -> None:
    """Its classes meet at x_0 = 0: within eps it loses the examples at most that far from it."""
    model, x, y = two_sides(points=60, examples=20)
    eps, options = (0.1, 0.3), {"flags": False}
    attacks = [Straight(points=3), RandomNoise(draws=3)]
    record = evaluate(model, x, y, L2(0.3), eps=eps, attacks=attacks, folder=tmp_path, **options)
    alone = record.undefended
    assert list(alone.per_attack) == ["apgd", "noise"]  # none of the given follows its gradient
    assert (alone.n, alone.eps, alone.threat) == (record.n, record.eps, record.threat)
    assert (alone.model["kind"], alone.certificate, alone.undefended) == ("net", None, None)
    for radius in eps:
        left = float((x[:, 0].abs() > radius).double().mean())
        assert alone.worst_case(radius).value == pytest.approx(100 * left)
    assert Evaluation.read(tmp_path / "evaluation.json") == record
    assert Evaluation.read(tmp_path / "undefended" / "evaluation.json") == alone
    without = evaluate(model, x, y, L2(0.3), eps=eps, attacks=attacks, undefended=False, **options)
    assert without.undefended is None
    assert timeless(without) == timeless(replace(record, undefended=None))


@pytest.mark.usefixtures("brief_reports")
def test_a_preset_attacks_both_and_progress_counts_both(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [Choice("straight", {"points": 3}), Choice("pgd", {"steps": 5})]
    few.append(Choice("noise", {"draws": 3}))
    monkeypatch.setitem(PRESETS, "quick", few)
    model, x, y = two_sides(points=60, examples=8)
    reported: list[tuple[str, int, int, float]] = []
    record = evaluate(
        model, x, y, L2(0.2), attacks="quick", flags=False, progress=lambda *it: reported.append(it)
    )
    assert list(record.undefended.per_attack) == ["pgd", "apgd", "noise"]
    assert "bank" in record.undefended.missing["straight"]
    done = [now[1] for now in reported]
    assert done == sorted(done)
    assert done[-1] == reported[-1][2]
    labels = [now[0] for now in reported]
    assert labels[0] == "undefended network, pgd, eps 0.2"
    assert reported[labels.index("certificates")][1] == 3  # one batch of each attack on the network


@pytest.mark.usefixtures("brief_reports")
@pytest.mark.parametrize("batches", [1, 4])
def test_a_run_killed_on_the_network_or_after_it_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    model, x, y = two_sides(points=60, examples=20)
    given = {"attacks": [Wander(), Walk((1.0, 0.0))], "flags": False, "batch_size": 7}
    whole = evaluate(model, x, y, L2(0.2), **given)
    monkeypatch.setattr(small, "BATCHES_LEFT", [batches])  # three of the network, then three
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, x, y, L2(0.2), folder=tmp_path, **given)
    monkeypatch.setattr(small, "BATCHES_LEFT", [6 - batches])
    again = evaluate(model, x, y, L2(0.2), folder=tmp_path, **given)
    assert timeless(again) == timeless(whole)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_attacks_that_are_weaker_on_the_network_are_flagged(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adversarial examples of the model do more to the network than an attack that stays."""
    monkeypatch.setattr(runner, "CHECKS", {})
    model, x, y = two_sides(task=task, points=60, examples=12)
    if task == "regression":
        y = y + 0.1 * y.sign()  # an error with a gradient, which grows away from the bounds
    record = evaluate(model, x, y, L2(0.3), attacks=[Straight(points=3), Idle()])
    (flag,) = record.undefended.flags
    assert flag.verdict == FAIL
    missed, tried = (int(word) for word in flag.found.split() if word.isdigit())
    assert 0 < missed <= tried
    assert record.flags == ()  # those of the model
    strong = evaluate(model, x, y, L2(0.3), attacks=[Straight(points=3)])
    assert [one.verdict for one in strong.undefended.flags] == [PASS]
    idle = evaluate(model, x, y, L2(0.0), attacks=[Idle()])
    assert [one.verdict for one in idle.undefended.flags] == [NOT_RUN]


def test_a_regression_is_printed_with_its_network_and_its_bound() -> None:
    model, x, y = two_sides(task="regression", points=60, examples=12)
    record = evaluate(model, x, y, L2(0.3), attacks=[Straight(points=3)], flags=False)
    alone, bound = fmean(record.undefended.worst_errors()), fmean(record.certificate.worst_errors)
    assert f" (undefended {alone:.4g}), certified {bound:.4g}; " in repr(record)


def test_models_without_a_network_say_so() -> None:
    x, y = plane_data()
    frame = lifted_net((3,), 2, blocks=0)
    points = prototype_net(frame, x, y, neighbors=1)
    model = OTAD(points, points.bank(), scope="global", n_neighbors=5).eval()
    with pytest.warns(UserWarning, match="x: 40 of 40 examples equal training points"):
        found = evaluate(model, x, y, L2(0.1), attacks=[RandomNoise(draws=3)], flags=False)
    assert found.undefended is None
    assert "no network" in found.undefended_reason
    bare = evaluate(frame.eval(), x, y, L2(0.1), attacks=[RandomNoise(draws=3)], flags=False)
    assert (bare.undefended, bare.undefended_reason) == (None, "")
