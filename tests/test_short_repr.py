"""Reprs are a few lines with the headline numbers, whatever the sizes."""

from __future__ import annotations

import torch
from factories import exact, model, net, points, queries

import otad
from otad.attacks import Pgd
from otad.cip import CipProblem
from otad.data import Dataset, Standardizer
from otad.explain import explain
from otad.nets import fc_resnet

X, Y = points(), (3 * points()[:, 0]).long()


def made() -> dict[str, tuple[object, tuple[str, ...]]]:
    one, x = model(), queries(model())
    y = one(x).argmax(1)
    trace, values = one.trace(x), model(task="regression")
    attacked = Pgd(steps=2)(one, x, y, otad.L2(0.3, bounds=(0, 1)), generator=torch.Generator())
    evaluation = otad.evaluate(
        one, x, y, otad.L2(0.3), attacks=[Pgd(steps=2)], flags=False, progress=False
    )
    deep = otad.defend(fc_resnet((5,), 3, blocks=40), X, Y)
    anchors = points(12).view(4, 3, 5)
    split = X, Y, X[:9], Y[:9]
    worst = f"worst case {evaluation.worst_case_accuracy:.1%}"
    return {
        "local": (one, ("classification of 3 classes", "70 points", "smoothness=2", "FCResNet")),
        "deep": (deep, ("70 points", "weights")),
        "global": (model(scope="global"), ("scope=global", "left_out=0")),
        "metric": (exact(), ("CNNMetric", "VisionTransformer")),
        "regression": (values, ("regression", "inputs (5,)")),
        "trace": (trace, ("Trace(20 inputs", "6 training points", "solved")),
        "answer": (one.solve(one.backbone.embed(x)), ("Answer(20 inputs",)),
        "solution": (trace.solution, ("20 rows", "6 neighbors", "dimension 5", "solved")),
        "problem": (CipProblem(X[:4], anchors, anchors, 2.0), ("anchors=(4, 3, 5) float32",)),
        "bank": (one.bank, ("inputs=(70, 5) float32", "labels=(70,) int64")),
        "potential": (model(scope="global").potential, ("levels=(70,) float64", "left_out=(0,)")),
        "neighbors": (trace.neighbors, ("indices=(20, 6) int64",)),
        "certificate": (otad.certify(one, x), ("20 inputs", "radius median", "hull")),
        "interval": (otad.certify_values(values, x, 0.1), ("20 inputs", "eps 0.1", "width")),
        "attack": (attacked, ("20 inputs", f"{int(attacked.broken.sum())} broken")),
        "evaluation": (evaluation, ("20 examples", "l2 eps 0.3", worst, "undefended", "1 attacks")),
        "explanation": (explain(one, x)[0], ("probability", "with weight", "local")),
        "dataset": (
            Dataset("some", *split, "classification", "made", ("a", "b", "c")),
            ("'some'", "classification of 3 classes", "70 train and 9 test inputs (5,)"),
        ),
        "standardizer": (Standardizer.fit(X), ("mean=(5,) float32",)),
    }


def test_reprs_are_short_and_say_what_matters() -> None:
    for one, parts in made().values():
        shown = repr(one)
        assert len(shown) < 400
        assert shown.count("\n") <= 3
        assert "tensor(" not in shown
        for part in parts:
            assert part in shown


def test_long_lists_are_counted() -> None:
    shown = repr(explain(model(), queries(model()))[0].neighbors)
    assert len(shown) < 100 * 6
    one = otad.certify(model(), queries(model(), 1))
    empty = otad.Certificate(one.radius[:0], one.prediction[:0], (), ())
    assert repr(empty).startswith("Certificate(0 inputs")
    assert torch.is_tensor(one.radius)
    assert "blocks" in repr(net())  # a network is shown layer by layer, as everywhere in torch
