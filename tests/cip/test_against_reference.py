"""The exact solver against the paper's formulation in the hands of a conic solver: 690 rows."""

from __future__ import annotations

import pytest
import torch
from cip.instances import CONVEXITIES, converted, random_problem, value_size

from otad.cip import ExactCip, Status
from otad.cip.reference import CvxpyCip

pytest.importorskip("cvxpy", reason="needs the extra 'reference' (cvxpy, clarabel)")

ALL = range(1, 16)
CASES = [(2, ALL, 3), (11, ALL, 3), (128, ALL, 1), (784, (1, 2, 3, 4, 6, 8, 10, 11, 13, 15), 1)]


@pytest.mark.parametrize("mode", ["consistent", "paper"])
@pytest.mark.parametrize("strong_convexity", CONVEXITIES)
@pytest.mark.parametrize(("dim", "counts", "batch"), CASES, ids=["d2", "d11", "d128", "d784"])
def test_same_answer(dim, counts, batch, strong_convexity, mode, generator) -> None:
    """Potentials, least smoothness, value, image and multipliers, each found on its own."""
    generator.manual_seed(100 * dim + 10 * CONVEXITIES.index(strong_convexity) + (mode == "paper"))
    raised = 0
    for count in counts:
        # Below, within and above the range in which the least smoothness lies.
        smoothness = torch.tensor([3.0, 1.0, 1.6]).roll(count)[:batch].double()
        problem = random_problem(
            generator,
            batch,
            count,
            dim,
            smoothness=smoothness,
            strong_convexity=strong_convexity,
        )
        found, expected = ExactCip(mode=mode)(problem), CvxpyCip(mode=mode)(problem)
        raised += int((found.status == Status.RAISED).sum())
        assert found.status.tolist() == expected.status.tolist()

        size = problem.images.norm(dim=-1).amax(1)
        image_error = (found.image - expected.image).norm(dim=1) / size
        value_error = (found.value - expected.value).abs() / found.value.abs()
        assert float(image_error.max()) <= 1e-5
        assert float(value_error.max()) <= 1e-7
        torch.testing.assert_close(found.smoothness, expected.smoothness, rtol=1e-8, atol=0)
        torch.testing.assert_close(found.multipliers, expected.multipliers, rtol=0, atol=1e-5)
        level_error = (found.potentials - expected.potentials).abs().amax(1) / value_size(problem)
        assert float(level_error.max()) <= 1e-8

        assert float(found.residual.max()) <= 1e-9
        assert float(problem.residual(found).max()) <= 1e-9
        assert float(expected.residual.max()) <= 1e-9
        single = converted(problem, torch.float32)
        rough = ExactCip(mode=mode)(single)
        assert rough.image.dtype == torch.float32
        assert float(rough.residual.max()) <= 1e-5
        assert float(single.residual(rough).max()) <= 1e-5
    assert raised >= 3  # the test has seen both kinds


@pytest.mark.parametrize("mode", ["consistent", "paper"])
@pytest.mark.parametrize("potential", ["lowest", "highest"])
def test_other_potentials_and_a_climb(mode, potential, generator) -> None:
    """Handed the potentials and the curvature that were found, eq. (3) has the same answer."""
    for count in (2, 5, 12):
        problem = random_problem(generator, 4, count, 7, smoothness=1.0, strong_convexity=0.2)
        solver = ExactCip(mode=mode, potential=potential, climb=(0.3, 0.1))
        found = solver(problem)
        expected = CvxpyCip(mode=mode)(
            problem,
            potentials=found.potentials,
            smoothness=found.smoothness,
            strong_convexity=found.strong_convexity,
        )
        assert bool((found.status == Status.RAISED).any())
        assert float(problem.residual(found).max()) <= 1e-9
        assert float(problem.residual(expected).max()) <= 1e-9
        torch.testing.assert_close(found.value, expected.value, rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(found.image, expected.image, rtol=0, atol=1e-5)
