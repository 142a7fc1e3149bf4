"""Models of every kind are served: regression, global maps, estimates, tables with text."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import factories
import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from serve.requests import body_of, outputs_of

import otad
from otad.serve import create_app
from otad.serve.protocol import write_response
from otad.serve.served import ServedModel

PATH = "/v2/models/model/infer"
POINTS = ("neighbors", "weights", "contributions")


def ask(client: TestClient, body: dict[str, Any], path: str = PATH) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def test_regression() -> None:
    model = factories.model(task="regression")
    x, client = factories.queries(model, 3), TestClient(create_app(model))
    found = outputs_of(ask(client, body_of(x)))
    with torch.no_grad():
        expected = model(x).tolist()
    assert found == {"prediction": pytest.approx(expected, abs=1e-5)}
    parts = outputs_of(ask(client, body_of(x, "contributions")))["contributions"]
    assert np.reshape(parts, (3, -1)).sum(1).tolist() == pytest.approx(expected, abs=1e-4)
    answer = client.post(PATH, json=body_of(x, "certified_radius"))
    assert answer.status_code == 400
    (first, *_) = ask(client, body_of(x), "/explain")["explanations"]
    assert first["prediction"] == pytest.approx(expected[0], abs=1e-5)


def test_answers_have_the_names_of_classes() -> None:
    model = factories.model()
    x = factories.queries(model, 3)
    model.notes["classes"] = ("low", "middle", "high")
    found = outputs_of(ask(TestClient(create_app(model)), body_of(x)))
    assert found["label"] == [model.notes["classes"][code] for code in found["prediction"]]
    model.notes["classes"] = ["low", "high"]
    factories.refuses(create_app, model, match="notes.classes: expected 3 names")


def test_a_global_map_has_as_many_points_as_its_own_rows_need() -> None:
    """However many the rows need that it was computed with."""
    model = factories.model(scope="global")
    served, x = ServedModel(model, "model"), factories.queries(model, 30)
    together = served.answer(x, POINTS)
    widths = (together["weights"] > 0).sum(1)
    assert widths.min() < widths.max()
    for width in (int(widths.min()), int(widths.max())):
        row = int((widths == width).nonzero()[0])
        one = {name: values[row : row + 1] for name, values in together.items()}
        found, alone = served.finish([one], POINTS), served.answer(x[row : row + 1], POINTS)
        assert found["neighbors"].shape == (1, width)
        alone_too = served.finish([alone], POINTS)
        for name in POINTS:
            np.testing.assert_allclose(found[name], alone_too[name], rtol=1e-4, atol=1e-6)
    both = served.finish(
        [{k: v[:1] for k, v in together.items()}, served.answer(x, POINTS)], POINTS
    )
    assert both["weights"].shape == (31, int(widths.max()))
    np.testing.assert_allclose(both["weights"].sum(1), 1, rtol=1e-5)


def test_a_model_without_proofs_says_why() -> None:
    model = factories.estimated("fc", "free")
    x, client = factories.queries(model, 2), TestClient(create_app(model))
    answer = client.post(PATH, json=body_of(x, "certified_radius"))
    assert answer.status_code == 400
    assert "expected ExactCip, got CipNet" in answer.json()["error"]
    found = outputs_of(ask(client, body_of(x, "weights", "label")))
    assert set(found["weights"]) == {None}  # its answers are no weighted means
    with torch.no_grad():
        assert found["label"] == [str(code) for code in model(x).argmax(1).tolist()]


def test_foreign_inputs_get_no_answer() -> None:
    model = otad.defend(None, torch.eye(3), torch.tensor([0, 1, 1]), inputs="pixels", n_neighbors=1)
    model.abstain_beyond = 0.5
    x = torch.cat([torch.eye(3)[:2], 5 + torch.eye(3)[:2]])
    client = TestClient(create_app(model))
    found = outputs_of(ask(client, body_of(x, "prediction", "label", "logits")))
    assert found["prediction"] == [0, 1, -1, -1]
    assert found["label"] == ["0", "1", "", ""]
    assert None not in found["logits"][:4]
    assert found["logits"][4:] == [None] * 4


def test_json_has_no_infinity_and_no_nan() -> None:
    values = {"radius": np.array([np.inf, np.nan, 1.5])}
    plain, length = write_response({}, values, {"radius": False})
    assert json.loads(plain)["outputs"][0]["data"] == [np.finfo(np.float64).max, None, 1.5]
    assert length is None
    exact, length = write_response({}, values, {"radius": True})
    assert exact[length:] == values["radius"].tobytes()


@pytest.fixture(scope="module")
def frame() -> Any:
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    size, color = rng.normal(size=40), rng.choice(["red", "blue"], 40)
    size[3], kind = np.nan, np.where(size > 0, "big", "small")
    return pandas.DataFrame({"size": size, "color": color}), kind


def test_a_table_with_text_has_one_tensor_per_column(frame: Any, tmp_path: Any) -> None:
    table, kind = frame
    clf = otad.OTADClassifier(epochs=1, hidden=8, n_blocks=1, random_state=0).fit(table, kind)
    clf.save(tmp_path / "kinds")
    client = TestClient(create_app(otad.load(tmp_path / "kinds", resident=False)))
    assert [
        (one["name"], one["datatype"], one["shape"])
        for one in client.get("/v2/models/model").json()["inputs"]
    ] == [("size", "FP64", [-1, 1]), ("color", "BYTES", [-1, 1])]
    rows = table[:6]

    def body(colors: list[str | None], shape: list[int]) -> dict[str, Any]:
        sizes = [None if math.isnan(size) else size for size in rows["size"].tolist()]
        about = {"shape": shape}
        size = {"name": "size", "datatype": "FP64", "data": sizes, **about}
        color = {"name": "color", "datatype": "BYTES", "data": colors, **about}
        return {"inputs": [size, color]}

    for shape in ([6], [6, 1]):
        found = outputs_of(ask(client, body(rows["color"].tolist(), shape)))
        assert found["label"] == clf.predict(rows).tolist()
        shares = np.reshape(found["probabilities"], (6, 2))
        np.testing.assert_allclose(shares, clf.predict_proba(rows), rtol=1e-4, atol=1e-5)
    assert TestClient(create_app(clf)).post(PATH, json=body(["red"] * 6, [6])).status_code == 200
    for color in ("green", None, ""):
        answer = client.post(PATH, json=body([color] * 6, [6]))
        assert answer.status_code == 400
        assert "'color', row 0: expected one of the categories 'blue', 'red'" in answer.text


def test_a_float64_model_takes_float64() -> None:
    x = torch.rand(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    net = otad.nets.fc_resnet((3,), 2, blocks=1, hidden=4).double()
    model = otad.defend(net, x, (x[:, 0] > 0.5).long(), n_neighbors=3)
    app = create_app(model)
    body = body_of(x[:2], "logits")
    assert TestClient(app).post(PATH, json=body).status_code == 400
    body["inputs"][0]["datatype"] = "FP64"
    found = outputs_of(ask(TestClient(app), body))["logits"]
    np.testing.assert_allclose(found, model(x[:2]).detach().ravel(), rtol=1e-9)


def test_the_queue_runs_any_function_of_the_model() -> None:
    app = create_app(factories.model())
    queue, served = app.state.queue, app.state.served
    x = factories.queries(served.model, 2)
    found = asyncio.run(queue.run(served.model.distance, x))
    assert torch.equal(found, served.model.distance(x))
