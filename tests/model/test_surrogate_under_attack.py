"""Attacks, evaluation and explanation of a model whose solver is a network."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
import torch
from factories import K, estimated, images

from otad.attacks import ATTACKS, L2, Pgd
from otad.attacks.target import gain_of
from otad.cip import Status
from otad.evaluate import Evaluation, evaluate, make_attack
from otad.evaluate.identity import Identity
from otad.explain import explain
from otad.model.otad import OTAD
from otad.report.evaluation_report import evaluation_report

X, Y = images(9, seed=7)
THREAT = L2(0.7, bounds=(0.0, 1.0))
EVERYWHERE = {
    "bpda": {"steps": 5},
    "pgd": {"steps": 5},
    "apgd": {"steps": 5},
    "metric": {"steps": 5},
    "soft_knn": {"temperatures": (0.1,), "steps": 5, "polish": 3},
    "transfer": {"inner": Pgd(steps=5)},
    "noise": {"draws": 5},
    "random_search": {"queries": 10},
    "square": {"queries": 10},
    "pixle": {"restarts": 2, "max_iterations": 2},
    "autoattack": {"variant": "custom", "attacks": ("apgd-ce",)},
}
ON_LINES = {
    "straight": {"points": 3},
    "bisector": {"pairs": 2, "polish": 3},
    "region": {"singles": 2, "rounds": 1, "polish": 3},
    "pull": {"classes": 1, "sizes": (1,), "steps": 2, "polish": 3},
}


@pytest.fixture(scope="module", params=["fc", "vit"])
def model(request: pytest.FixtureRequest) -> OTAD:
    return estimated(request.param)


CASES = [
    *(("vit", name) for name in EVERYWHERE),  # the paper's model
    *(("fc", name) for name in ["pgd", "transfer", *ON_LINES]),
]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_attacks_run_and_their_verdict_is_the_models(kind: str, name: str) -> None:
    model, options = estimated(kind), (EVERYWHERE | ON_LINES).get(name, {})
    package = ATTACKS[name].needs.package
    if package is not None and find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    attack = make_attack(name, model, **options)
    with torch.no_grad():
        y = model(X).argmax(1)  # so that every example is right unattacked
    result = attack(model, X, y, THREAT, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        outputs = model(result.inputs)
        clean = gain_of(model(X), y)
    assert torch.equal(outputs.argmax(1) != y, result.broken)
    assert float(result.distance.max()) <= THREAT.eps * (1 + 1e-6)
    torch.testing.assert_close(result.gain, gain_of(outputs, y), rtol=1e-4, atol=1e-5)
    if name in ("pgd", "apgd"):
        assert int(result.backwards.min()) > 0
        assert bool((result.gain > clean).any())


def test_an_evaluation_says_what_a_net_has(model: OTAD, tmp_path) -> None:
    found = evaluate(
        model, X, Y, THREAT,
        attacks=[make_attack(name, model, **EVERYWHERE[name]) for name in ("pgd", "metric")],
        flags=False, folder=tmp_path,
    )  # fmt: skip
    assert found.solver is not None
    assert found.solver.statuses["estimated"] == 1.0
    assert (found.solver.smoothness, found.solver.residual) == (None, None)
    assert found.solver.changed_by_potential is None
    assert found.certificate is None
    assert "certificate" in found.missing
    assert found.model["solver"] == {"cip_net": model.solver.config()}
    twin = estimated("fc" if model.metric is None else "vit")
    assert Identity().model(model) == Identity().model(twin)
    with torch.no_grad():
        next(twin.solver.parameters()).add_(0.1)
    assert Identity().model(model)["fingerprint"] != Identity().model(twin)["fingerprint"]
    assert Evaluation.read(tmp_path / "evaluation.json") == found
    page = evaluation_report(found)
    (account,) = (part for part in page.sections if part.slug == "solver")
    assert [type(block).__name__ for block in account.blocks] == ["Table", "Text"]


def test_an_explanation_lists_neighbors_with_weights_only_where_there_are_any() -> None:
    model = estimated("fc")
    (one, *_) = explain(model, X, classes=["a", "b", "c"])
    trace = model.trace(X)
    assert [it.index for it in one.neighbors] == trace.neighbors.indices[0].tolist()
    assert {it.weight for it in one.neighbors} == {None}
    assert (one.status, one.n_weighted) == (Status.ESTIMATED, None)
    assert one.heaviest(2) == list(one.neighbors[:2])  # the nearest
    assert "estimated by a network instead of the solver\n" in str(one)
    assert f"{K} neighbors; the answer has no weights" in str(one)
    back = json.loads(json.dumps(one.to_dict(), allow_nan=False))
    assert (back["status"], back["n_weighted"]) == ("estimated", None)
    assert [it["weight"] for it in back["neighbors"]] == [None] * K
    shown = {text.get_text() for text in one.figure(top=2).texts}
    assert "training points behind the answer, nearest first" in shown
    model = estimated("fc", readout="hull")  # whose answers are weighted means of features
    (one, *_) = explain(model, X)
    assert (one.status, one.n_weighted) == (Status.ESTIMATED, K)
    assert sum(it.weight for it in one.neighbors) == pytest.approx(1, abs=1e-5)
    mixed = sum(it.weight * model.bank_features[it.index] for it in one.neighbors)
    shares = model.backbone.head(mixed[None])[0].softmax(0).tolist()
    assert one.probabilities == pytest.approx(dict(enumerate(shares)), abs=1e-4)
