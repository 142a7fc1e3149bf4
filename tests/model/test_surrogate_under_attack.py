"""Attacks, evaluation and explanation of a model whose solver is a network."""

from __future__ import annotations

import json
from importlib.util import find_spec
from io import BytesIO, StringIO

import pytest
import torch
from factories import K, estimated, images
from rich.console import Console

from otad.attacks import ATTACKS, L2
from otad.attacks.base import gain_of
from otad.cip import Status
from otad.evaluate import Evaluation, evaluate, make_attack
from otad.evaluate.identity import Identity
from otad.explain import explain
from otad.model.bank import FeatureBank
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
    "transfer": {},
    "noise": {"draws": 5},
    "random_search": {"queries": 10},
    "square": {"queries": 10},
    "pixle": {"restarts": 2, "max_iterations": 2},
}
ON_LINES = {
    "straight": {"points": 3},
    "bisector": {"pairs": 2, "polish": 3},
    "region": {"singles": 2, "rounds": 1, "polish": 3},
}


@pytest.fixture(scope="module", params=["fc", "vit"])
def model(request: pytest.FixtureRequest) -> OTAD:
    return estimated(request.param)


CASES = [
    *((kind, name) for kind in ("fc", "vit") for name in EVERYWHERE),
    *(("fc", name) for name in ON_LINES),
    ("vit", "autoattack"),  # the paper's; it takes long on models that resist
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
    assert Evaluation.read(tmp_path / "evaluation.json") == found
    page = evaluation_report(found)
    (account,) = (part for part in page.sections if part.slug == "solver")
    assert [type(block).__name__ for block in account.blocks] == ["Table", "Text"]


def test_a_card_tells_nets_apart(model: OTAD) -> None:
    kind = "fc" if model.metric is None else "vit"
    twin = estimated(kind)
    assert Identity().model(model) == Identity().model(twin)
    with torch.no_grad():
        next(twin.solver.parameters()).add_(0.1)
    assert Identity().model(model)["fingerprint"] != Identity().model(twin)["fingerprint"]


def test_neighbors_that_say_the_same_leave_the_net_no_choice(model: OTAD) -> None:
    """So weaknesses can be planted in its bank, as an evaluation does."""
    bank, place = model.bank, X[:1]
    with torch.no_grad():
        embedded, key = model.backbone.embed(place), model.query_keys(place)
    rows = torch.tensor([4] * K)
    copied = FeatureBank(
        torch.cat([bank.inputs, embedded.expand(K, -1)]),
        torch.cat([bank.features, bank.features[rows]]),
        torch.cat([bank.labels, bank.labels[rows]]),
        "planted",
    )
    keys = None if model.bank_keys is None else torch.cat([model.bank_keys, key.expand(K, -1)])
    planted = OTAD(
        model.backbone, copied, n_neighbors=K, solver=model.solver, metric=model.metric, keys=keys
    )
    with torch.no_grad():
        found = planted.trace(place)
    assert found.neighbors.indices[0].tolist() == [36, 37, 38]
    torch.testing.assert_close(found.solution.image[0], bank.features[4])


def test_an_explanation_lists_neighbors_without_weights() -> None:
    model = estimated("fc")
    (one, *_) = explain(model, X, classes=["a", "b", "c"])
    trace = model.trace(X)
    assert [it.index for it in one.neighbors] == trace.neighbors.indices[0].tolist()
    assert {it.weight for it in one.neighbors} == {None}
    assert (one.status, one.n_weighted) == (Status.ESTIMATED, None)
    assert one.heaviest(2) == list(one.neighbors[:2])  # the nearest
    assert "estimated by a network that imitates the solver, not solved\n" in str(one)
    assert f"{K} neighbors, to which the answer gives no weights" in str(one)
    assert str(one).count("\n") == 3 + K
    console = Console(width=120, file=StringIO(), color_system=None)
    console.print(one.table())
    table = console.file.getvalue()
    assert "nan" not in str(one) + table
    assert "estimated by a network" in table
    back = json.loads(json.dumps(one.to_dict(inputs=True), allow_nan=False))
    assert back["status"] == "estimated"
    assert back["n_weighted"] is None
    assert [it["weight"] for it in back["neighbors"]] == [None] * K
    figure = one.figure(top=2)
    assert "training points behind the answer, nearest first" in {
        text.get_text() for text in figure.texts
    }
    figure.savefig(stream := BytesIO(), format="png")
    assert stream.getvalue().startswith(b"\x89PNG")


def test_weights_are_told_where_the_answer_is_made_of_them() -> None:
    model = estimated("fc", readout="hull")
    (one, *_) = explain(model, X)
    assert one.status == Status.ESTIMATED
    assert sum(it.weight for it in one.neighbors) == pytest.approx(1, abs=1e-5)
    assert one.n_weighted == K
    mixed = sum(it.weight * model.bank_features[it.index] for it in one.neighbors)
    shares = model.backbone.head(mixed[None])[0].softmax(0).tolist()
    assert one.probabilities == pytest.approx(dict(enumerate(shares)), abs=1e-4)
