"""Clients of the Open Inference Protocol get the answers that the model gives itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import factories
import numpy as np
import pytest
import torch
from serve.running import running

import otad
from otad.explain import explain
from otad.serve import create_app

triton = pytest.importorskip("tritonclient.http", reason="needs the extra dev")

ROWS = 7
ALL = ("prediction", "label", "probabilities", "logits", "distance", "neighbors", "weights")
ALL += ("contributions", "certified_radius")


@pytest.fixture(scope="module")
def model() -> otad.OTAD:
    model = factories.model()
    model.notes["classes"] = ["low", "middle", "high"]
    return model


@pytest.fixture(scope="module")
def client(model: otad.OTAD) -> Iterator[Any]:
    """A Triton client of a service over a real socket. Parts of 4 rows are computed at once."""
    app = create_app(model, name="cubes", max_batch=4)
    with running(app) as at, triton.InferenceServerClient(at, network_timeout=300.0) as client:
        yield client


def ask(client: Any, x: torch.Tensor, names: Any = (), *, binary: bool = True, **more: Any) -> Any:
    given = triton.InferInput("input", list(x.shape), "FP32")
    given.set_data_from_numpy(x.numpy(), binary_data=binary)
    wanted = [triton.InferRequestedOutput(name, binary_data=binary) for name in names]
    return client.infer("cubes", [given], outputs=wanted or None, request_id="7", **more)


def test_health_and_metadata(client: Any, model: otad.OTAD) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("cubes")
    assert client.is_model_ready("cubes", "1")
    assert not client.is_model_ready("cubes", "2")
    assert not client.is_model_ready("spheres")
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    found = client.get_model_metadata("cubes", "1")
    assert found["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 5]}]
    assert tuple(tensor["name"] for tensor in found["outputs"]) == ALL


@pytest.mark.parametrize("binary", [True, False])
def test_all_outputs_equal_the_model_itself(client: Any, model: otad.OTAD, binary: bool) -> None:
    x = factories.queries(model, ROWS)
    found = ask(client, x, ALL, binary=binary, model_version="1")
    assert found.get_response()["id"] == "7"
    with torch.no_grad():
        trace = model.trace(x)
    get = found.as_numpy
    # Neighbors, weights and distances do not depend on the batch; the head may round differently.
    assert (get("neighbors") == trace.neighbors.indices.numpy()).all()
    assert (get("weights") == trace.solution.multipliers.numpy()).all()
    assert (get("distance") == trace.distance.numpy()).all()
    np.testing.assert_allclose(get("logits"), trace.outputs.numpy(), rtol=1e-5, atol=1e-5)
    shares = trace.outputs.softmax(1).numpy()
    np.testing.assert_allclose(get("probabilities"), shares, rtol=1e-5, atol=1e-6)
    classes = trace.outputs.argmax(1).tolist()
    assert get("prediction").tolist() == classes
    labels = [text.decode() if isinstance(text, bytes) else text for text in get("label")]
    assert labels == [model.notes["classes"][code] for code in classes]
    radius = otad.certify(model, x, progress=False).radius.numpy()
    assert radius.max() > 0
    np.testing.assert_allclose(get("certified_radius"), radius, rtol=1e-4, atol=1e-6)
    told = [[it.contribution for it in one.neighbors] for one in explain(model, x)]
    np.testing.assert_allclose(get("contributions"), told, rtol=1e-4, atol=1e-5)


def test_the_usual_outputs_and_a_clear_error(client: Any, model: otad.OTAD) -> None:
    x = factories.queries(model, 1)
    found = ask(client, x)
    assert [one["name"] for one in found.get_response()["outputs"]] == list(ALL[:3])
    assert found.as_numpy("probabilities").sum() == pytest.approx(1, abs=1e-5)
    for wrong, names in ((x, ["color"]), (x + 2, []), (x * np.nan, []), (x[:, :4], [])):
        with pytest.raises(Exception, match=r"expected .*, got .*"):
            ask(client, wrong, names)
    assert ask(client, x).as_numpy("prediction").shape == (1,)
