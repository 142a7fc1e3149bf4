"""The kernels of soft votes, against torch."""

from __future__ import annotations

import os

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
pytest.importorskip("triton", reason="needs Triton, which comes with torch for CUDA")

import otad  # noqa: E402
from otad.attacks.adaptive import soft_votes  # noqa: E402
from otad.attacks.adaptive.neighborhood import Neighborhood  # noqa: E402

# NumPy, which interprets kernels here, warns of numbers that the kernel masks out afterwards.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if HAS_CUDA else "cpu"


@pytest.mark.parametrize("share", [1.0, 0.01])
def test_the_advantage_and_its_gradient_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(2100, 5, generator=generator)  # one more block than a program reads
    labels = torch.randint(3, (2100,), generator=generator)  # nobody votes for the last class
    net = otad.nets.fc_resnet((5,), 4, blocks=1, hidden=8, bounds=(0.0, 1.0)).to(DEVICE)
    model = otad.defend(net, points.to(DEVICE), labels.to(DEVICE), n_neighbors=4, smoothness=20.0)
    x = torch.rand(6, 5, generator=generator).to(DEVICE)
    x[0] = points[7]
    y = torch.tensor([0, 0, 3, 0, 2, 1], device=DEVICE)
    aims = torch.tensor([1, 2, 0, 3, 2, 0], device=DEVICE)
    bank = Neighborhood.of(model, x)
    with torch.no_grad():
        width = bank.width(bank.ranks_at(x), share)

    def slope(advantage) -> tuple[torch.Tensor, torch.Tensor]:
        at = x.clone().requires_grad_()
        value = advantage(bank.embed(at))
        weighted = (value * torch.arange(1, 7, device=DEVICE)).sum()
        return value.detach(), torch.autograd.grad(weighted, at)[0]

    found = slope(lambda at: soft_votes.advantage_by_kernel(bank, at, aims, y, width))
    monkeypatch.setattr(soft_votes, "has_kernel", lambda bank: False)
    expected = slope(soft_votes.advantage_over(bank, aims, y, width))
    assert bool((expected[1] != 0).any(1)[[0, 1, 2, 3, 5]].all())
    for mine, theirs in zip(found, expected, strict=True):
        scale = float(theirs.abs().max())
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5 * scale)
