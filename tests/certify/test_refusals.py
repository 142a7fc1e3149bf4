"""What cannot be certified is refused, with the reason."""

from __future__ import annotations

import pytest
import torch
from certify.small import plane_model, queries
from torch import Tensor, nn

from otad.certify import Certificate, certify, certify_values
from otad.cip import ExactCip
from otad.errors import InputError, SolverError
from otad.model.bank import FeatureBank
from otad.model.defend import defend
from otad.model.otad import OTAD
from otad.nets import LinearHead, SequentialBackbone, fc_resnet


class Bent(LinearHead):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).tanh()


def embedded_model(*, embed: nn.Module) -> OTAD:
    drawn_by = torch.Generator().manual_seed(3)
    x = torch.randn(40, 2, generator=drawn_by)
    y = (x[:, 0] > 0).long()
    head = nn.Linear(2, 2)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[-1.0, 0.2], [1.0, 0.1]]))
        head.bias.zero_()
    net = SequentialBackbone(embed, [nn.Identity()], head, input_shape=(2,))
    return defend(net, x, y, n_neighbors=2)


def turning_layer() -> nn.Linear:
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.2, -0.5], [0.5, 1.2]]))
        layer.bias.zero_()
    return layer


def test_wrong_task() -> None:
    classes, values = plane_model(0), plane_model(0, task="regression")
    with pytest.raises(InputError, match="expected regression, got classification; use certify"):
        certify_values(classes, queries(classes, 2, 0), 0.1)
    with pytest.raises(InputError, match="expected classification, got regression; use certify_v"):
        certify(values, queries(values, 2, 0))


def test_no_model() -> None:
    with pytest.raises(InputError, match="expected an OTAD model, got FCResNet"):
        certify(fc_resnet((2,), 2), torch.zeros(1, 2))  # type: ignore[arg-type]


def test_head_that_is_not_linear() -> None:
    model = plane_model(0)
    bent = Bent(2, 3, "classification")
    bent.weight, bent.bias = model.backbone.head.weight, model.backbone.head.bias
    model.backbone.head = bent
    with pytest.raises(InputError, match="head: expected a LinearHead, got Bent"):
        certify(model, queries(model, 2, 0))


def test_abstaining_and_unknown_curvature() -> None:
    x = torch.zeros(1, 2)
    with pytest.raises(InputError, match="got 'abstain'"):
        certify(plane_model(0, on_failure="abstain"), x)
    with pytest.raises(InputError, match="climb: expected None"):
        certify(plane_model(0, solver={"climb": (0.5, 0.1)}), x)
    certify(plane_model(0, solver={"climb": (0.5, 0.0)}), x)
    certify(plane_model(0, solver={"climb": (0.5, 0.1), "mode": "paper"}), x)


def test_raising_is_said() -> None:
    model = plane_model(0, on_failure="raise", n_neighbors=1)
    assert any(
        "raises an error" in words for words in certify(model, torch.zeros(1, 2)).assumptions
    )
    torn = plane_model(0, on_failure="raise", copies=10, points=20, n_neighbors=20)
    with pytest.raises(SolverError):
        certify(torn, torch.zeros(1, 2))


def test_unknown_embedding_needs_a_constant() -> None:
    model = embedded_model(embed=turning_layer())
    x = torch.randn(12, 2, generator=torch.Generator().manual_seed(1))
    with pytest.raises(InputError, match="embedding_lipschitz: expected a number"):
        certify(model, x)
    with pytest.raises(InputError, match="embedding_lipschitz: expected a positive"):
        certify(model, x, embedding_lipschitz=-1.0)
    found = certify(model, x, embedding_lipschitz=1.3001)  # a rotation times 1.3
    assert any("1.3" in words for words in found.assumptions)
    # The same points and features seen without the rotation: radii are 1.3 times larger there.
    inner = SequentialBackbone(None, [nn.Identity()], nn.Linear(2, 2), input_shape=(2,))
    inner.head.weight, inner.head.bias = model.backbone.head.weight, model.backbone.head.bias
    plain = OTAD(inner.eval(), model.bank, n_neighbors=2)
    inside = certify(plain, model.backbone.embed(x).detach())
    assert torch.allclose(found.radius * 1.3001, inside.radius, rtol=1e-4, atol=1e-5)
    model.backbone.train()
    with pytest.raises(InputError, match="expected evaluation mode"):
        certify(model, x, embedding_lipschitz=1.3001)


