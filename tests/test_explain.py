"""Explanations: the numbers are those of the trace, in every form they are shown in."""

from __future__ import annotations

import json
from dataclasses import replace
from io import BytesIO, StringIO

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from otad.cip import ExactCip, Status
from otad.errors import InputError
from otad.explain import explain
from otad.explain.explanation import AGREES, DIFFERS
from otad.model.defend import defend
from otad.model.otad import OTAD
from otad.nets import SequentialBackbone, fc_resnet

N, D, K = 60, 4, 5
NAMES = ["acid", "[sugar]", "salt", "pH"]


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def table_model(task: str = "classification", **options) -> tuple[OTAD, Tensor]:
    x = 10 * rand(N, D)
    y = (x[:, 0] > 5).long() if task == "classification" else x.sum(1)
    outputs = 2 if task == "classification" else 1
    net = fc_resnet((D,), outputs, blocks=2, task=task, mean=5.0, std=3.0)
    return defend(net, x, y, n_neighbors=K, **options), x


def image_model(shape: tuple[int, ...] = (1, 6, 6), **options) -> tuple[OTAD, Tensor]:
    x = rand(N, *shape)
    net = fc_resnet(shape, 2, blocks=1, **options)
    return defend(net, x, (x.flatten(1).mean(1) > 0.5).long(), n_neighbors=K), x


QUERIES = 10 * rand(7, D, seed=1)


def plain(table) -> str:
    console = Console(width=120, file=StringIO(), color_system=None)
    console.print(table)
    return console.file.getvalue()


def test_names_are_those_of_the_model() -> None:
    model, _ = table_model()
    model.notes |= {"classes": ["dry", "sweet"], "feature_names": NAMES}
    named = explain(model, QUERIES, classes=["dry", "sweet"], feature_names=NAMES)
    assert [one.to_dict() for one in explain(model, QUERIES)] == [one.to_dict() for one in named]
    assert named[0].prediction in ("dry", "sweet")


def test_numbers_are_those_of_the_trace() -> None:
    model, train_x = table_model(smoothness=1.2)
    found = explain(model, QUERIES, classes=np.array(["dry", "sweet"]), feature_names=NAMES)
    with torch.no_grad():
        trace = model.trace(QUERIES)
        shares = trace.outputs.double().softmax(1)
    assert len(found) == len(QUERIES)
    for row, one in enumerate(found):
        assert one.prediction == ["dry", "sweet"][int(trace.outputs[row].argmax())]
        assert type(one.prediction) is str
        expected = dict(zip(["dry", "sweet"], shares[row].tolist(), strict=True))
        assert one.probabilities == pytest.approx(expected)
        indices = trace.neighbors.indices[row]
        assert [it.index for it in one.neighbors] == indices.tolist()
        weights = trace.solution.multipliers[row].tolist()
        assert [it.weight for it in one.neighbors] == pytest.approx(weights)
        assert sum(it.weight for it in one.neighbors) == pytest.approx(1)
        distances = ((QUERIES[row] - train_x[indices]) / 3).norm(dim=1).tolist()
        assert [it.distance for it in one.neighbors] == pytest.approx(distances, rel=1e-5)
        truths = ["sweet" if x[0] > 5 else "dry" for x in train_x[indices]]
        assert [it.label for it in one.neighbors] == truths
        for name in ("status", "smoothness", "residual"):
            assert getattr(one, name) == getattr(trace.solution, name)[row]
        assert one.n_weighted == sum(weight > 0 for weight in weights) >= 1
        assert torch.equal(one.inputs, QUERIES[row])
        for it in one.neighbors:  # computed from the bank
            torch.testing.assert_close(it.inputs, train_x[it.index], rtol=1e-5, atol=1e-5)
    assert {one.status for one in found} == {Status.SOLVED, Status.RAISED}


def test_regression() -> None:
    model, train_x = table_model("regression")
    (one, *_) = explain(model, QUERIES)
    assert one.prediction == pytest.approx(float(model(QUERIES)[0].detach()))
    assert one.probabilities is None
    targets = train_x.sum(1)[[it.index for it in one.neighbors]].tolist()
    assert [it.label for it in one.neighbors] == pytest.approx(targets)
    assert f"{one.prediction:.5g}" in str(one)
    assert f"{targets[0]:.5g}" in plain(one.table())


