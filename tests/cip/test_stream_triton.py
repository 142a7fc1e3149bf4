"""The GPU kernels against the plain path they replace."""

from __future__ import annotations

import pytest
import torch

from otad.cip import BankProblem, CipProblem, ExactCip
from otad.cip.local.stream_triton import can_stream

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SHAPES = [
    (1, 5, 0.0),
    (3, 17, 0.0),
    (10, 784, 0.0),
    (10, 784, -0.5),
    (33, 500, 0.3),
    (64, 300, -0.3),
]


def bank_problem(count: int, dim: int, low: float, dtype: torch.dtype, device: str) -> BankProblem:
    generator = torch.Generator().manual_seed(count)
    inputs = torch.randn(200, dim, generator=generator)
    noise = 0.01 * torch.randn(200, dim, generator=generator)
    features = (inputs.clamp(-1, 1) + low * inputs + noise).to(device, dtype)
    inputs = inputs.to(device, dtype)
    indices = torch.rand(40, 200, generator=generator).argsort(1)[:, :count].to(device)
    query = inputs[indices].float().mean(1)
    return BankProblem(query, inputs, features, indices, 3.0, low)


def test_the_kernels_stay_out_of_the_way_on_a_cpu() -> None:
    assert not can_stream(bank_problem(3, 5, 0.0, torch.float16, "cpu"))


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("count", "dim", "low"), SHAPES)
def test_streamed_answers_equal_gathered_ones(
    count: int, dim: int, low: float, dtype: torch.dtype
) -> None:
    bank = bank_problem(count, dim, low, dtype, "cuda")
    everyone = slice(0, 40)
    anchors, images = bank.anchors_of(everyone).float(), bank.images_of(everyone).float()
    dense = CipProblem(bank.query, anchors, images, 3.0, low)
    assert can_stream(bank)
    assert not can_stream(dense)
    solver = ExactCip(on_failure="fallback")
    streamed, gathered = solver(bank), solver(dense)
    solved = ~streamed.failed & ~gathered.failed
    assert bool(solved.any())
    size = gathered.image.norm(dim=1).max()
    assert float((streamed.image - gathered.image)[solved].norm(dim=1).max() / size) < 1e-4
    assert float(bank.residual(streamed)[solved].max()) < 1e-5


@needs_cuda
def test_gradient_of_a_streamed_problem_equals_the_dense_one() -> None:
    bank = bank_problem(10, 300, 0.2, torch.float32, "cuda")
    rows = slice(0, 40)
    grads = []
    for streamed in (True, False):
        query = bank.query.clone().requires_grad_(True)
        parts = (bank.inputs, bank.features, bank.indices)
        problem = (
            BankProblem(query, *parts, 3.0, 0.2)
            if streamed
            else CipProblem(query, bank.anchors_of(rows), bank.images_of(rows), 3.0, 0.2)
        )
        ExactCip()(problem).image.square().sum().backward()
        grads.append(query.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-3, atol=1e-3)
