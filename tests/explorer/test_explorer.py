"""The data of the explorer: equal to what the library itself answers, explains and certifies."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from typing import Any

import factories
import pytest
import torch
from fastapi.testclient import TestClient
from sklearn.decomposition import PCA

import otad
from otad.data.encoding import TableEncoding
from otad.explorer.explorer import STEPS, Explorer, example_rows, explorer_page
from otad.serve import create_app

HOSTILE = '</script><img src=x onerror="alert(1)">&amp;\u2028'


def path_of(explorer: Explorer, found: dict[str, Any]) -> torch.Tensor:
    """The inputs of the path, as the page computes them."""
    start, end = (torch.tensor(found[name]).double() for name in ("input", "end"))
    path = start + torch.tensor(found["times"]).double()[:, None] * (end - start)
    bounds = explorer.model.backbone.bounds
    path = path if bounds is None else path.clamp(*bounds)
    return path.float().view(-1, *explorer.shape)


def check_view(explorer: Explorer, place: list[float], key: torch.Tensor) -> None:
    """The view is the PCA of the bank, up to the signs of its axes."""
    points = explorer.model.bank_points.double()
    reference = PCA(2).fit(points)
    shown = torch.tensor(explorer.setup()["map"]["points"]).double()
    for axis, expected in enumerate(torch.from_numpy(reference.transform(points)).unbind(1)):
        ratio = float((shown[:, axis] * expected).sum() / expected.square().sum())
        assert abs(ratio) == pytest.approx(1.0, abs=1e-4)
    assert explorer.share == pytest.approx(reference.explained_variance_ratio_.sum(), abs=1e-5)
    expected = torch.from_numpy(reference.transform(key.double()))[0].abs()
    assert torch.tensor(place).abs().tolist() == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("kind", ["local", "regression", "global", "metric", "surrogate"])
def test_every_step_is_what_the_library_answers(kind: str) -> None:
    model = factories.KINDS[kind](0)
    explorer, x = Explorer(model, kind), factories.queries(model, 3)[1]
    json.dumps(explorer.setup(), allow_nan=False)
    found = json.loads(json.dumps(explorer.explore(x), allow_nan=False))
    path, steps = path_of(explorer, found), [0, 20, STEPS - 1]
    assert len(path) == STEPS
    assert torch.allclose(path[0], x, atol=1e-6)

    with torch.no_grad():
        outputs, alone = model(path[steps]), model.backbone(path[steps])
    unit = explorer.unit.double()
    lengths = ((path - path[0]).double() / unit).flatten(1).norm(dim=1)
    assert found["distance"] == pytest.approx(lengths.tolist(), abs=1e-4)
    far = model.distance(path[steps]).tolist()
    assert [found["from_bank"][step] for step in steps] == pytest.approx(far, rel=1e-3)
    if kind in ("local", "metric"):  # by keys
        check_view(explorer, found["places"][0], model.query_keys(x[None]).detach())
    if kind == "regression":
        for name, values in (("answer", outputs), ("undefended", alone)):
            shown = [found[name][step] for step in steps]
            assert shown == pytest.approx(values.tolist(), rel=1e-3, abs=1e-4)
        proved = otad.certify_values(model, x[None], found["certificate"]["eps"], unit=unit)
        assert found["certificate"]["low"] == pytest.approx(float(proved.low), rel=1e-4)
        assert found["certificate"]["low"] <= min(found["answer"])
        assert max(found["answer"]) <= found["certificate"]["high"]
        return
    names = {"probabilities": outputs, "undefended_probabilities": alone}
    for name, logits in names.items():
        shares = logits.softmax(1)[:, found["shown"]]
        shown = torch.tensor([found[name][step] for step in steps])
        assert torch.allclose(shown, shares, atol=1e-3)
    flip = found["answer_flip"]
    assert flip is not None
    assert len({*found["answer"][:flip]}) == 1
    assert found["answer"][flip] != found["answer"][0]

    certificate = found["certificate"]
    if kind in ("metric", "surrogate"):
        assert "expected" in certificate["refusal"]
    else:
        radius = float(otad.certify(model, x[None], unit=unit).radius)
        assert certificate["radius"] == pytest.approx(radius, abs=1e-5)
        assert found["distance"][flip] >= radius
    if kind != "surrogate":  # a network that estimates the answer gives no weights
        for step, explained in zip(steps, otad.explain(model, path[steps]), strict=True):
            listed = {index: weight for index, weight, *_ in found["neighbors"][step]}
            expected = {it.index: it.weight for it in explained.heaviest(10)}
            heavy = {index for index, weight in expected.items() if weight and weight > 0.01}
            assert heavy <= listed.keys()
            assert all(listed[i] == pytest.approx(expected[i], abs=2e-3) for i in heavy)
            total = sum(part for _, _, part, _ in found["neighbors"][step])
            assert total == pytest.approx(explained.margin, abs=2e-2)
            labels = {it.index: it.label for it in explained.neighbors}
            assert all(found["points"][str(i)]["label"] == labels[i] for i in heavy)


def test_no_answer_is_attacked_where_the_model_abstains() -> None:
    model = factories.model(abstain_beyond=1e-6)
    found = Explorer(model, "far").explore(factories.queries(model, 1)[0])
    assert found["answer"] == [None]
    assert found["distance"] == [0.0]


def test_categories_are_chosen_and_never_attacked() -> None:
    cells = {"size": [1.0, 2.0, 3.0, 4.0] * 6, "color": ["red", "blue", "red", "blue"] * 6}
    encoding = TableEncoding.fit(cells, ["color"], range(24))
    x = encoding.encode(cells, lambda name, row: name).float()
    net = otad.nets.fc_resnet((3,), 2, blocks=1, hidden=8)
    model = otad.defend(net, x, (x[:, 0] > 2).long(), n_neighbors=3)
    columns = list(encoding.feature_names)
    model.notes |= {"preparation": encoding.to_json(), "feature_names": columns}
    explorer = Explorer(model, "table")
    size, color = explorer.setup()["fields"]
    assert (size["name"], size["at"]) == ("size", 0)
    assert (color["options"], color["choice"]) == (["blue", "red"], [1, 2])
    found = explorer.explore(explorer.read({"input": [2.4, 0, 1]}))
    assert found["end"][1:] == [0, 1]
    assert found["end"][0] != found["input"][0]
    factories.refuses(explorer.read, {"input": [2.4, 1, 1]}, match="exactly one 1")


def test_examples_cover_the_classes_or_the_range_of_values() -> None:
    labels = torch.tensor([2, 0, 0, 0, 1, 2, 0])
    assert labels[example_rows(labels, 3)].tolist() == [0, 1, 2]
    assert labels[example_rows(labels, 5)].tolist() == [0, 1, 2, 0, 2]
    assert sorted(example_rows(labels, 20).tolist()) == list(range(7))
    values = torch.tensor([3.0, 1.0, 2.0])
    assert values[example_rows(values, 2)].tolist() == [1.0, 3.0]


def test_hostile_requests_are_refused_and_change_nothing() -> None:
    model = factories.model()
    with TestClient(create_app(model, name="small")) as client:
        before = client.post("/explore", json={"input": [0.5] * factories.D}).json()
        bad: dict[str, str | bytes] = {
            "5 numbers, .* got 4 values": '{"input": [1, 1, 1, 1]}',
            "a finite number, got 'a'": '{"input": ["a", 0, 0, 0, 0]}',
            "a finite number, got True": '{"input": [true, 0, 0, 0, 0]}',
            "a finite number, got None": '{"input": [null, 0, 0, 0, 0]}',
            "a list of numbers, got str": '{"input": "00000"}',
            "an object .* got list": "[1, 2]",
            r"an object .* got \['input', 'path'\]": '{"input": [], "path": "/etc/passwd"}',
            "bounds .* got values from -1.0 to 2.0": '{"input": [2, 0, 0, 0, -1]}',
            "JSON, .* inf": '{"input": [1e999, 0, 0, 0, 0]}',
            "JSON, got": b"\xff\xfe{",
            "JSON, got: max": "[" * 100_000,
        }
        for expected, body in bad.items():
            reply = client.post("/explore", content=body)
            assert 400 <= reply.status_code < 500, body
            assert re.search(f"expected .*{expected}", reply.json()["error"]), reply.json()
        assert client.post("/explore", json={"input": [0.5] * factories.D}).json() == before


def test_names_cannot_leave_the_page_and_only_its_own_script_runs() -> None:
    model = factories.model()
    model.notes |= {"classes": [HOSTILE, "b", "c"], "feature_names": [HOSTILE, *"bcde"]}
    x = factories.queries(model, 1)
    page = explorer_page(Explorer(model, HOSTILE, examples=x), "otad serve <model>")
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    stored = json.loads(data)
    assert stored["setup"]["classes"][0] == stored["setup"]["name"] == HOSTILE
    assert stored["command"] == "otad serve <model>"
    assert len(stored["explored"]) == 1
    assert HOSTILE not in page
    assert page.count("<script") == page.count("</script>") == 2
    (policy,) = re.findall(r'Content-Security-Policy" content="(.*?)"', page)
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.S)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)
    assert math.isfinite(stored["explored"][0]["distance"][-1])
