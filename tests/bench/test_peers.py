"""Every solver answers its question, on the same instance, as ours does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from otad.bench.instances import random_instance
from otad.bench.peers import OURS_32, OURS_64, PEERS, POTENTIALS, QUESTIONS, Peer, our_answer

CPU = torch.device("cpu")
EXACT = {OURS_32: 1e-5, OURS_64: 1e-12, "ProxQP": 1e-6, "HiGHS": 1e-9}
CONIC = 1e-3  # the square root of the tolerance on the objective


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: f"{peer.question}: {peer.name}")
def test_answers_agree(peer: Peer, generator: torch.Generator) -> None:
    if not peer.installed:
        pytest.skip(f"needs {', '.join(peer.modules)} of the extra 'reference'")
    instance = random_instance(
        4, 5, 7, generator=generator, strong_convexity=QUESTIONS[peer.question]
    )
    ours = our_answer(instance, peer.question)
    found = peer.prepare(instance, CPU)(slice(1, 3))
    rows = np.asarray(found.rows)
    assert rows.shape == (2, ours.shape[1])
    assert np.abs(rows - ours[1:3]).max() < EXACT.get(peer.name, CONIC)
    if peer.name not in EXACT:
        assert found.own_seconds is not None
        assert found.own_seconds > 0


def test_our_potentials_satisfy_eq_2(generator: torch.Generator) -> None:
    """By the formula as it stands, and as low as they can be: each is held up by another."""
    instance = random_instance(6, 5, 7, generator=generator)
    u = torch.from_numpy(our_answer(instance, POTENTIALS))
    x, z = instance.anchors, instance.images
    for row in range(6):
        slack = torch.full((5, 5), torch.inf, dtype=torch.float64)
        for i in range(5):
            for j in range(5):
                if i != j:
                    bend = (z[row, i] - z[row, j]).square().sum() / (2 * instance.smoothness)
                    rise = z[row, j] @ (x[row, i] - x[row, j])
                    slack[i, j] = u[row, i] - u[row, j] - rise - bend
        assert slack.min() > -1e-12
        assert u[row, 0] == 0
        assert slack.amin(1)[1:].abs().max() < 1e-12


def test_rows_whose_smoothness_was_raised_are_shared_as_raised(generator: torch.Generator) -> None:
    """With a smoothness too small to be feasible, all solvers use the one that ours found."""
    easy = random_instance(3, 6, 5, generator=generator)
    instance = type(easy)(easy.query, easy.anchors, easy.images, 0.3, 0.0)
    assert (instance.solution.smoothness > 0.3).all()
    for peer in PEERS:
        if peer.installed and peer.name in ("ProxQP", "HiGHS"):
            found = np.asarray(peer.prepare(instance, CPU)(slice(None)).rows)
            assert np.abs(found - our_answer(instance, peer.question)).max() < 1e-5


def test_a_peer_without_its_module_is_not_installed() -> None:
    (ours,) = (peer for peer in PEERS if (peer.name, peer.question) == (OURS_64, POTENTIALS))
    assert ours.installed
    assert not Peer("x", POTENTIALS, ours.prepare, ("scipy", "no_such_module")).installed