def test_dict_is_json() -> None:
    model, _ = table_model()
    (one,) = explain(model, QUERIES[:1], classes=np.array([3, 8]), feature_names=NAMES)
    brief, back = (
        json.loads(json.dumps(one.to_dict(inputs=it), allow_nan=False)) for it in (False, True)
    )
    assert back == one.to_dict(inputs=True)
    assert (back["prediction"], back["status"]) == (one.prediction, "solved")
    assert set(back["probabilities"]) == {"3", "8"}
    assert [it["weight"] for it in back["neighbors"]] == [it.weight for it in one.neighbors]
    assert set(back) - set(brief) == {"inputs", "feature_names", "differences"}
    assert set(back["neighbors"][0]) - set(brief["neighbors"][0]) == {"inputs"}
    assert back["inputs"] == pytest.approx(QUERIES[0].tolist())


def test_text_and_table_show_query_and_neighbors() -> None:
    model, _ = table_model()
    one = explain(model, QUERIES, classes=["[dry]", "sweet"], feature_names=NAMES)[2]
    text, table = str(one), plain(one.table(top=3))
    for shown in (text, table):
        assert f"prediction: {one.prediction} (probability " in shown
        assert one.account in shown
    assert one.account == "solved with smoothness 2, as asked"
    heaviest = sorted(one.neighbors, key=lambda it: -it.weight)
    assert one.heaviest(3) == heaviest[:3]
    assert f"{one.n_weighted} of {K} neighbors have weight" in text
    assert text.count("\n") == 4 + len(one.reasons) + one.n_weighted + 5
    for shown in (text, table.replace("\n", " ")):
        assert "distances between normalized inputs" in " ".join(shown.split())
    for it in heaviest[:3]:
        assert f"row {it.index}" in table
        assert f"{it.weight:.3f}" in table
        assert f"{it.inputs[1]:.4g}" in table
    assert f"row {heaviest[3].index}" not in table
    for name, value in zip(NAMES, one.inputs.tolist(), strict=True):
        (line,) = (line for line in table.splitlines() if f" {name} " in line)
        assert f" {value:.4g} " in line
    (one,) = explain(model, QUERIES[:1])  # without names
    assert type(one.prediction) is int
    assert set(one.probabilities) == {0, 1} >= {it.label for it in one.neighbors}
    table = plain(one.table(max_features=3))
    squares = [it.weight * ((it.inputs - one.inputs) / 3).square() for it in one.neighbors]
    order = sum(squares).argsort(descending=True).tolist()
    assert order != sorted(order)
    lines = [line for line in table.splitlines() if "feature" in line and "distances" not in line]
    listed = [line.split()[2] for line in lines]
    assert listed == [str(k) for k in order[:3]]  # those that differ the most
    assert "... 1 more, which differ less" in table
    assert one.differences.tolist() == pytest.approx(sum(squares).tolist(), rel=1e-4)
    with pytest.raises(InputError, match=r"figure: .* got .* \(4,\)"):
        one.figure()
    with pytest.raises(InputError, match="count: expected an integer of at least 1, got 0"):
        one.table(top=0)


@pytest.mark.parametrize("on_failure", ["abstain", "fallback"])
def test_rows_without_a_solution(on_failure: str) -> None:
    """Two training points at one place with different features contradict each other."""
    model, train_x = table_model(solver=ExactCip(on_failure=on_failure))
    model.bank_inputs[1] = model.bank_inputs[0]
    (one,) = explain(model, train_x[:1] + 1e-3)
    assert one.status is Status.INFEASIBLE
    assert one.account == "not solved: the neighbors contradict each other"
    found = json.loads(json.dumps(one.to_dict(), allow_nan=False))
    assert found["smoothness"] is found["residual"] is None
    if on_failure == "abstain":
        assert one.prediction is one.probabilities is found["prediction"] is None
        assert found["neighbors"][0]["weight"] is None
        assert "prediction: none (abstained)" in str(one)
        assert "none (abstained)" in plain(one.table())
    else:
        assert one.prediction in (0, 1)
        assert one.n_weighted == 1


