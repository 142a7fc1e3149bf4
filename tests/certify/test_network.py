"""Certificates of networks alone: nothing changes within a radius, and closed forms are met."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from factories import refuses
from torch import Tensor

import otad
from otad.attacks import Pgd
from otad.certify import certify, certify_values
from otad.certify.input_reach import KEY_ROUNDOFFS
from otad.certify.network import NetworkBound
from otad.nets import Backbone, LinfDistNet, LipschitzBound, SOCNet, fc_resnet, load_net, save_net
from otad.training import TrainConfig, train
from otad.training.backbone_config import fit_margin_loss
from otad.training.margins import scaled_margins

SIDE = 41


def linf_plane(seed: int = 0, **options) -> LinfDistNet:
    return LinfDistNet((2,), 3, widths=(6, 6), seed=seed, **options)


def soc_plane(seed: int = 0, **options) -> SOCNet:
    return SOCNet((1, 1, 2), 3, widths=(4,), seed=seed, **options)


def trained(make, seed: int = 0) -> Backbone:
    """A net of the plane with three classes around the origin."""
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(120, 2, generator=generator) - 1
    y = ((torch.atan2(x[:, 1], x[:, 0]) + math.pi) / 2.1).long().clamp_max(2)
    net = make(seed, mean=0.1, std=0.7)
    settings = {"optimizer": "adamw", "learning_rate": 0.02, "loss": "margin", "target_margin": 0.2}
    config = TrainConfig(epochs=6, batch_size=40, weight_decay=0.0, **settings)
    train(net, (x.view(-1, *net.input_shape), y), config)
    return net


def ball_around(net: Backbone, radius: float) -> Tensor:
    """All points of a fine grid within a radius of the origin, in the norm of the net."""
    line = torch.linspace(-1, 1, SIDE, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line)
    if net.lipschitz.norm == "l2":
        grid = grid[grid.norm(dim=1) <= 1]
    return radius * grid


@pytest.mark.parametrize("make", [linf_plane, soc_plane])
def test_nothing_changes_within_a_radius(make) -> None:
    proved, reached = 0, 0
    for seed in range(2):
        net = trained(make, seed)
        x = 2 * torch.rand(6, *net.input_shape, generator=torch.Generator().manual_seed(9)) - 1
        found = certify(net, x)
        assert found.norm == net.lipschitz.norm
        assert torch.equal(found.prediction, net(x).argmax(1))
        proved += int((found.radius > 0.02).sum())
        for point, label, radius in zip(x, found.prediction, found.radius.tolist(), strict=True):
            for factor in (0.999999, 4.0):
                around = point + ball_around(net, factor * radius).view(-1, *x.shape[1:]).float()
                with torch.no_grad():
                    same = bool((net(around).argmax(1) == label).all())
                assert same or factor > 1
                reached += not same
    assert proved >= 8, "radii of 0 prove nothing"
    assert reached >= 2, "no radius is close to a change"


def line_net() -> LinfDistNet:
    """Logits -|x + 1| and -|x - 1| for x > -10."""
    net = LinfDistNet((1,), 2, widths=(1,)).eval()
    net.layers[0].weight.data.fill_(-10.0)
    net.layers[1].weight.data.copy_(torch.tensor([[9.0], [11.0]]))
    return net


def kept_net() -> SOCNet:
    """Logits x and 1 - x for x > 0, the first of two channels: its layer is the identity."""
    net = SOCNet((2, 1, 1), 2, widths=(2,), activation="maxmin").eval()
    net.layers[1].free.data.zero_()
    net.head.parametrizations.weight.original.data.zero_()[:, 0] = torch.tensor([2.0, -3.0])
    net.head.bias.data.copy_(torch.tensor([0.0, 1.0]))
    return net


def test_closed_forms_are_met() -> None:
    found = certify(line_net(), torch.tensor([[-0.4], [0.7], [0.0]]))
    assert found.radius.tolist() == pytest.approx([0.4, 0.7, 0.0], abs=5e-4)
    assert bool((found.radius[:2] < torch.tensor([0.4, 0.7])).all())
    assert found.prediction[:2].tolist() == [0, 1]
    assert found.rules == ("network", "network", "none")
    assert repr(found).startswith("Certificate(3 inputs, radius median 0.4 in linf; by rule")
    assert torch.equal(found.linf_radius(4), found.radius)
    halved = certify(line_net(), torch.tensor([[-0.4]]), unit=torch.tensor([2.0]))
    assert float(halved.radius) == pytest.approx(0.2, abs=5e-4)
    x = torch.tensor([[0.9, 0.3], [0.1, 2.0]]).view(2, 2, 1, 1)
    found = certify(kept_net(), x, batch_size=1)
    assert found.radius.tolist() == pytest.approx([0.4, 0.4], abs=1e-4)
    assert bool((found.radius < 0.4).all())
    assert found.norm == "l2"
    assert torch.equal(found.linf_radius(4), found.radius / 2)


@pytest.mark.parametrize("make", [linf_plane, soc_plane])
def test_rounding_is_within_what_is_assumed(make) -> None:
    net = make(3).eval()
    wide = make(3).double().eval()
    x = 3 * torch.randn(500, *net.input_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        error = (net.embed(x).double() - wide.embed(x.double())).norm(dim=1)
    size = x.double().flatten(1).abs().amax(1) + net.lipschitz.offset
    assert float((error / size).max()) < KEY_ROUNDOFFS / 16 * torch.finfo(torch.float32).eps


def test_autocast_of_the_caller_changes_no_certificate() -> None:
    net = soc_plane(3).eval()
    with torch.no_grad():
        net.head.bias += 20  # bfloat16 keeps few digits of outputs near 20
    x = torch.randn(50, *net.input_shape, generator=torch.Generator().manual_seed(0))
    expected = certify(net, x)
    with torch.autocast("cpu", torch.bfloat16):
        found = certify(net, x)
    assert torch.equal(found.radius, expected.radius)
    assert torch.equal(found.prediction, expected.prediction)


def test_a_changed_std_has_to_be_positive(tmp_path) -> None:
    net = soc_plane().eval()
    net.std[0] = -0.01
    with pytest.raises(otad.InputError, match="model: expected a positive std"):
        certify(net, torch.zeros(1, *net.input_shape))
    save_net(net, tmp_path / "net.safetensors")
    with pytest.raises(otad.InputError, match="std: expected positive values"):
        load_net(tmp_path / "net.safetensors")


def test_a_saved_net_has_the_same_certificate(tmp_path) -> None:
    for make in (linf_plane, soc_plane):
        net, x = trained(make), torch.rand(5, *make().input_shape)
        save_net(net, tmp_path / "net.safetensors")
        again, found = certify(load_net(tmp_path / "net.safetensors"), x), certify(net, x)
        assert torch.equal(again.radius, found.radius)


class Boastful(LinfDistNet):
    @property
    def lipschitz(self) -> LipschitzBound:
        return LipschitzBound("linf", 0.2, 0.0)


def test_evaluations_convert_radii_and_refute_false_bounds() -> None:
    net = line_net()
    net.bounds = -1.0, 1.0
    x = torch.tensor([[-0.4], [0.7]])
    y = net(x).argmax(1)
    for threat in (otad.Linf(0.5), otad.L2(0.5)):
        found = otad.evaluate(net, x, y, threat, attacks=[Pgd(steps=20)], flags=False)
        assert found.certificate.radius == pytest.approx([0.4, 0.7], abs=5e-4)
        assert found.worst_case_accuracy == found.certified_accuracy(0.5).value / 100 == 0.5
        assert [flag.verdict for flag in found.flags] == ["PASS"]
    in_l2 = otad.evaluate(kept_net(), torch.full((1, 2, 1, 1), 0.9), torch.tensor([0]),
                          otad.Linf(0.1), attacks=[Pgd(steps=20)], flags=False)  # fmt: skip
    assert in_l2.certificate.radius == pytest.approx([0.4 / math.sqrt(2)], abs=1e-4)
    net.__class__ = Boastful
    found = otad.evaluate(net, x, y, otad.Linf(0.5), attacks=[Pgd(steps=20)], flags=False)
    assert [flag.verdict for flag in found.flags] == ["FAIL"]


def test_the_certified_margin_is_rewarded() -> None:
    net, labels = kept_net(), torch.tensor([0, 1, 1])
    outputs = torch.tensor([[2.0, 1.0], [3.0, 1.0], [0.0, 4.0]])
    config = TrainConfig(loss="fit_margin", beta=0.5)
    fitted = torch.nn.functional.cross_entropy(outputs, labels, reduction="none")
    expected = fitted - 0.5 * torch.tensor([0.5, 0.0, 2.0])  # rows of the head are 2 apart
    loss = fit_margin_loss("classification", config)
    torch.testing.assert_close(loss(outputs, labels, net.head, reduction="none"), expected)
    torch.testing.assert_close(loss(outputs, labels, net.head), expected.mean())
    distances = scaled_margins(outputs, labels, line_net().head)
    torch.testing.assert_close(distances, torch.tensor([0.5, -1.0, 2.0]))  # margin / 2
    refuses(fit_margin_loss, "regression", config, match="loss: expected 'fit' for regression")


@pytest.mark.parametrize(
    ("net", "options", "message"),
    [
        (fc_resnet((1,), 2).eval(), {}, "expected an OTAD model, or a classifier .* FCResNet"),
        (linf_plane(), {}, "model: expected evaluation mode"),
        (line_net(), {"embedding_lipschitz": 1.0}, "embedding_lipschitz: expected None"),
        (line_net(), {"unit": torch.zeros(1)}, "unit: expected positive values"),
        (line_net(), {"batch_size": 0}, "batch_size"),
    ],
)
def test_what_cannot_be_certified_is_refused(net, options, message: str) -> None:
    refuses(certify, net, torch.zeros(2, *net.input_shape), match=message, **options)


class Calibrated(SOCNet):
    def forward(self, x: Tensor) -> Tensor:
        return 20 * super().forward(x)


class Normalizing(SOCNet):
    def normalize(self, x: Tensor) -> Tensor:
        return 5 * super().normalize(x)


def test_a_constant_counts_only_for_what_it_was_proved_of() -> None:
    x = torch.zeros(1, 1, 1, 2)
    for kind, method in ((Calibrated, "forward"), (Normalizing, "normalize")):
        net = kind((1, 1, 2), 3, widths=(4,)).eval()
        expected = f"{kind.__name__}: expected its own Lipschitz constant, .* own {method}"
        refuses(certify, net, x, match=expected)
    for part in ("", "head"):
        net = soc_plane().eval()
        net.get_submodule(part).register_forward_hook(lambda layer, given, found: 20 * found)
        refuses(certify, net, x, match="without hooks")
    model = otad.defend(None, torch.randn(20, 2), torch.arange(20) % 2, inputs="pixels")
    model.backbone.head.register_forward_hook(lambda layer, given, found: 20 * found)
    refuses(certify, model, torch.randn(2, 2), match="head: expected a LinearHead without hooks")


def test_rounding_is_that_of_the_coarsest_layer() -> None:
    net = soc_plane().eval().bfloat16()
    net.head.float()
    words = [one for one in NetworkBound(net, None).assumptions if "rounding" in one]
    assert words == ["rounding changes computed features by at most 0.5 of their terms"]


def test_inputs_may_be_rounded_before_the_model_sees_them() -> None:
    far = 1e6
    frame = otad.nets.lifted_net((1,), 2, blocks=0, mean=far, std=1.0)
    given = torch.tensor([[far - 1.0], [far + 1.0625]]), torch.tensor([0, 1])
    model = otad.defend(frame, *given, inputs="pixels", scope="local", n_neighbors=1)
    x = far - np.linspace(0.0, 0.9, 101)[:, None]  # float32 has steps of 0.0625 there
    found = certify(model, x)
    assert bool((found.radius > 0).any())
    moved = x + 0.999 * found.radius.numpy()[:, None]
    assert torch.equal(certify(model, moved).prediction, found.prediction)


def test_values_of_networks_have_no_interval() -> None:
    refuses(certify_values, line_net(), torch.zeros(1, 1), 0.1, match="OTAD")
