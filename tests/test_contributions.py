"""Contributions sum to the margin or the value, for every kind of model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from factories import D, estimated, exact, model, net, points, prototypes, queries

from otad.cip import ExactCip
from otad.explain import ClassPart, Explanation, Neighbor, explain
from otad.model.defend import defend
from otad.model.otad import OTAD
from otad.nets import lifted_net


def precise(task: str = "classification", **options) -> OTAD:
    """70 points in float64; the head has a bias."""
    x, values = points().double(), task == "regression"
    y = x.sum(1) if values else (3 * x[:, 0]).long()
    backbone = net(task=task).double()
    with torch.no_grad():
        backbone.head.bias += torch.linspace(0.1, 0.7, backbone.n_outputs)
    return defend(backbone, x, y, n_neighbors=6, **options)


def lifted(task: str = "classification") -> OTAD:
    x = points(40).double()
    y, outputs = ((3 * x[:, 0]).long(), 3) if task == "classification" else (x.sum(1), 1)
    frame = lifted_net((D,), outputs, task=task, hidden=(8,), std=0.3).double()
    return defend(frame, x, y, scope="global", n_neighbors=4)


KINDS: dict[str, Callable[[], OTAD]] = {
    "local": precise,
    "local, curved": lambda: precise(strong_convexity=-0.3),
    "local, paper": lambda: precise(
        strong_convexity=0.1, smoothness=1.05, solver=ExactCip(mode="paper", climb=(0.2, 0.1))
    ),
    "local, climbing": lambda: precise(
        strong_convexity=0.1, smoothness=1.05, solver=ExactCip(climb=(0.2, 0.1))
    ),
    "global": lambda: precise(scope="global"),
    "global, curved": lambda: precise(scope="global", strong_convexity=-0.3),
    "lifted": lifted,
    "prototypes": lambda: prototypes().double(),
    "transformer, metric": lambda: exact().double(),
    "estimated as a mean": lambda: estimated("fc", "hull").double(),
    "regression, local": lambda: precise("regression", strong_convexity=-0.2),
    "regression, global": lambda: precise("regression", scope="global"),
    "regression, lifted": lambda: lifted("regression"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_contributions_sum_to_the_answer(kind: str) -> None:
    made = KINDS[kind]()
    x = queries(made, 12).double()
    with torch.no_grad():  # as `explain` does: with gradients the last bits may differ
        outputs = made(x)
    for row, one in enumerate(explain(made, x)):
        parts = [it.contribution for it in one.neighbors]
        assert [it.weight * it.alone for it in one.neighbors] == parts
        if outputs.dim() == 1:
            assert (one.margin, one.runner_up, one.by_class) == (None, None, {})
            expected = float(outputs[row])
        else:
            first, second = outputs[row].topk(2).values.tolist()
            assert outputs[row, [one.prediction, one.runner_up]].tolist() == [first, second]
            expected = first - second
            assert one.margin == expected
            shares = one.by_class
            assert sum(part.contribution for part in shares.values()) == pytest.approx(expected)
            assert sum(part.points for part in shares.values()) == one.n_weighted
            assert sum(part.weight for part in shares.values()) == pytest.approx(1)
        assert sum(parts) == pytest.approx(expected, abs=1e-12)
        assert one.total == expected
        assert one.remainder == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("scope", ["local", "global"])
def test_alone_is_what_the_network_answers_at_the_training_point(scope: str) -> None:
    made, x = precise(scope=scope), points().double()
    logits = made.backbone(x).detach()
    for one in explain(made, queries(made).double()):
        for it in one.neighbors:
            margin = logits[it.index, one.prediction] - logits[it.index, one.runner_up]
            assert it.alone == pytest.approx(float(margin), abs=1e-6)  # the bank is in float32


def test_an_estimate_that_is_no_mean_has_no_contributions() -> None:
    made = estimated("fc", "free")
    (one,) = explain(made, queries(made, 1))
    assert {it.contribution for it in one.neighbors} == {None}
    assert (one.total, one.remainder, one.by_class, one.reasons) == (None, None, {}, [])
    assert one.margin is not None
    json.dumps(one.to_dict(), allow_nan=False)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_an_abstention_has_no_contributions(task: str) -> None:
    made = precise(task)
    made.abstain_beyond = 1e-9
    (one,) = explain(made, queries(made, 1).double())
    assert (one.prediction, one.margin, one.runner_up, one.total) == (None, None, None, None)
    assert one.n_weighted
    assert {it.contribution for it in one.neighbors} == {None}
    assert "abstained" in str(one)
    json.dumps(one.to_dict(), allow_nan=False)


def test_a_class_of_less_weight_that_wins_is_explained() -> None:
    (one,) = explain(model(), queries(model(), 1), classes=["three", "eight", "nine"])
    inputs = one.neighbors[0].inputs
    points = (
        Neighbor(7, 0.58, "eight", 1.0, inputs, alone=-1.0),
        Neighbor(9, 0.42, "three", 1.2, inputs, alone=20.0, name="three/0.png"),
    )
    margin = 0.42 * 20 - 0.58
    shares = {"three": 0.9995, "eight": 0.0004, "nine": 0.0001}
    told = {"prediction": "three", "runner_up": "eight", "margin": margin, "neighbors": points}
    one = Explanation(**(vars(one) | told | {"probabilities": shares}))
    assert one.by_class == {
        "three": ClassPart(1, 0.42, pytest.approx(8.4)),
        "eight": ClassPart(1, 0.58, pytest.approx(-0.58)),
    }
    assert one.reasons == [
        "the contributions sum to 7.82, the margin of three over eight in logits",
        "three: +8.4 by 1 training point with weight 0.420",
        "eight: -0.58 by 1 training point with weight 0.580",
    ]
    for sentence in one.reasons:
        assert sentence in str(one)
    mistaken = replace(one, neighbors=(replace(points[0], alone=3.0), points[1]))
    assert mistaken.reasons[-1] == (
        "the network itself classifies 1 of the points labeled eight as three"
    )
    line = next(line for line in str(one).splitlines() if "three/0.png" in line)
    assert "0.420" in line
    assert "+8.4" in line
    found = one.to_dict()
    assert found["by_class"]["eight"] == {"points": 1, "weight": 0.58, "contribution": -0.58}
    assert (found["runner_up"], found["margin"]) == ("eight", margin)
    assert found["neighbors"][1]["contribution"] == pytest.approx(8.4)
