"""The kernels of attacks on a GPU, against the same in torch."""

from __future__ import annotations

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
pytest.importorskip("triton", reason="needs Triton, which comes with torch for CUDA")

import otad  # noqa: E402
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
