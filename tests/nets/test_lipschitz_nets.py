"""The networks with a proved Lipschitz constant: their layers against dense matrices and loops."""

from __future__ import annotations

import math

import pytest
import torch
from factories import refuses
from torch import Tensor
from torch.backends import cudnn

from otad.nets import LinfDistNet, SOCNet, linf_dist
from otad.nets.linf_dist import DistanceLayer
from otad.nets.lipschitz import max_min
from otad.nets.soc import LARGEST_NORM, Activation, SkewConv, norm_bound
from otad.training import TrainConfig, train


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def skew_conv(pixels: int = 12, terms: int = 8, scale: float = 1.0) -> SkewConv:
    layer = SkewConv(4, pixels, terms, torch.Generator().manual_seed(1)).double().eval()
    layer.free.data.mul_(scale)
    return layer


def dense(function, *shape: int) -> Tensor:
    """The matrix of a linear map of images."""
    units = torch.eye(math.prod(shape), dtype=torch.float64).unflatten(1, shape)
    return function(units).flatten(1).mT


@pytest.mark.parametrize(("shape", "scale"), [((3, 4), 0.1), ((3, 4), 1.0), ((1, 1), 5.0)])
def test_a_skew_convolution_is_the_exponential_of_a_skew_matrix(shape, scale: float) -> None:
    layer = skew_conv(math.prod(shape), scale=scale)
    kernel, padding = layer.kernel.detach(), layer.size // 2
    skew = dense(lambda x: torch.nn.functional.conv2d(x, kernel, padding=padding), 4, *shape)
    assert torch.equal(skew, -skew.mT)
    norm, bound = float(torch.linalg.matrix_norm(skew, 2)), float(norm_bound(kernel))
    assert norm <= bound <= min(3.2 * norm, LARGEST_NORM * (1 + 1e-9))
    with torch.no_grad():
        jacobian = dense(lambda x: layer(x), 4, *shape)
    error = torch.linalg.matrix_norm(jacobian - torch.matrix_exp(skew), 2)
    assert error <= layer.error_bound() + 1e-13
    lengths = torch.linalg.svdvals(jacobian)
    assert (lengths - 1).abs().max() <= layer.error_bound() + 1e-13
    layer.bias.data += 1  # which moves all outputs alike
    torch.testing.assert_close(dense(lambda x: layer(x), 4, *shape), jacobian + 1)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on processors without bfloat16
def test_mixed_precision_bounds_norms_roughly_and_changes_no_evaluation() -> None:
    kernel = 5 * SkewConv(32, 4, 14, torch.Generator().manual_seed(1)).free.detach()
    net, x = SOCNet((1, 8, 8), 3, widths=(4,)).eval(), random(2, 1, 8, 8).float()
    net.layers[1].free.data.mul_(9)  # so that its kernel is scaled down
    expected, proved = net.embed(x), net.lipschitz
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(net.embed(x), expected)
        assert net.lipschitz == proved
        rough = norm_bound(kernel)
    assert float(rough) == pytest.approx(float(norm_bound(kernel.double())), rel=0.03)


def test_few_terms_stretch_by_no_more_than_is_stated() -> None:
    layer = skew_conv(terms=3)
    with torch.no_grad():
        largest = float(torch.linalg.svdvals(dense(lambda x: layer(x), 4, 3, 4))[0])
    assert 1.001 < largest <= 1 + layer.error_bound()
    assert layer.error_bound() == pytest.approx(LARGEST_NORM**3 / 6)


def test_reflections_preserve_lengths_and_sort_at_first() -> None:
    layer = Activation(6, "householder").double()
    x, near = random(500, 8, 1, 2), random(500, 8, 1, 2, seed=1)
    torch.testing.assert_close(layer(x), max_min(x[:, :6], dim=1), atol=1e-6, rtol=0)
    assert torch.equal(Activation(6, "maxmin")(x), max_min(x[:, :6], dim=1))
    layer.angles.data.copy_(4 * random(3, 1, 1, seed=2))
    torch.testing.assert_close(layer(x).norm(dim=1), x[:, :6].norm(dim=1))
    for step in (1.0, 1e-3):
        moved = x + step * near
        apart = (layer(moved) - layer(x)).flatten(1).norm(dim=1)
        assert bool((apart <= (moved - x).flatten(1).norm(dim=1) * (1 + 1e-12)).all())


@pytest.mark.parametrize("order", [1.5, 8.0, 1000.0, math.inf])
def test_neurons_are_distances(order: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linf_dist, "BLOCK", 40)  # two rows of the weight at a time
    layer = DistanceLayer(4, 5, torch.Generator().manual_seed(0)).double()
    layer.order, layer.is_shifted = order, False
    x = (0.3 * random(5, 4)).requires_grad_()
    distances = layer(x)
    for row, neuron in ((0, 0), (4, 3)):
        apart = (x[row] - layer.weight[neuron]).abs()
        largest = apart.max()
        expected = largest * (apart / largest).pow(order).sum() ** (1 / order)
        torch.testing.assert_close(distances[row, neuron], expected, rtol=1e-12, atol=0)
        (slope,) = torch.autograd.grad(distances[row, neuron], x, retain_graph=True)
        if order < math.inf:
            (known,) = torch.autograd.grad(expected, x, retain_graph=True)
            torch.testing.assert_close(slope, known)
        assert float(slope.abs().sum()) <= 4 ** (1 / order) + 1e-9  # 1-Lipschitz in l_p
    if order == 8:
        assert torch.autograd.gradcheck(lambda x, w: linf_dist.LpDistance.apply(x, w, order),
                                        (x, layer.weight))  # fmt: skip
    assert layer(layer.weight)[2, 2].item() == 0
    layer(layer.weight.detach()).sum().backward()
    assert bool(layer.weight.grad.isfinite().all())
    assert torch.equal(layer.eval()(x), torch.cdist(x, layer.weight, p=math.inf))


