"""The kernels of attacks on a GPU, against the same in torch."""

from __future__ import annotations

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
pytest.importorskip("triton", reason="needs Triton, which comes with torch for CUDA")

import otad  # noqa: E402
from otad.attacks.adaptive import soft_votes  # noqa: E402
from otad.attacks.adaptive.neighborhood import Neighborhood  # noqa: E402
from otad.attacks.projection import has_kernel, project_by_kernel  # noqa: E402

# NumPy, which interprets kernels here, warns of numbers that the kernel masks out afterwards.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if HAS_CUDA else "cpu"


@pytest.mark.parametrize("far", [0.01, 1.0, 1000.0])
@pytest.mark.parametrize("eps", [1e-3, 0.3, 3.0])
@pytest.mark.parametrize("bounds", [None, (0.0, 1.0), (-0.3, 0.7), (1.0, 2.0), (-2.0, -1.0)])
@pytest.mark.parametrize("norm", [otad.L2, otad.Linf])
def test_points_are_the_nearest_of_the_ball(norm, bounds, eps, far) -> None:
    generator = torch.Generator().manual_seed(0)
    low, high = bounds or (-1.0, 2.0)
    x = low + (high - low) * (2 * torch.rand(9, 1, 9, 9, generator=generator) - 0.5).clamp(0, 1)
    moved = x + far * torch.randn(x.shape, generator=generator)
    moved[0] = x[0]
    ball = norm(eps, bounds=bounds)
    found = project_by_kernel(ball, moved.to(DEVICE), x.to(DEVICE)).cpu()
    torch.testing.assert_close(found, ball.project(moved, x), rtol=1e-6, atol=2e-6)
    assert bool((ball.distance(found, x) <= eps).all())
    assert torch.equal(found[0], x[0])
    if bounds is not None:
        assert x.new_tensor(low) <= found.min()
        assert found.max() <= x.new_tensor(high)


def test_an_example_outside_the_bounds_has_no_projection() -> None:
    ball, x = otad.L2(0.1, bounds=(0.0, 1.0)), torch.full((2, 4), 0.5, device=DEVICE)
    x[1, 2] = 1.5
    found = project_by_kernel(ball, x + 0.01, x)
    assert found.isnan().tolist() == [[False] * 4, [True] * 4]


def test_the_kernel_is_for_plain_balls_on_a_gpu() -> None:
    x = torch.rand(2, 4)
    assert not has_kernel(otad.L2(0.1), x)
    assert has_kernel(otad.L2(0.1), x.to(DEVICE)) == HAS_CUDA
    assert not has_kernel(otad.L2(0.1, mutable=[True, True, False, True]), x.to(DEVICE))
    assert not has_kernel(otad.L2(0.0), x.to(DEVICE))
    assert not has_kernel(otad.L2(0.1), x.double().to(DEVICE))


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
