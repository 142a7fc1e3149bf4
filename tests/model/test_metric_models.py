"""Neighbors by a metric of their own: searched among keys, integrated among inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from factories import points
from torch import Tensor, nn

from otad.baselines import MajorityKnn
from otad.certify import certify
from otad.errors import InputError
from otad.model.defend import defend
from otad.model.diagnostics import defended_map, neighborhood_smoothness
from otad.model.otad import OTAD
from otad.nets import FCResNet, SequentialBackbone, fc_resnet


class FirstFeatures(nn.Module):
    """Looks at the first two of the features only."""

    def forward(self, x: Tensor) -> Tensor:
        return 3.0 * x[:, :2]


def make(metric: nn.Module | None) -> tuple[OTAD, FCResNet, Tensor, Tensor]:
    x = points(60, dim=6)
    y = (x[:, 0] > 0.5).long()
    net = fc_resnet((6,), 2, blocks=2, seed=1, bounds=(0.0, 1.0)).eval()
    return defend(net, x, y, n_neighbors=4, metric=metric), net, x, y


QUERIES = points(15, seed=5, dim=6)


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
    assert torch.equal(MajorityKnn(model).neighbors(QUERIES).indices, brute.indices)
    assert bool((neighborhood_smoothness(model, QUERIES) > 0).all())


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda model: model.save("model"), r"metric: .*otad.nets.Metric .* got FirstFeatures"),
        (lambda model: certify(model, QUERIES), r"got a metric \(FirstFeatures\)"),
        (defended_map, "model: expected neighbors by embedded inputs"),
        (lambda model: OTAD(model.backbone, model.bank, metric=model.metric), "metric: .* keys"),
        (lambda model: model.replace(keys=torch.zeros(59, 2)), r"keys: expected shape \(60, 2\)"),
    ],
)
def test_what_cannot_be_described_or_proved_is_refused(
    tmp_path: Path, monkeypatch, act: Callable[[OTAD], object], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        act(make(FirstFeatures())[0])
    assert not list(tmp_path.iterdir())


def test_training_a_larger_module_changes_no_statistics_and_passes_gradients_on() -> None:
    body = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5))
    net = SequentialBackbone(body, [nn.Identity()], nn.Linear(6, 2), input_shape=(6,))
    metric = nn.Sequential(nn.BatchNorm1d(6))  # keys that depend on the mode it is in
    model = defend(net, points(60, dim=6), torch.arange(60) % 2, n_neighbors=4, metric=metric)
    before, expected = {k: v.clone() for k, v in model.state_dict().items()}, model(QUERIES)
    larger = nn.Sequential(nn.PReLU(), model).train()
    assert larger.training
    x = QUERIES.requires_grad_()
    larger(x).sum().backward()
    assert float(x.grad.abs().sum()) > 0
    assert torch.equal(model.train()(QUERIES), expected)
    assert not any(part.training for part in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for part, name in ((metric, "metric"), (metric[0], "metric.0"), (net, "backbone")):
        part.train()  # by others
        for answer in (model, MajorityKnn(model)):
            with pytest.raises(InputError, match=rf"^model.{name}: .* evaluation .* call eval"):
                answer(QUERIES)
        assert torch.equal(model.eval()(QUERIES), expected)


def test_a_metric_that_works_in_place_changes_no_data() -> None:
    data = points(60, dim=6) - 0.5
    x, before = data[:50], data.clone()
    layers = [nn.Sequential(nn.Flatten(), nn.ReLU(inplace=inplace)) for inplace in (True, False)]
    net = fc_resnet((6,), 2, blocks=1)
    here, plain = (defend(net, x, torch.arange(50) % 2, metric=layer) for layer in layers)
    asked = data[50:].requires_grad_()
    assert torch.equal(here(asked), plain(asked))
    here(asked).sum().backward()
    assert torch.equal(data, before)
