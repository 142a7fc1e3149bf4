"""Other people's robustness libraries attack an OTAD module handed to them as it is."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from otad.attacks import L2
from otad.model.defend import defend
from otad.model.otad import OTAD
from otad.nets import fc_resnet

Case = tuple[OTAD, Tensor, Tensor]


@pytest.fixture(scope="module")
def case() -> Case:
    """A model of 300 digits, and ten others of which it answers some wrong."""
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(digits.target)
    net = fc_resnet((1, 8, 8), 10, blocks=1, bounds=(0.0, 1.0)).train()
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        F.cross_entropy(net(x[:300]), y[:300]).backward()
        optimizer.step()
    model = defend(net, x[:300], y[:300], n_neighbors=4)
    answers = model(x[1000:1300]).argmax(1)
    right, wrong = ((answers == y[1000:1300]) == value for value in (True, False))
    rows = 1000 + torch.cat([right.nonzero()[:8, 0], wrong.nonzero()[:2, 0]])
    return model, x[rows], y[rows]


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())


def assert_legal(found: Tensor, x: Tensor, norm: float, eps: float) -> None:
    """In the ball, up to the single precision the libraries work in, and in [0, 1] exactly."""
    assert float(torch.linalg.vector_norm((found - x).flatten(1), norm, dim=1).max()) <= eps + 1e-5
    assert float(found.min()) >= 0
    assert float(found.max()) <= 1


def test_autoattack_runs_and_its_flags_tell_what_otad_is(case, caplog) -> None:
    """It finds points without gradient (see the test below), and that Square, which needs none,
    breaks what its gradient attacks could not: an honest evaluation needs attacks of other kinds.
    """
    library = pytest.importorskip("pyautoattack", reason="needs the extra attacks")
    model, x, y = case
    attack = library.AutoAttack(model, norm="L2", eps=1.5, seed=0)
    for part in (attack.apgd, attack.apgd_targeted, attack.fab):
        part.n_iter = 5
    attack.apgd_targeted.n_target_classes = attack.fab.n_target_classes = 2
    attack.square.n_queries = 60
    with caplog.at_level(logging.WARNING, "auto-attack"), torch.random.fork_rng():
        found, answers = attack.run_standard_evaluation(x, y)
    assert_legal(found, x, 2, 1.5)
    assert torch.equal(model(found).argmax(1), answers)
    assert accuracy(model, found, y) < accuracy(model, x, y) == 0.8
    flags = {record.getMessage() for record in caplog.records}
    assert any("points with zero gradient" in flag for flag in flags), flags
    assert any("Square Attack has decreased the robust accuracy" in flag for flag in flags), flags
    for absent in ("randomized", "dynamic", "probability"):
        assert not any(absent in flag for flag in flags)


def test_the_model_is_flat_exactly_where_one_neighbor_carries_the_answer(case, generator) -> None:
    model, x, _ = case
    moved = L2(1.5, (0.0, 1.0)).surface(x.repeat(8, 1, 1, 1), generator).requires_grad_()
    trace = model.trace(moved)
    best, second = trace.outputs.topk(2, dim=1).values.T
    (gradient,) = torch.autograd.grad((best - second).sum(), moved)
    flat = (gradient == 0).flatten(1).all(1)
    assert 0 < int(flat.sum()) < len(flat)
    assert torch.equal(flat, (trace.solution.multipliers > 0).sum(1) == 1)


def test_foolbox_runs(case) -> None:
    foolbox = pytest.importorskip("foolbox", reason="needs the extra clients")
    model, x, y = case
    client = foolbox.PyTorchModel(model, bounds=(0, 1))
    assert torch.equal(client(x), model(x))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        _, (found,), success = foolbox.attacks.L2PGD(steps=10)(client, x, y, epsilons=[1.5])
    assert_legal(found, x, 2, 1.5)
    assert torch.equal(success[0], model(found).argmax(1) != y)
    assert accuracy(model, found, y) <= accuracy(model, x, y)
    assert bool((found != x).flatten(1).any(1).all())


def test_art_runs(case) -> None:
    pytest.importorskip("art", reason="needs the extra clients")
    classification = pytest.importorskip("art.estimators.classification")
    evasion = pytest.importorskip("art.attacks.evasion")
    model, x, y = case
    client = classification.PyTorchClassifier(
        model, nn.CrossEntropyLoss(), input_shape=(1, 8, 8), nb_classes=10, clip_values=(0.0, 1.0)
    )
    with torch.no_grad():
        np.testing.assert_array_equal(client.predict(x.numpy()), model(x).numpy())
    before = np.random.get_state()
    np.random.seed(0)
    attack = evasion.SquareAttack(client, eps=0.3, max_iter=25, nb_restarts=1, verbose=False)
    found = torch.from_numpy(attack.generate(x.numpy(), y.numpy()))
    np.random.set_state(before)
    assert_legal(found, x, torch.inf, 0.3)
    assert accuracy(model, found, y) < accuracy(model, x, y)
