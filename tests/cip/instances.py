"""Random convex integration problems whose answers exist, small CIP-nets, comparisons, and a
linear program for eq. (2)."""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import linprog
from torch import Tensor
from torch.testing import assert_close

from otad.cip import CipProblem, CipSolution
from otad.cip.surrogate import CipNet

CONVEXITIES = (-0.5, 0.0, 0.3)
LEAST_SLOPE, GREATEST_SLOPE = 0.4, 2.4  # of `convex_map`
FIELDS = ("query", "anchors", "images", "smoothness", "strong_convexity")
B, K, DIM = 7, 4, 5  # of the problems that small CIP-nets answer


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def convex_map(points: Tensor, generator: torch.Generator) -> Tensor:
    """The gradient of a random convex function at points (B,K,d); a different one for each row.

    0.4 x + 2 W tanh(W x + b) with a random reflection W: the slopes are in [0.4, 2.4].
    """
    batch, _, dim = points.shape
    mirror = torch.nn.functional.normalize(normal(generator, batch, 1, dim), dim=-1)

    def reflect(vectors: Tensor) -> Tensor:
        return vectors - 2 * (vectors * mirror).sum(-1, keepdim=True) * mirror

    bent = torch.tanh(reflect(points) + normal(generator, batch, 1, dim))
    return LEAST_SLOPE * points + (GREATEST_SLOPE - LEAST_SLOPE) * reflect(bent)


def random_problem(
    generator, batch, count, dim, *, smoothness=GREATEST_SLOPE, strong_convexity=0.0, noise=0.0
) -> CipProblem:
    """Pairs of a convex map, disturbed by `noise`; queries among the anchors.

    Without noise potentials exist for L = 2.4, l = 0.4, and for some L below 2.4 as a rule.
    """
    anchors = normal(generator, batch, count, dim)
    images = convex_map(anchors, generator) + noise * normal(generator, batch, count, dim)
    mixture = torch.rand(batch, 1, count, generator=generator, dtype=torch.float64)
    query = (mixture / mixture.sum(-1, keepdim=True) @ anchors)[:, 0]
    query = query + 0.3 * normal(generator, batch, dim)
    return CipProblem(query, anchors, images, smoothness, strong_convexity)


def changed(problem: CipProblem, **parts: Tensor | float) -> CipProblem:
    return CipProblem(**{name: getattr(problem, name) for name in FIELDS} | parts)


def converted(problem: CipProblem, dtype: torch.dtype) -> CipProblem:
    return changed(problem, **{name: getattr(problem, name).to(dtype) for name in FIELDS[:3]})


def rows_of(problem: CipProblem, rows: Tensor | slice) -> CipProblem:
    return CipProblem(*(getattr(problem, name)[rows] for name in FIELDS))


def value_size(problem: CipProblem) -> Tensor:
    """The size (B,) of the terms that a value of the potential is made of."""
    image = problem.images.norm(dim=-1).amax(1)
    offset = (problem.anchors - problem.query[:, None]).norm(dim=-1).amax(1)
    return image * offset + image.square() / 2


def assert_same(
    found: CipSolution, expected: CipSolution, problem: CipProblem, tolerance: float
) -> None:
    """All fields but residuals, each beside its natural size; NaN where NaN is expected."""
    size = problem.images.norm(dim=-1).amax(1)
    value, one = value_size(problem), torch.tensor(1.0)
    units = {"image": size[:, None], "value": value, "multipliers": one, "strong_convexity": one}
    units |= {"potentials": value[:, None], "smoothness": expected.smoothness}
    for name, unit in units.items():
        mine, other = (getattr(part, name) / unit for part in (found, expected))
        assert_close(mine, other, rtol=0, atol=tolerance, equal_nan=True, msg=name)
    assert found.status.tolist() == expected.status.tolist()
    assert torch.equal(found.active, expected.active)


def make_net(readout: str = "free", seed: int = 0, **options: int) -> CipNet:
    sizes = {"width": 16, "blocks": 2, "heads": 2} | options
    generator = torch.Generator().manual_seed(seed)
    return CipNet(DIM, K, readout=readout, generator=generator, **sizes)


def family(seed: int, rows: int) -> CipProblem:
    """Problems of one kind for small CIP-nets, in float32."""
    generator = torch.Generator().manual_seed(seed)
    return converted(random_problem(generator, rows, K, DIM, smoothness=3.0), torch.float32)


def gaps(x: Tensor, z: Tensor, levels: Tensor, smoothness: float, bend: float) -> Tensor:
    """u~_i - (right side for j) (N,N), straight from the definition."""
    x, z = x.double(), z.double()
    images, values = z - bend * x, levels - bend / 2 * x.square().sum(1)
    steps = ((x[:, None] - x[None]) * images[None]).sum(2)
    bends = (images[:, None] - images[None]).square().sum(2) / (2 * (smoothness - bend))
    return values[:, None] - values[None] - steps - bends


def is_feasible(x: Tensor, z: Tensor, smoothness: float, bend: float) -> bool:
    """By HiGHS, which knows nothing of cycles: u_j - u_i <= what is left for i and j."""
    room, unknowns = gaps(x, z, torch.zeros(len(x)), smoothness, bend).numpy(), np.eye(len(x))
    i, j = np.nonzero(unknowns == 0)
    if len(i) == 0:
        return True
    rows, most = unknowns[j] - unknowns[i], room[i, j] / np.abs(room).max()
    options = {"primal_feasibility_tolerance": 1e-10}
    answer = linprog(0 * unknowns[0], rows, most, bounds=(None, None), options=options)
    assert answer.status in (0, 2)
    return bool(answer.status == 0)
