"""What the cell rule rests on: one neighbor set, one map."""

from __future__ import annotations

import torch
from certify.small import plane_model, queries

from otad.certify.bisectors import BankBisectors
from otad.certify.cell import cell_radius, steady_map
from otad.certify.input_reach import input_reach
from otad.certify.rules import Batch
from otad.cip import CipProblem, ExactCip, Status
from otad.model.otad import OTAD


def random_set(seed: int, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    drawn_by = torch.Generator().manual_seed(seed)
    anchors = torch.randn(5, 3, dtype=torch.float64, generator=drawn_by)
    return anchors, anchors + noise * torch.randn(5, 3, dtype=torch.float64, generator=drawn_by)


def test_potentials_depend_on_neither_query_nor_order() -> None:
    order = torch.tensor([3, 0, 4, 1, 2])
    statuses = set()
    for seed in range(8):
        anchors, images = random_set(seed, 0.2)
        near, far = torch.zeros(1, 3).double(), torch.full((1, 3), 2.0).double()
        for solver in (ExactCip(), ExactCip(mode="paper", climb=(0.2, 0.1))):
            first = solver(CipProblem(near, anchors[None], images[None], 1.3, -0.2))
            moved = solver(CipProblem(far, anchors[None], images[None], 1.3, -0.2))
            turned = solver(CipProblem(near, anchors[None, order], images[None, order], 1.3, -0.2))
            assert torch.allclose(first.potentials, moved.potentials, atol=1e-9)
            assert torch.allclose(first.potentials[:, order], turned.potentials, atol=1e-9)
            statuses.add(int(first.status))
    assert statuses == {Status.SOLVED, Status.RAISED}


def test_who_is_left_out_does_depend_on_the_query() -> None:
    """So rows that had to be repaired are not covered by the rule."""
    solver, differing = ExactCip(max_smoothness=1.5), 0
    for seed in range(8):
        anchors, images = random_set(seed, 0.4)
        near, far = anchors[:1], anchors[-1:]
        kept = [
            solver(CipProblem(query, anchors[None], images[None], 1.5)).active
            for query in (near, far)
        ]
        differing += not torch.equal(*kept)
    assert differing > 0


def parts(model: OTAD, x: torch.Tensor) -> tuple[BankBisectors, torch.Tensor, torch.Tensor]:
    """Bisectors, neighbors, and up to where the map is known to be steady."""
    reach = input_reach(model, None, None, None)
    batch = Batch(reach, x)
    steady = steady_map(model, batch, reach.votes)
    return batch.bisectors, batch.trace.neighbors.indices, steady.reach


def test_neighbors_stay_within_the_cell_and_no_longer() -> None:
    model = plane_model(3, points=80, n_neighbors=3)
    x = queries(model, 20, 3)
    around, neighbors, _ = parts(model, x)
    radius = cell_radius(around, neighbors, torch.full((20,), 9.0, dtype=torch.float64))
    angle = torch.linspace(0, 6.2832, 400)
    circle = torch.stack([angle.cos(), angle.sin()], dim=1)
    own = neighbors.sort(dim=1).values
    for row in range(len(x)):
        inside, outside = (
            model.neighbors(model.backbone.embed(x[row] + size * float(radius[row]) * circle))
            for size in (0.9999, 1.01)
        )
        assert (inside.indices.sort(dim=1).values == own[row]).all()
        assert (outside.indices.sort(dim=1).values != own[row]).any()


def test_steady_rows_are_solved_ones_with_room() -> None:
    smooth = plane_model(1, n_neighbors=4, noise=0.02)
    assert (parts(smooth, queries(smooth, 10, 1))[2] > 0).all()
    torn = plane_model(1, n_neighbors=4, noise=5.0)
    x = queries(torn, 30, 1)
    solved = torn.trace(x).solution.status == int(Status.SOLVED)
    assert not bool(solved.all())
    assert (parts(torn, x)[2][~solved] == 0).all()
    # Copies with one feature are no contradiction, but rounding could make them one.
    copied = plane_model(1, n_neighbors=4, copies=15, noise=0.0)
    around = parts(copied, queries(copied, 10, 1))
    twins = around[1] % 15
    doubled = torch.tensor([len(set(row.tolist())) < 4 for row in twins])
    assert doubled.any()
    assert (around[2][doubled] == 0).all()