def test_means_are_subtracted_and_kept() -> None:
    layer = DistanceLayer(4, 5, torch.Generator().manual_seed(0)).double()
    x = random(20, 4)
    for _ in range(200):
        found = layer(x)
    assert found.mean(0).abs().max().item() < 1e-12
    layer.order = math.inf
    for _ in range(200):
        found = layer(x)
    torch.testing.assert_close(layer.eval()(x), found)


def test_the_order_grows_to_infinity() -> None:
    net, orders = LinfDistNet((2,), 2, widths=(3, 4)), []
    for share in (0.0, 0.125, 0.5, 0.874, 0.875, 1.0):
        net.begin_step(share)
        assert len({layer.order for layer in net.layers}) == 1
        orders.append(net.layers[0].order)
    assert orders[:2] == [8, 8]
    assert orders[2] == pytest.approx(math.sqrt(8 * 1000))
    assert orders[3] == pytest.approx(1000, rel=0.01)
    assert orders[4:] == [math.inf] * 2
    x, y = random(30, 2).float(), torch.arange(30) % 2
    train(net, (x, y), TrainConfig(epochs=2, batch_size=10, loss="margin"))
    assert net.layers[0].order > 200  # at the last step, after 5 of 6


@pytest.mark.parametrize(
    ("net", "order"),
    [
        (LinfDistNet((3, 4, 6), 5, widths=(9, 7), std=0.5), math.inf),
        (SOCNet((3, 4, 6), 5, widths=(4,), depth=2, std=0.5), 2.0),
    ],
    ids=["linf", "soc"],
)
def test_features_are_lipschitz(net, order: float) -> None:
    net = net.double()
    with torch.no_grad():
        net(random(50, *net.input_shape))  # moves running means
    net.eval()
    for layer in net.layers:
        if isinstance(layer, SkewConv):
            layer.bias.data.copy_(random(len(layer.bias)))
    found = net.lipschitz
    x, step = random(60, 3, 4, 6), random(60, 3, 4, 6, seed=1)
    ratios, length = [], {"ord": order, "dim": 1}
    with torch.no_grad():
        for size in (1.0, 1e-4):
            apart = torch.linalg.vector_norm(net.embed(x + size * step) - net.embed(x), **length)
            moved = torch.linalg.vector_norm(size * step.flatten(1) / 0.5, **length)
            ratios.append(float((apart / moved).max()))
        features, inputs = net.embed(x), (x / 0.5).flatten(1)
    assert 0.1 < max(ratios) <= found.constant * (1 + 1e-10)
    assert found.constant < 1.001
    sizes = found.constant * torch.linalg.vector_norm(inputs, **length) + found.offset
    assert bool((torch.linalg.vector_norm(features, **length) <= sizes).all())


def test_evaluation_keeps_full_precision() -> None:
    net, seen = SOCNet((1, 2, 2), 2, widths=(2,)), []
    net.layers[1].register_forward_hook(lambda *_: seen.append(cudnn.allow_tf32))
    allowed = cudnn.allow_tf32
    for mode in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            assert net.train(mode).embed(torch.rand(3, 1, 2, 2)).dtype == torch.float32
    assert seen == [allowed, False]
    assert cudnn.allow_tf32 is allowed


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinfDistNet((4,), 1, task="regression"), "task: expected one of classification"),
        (lambda: LinfDistNet((4,), 2, widths=()), "widths: expected at least one"),
        (lambda: SOCNet((1, 4, 4), 1, task="regression"), "task: expected one of classification"),
        (lambda: SOCNet((4, 4), 2), r"input_shape: expected images \(C,H,W\)"),
        (lambda: SOCNet((1, 4, 4), 2, widths=(3,)), "widths: expected even numbers"),
        (lambda: SOCNet((3, 4, 4), 2, widths=(2,)), "first of at least 3 channels"),
        (lambda: SOCNet((1, 4, 4), 2, widths=(2,), activation="relu"), "activation: .*householder"),
        (lambda: SOCNet((1, 4, 4), 2, widths=(2,), terms=1), "terms: expected .* at least 2"),
        (
            lambda: train(
                LinfDistNet((2,), 2, widths=(3,)),
                (random(4, 2).float(), torch.arange(4) % 2),
                TrainConfig(cuda_graph=True, whole_batches=True),
            ),
            "cuda_graph: expected False for a LinfDistNet",
        ),
    ],
)
def test_what_these_nets_cannot_be_is_refused(make, message: str) -> None:
    refuses(make, match=message)