@pytest.mark.parametrize("shape", [(1, 6, 6), (3, 6, 6), (6, 4)])
def test_images_are_drawn_beside_each_other(shape: tuple[int, ...]) -> None:
    model, train_x = image_model(shape, bounds=(0, 1))
    (one,) = explain(model, rand(1, *shape, seed=3), classes=["dark", "light"])
    figure = one.figure(top=3)
    images = [axes.images[0] for axes in figure.axes if axes.images]
    shown = [one.inputs, *(train_x[it.index] for it in one.heaviest(3))]
    assert len(images) == len(shown)
    for image, expected in zip(images, shown, strict=True):
        pixels = expected if expected.dim() == 2 else expected.movedim(0, -1).squeeze(-1)
        np.testing.assert_allclose(image.get_array(), pixels.numpy(), atol=1e-6)
    words = " ".join(text.get_text() for text in figure.texts)
    assert one.account in words
    for it in one.heaviest(3):
        assert f"weight {it.weight:.3f}" in words
        assert it.label in words
    assert one.figure(top=1).get_figwidth() < figure.get_figwidth()
    figure.savefig(stream := BytesIO(), format="png")
    assert stream.getvalue().startswith(b"\x89PNG")
    wide = replace(one, inputs=40 * one.inputs - 20, bounds=None).figure(top=2)
    pixels = wide.axes[0].images[0].get_array()  # without bounds: the range shown
    assert (float(pixels.min()), float(pixels.max())) == (0.0, 1.0)


def test_dollars_in_labels_are_dollars() -> None:
    model, x = image_model()
    figure = explain(model, x[:1], classes=["$5_$", "$5 to $9"])[0].figure(top=3)
    figure.savefig(BytesIO())
    assert {text.get_text() for text in figure.texts} & {"$5_$", "$5 to $9"}
    assert not any(text.get_parse_math() for text in figure.texts if "$" in text.get_text())


def test_frames_show_whether_labels_agree() -> None:
    model, _ = image_model()
    for one in explain(model, rand(3, 1, 6, 6, seed=3)):
        frames = [axes.spines["left"].get_edgecolor() for axes in one.figure(top=K).axes]
        colors = ["#" + bytes(round(255 * part) for part in rgba[:3]).hex() for rgba in frames]
        for it in one.heaviest(K):
            assert (AGREES if it.label == one.prediction else DIFFERS) in colors
        agree = {it.label == one.prediction for it in one.neighbors}
        assert (DIFFERS in colors) == (False in agree)