def test_known_embedding_takes_no_constant() -> None:
    model = embedded_model(embed=nn.Flatten())
    certify(model, torch.zeros(1, 2))
    with pytest.raises(InputError, match="embedding_lipschitz: expected None"):
        certify(model, torch.zeros(1, 2), embedding_lipschitz=1.0)


def test_own_normalization_is_not_known() -> None:
    class Squashed(SequentialBackbone):
        def normalize(self, x: Tensor) -> Tensor:
            return x.tanh()

    model = embedded_model(embed=nn.Flatten())
    model.backbone.__class__ = Squashed
    with pytest.raises(InputError, match=r"embedding_lipschitz.*Squashed"):
        certify(model, torch.zeros(1, 2))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(1, 3), "expected shape"),
        (torch.full((1, 2), torch.nan), "expected finite values"),
        (torch.zeros(1, 2, dtype=torch.int64), "expected dtype"),
        ([[0.0, 0.0]], "expected a torch.Tensor"),
    ],
)
def test_inputs(x: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        certify(plane_model(0), x)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("unit", "message"),
    [
        (torch.ones(3), "unit: expected shape"),
        (torch.tensor([1.0, 0.0]), "unit: expected positive"),
        (torch.tensor([1.0, torch.inf]), "unit: expected finite"),
        (1.0, "unit: expected a torch.Tensor or None, got float"),
    ],
)
def test_units(unit: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        certify(plane_model(0), torch.zeros(1, 2), unit=unit)  # type: ignore[arg-type]


@pytest.mark.parametrize("eps", [-0.1, float("inf"), float("nan")])
def test_eps(eps: float) -> None:
    with pytest.raises(InputError, match="eps: expected a finite number"):
        certify_values(plane_model(0, task="regression"), torch.zeros(1, 2), eps)


def test_outputs_that_are_no_numbers() -> None:
    model = plane_model(0)
    with torch.no_grad():
        model.backbone.head.bias.fill_(torch.nan)
    with pytest.raises(InputError, match="model: expected finite outputs"):
        certify(model, torch.zeros(1, 2))


def test_batch_size() -> None:
    with pytest.raises(InputError, match="batch_size"):
        certify(plane_model(0), torch.zeros(1, 2), batch_size=0)


def test_certificate_counts_and_converts() -> None:
    one = Certificate(torch.tensor([0.5, 2.0, 3.0]), torch.tensor([1, 1, 0]), ("hull",) * 3, ())
    assert one.holds(torch.tensor([1, 0, 0]), 1.0).tolist() == [False, False, True]
    assert one.accuracy(torch.tensor([1, 1, 0]), 1.0) == pytest.approx(2 / 3)
    assert one.linf_radius(4).tolist() == [0.25, 1.0, 1.5]
    with pytest.raises(InputError, match="n_mutable"):
        one.linf_radius(0)
    with pytest.raises(InputError, match="y: expected shape"):
        one.holds(torch.tensor([1]), 1.0)


def test_bank_in_half_precision_and_elsewhere() -> None:
    """A bank that is not resident, in float16, gives the radii of its rounded points."""
    model = plane_model(2, n_neighbors=2)
    half = FeatureBank(
        model.bank_inputs.half(), model.bank_features.half(), model.bank_labels, "half"
    )
    exact = FeatureBank(half.inputs.float(), half.features.float(), half.labels, "float")
    x = queries(model, 8, 2)
    solver = ExactCip(on_failure="fallback")
    radii = [
        certify(OTAD(model.backbone, bank, n_neighbors=2, solver=solver, resident=False), x).radius
        for bank in (half, exact)
    ]
    assert torch.allclose(radii[0], radii[1], rtol=1e-9)
