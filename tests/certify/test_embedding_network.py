"""Certificates behind a network with a proved constant: closed forms, and attacks that search."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
from factories import refuses
from torch import Tensor, nn

import otad
from otad.certify import certify
from otad.nets import LinfDistNet, OrthogonalNet, SOCNet, feature_lift
from otad.nets.adapt import UNREAD
from otad.training import TrainConfig, train

SOFT = {"optimizer": "orthogonal_muon", "loss": "soft_margin", "weight_decay": 0.0}


@cache
def digits() -> tuple[Tensor, Tensor, Tensor]:
    data = otad.data.load("digits")
    return data.train_x[:200], data.train_y[:200], data.test_x[:8]


@cache
def trained() -> OrthogonalNet:
    net = OrthogonalNet((1, 8, 8), 10, width=16, blocks=2, bounds=(0.0, 1.0), mean=0.3, std=0.5)
    config = TrainConfig(epochs=8, batch_size=25, learning_rate=0.003, target_margin=0.6, **SOFT)
    train(net, digits()[:2], config)
    return net


@cache
def model(how: str) -> nn.Module:
    """The network alone, or a map through its features: as `defend` makes it, in global or in local
    scope, or with the factor `how`."""
    if how == "network":
        return trained()
    net, options = trained(), {"scope": "global"}
    if how == "local":
        options = {"n_neighbors": 1}
    elif how != "defended":
        net, options = feature_lift(net, float(how)), options | {"smoothness": 2.0}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "defense: the defense works on the 16 features")
        return otad.defend(net, *digits()[:2], progress=False, **options)


def turned(victim: nn.Module, x: Tensor, radii: Tensor) -> Tensor:
    """Whether gradient steps within its radius change the answer (n,) of each input."""
    with torch.no_grad():
        labels = victim(x).argmax(1)
    generator, found = torch.Generator().manual_seed(0), torch.zeros(len(x), dtype=torch.bool)
    own, shape = nn.functional.one_hot(labels, 10).bool(), (-1, 1, 1, 1)
    limits = radii.float().view(shape)
    step = torch.randn(x.shape, generator=generator)
    for _ in range(6):
        length = step.flatten(1).norm(dim=1).view(shape)
        step = (step * (limits / length.clamp_min(1e-12)).clamp_max(1.0)).requires_grad_()
        moved = (x + step).clamp(0.0, 1.0)
        outputs = victim(moved)
        found |= outputs.argmax(1) != labels
        rivals = outputs.masked_fill(own, -torch.inf).amax(1) - outputs[own]
        (slope,) = torch.autograd.grad(rivals.sum(), step)
        steepest = slope / slope.flatten(1).norm(dim=1).view(shape).clamp_min(1e-12)
        step = (step + limits / 3 * steepest).detach()
    return found


@pytest.mark.parametrize("how", ["network", "defended", "local", "1"])
def test_no_attack_changes_a_certified_answer(how: str) -> None:
    victim, x = model(how), digits()[2]
    found = certify(victim, x)
    assert int((found.radius > 0.05).sum()) >= 3, "small radii prove nothing"
    assert not bool(turned(victim, x, 0.999999 * found.radius).any())
    farther = (20 if how == "local" else 5) * found.radius
    assert bool(turned(victim, x, farther).any()), "the attack finds nothing anywhere"


def test_all_of_them_prove_margins_over_root_two() -> None:
    x = digits()[2]
    for how in ("network", "defended", "1", "0.1"):
        victim = model(how)
        with torch.no_grad():
            largest = victim(x).topk(2).values.double()
        known = 0.5 * (largest[:, 0] - largest[:, 1]) / 2**0.5  # std is 0.5
        radius = certify(victim, x).radius
        assert bool((radius < known).all())
        torch.testing.assert_close(radius, known, rtol=4e-3, atol=1e-3)


def test_the_map_passes_through_all_pairs_and_its_weights_name_them() -> None:
    x, victim = digits()[0], model("0.1")
    assert len(victim.potential.left_out) == 0
    with torch.no_grad():
        trace, own = victim.trace(x[:20]), trained()(x[:20])
    torch.testing.assert_close(trace.outputs, own, rtol=1e-4, atol=1e-4)
    assert torch.equal(trace.neighbors.indices[:, 0], torch.arange(20))
    assert float(trace.solution.multipliers[:, 0].min()) > 0.999


def test_less_weight_on_unread_directions_comes_closer_to_the_head() -> None:
    x = otad.data.load("digits").test_x[:40]
    with torch.no_grad():
        head = trained()(x)
        whole, less = ((model(how)(x) - head).norm(dim=1) for how in ("1", "0.1"))
    assert bool((less <= whole + 0.01).all())  # as the miss is what the weights minimize
    assert float(less.mean()) < 0.9 * float(whole.mean())


def test_a_saved_map_has_the_same_certificate(tmp_path: Path) -> None:
    x, victim = digits()[2], model("0.1")
    victim.save(tmp_path / "model")
    again = otad.load(tmp_path / "model")
    assert again.backbone.config() == victim.backbone.config()
    one, other = certify(victim, x), certify(again, x)
    assert torch.equal(one.radius, other.radius)
    said = "; ".join(one.assumptions)
    assert "the embedding of Lift moves by at most 1" in said
    assert "rounding moves embedded inputs" in said


def test_units_and_stated_constants_count() -> None:
    x, victim = digits()[2], model("1")
    plain = certify(victim, x).radius
    unit = torch.full((1, 8, 8), 2.0)
    halved = certify(victim, x, unit=unit).radius
    torch.testing.assert_close(halved, plain / 2, rtol=1e-3, atol=1e-4)
    stated = certify(victim, x, embedding_lipschitz=20.0)  # instead of 1
    torch.testing.assert_close(stated.radius, plain / 20, rtol=1e-2, atol=1e-5)
    assert "as stated" in "; ".join(stated.assumptions)


def test_constants_in_another_norm_prove_nothing_in_l2() -> None:
    x, y, test = digits()
    net = LinfDistNet((1, 8, 8), 10, widths=(8,), bounds=(0.0, 1.0)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = otad.defend(net, x, y, scope="global", smoothness=2.0, progress=False)
    refuses(certify, other, test, match="LinfDistNet has its own embedding, got None")


@pytest.mark.parametrize("inputs", ["auto", "features"])
def test_features_of_a_network_with_a_constant_are_lifted_as_they_are(inputs: str) -> None:
    x, y, test = digits()
    with pytest.warns(UserWarning, match="features that enter") as said:
        lifted = otad.defend(trained(), x, y, inputs=inputs, scope="global", progress=False)
    assert "no radius is certified" not in str(said[0].message)
    assert lifted.backbone.inner is trained()
    assert lifted.backbone.unread == UNREAD
    assert bool((certify(lifted, test).radius > 0).any())


@pytest.mark.filterwarnings("ignore:defense")
def test_any_network_with_a_constant_in_l2_is_lifted_and_no_other() -> None:
    x, y, test = digits()
    soc = SOCNet((1, 8, 8), 10, widths=(4,), bounds=(0.0, 1.0)).eval()
    lifted = otad.defend(soc, x, y, scope="global", progress=False)
    with torch.no_grad():
        torch.testing.assert_close(lifted(x[:20]), soc(x[:20]), rtol=1e-3, atol=1e-3)
    found = certify(lifted, test)
    assert bool((found.radius > 0).all())
    assert not bool(turned(lifted, test, 0.999999 * found.radius).any())
    linf = LinfDistNet((1, 8, 8), 10, widths=(8,), bounds=(0.0, 1.0)).eval()
    assert otad.defend(linf, x, y, progress=False).backbone is linf


@pytest.mark.filterwarnings("ignore:defense")
def test_a_bank_in_half_precision_keeps_distances_long() -> None:
    how = {"scope": "global", "smoothness": 2.0, "bank_dtype": torch.bfloat16, "progress": False}
    long, short = (
        otad.defend(net, *digits()[:2], **how) for net in (trained(), feature_lift(trained(), 0.1))
    )
    assert (long.backbone.unread, short.backbone.unread) == (1, 0.1)
    assert len(long.potential.left_out) < len(short.potential.left_out)