def test_another_embedding_needs_the_training_inputs() -> None:
    train_x, query = rand(N, 1, 6, 6), rand(1, 1, 6, 6, seed=3)
    embed = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    net = SequentialBackbone(embed, [nn.Tanh()], nn.Linear(3, 2), input_shape=(1, 6, 6))
    model = defend(net, train_x, torch.arange(N) % 2, n_neighbors=K)
    (blind,) = explain(model, query)
    assert all(it.inputs is None for it in blind.neighbors)
    assert "inputs" not in blind.to_dict(inputs=True)["neighbors"][0]
    with pytest.raises(InputError, match="train_x: expected"):
        blind.figure()
    (seeing,) = explain(model, query, train_x=train_x.numpy())
    assert all(torch.equal(it.inputs, train_x[it.index]) for it in seeing.neighbors)
    assert seeing.figure().axes
    layers = nn.Sequential(nn.Flatten(), nn.Linear(36, 36), nn.Linear(36, 2))
    model = defend(layers, train_x, torch.arange(N) % 2, n_neighbors=K)
    for it in explain(model, query)[0].neighbors:  # a user's net without an embedding
        torch.testing.assert_close(it.inputs, train_x[it.index])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": ["a"]}, "classes: expected 2 names, one for each output, got 1"),
        ({"classes": ["a", "a"]}, "classes: expected distinct names, got repeated a"),
        ({"feature_names": ["a"]}, r"feature_names: expected one for each input \(4,\), got 1"),
        ({"train_x": torch.zeros(3, D)}, r"train_x: expected shape \(60, 4\)"),
        ({"train_x": 10 * rand(N, D).flip(0)}, "train_x: .*in its order, got others in row"),
        ({"train_x": 10 * rand(N, D).double()}, "train_x: .*float32, got .*float64"),
        ({"x": torch.zeros(1, D + 1)}, r"x: expected shape \(1, 4\)"),
    ],
)
def test_refusals(options: dict[str, object], message: str) -> None:
    model, _ = table_model()
    with pytest.raises(InputError, match=message):
        explain(model, **({"x": QUERIES} | options))


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_global_map_is_explained_by_its_support(task: str) -> None:
    model, train_x = table_model(task, scope="global")
    found = explain(model, QUERIES, feature_names=NAMES)
    with torch.no_grad():
        trace, outputs = model.trace(QUERIES), model(QUERIES)
        features = model.bank_features.double()
    assert len({len(one.neighbors) for one in found}) > 1  # narrower supports are not padded
    for row, one in enumerate(found):
        weights = torch.tensor([it.weight for it in one.neighbors], dtype=torch.float64)
        assert bool((weights > 0).all())
        assert float(weights.sum()) == pytest.approx(1, abs=1e-6)
        assert one.n_weighted == len(one.neighbors)
        image = weights @ features[[it.index for it in one.neighbors]]
        answer = model.backbone.head(image.float()[None])[0]
        torch.testing.assert_close(answer, outputs[row], rtol=1e-4, atol=1e-4)
        assert one.heaviest(2) == list(one.neighbors[:2])
        assert (one.scope, one.gap) == ("global", float(trace.gap[row]))
        assert one.smoothness == model.smoothness
        for it in one.neighbors:
            torch.testing.assert_close(it.inputs, train_x[it.index], rtol=1e-5, atol=1e-5)
    one = found[0]
    assert one.account.startswith(f"global map, smoothness {one.smoothness:.3g}, duality gap")
    assert f"{one.n_weighted} training points have weight" in str(one)
    assert one.account in " ".join(plain(one.table()).split())
    back = json.loads(json.dumps(one.to_dict(), allow_nan=False))
    assert (back["scope"], back["gap"]) == ("global", one.gap)
    rough = replace(one, status=Status.UNSOLVED, gap=0.25)
    assert rough.account.endswith("gap 2.5e-01, which is larger than it should be")
    local = explain(table_model(task)[0], QUERIES)[0]
    assert (local.scope, local.to_dict()["gap"]) == ("local", None)


def test_features_are_in_the_order_of_the_means_that_are_shown() -> None:
    """The first feature is scattered around the query, the second one is off on one side; features
    that differ by rounding alone are not shown."""
    model, _ = table_model()
    one = explain(model, QUERIES[:1], feature_names=NAMES)[0]
    steps = [[4.0, 1.0, 0.0, 0.0], [-4.0, 1.0, 0.0, 0.0]]
    points = [
        replace(it, weight=0.5, inputs=one.inputs + torch.tensor(step))
        for it, step in zip(one.neighbors, steps, strict=False)
    ]
    lines = str(replace(one, neighbors=tuple(points))).splitlines()
    assert lines[-2].startswith("features that differ most")
    assert lines[-1].startswith("  [sugar]: ")  # the others do not differ
    same = [replace(it, inputs=one.inputs + 1e-8) for it in one.neighbors]
    assert "differ most" not in str(replace(one, neighbors=tuple(same)))


def test_units_of_features_are_named_only_where_features_are_shown() -> None:
    model, x = table_model()
    layers = nn.Sequential(nn.Linear(D, 3), nn.ReLU(), nn.Linear(3, 2))
    hidden = defend(layers, x, model.bank_labels, inputs="features", n_neighbors=K)
    for given, shown in ((model, True), (hidden, False)):
        one = explain(given, QUERIES[:1])[0]
        for text in (str(one), plain(one.table())):
            assert ("features in input units" in text) is shown
