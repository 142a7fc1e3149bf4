"""Adversarial training of classifiers and regressors: closed forms, another library, refusals."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factories import refuses
from torch import Tensor, nn
from training.small_vision import images, weights_print

import otad
from otad.attacks import Pgd
from otad.baselines import adversarial_training
from otad.nets import Backbone, ResNet, SequentialBackbone, fc_resnet
from otad.training import Adversary, TrainConfig, train
from otad.training.backbone_config import LOSSES, divergence

EPS = 0.3
ORDERS = {"l2": 2, "linf": math.inf}
STEP = {"epochs": 1, "batch_size": 40, "learning_rate": 0.1, "schedule": "constant"}
ONE_STEP = TrainConfig(**STEP)


def points(rows: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two classes separated for sure by a faint direction (+-0.1), and by a strong one (+-0.4)
    in nine cases of ten."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(2, (rows,), generator=generator)
    sign = 2.0 * y - 1
    honest = torch.where(torch.rand(rows, generator=generator) < 0.1, -1.0, 1.0)
    x = 0.02 * torch.randn(rows, 10, generator=generator)
    x[:, 0] += 0.4 * sign * honest
    x[:, 1:] += 0.1 * sign[:, None] / 3
    return x, y


def linear(outputs: int = 2, **options: Any) -> Backbone:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = nn.Linear(10, outputs)
    task = "classification" if outputs > 1 else "regression"
    return SequentialBackbone(None, [], head, input_shape=(10,), task=task, **options).double()


def straight(norm: str = "l2", **options: Any) -> Adversary:
    return Adversary(EPS, steps=1, random_start=False, norm=norm, **options)


def outward(slope: Tensor, norm: str) -> Tensor:
    return EPS * (slope.sign() if norm == "linf" else slope / slope.norm())


@pytest.mark.parametrize("norm", ORDERS)
def test_fgsm_on_a_linear_classifier_is_the_worst_case_in_closed_form(norm: str) -> None:
    x, y = points()
    net = linear()
    weight, bias = net.head.weight.detach().clone(), net.head.bias.detach().clone()
    result = train(net, (x.double(), y), replace(ONE_STEP, adversary=straight(norm)))
    # Towards the other class, by eps.
    sides = torch.where(y == 0, 1.0, -1.0).double()
    moved = x.double() + sides[:, None] * outward(weight[1] - weight[0], norm)
    logits = moved @ weight.T + bias
    loss = (logits.exp().sum(1).log() - logits[torch.arange(len(y)), y]).mean().item()
    assert result.final.loss == pytest.approx(loss)
    right = (logits.argmax(1) == y).double().mean().item()
    assert result.final.train_score == pytest.approx(right)
    slope = (logits.softmax(1) - torch.eye(2)[y]).T @ moved / len(y)
    expected = weight - 0.1 * (slope + ONE_STEP.weight_decay * weight)
    torch.testing.assert_close(net.head.weight.detach(), expected)


@pytest.mark.parametrize("norm", ORDERS)
@pytest.mark.parametrize("loss", ["fit", "trades"])
def test_in_regression_the_error_grows_by_the_dual_norm(norm: str, loss: str) -> None:
    x, _ = points()
    y = x.double().sum(1)
    net = linear(1)
    adversary = straight(norm) if loss == "fit" else Adversary(EPS, 4, step_size=50.0, norm=norm)
    weight, answers = net.head.weight.detach()[0].clone(), net(x.double()).detach()
    config = replace(ONE_STEP, adversary=adversary, loss=loss, beta=0.7)
    result = train(net, (x.double(), y), config)
    growth = EPS * float(weight.abs().sum() if norm == "linf" else weight.norm())
    errors = (answers - y).abs()
    worst = (errors + growth).square().mean().item()
    assert result.final.train_score >= errors.square().mean().item()
    if loss == "fit":
        assert result.final.loss == pytest.approx(worst)
    else:  # at the worst point of |f(x') - f(x)|
        expected = errors.square().mean().item() + 0.7 * growth**2
        assert result.final.loss == pytest.approx(expected, rel=1e-6)


def direct_losses(beta: float, clean: Tensor, moved: Tensor, y: Tensor) -> tuple[list, list]:
    """TRADES and MART as their papers have them, row by row."""
    trades, mart = [], []
    for one, other, label in zip(clean.tolist(), moved.tolist(), y.tolist(), strict=True):
        p, q = (np.exp(row) / np.exp(row).sum() for row in (one, other))
        kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        wrong = max(np.delete(q, label))
        trades.append(-math.log(p[label]) + beta * kl)
        boosted = -math.log(q[label]) - math.log(1.0001 - wrong)
        mart.append(boosted + beta * kl * (1 - p[label]))
    return trades, mart


def losses_of(loss: str, beta: float, clean: Tensor, moved: Tensor, y: Tensor) -> Tensor:
    config = TrainConfig(adversary=Adversary(EPS), loss=loss, beta=beta)
    found = LOSSES[loss]("classification", config)
    return found(torch.cat([moved, clean]), y, None, reduction="none")


def test_trades_and_mart_are_the_formulas_of_their_papers() -> None:
    generator = torch.Generator().manual_seed(3)
    clean, moved = (3 * torch.randn(30, 5, generator=generator).double() for _ in range(2))
    y = torch.arange(30) % 5
    trades, mart = (torch.tensor(one).double() for one in direct_losses(6.0, clean, moved, y))
    torch.testing.assert_close(losses_of("trades", 6.0, clean, moved, y), trades)
    torch.testing.assert_close(losses_of("mart", 6.0, clean, moved, y), mart)
    sure = 1e4 * torch.eye(5)[y].double()  # probabilities of 0 and 1
    assert losses_of("mart", 6.0, sure, sure.roll(1, 1), y).isfinite().all()
    assert not divergence(clean, clean).any()


@pytest.mark.parametrize("loss", ["trades", "mart"])
@pytest.mark.parametrize("share", [0.0, 0.05])
def test_a_step_follows_the_gradient_at_clean_and_perturbed_inputs(loss: str, share: float) -> None:
    x, y = points()
    x = x.double()
    net = fc_resnet((10,), 2, blocks=1, hidden=8, bounds=(-2, 2)).double()
    by_hand = copy.deepcopy(net)
    adversary = Adversary(EPS, steps=2, weight_share=share)
    config = replace(ONE_STEP, adversary=adversary, loss=loss, beta=2.0)
    plain, weighted = net, copy.deepcopy(net)
    train(plain, (x, y), config)
    train(weighted, (x, y), config, weights=torch.full((40,), 3.0).double())
    seen = []

    def recorded(ball: Any, model: nn.Module, near: Tensor, *more: Any) -> Tensor:
        seen.append((near, Adversary.attack(adversary, ball, model, near, *more)))
        return seen[-1][1]

    # The perturbed inputs of the training itself, in its own order.
    spied = replace(adversary)
    object.__setattr__(spied, "attack", recorded)
    train(copy.deepcopy(by_hand), (x, y), replace(config, adversary=spied))
    ((near, moved),) = seen
    labels = y[torch.cdist(near, x).argmin(1)]

    def total(model: nn.Module) -> Tensor:
        return losses_of(loss, 2.0, model(near), model(moved), labels).mean()

    elsewhere = copy.deepcopy(by_hand)
    for weight, slope in zip(
        elsewhere.parameters(),
        torch.autograd.grad(total(elsewhere), list(elsewhere.parameters())),
        strict=True,
    ):
        if weight.dim() > 1:
            weight.data += share * weight.detach().norm() / slope.norm() * slope
    slopes = torch.autograd.grad(total(elsewhere), list(elsewhere.parameters()))
    for model in (plain, weighted):
        parts = zip(model.parameters(), by_hand.parameters(), slopes, strict=True)
        for trained, weight, slope in parts:
            decayed = slope + config.weight_decay * weight.detach()
            torch.testing.assert_close(trained.detach(), weight.detach() - 0.1 * decayed)


@pytest.mark.parametrize(("norm", "share"), [("l2", 0.0), ("linf", 0.0), ("l2", 0.02)])
def test_a_step_is_that_of_the_adversarial_robustness_toolbox(norm: str, share: float) -> None:
    pytest.importorskip("art", reason="needs the extra clients")
    evasion = pytest.importorskip("art.attacks.evasion")
    trainers = pytest.importorskip("art.defences.trainer")
    classification = pytest.importorskip("art.estimators.classification")
    x, y = points()
    net = fc_resnet((10,), 2, blocks=1, hidden=8)

    def theirs() -> Any:
        twin = copy.deepcopy(net)
        optimizer = torch.optim.SGD(twin.parameters(), 0.1, weight_decay=ONE_STEP.weight_decay)
        loss = nn.CrossEntropyLoss()
        return classification.PyTorchClassifier(
            twin, loss, (10,), 2, optimizer=optimizer, device_type="cpu"
        )

    ours, known = copy.deepcopy(net), theirs()
    train(ours, (x, y), replace(ONE_STEP, adversary=straight(norm, weight_share=share)))
    attack = evasion.FastGradientMethod(known, norm=ORDERS[norm], eps=EPS, batch_size=40)
    labels, how = np.eye(2, dtype=np.float32)[y.numpy()], {"nb_epochs": 1, "batch_size": 40}
    if share:
        trainer = trainers.AdversarialTrainerAWPPyTorch(known, theirs(), attack, "PGD", share, 1, 0)
    else:
        trainer = trainers.AdversarialTrainer(known, attack, ratio=1.0)
    trainer.fit(x.numpy(), labels, **how)
    for one, two in zip(ours.parameters(), known.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_the_ball_grows_and_has_the_units_of_the_net() -> None:
    std = torch.arange(1.0, 11.0)
    net = linear(std=std, bounds=(-1, 1)).float()
    adversary = Adversary(0.4, unit="std", warmup=2, norm="linf")
    assert [adversary.ball(net, epoch).eps for epoch in (0, 0.5, 2, 9)] == [0.0, 0.1, 0.4, 0.4]
    ball = adversary.ball(net)
    assert torch.equal(ball.scale, std)
    assert ball.bounds == (-1.0, 1.0)
    x = torch.zeros(3, 10)
    start = adversary.start(ball, x, torch.Generator().manual_seed(0))
    assert bool(((start / std).abs() <= 0.4).all())
    moved = adversary.attack(ball, net, x, lambda outputs: outputs[:, 0], start)
    furthest = (1 / std).clamp_max(0.4).expand(3, -1)
    torch.testing.assert_close((moved / std).abs(), furthest)


def test_warm_ups_end() -> None:
    """At first it is plain training, later that of the whole ball and of perturbed weights."""
    x, y = points(200)
    config = replace(ONE_STEP, epochs=4, learning_rate=1e-6)

    def losses(**options: Any) -> list[float]:
        adversary = None if not options else straight(**options)
        net = fc_resnet((10,), 2, blocks=1, hidden=8)
        history = train(net, (x, y), replace(config, adversary=adversary)).history
        return [record.loss for record in history]

    plain, whole = losses(), losses(norm="l2")
    perturbed = losses(weight_share=0.05)
    grown, late = losses(warmup=2), losses(weight_share=0.05, weight_warmup=2)
    assert grown[2:] == pytest.approx(whole[2:], rel=1e-4)
    assert plain[0] < grown[0] < grown[1] < whole[1] < perturbed[1]
    assert late == pytest.approx(whole[:2] + perturbed[2:], rel=1e-4)


METHODS = {"pgd": {}, "fgsm": {"warmup": 2.0}, "trades": {"beta": 3.0}, "mart": {"beta": 3.0}}


def test_every_method_makes_a_classifier_robust() -> None:
    data, (x, y), threat = (*points(300), *points(150, 1)), points(150, 1), otad.L2(0.2)
    settings = {"epochs": 8, "batch_size": 75, "optimizer": "adamw", "learning_rate": 0.04}

    def score(net: Backbone) -> float:
        found = otad.attack(net, x, y, threat, attack="pgd", steps=10)
        return float((~found.broken).double().mean())

    plain = fc_resnet((10,), 2, blocks=1, hidden=32)
    assert train(plain, data, TrainConfig(**settings)).final.val_score == 1.0
    assert score(plain) < 0.1
    for method, options in METHODS.items():
        net = fc_resnet((10,), 2, blocks=1, hidden=32)
        how = {"method": method, "steps": 5, "settings": settings} | options
        result = adversarial_training(net, data, threat, **how)
        assert result.final.val_score == pytest.approx(score(net), abs=0.03)
        assert result.final.val_score > 0.9


def test_a_resnet_is_trained_saved_loaded_and_evaluated(tmp_path: Path) -> None:
    x, y = images(60)
    net = ResNet((3, 8, 8), 3, widths=(4, 8), depth=1, activation="silu", bounds=(0, 1))
    settings = {"epochs": 3, "batch_size": 20, "learning_rate": 0.1, "nesterov": True}
    settings |= {"channels_last": True, "augment": "light", "ema": 0.5, "mixing": 1.0}
    settings |= {"mixing_by": "cutmix"}
    adversarial_training(
        net, (x, y), otad.Linf(0.02), steps=2, weight_share=0.01, settings=settings
    )
    otad.nets.save_net(net, tmp_path / "net.safetensors", method="pgd")
    twin = otad.nets.load_net(tmp_path / "net.safetensors")
    assert torch.equal(twin(x), net(x))
    assert not twin.training
    threat = otad.Linf(0.02)
    found = otad.evaluate(twin, x[:20], y[:20], threat, attacks=[Pgd(steps=3)], flags=False)
    assert found.model["net"]["kind"] == "resnet"
    (tmp_path / "net.safetensors").write_bytes(b"{}")
    refuses(otad.nets.load_net, tmp_path / "net.safetensors", match="net.safetensors: expected")


def test_a_resnet_18_has_its_usual_size() -> None:
    net = ResNet((3, 32, 32), 10)
    assert sum(weight.numel() for weight in net.parameters()) == 11_173_962
    assert net.stem[0].kernel_size == (3, 3)


@pytest.mark.parametrize("loss", ["fit", "trades"])
def test_a_run_in_pieces_ends_with_the_same_weights(tmp_path: Path, loss: str) -> None:
    adversary = Adversary(0.2, steps=2, weight_share=0.02, warmup=2.5, weight_warmup=1.5)
    config = TrainConfig(
        epochs=4, batch_size=25, adversary=adversary, loss=loss, ema=0.8, nesterov=True
    )
    make, data = partial(fc_resnet, (10,), 2, blocks=1, hidden=8), (*points(60), *points(30, 1))
    whole = make()
    expected = train(whole, data, config)
    for epoch in range(4):
        part = make()
        result = train(part, data, config, checkpoint_dir=tmp_path, max_seconds=1e-9)
        assert result.resumed_after == epoch
    assert weights_print(part) == weights_print(whole)
    assert result == expected
    other = replace(config, adversary=replace(adversary, warmup=1.0))
    message = r"differs in config\.adversary\.warmup"
    refuses(train, make(), data, other, checkpoint_dir=tmp_path, match=message)


ANY = Adversary(0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "trades"}, "adversary: expected one for the loss 'trades', got None"),
        ({"loss": "mart"}, "adversary: expected one"),
        ({"loss": "trades", "adversary": straight()}, "adversary: .*random start"),
        ({"beta": -1.0}, "beta: "),
        ({"adversary": math.nan}, "adversary: expected an Adversary, or None, got nan"),
        ({"nesterov": True, "optimizer": "adamw"}, "nesterov: .*'adamw'"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov: .*momentum 0"),
        (
            {"cuda_graph": True, "whole_batches": True, "adversary": replace(ANY, warmup=1)},
            "cuda_graph: .*warm-up",
        ),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    refuses(TrainConfig, **changes, match=message)


NET = fc_resnet((10,), 2, blocks=1, hidden=4, std=2.0, bounds=(-2, 2))
MASK = torch.ones(10, dtype=torch.bool)


@pytest.mark.parametrize(
    ("threat", "options", "message"),
    [
        (otad.L2(0.1), {"method": "free"}, "method: .*pgd.*'free'"),
        (otad.L2(0.0), {}, "eps: "),
        (otad.L2(0.1, bounds=(0, 1)), {}, r"threat.bounds: .*-2.*\(0.0, 1.0\)"),
        (otad.L2(0.1, mutable=MASK), {}, "threat.mutable: expected none"),
        (otad.L2(0.1, groups=[[0, 1]]), {}, "threat.groups: expected none"),
        (otad.L2(0.1, scale=torch.ones(10)), {}, "threat.scale: .*standard deviations"),
        (otad.L2(0.1), {"settings": {"speed": 3}}, "settings: .*TrainConfig.*speed"),
        (otad.L2(0.1), {"steps": 0}, "steps: "),
        (otad.L2(0.1), {"warmup": -1.0}, "warmup: "),
        (
            otad.L2(0.1),
            {"method": "mart", "settings": {"label_smoothing": 0.1}},
            "smoothing: .*0.1",
        ),
        ("l2", {}, "threat: expected"),
    ],
)
def test_bad_calls_are_refused(threat: Any, options: dict[str, Any], message: str) -> None:
    refuses(adversarial_training, copy.deepcopy(NET), points(), threat, **options, match=message)


def test_mart_is_for_classes_alone() -> None:
    x, _ = points()
    config = replace(ONE_STEP, loss="mart", adversary=ANY)
    net = fc_resnet((10,), 1, blocks=1, task="regression")
    refuses(train, net, (x, x[:, 0]), config, match="loss: .*'trades' for regression, got 'mart'")
    threat = otad.Linf(0.1, scale=NET.std.expand(10))
    settings = {"epochs": 1, "batch_size": 20}
    robust = copy.deepcopy(NET)
    assert adversarial_training(robust, points(), threat, settings=settings).finished
