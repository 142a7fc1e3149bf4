"""What cannot be certified is refused, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from certify.small import global_model, plane_model, queries
from torch import Tensor, nn

from otad.certify import Certificate, certify, certify_values
from otad.errors import InputError, SolverError
from otad.model.bank import FeatureBank
from otad.model.defend import defend
from otad.model.otad import OTAD
from otad.nets import LinearHead, SequentialBackbone, fc_resnet

ZERO = torch.zeros(1, 2)


class Bent(LinearHead):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).tanh()


def linear(weight: list[list[float]]) -> nn.Linear:
    layer = nn.Linear(2, 2)
    layer.weight.data, layer.bias.data = torch.tensor(weight), torch.zeros(2)
    return layer


def embedded_model(*, embed: nn.Module) -> OTAD:
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(3))
    head = linear([[-1.0, 0.2], [1.0, 0.1]])
    net = SequentialBackbone(embed, [nn.Identity()], head, input_shape=(2,))
    return defend(net, x, (x[:, 0] > 0).long(), n_neighbors=2)


@pytest.mark.parametrize("make", [plane_model, global_model], ids=["local", "global"])
def test_another_task_or_head(make: Any) -> None:
    model, values = make(0), make(0, task="regression")
    with pytest.raises(InputError, match=r"regression.*classification.*certify"):
        certify_values(model, ZERO, 0.1)
    with pytest.raises(InputError, match=r"classification.*regression.*certify_values"):
        certify(values, ZERO)
    model.backbone.head.__class__ = Bent
    with pytest.raises(InputError, match=r"head.*LinearHead.*Bent"):
        certify(model, ZERO)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (fc_resnet((2,), 2), r"model.*OTAD.*FCResNet"),
        (plane_model(0, on_failure="abstain"), r"on_failure.*'abstain'"),
        (plane_model(0, solver={"climb": (0.5, 0.1)}), r"climb.*0\.1"),
    ],
)
def test_no_model_abstaining_and_unknown_curvature(model: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        certify(model, ZERO)
    certify(plane_model(0, solver={"climb": (0.5, 0.0)}), ZERO)
    certify(plane_model(0, solver={"climb": (0.5, 0.1), "mode": "paper"}), ZERO)


def test_a_solver_that_raises_is_an_assumption() -> None:
    model = plane_model(0, on_failure="raise", n_neighbors=1)
    assert any("raises an error" in words for words in certify(model, ZERO).assumptions)
    torn = plane_model(0, on_failure="raise", copies=10, points=20, n_neighbors=20)
    with pytest.raises(SolverError):
        certify(torn, ZERO)


def test_unknown_embedding_needs_a_constant() -> None:
    model = embedded_model(embed=linear([[1.2, -0.5], [0.5, 1.2]]))  # a rotation, times 1.3
    x = torch.randn(12, 2, generator=torch.Generator().manual_seed(1))
    for constant in (None, -1.0):
        with pytest.raises(InputError, match=rf"embedding_lipschitz.*{constant}"):
            certify(model, x, embedding_lipschitz=constant)
    found = certify(model, x, embedding_lipschitz=1.3001)
    assert any("1.3" in words for words in found.assumptions)
    # The same points and features seen without the rotation: radii are 1.3 times larger there.
    inner = SequentialBackbone(None, [nn.Identity()], nn.Linear(2, 2), input_shape=(2,))
    inner.head.weight, inner.head.bias = model.backbone.head.weight, model.backbone.head.bias
    plain = OTAD(inner.eval(), model.bank, n_neighbors=2)
    inside = certify(plain, model.backbone.embed(x).detach())
    assert torch.allclose(found.radius * 1.3001, inside.radius, rtol=1e-4, atol=1e-5)
    model.backbone.train()
    with pytest.raises(InputError, match="evaluation mode"):
        certify(model, x, embedding_lipschitz=1.3001)


def test_known_embedding_takes_no_constant() -> None:
    class Squashed(SequentialBackbone):
        def normalize(self, x: Tensor) -> Tensor:
            return x.tanh()

    model = embedded_model(embed=nn.Flatten())
    certify(model, ZERO)
    with pytest.raises(InputError, match=r"embedding_lipschitz.*1\.0"):
        certify(model, ZERO, embedding_lipschitz=1.0)
    model.backbone.__class__ = Squashed  # whose normalization is its own
    with pytest.raises(InputError, match=r"embedding_lipschitz.*Squashed"):
        certify(model, ZERO)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (torch.zeros(1, 3), {}, "expected shape"),
        (torch.full((1, 2), torch.nan), {}, "expected finite values"),
        (torch.zeros(1, 2, dtype=torch.int64), {}, "expected dtype"),
        ([[0.0, 0.0]], {}, r"expected a torch\.Tensor"),
        (ZERO, {"unit": torch.ones(3)}, r"unit.*\(3,\)"),
        (ZERO, {"unit": torch.tensor([1.0, 0.0])}, r"unit.*positive.*0\.0"),
        (ZERO, {"unit": torch.tensor([1.0, torch.inf])}, r"unit.*finite"),
        (ZERO, {"unit": 1.0}, r"unit.*float"),
        (ZERO, {"batch_size": 0}, r"batch_size.*0"),
    ],
)
def test_arguments(x: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        certify(plane_model(0), x, **options)


def test_eps_and_outputs_that_are_no_numbers() -> None:
    for eps in (-0.1, float("inf"), float("nan")):
        with pytest.raises(InputError, match=rf"eps.*{eps}"):
            certify_values(plane_model(0, task="regression"), ZERO, eps)
    model = plane_model(0)
    with torch.no_grad():
        model.backbone.head.bias.fill_(torch.nan)
    with pytest.raises(InputError, match=r"model.*nan"):
        certify(model, ZERO)


def test_certificate_counts_and_converts() -> None:
    one = Certificate(torch.tensor([0.5, 2.0, 3.0]), torch.tensor([1, 1, 0]), ("hull",) * 3, ())
    assert one.holds(torch.tensor([1, 0, 0]), 1.0).tolist() == [False, False, True]
    assert one.accuracy(torch.tensor([1, 1, 0]), 1.0) == pytest.approx(2 / 3)
    assert one.linf_radius(4).tolist() == [0.25, 1.0, 1.5]
    with pytest.raises(InputError, match=r"n_mutable.*0"):
        one.linf_radius(0)
    with pytest.raises(InputError, match=r"y.*\(3,\).*\(1,\)"):
        one.holds(torch.tensor([1]), 1.0)


def test_bank_in_half_precision_and_elsewhere() -> None:
    """A bank that is not resident, in float16, gives the radii of its rounded points."""
    model = plane_model(2, n_neighbors=2)
    pairs = model.bank_inputs.half(), model.bank_features.half()
    x, radii = queries(model, 8, 2), []
    for inputs, features in (pairs, [part.float() for part in pairs]):
        bank = FeatureBank(inputs, features, model.bank_labels, "rounded")
        radii.append(certify(model.replace(bank=bank, resident=False), x).radius)
    assert torch.allclose(radii[0], radii[1], rtol=1e-9)
