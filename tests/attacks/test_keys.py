"""Attacks on neighbors that a metric finds: by gradient, and straight to given training inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attacks.bank_models import BOX, Bent, keyed_model, tiles
from attacks.linear_models import assert_legal, run
from torch import Tensor

from otad.attacks import L2, Linf, MetricAttack, Pgd
from otad.attacks.adaptive import Keys, Straight
from otad.attacks.adaptive.ascent import _by_rank, _by_vote
from otad.attacks.adaptive.neighborhood import (
    Block,
    Neighborhood,
    head_outputs,
    lowest,
)
from otad.attacks.target import Survivors, Target, margin
from otad.baselines import MajorityKnn
from otad.errors import InputError
from otad.model.training_inputs import check_training_inputs

QUICK = Keys(steps=15, targets=2, temperatures=(0.1,), restarts=1, polish=10)


def right_rows(model: torch.nn.Module, count: int, seed: int) -> tuple[Tensor, Tensor]:
    x, y = tiles(count, seed)
    with torch.no_grad():
        right = model(x).argmax(1) == y
    return x[right], y[right]


@pytest.mark.parametrize("ball", [L2(0.4, BOX), Linf(0.1, BOX)], ids=["l2", "linf"])
def test_beats_the_attacks_that_do_not_know_the_classes_or_the_neighbors(ball) -> None:
    model, _ = keyed_model()
    x, y = right_rows(model, 60, 1)
    found = run(QUICK, model, x, ball, y)
    for attack in (Pgd(steps=15), MetricAttack(model.query_keys, steps=15)):
        assert found.accuracy < run(attack, model, x, ball, y).accuracy - 0.1
    assert_legal(found.inputs, x, ball)
    assert bool((found.broken == (model(found.inputs).argmax(1) != y)).all())


@pytest.mark.parametrize("loss", ["rank", "vote", "joint"])
def test_every_loss_succeeds_on_its_own(loss) -> None:
    model, _ = keyed_model()
    x, y = right_rows(model, 40, 2)
    alone = replace(QUICK, losses=(loss,), polish=0)
    assert run(alone, model, x, L2(0.5, BOX), y).accuracy < 0.6
    weak = run(alone, model, x, L2(0.25, BOX), y)
    strong = run(replace(alone, polish=10, restarts=2), model, x, L2(0.25, BOX), y)
    assert bool((strong.broken >= weak.broken).all())


def test_rank_is_the_lead_of_the_wrong_points_and_its_gradient() -> None:
    model, _ = keyed_model(neighbors=4)
    model = model.double()
    x, y = tiles(6, 4)
    x = x.double()
    bank = Neighborhood.of(model, x)
    aims = bank.nearest_classes(bank.ranks(bank.embed(x)), y)[:, 0]
    assert bool((aims != y).all())
    rows = torch.arange(6)
    ask = _by_rank(Block(Survivors(Target(model, y), x, L2(1.0)), bank, rows), aims)
    found = ask(x, rows)
    squares = torch.cdist(model.query_keys(x), model.bank_keys[bank.members]).square()
    for row in range(6):
        own = squares[row, bank.votes == y[row]].sort().values[:2].mean()
        other = squares[row, bank.votes == aims[row]].sort().values[:4].mean()
        assert float(found.value[row]) == pytest.approx(float(own - other), abs=1e-9)
    step = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    ahead, behind = (ask(x + sign * 1e-6 * step, rows).value for sign in (1, -1))
    slope = (found.gradient * step).flatten(1).sum(1)
    torch.testing.assert_close((ahead - behind) / 2e-6, slope, rtol=1e-4, atol=1e-6)


def test_the_soft_vote_is_the_mean_answer_of_the_bank_for_a_wide_temperature() -> None:
    model, _ = keyed_model()
    x, y = tiles(5, 5)
    bank = Neighborhood.of(model, x)
    block = Block(Survivors(Target(model, y), x, L2(1.0)), bank, torch.arange(5))
    _, value, gradient = _by_vote(block, 1e6, jointly=False)(x, block.rows)
    mean = bank.outputs.mean(0).expand(5, -1)
    torch.testing.assert_close(value, margin(mean, y), rtol=1e-3, atol=1e-3)
    near = _by_vote(block, 1e-2, jointly=False)(x, block.rows).value
    assert bool((near < value).all())  # right answers are clearer near by
    assert gradient.shape == x.shape


def test_a_class_without_points_and_copies_of_an_example_do_no_harm() -> None:
    model, train_x = keyed_model(neighbors=3)
    with torch.no_grad():
        model.backbone.head.bias[2] -= 1e3  # nobody votes for the last class
    # the bank itself
    result = run(replace(QUICK, targets=3), model, train_x[:10], L2(1.0, BOX))
    assert bool(result.inputs.isfinite().all())
    assert result.accuracy < 1


def test_k_nn_and_values_are_attacked_too() -> None:
    model, _ = keyed_model()
    rule = MajorityKnn(model, 5).eval()
    x, y = right_rows(rule, 40, 6)
    assert run(QUICK, rule, x, L2(0.5, BOX), y).accuracy < 0.6
    values, _ = keyed_model(values=True)
    x, _ = tiles(20, 7)
    y = x.mean((1, 2, 3))
    clean = (values(x) - y).abs().detach()
    found = run(QUICK, values, x, L2(0.5, BOX), y)
    assert bool((found.gain >= clean).all())
    assert float(found.gain.mean()) > 2 * float(clean.mean())


def test_lines_to_given_inputs_with_the_nearest_keys() -> None:
    model, train_x = keyed_model()
    x, y = right_rows(model, 40, 8)
    ball = L2(1.0, BOX)
    with pytest.raises(InputError, match="train_x"):
        run(Straight(), model, x, ball, y)
    assert run(Straight(points=6, train_x=train_x), model, x, ball, y).accuracy < 0.5
    bank = Neighborhood.of(model, x, train_x)
    wrong = bank.is_wrong(y)
    near = lowest(bank.ranks_at(x), 1, wrong)[:, 0]
    keys = torch.cdist(model.query_keys(x), model.bank_keys[bank.members])
    keys = keys.masked_fill(~wrong, torch.inf)
    assert torch.equal(near, keys.argmin(1))
    assert torch.equal(bank.training_inputs(near, x), train_x[bank.members[near]])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda x: x[:-1], r"train_x.*\(90, 1, 4, 4\)"),
        (lambda x: x.flip(0), "train_x.*row 0"),
        (lambda x: x.double(), "train_x.*float32.*float64"),
        (lambda x: x.numpy(), "train_x.*ndarray"),
    ],
)
def test_other_training_inputs_are_refused(spoil, message) -> None:
    model, train_x = keyed_model()
    assert check_training_inputs(model, train_x) is train_x
    with pytest.raises(InputError, match=message):
        check_training_inputs(model, spoil(train_x))  # type: ignore[operator]


def test_what_bank_points_answer_is_read_anew_when_it_changes() -> None:
    model, _ = keyed_model()
    x, _ = tiles(1, 0)
    first = head_outputs(model, x)
    assert head_outputs(model, x) is first
    with torch.no_grad():
        model.backbone.head.bias.add_(1.0)
    torch.testing.assert_close(head_outputs(model, x), first + 1)
    assert head_outputs(model.double(), x.double()).dtype == torch.float64


def test_the_bank_is_taken_in_blocks_of_examples(monkeypatch) -> None:
    model, _ = keyed_model(metric=Bent(3))
    x, y = right_rows(model, 12, 9)
    attack = replace(QUICK, steps=5)
    whole = run(attack, model, x, L2(0.3, BOX), y)
    monkeypatch.setattr("otad.attacks.adaptive.neighborhood.SCORES_AT_ONCE", 5 * 90)
    parts = run(attack, model, x, L2(0.3, BOX), y)
    assert torch.equal(whole.broken, parts.broken)
    torch.testing.assert_close(whole.gain, parts.gain, rtol=1e-3, atol=1e-3)
