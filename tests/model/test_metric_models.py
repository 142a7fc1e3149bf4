"""Neighbors by a metric of their own: sought among keys, integrated among inputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from otad.baselines import MajorityKnn
from otad.certify import certify
from otad.errors import InputError
from otad.model.defend import defend
from otad.model.diagnostics import defended_map, neighborhood_smoothness
from otad.model.otad import OTAD, load
from otad.nets import FCResNet, PretrainedMetric, SequentialBackbone, fc_resnet
from otad.nets.adapt import _BUILDERS


class FirstFeatures(nn.Module):
    """Looks at the first two of the features only."""

    def forward(self, x: Tensor) -> Tensor:
        return 3.0 * x[:, :2]


def make(metric: nn.Module | None) -> tuple[OTAD, FCResNet, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(60, 6, generator=generator)
    y = (x[:, 0] > 0.5).long()
    net = fc_resnet((6,), 2, blocks=2, seed=1, bounds=(0.0, 1.0)).eval()
    return defend(net, x, y, n_neighbors=4, metric=metric), net, x, y


QUERIES = torch.rand(15, 6, generator=torch.Generator().manual_seed(5))


def test_a_metric_that_changes_nothing_changes_nothing() -> None:
    plain, *_ = make(None)
    same, *_ = make(nn.Flatten())
    assert torch.equal(plain(QUERIES), same(QUERIES))
    assert torch.equal(plain.bank_points, same.bank_points)
    born = OTAD(plain.backbone.train(), plain.bank, n_neighbors=4)  # in evaluation mode
    assert not any(part.training for part in born.modules())
    assert torch.equal(born(QUERIES), same(QUERIES))


def test_neighbors_are_the_nearest_keys_and_the_map_passes_through_their_pairs() -> None:
    model, net, x, _ = make(FirstFeatures())
    trace = model.trace(QUERIES)
    brute = torch.cdist(QUERIES[:, :2].double(), x[:, :2].double()).topk(4, largest=False)
    assert torch.equal(trace.neighbors.indices, brute.indices)
    torch.testing.assert_close(trace.neighbors.distances, 3 * brute.values, rtol=1e-5, atol=1e-6)
    features = net.transport(net.embed(x))[0].detach()
    mixed = (trace.solution.multipliers[:, :, None] * features[brute.indices]).sum(1)
    torch.testing.assert_close(trace.solution.image, mixed, rtol=1e-4, atol=1e-5)
    # a bank point is its own nearest neighbor in the metric too, so it gets its own feature
    torch.testing.assert_close(model(x[:8]), net(x[:8]), rtol=1e-3, atol=1e-4)


def test_k_nn_and_measures_use_the_same_neighbors() -> None:
    model, *_ = make(FirstFeatures())
    rule = MajorityKnn(model)
    assert torch.equal(
        rule.neighbors(QUERIES).indices, model.neighbors(model.query_keys(QUERIES)).indices
    )
    assert bool((neighborhood_smoothness(model, QUERIES) > 0).all())
    with pytest.raises(InputError, match="expected neighbors by embedded inputs"):
        defended_map(model)


def test_the_gradient_is_that_of_the_map_between_fixed_neighbors() -> None:
    model, *_ = make(FirstFeatures())
    model = model.double()
    x = QUERIES.double().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x)[:, 0].sum(), x)
    step = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ahead, behind = (model(x.detach() + sign * 1e-6 * step)[:, 0] for sign in (1, -1))
    torch.testing.assert_close((gradient * step).sum(1), (ahead - behind) / 2e-6, rtol=1e-3,
                               atol=1e-5)  # fmt: skip


def test_what_cannot_be_described_or_proved_is_refused(tmp_path: Path) -> None:
    model, net, *_ = make(FirstFeatures())
    with pytest.raises(InputError, match=r"otad.nets.Metric .* got FirstFeatures"):
        model.save(tmp_path / "model")
    assert not (tmp_path / "model").exists()
    with pytest.raises(InputError, match="got a metric \\(FirstFeatures\\)"):
        certify(model, QUERIES)
    with pytest.raises(InputError, match=r"metric: .* keys"):
        OTAD(net, model.bank, metric=FirstFeatures())
    with pytest.raises(InputError, match=r"keys: expected shape \(60, 2\) with one key per bank"):
        OTAD(net, model.bank, metric=FirstFeatures(), keys=torch.zeros(59, 2))


def test_a_metric_that_could_not_be_read_again_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model that was there before stays."""

    def linear(width: int) -> nn.Module:
        return nn.Linear(6, width)

    monkeypatch.setitem(_BUILDERS, "linear-for-test", linear)
    good, bad = (
        PretrainedMetric(
            linear(3), input_shape=(6,), builder="linear-for-test", builder_options={"width": width}
        )
        for width in (3, 4)
    )
    model, *_ = make(good)
    model.save(tmp_path)
    wrong, *_ = make(bad)
    with pytest.raises(InputError, match=r"builder_options: expected those by which .*weight"):
        wrong.save(tmp_path)
    assert torch.equal(load(tmp_path)(QUERIES), model(QUERIES))


class Normed(nn.Module):
    """Keys that depend on the mode it is in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)  # type: ignore[no-any-return]


def test_training_a_larger_module_moves_no_statistics_and_passes_gradients_on() -> None:
    body = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5))
    net = SequentialBackbone(body, [nn.Identity()], nn.Linear(6, 2), input_shape=(6,))
    data = torch.rand(60, 6, generator=torch.Generator().manual_seed(0))
    model = defend(net, data, torch.arange(60) % 2, n_neighbors=4, metric=Normed())
    before, expected = {k: v.clone() for k, v in model.state_dict().items()}, model(QUERIES)
    larger = nn.Sequential(nn.PReLU(), model).train()
    assert larger.training
    x = QUERIES.requires_grad_()
    larger(x).sum().backward()
    assert float(x.grad.abs().sum()) > 0
    assert torch.equal(model.train()(QUERIES), expected)
    assert not any(part.training for part in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_parts_set_to_training_by_others_are_refused() -> None:
    metric = Normed()
    model, net, *_ = make(metric)
    expected = model(QUERIES)
    for part, name in ((metric, "metric"), (metric.norm, "metric.norm"), (net, "backbone")):
        part.train()
        for answer in (model, MajorityKnn(model)):
            with pytest.raises(InputError, match=rf"^model.{name}: .* evaluation .* call eval"):
                answer(QUERIES)
        assert torch.equal(model.eval()(QUERIES), expected)


def test_a_metric_that_works_in_place_changes_no_data() -> None:
    data = torch.rand(60, 6, generator=torch.Generator().manual_seed(0)) - 0.5
    x, kept = data[:50], data.clone()
    layers = [nn.Sequential(nn.Flatten(), nn.ReLU(inplace=inplace)) for inplace in (True, False)]
    net = fc_resnet((6,), 2, blocks=1)
    here, plain = (defend(net, x, torch.arange(50) % 2, metric=layer) for layer in layers)
    asked = data[50:].requires_grad_()
    assert torch.equal(here(asked), plain(asked))
    here(asked).sum().backward()
    assert torch.equal(data, kept)
