"""OTAD as a module: what it computes, how it is copied, what it refuses."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from factories import D, N, model, net, points, refuses
from torch import Tensor, nn

from otad.cip import CipProblem, ExactCip, Status
from otad.cip.whole_bank.map import WholeBank
from otad.errors import InputError
from otad.model.bank import FeatureBank
from otad.model.defend import defend
from otad.model.loading import load
from otad.model.otad import OTAD
from otad.nets import fc_resnet
from otad.search.neighbors import TorchSearch

K = 6


def trained(*layers: nn.Module) -> nn.Sequential:
    """A user's own net, with weights that do not depend on the global state."""
    drawn_by = torch.Generator().manual_seed(5)
    net = nn.Sequential(*layers)
    with torch.no_grad():
        for weight in net.parameters():
            weight.uniform_(-0.5, 0.5, generator=drawn_by)
    return net


def sequential(width: int = D) -> nn.Sequential:
    return trained(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, width), nn.Linear(width, 3))


QUERIES = points(40, 99)


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize(
    ("convexity", "solver"),
    [(0.0, ExactCip()), (0.0, ExactCip(mode="paper", climb=(0.3, 0.1))), (-0.4, ExactCip())],
)
def test_it_is_its_parts_put_together(task: str, convexity: float, solver: ExactCip) -> None:
    """Embedding, neighbors by all distances, convex integration and head, each by hand."""
    ours = model(task=task, smoothness=1.1, strong_convexity=convexity, solver=solver)
    embedded = (QUERIES - 0.5) / 0.3
    bank_inputs = (points(N, 0) - 0.5) / 0.3
    bank_features = ours.backbone.transport(bank_inputs)[0].detach()
    distances = (embedded.double()[:, None] - bank_inputs.double()).norm(dim=2)
    nearest = distances.sort(dim=1, stable=True).indices[:, :K]
    pairs = bank_inputs[nearest], bank_features[nearest]
    solution = solver(CipProblem(embedded, *pairs, 1.1, convexity))
    head = ours.backbone.head
    outputs = (solution.image @ head.weight.T + head.bias).detach()

    trace = ours.trace(QUERIES)
    assert torch.equal(trace.neighbors.indices, nearest)
    torch.testing.assert_close(trace.neighbors.distances, distances.gather(1, nearest))
    assert torch.equal(trace.labels, ours.bank_labels[nearest])
    assert torch.equal(trace.solution.status, solution.status)
    assert (trace.solution.status == Status.RAISED).any()
    torch.testing.assert_close(trace.solution.image, solution.image)
    expected = outputs if task == "classification" else outputs[:, 0]
    torch.testing.assert_close(trace.outputs, expected)
    assert torch.equal(ours(QUERIES), trace.outputs)


def test_training_points_map_to_themselves() -> None:
    """A consistent map passes through every pair (x_i, z_i), so the net's own answer comes out."""
    ours = model(smoothness=1.2)
    with torch.no_grad():
        trace = ours.trace(points(N, 0))
    assert torch.equal(trace.neighbors.indices[:, 0], torch.arange(N))
    assert 0 < (trace.solution.status == Status.RAISED).sum() < N
    torch.testing.assert_close(trace.solution.image, ours.bank_features, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(trace.outputs, ours.backbone(points(N, 0)), rtol=1e-3, atol=1e-4)


def test_an_excluded_point_is_as_if_it_were_not_in_the_bank() -> None:
    ours = model()
    rows = torch.tensor([0, 17, N - 1])
    trace = ours.trace(points(N, 0)[rows], exclude=rows)
    assert not (trace.neighbors.indices == rows[:, None]).any()
    for number, row in enumerate(rows.tolist()):
        others = torch.arange(N) != row
        without = ours.replace(bank=ours.bank.select(others.nonzero()[:, 0]))
        expected = without(points(N, 0)[row : row + 1])[0]
        torch.testing.assert_close(trace.outputs[number], expected)


@pytest.mark.parametrize("convexity", [0.0, -0.4])
@pytest.mark.parametrize("mode", ["consistent", "paper"])
def test_gradient_is_that_of_finite_differences(mode: str, convexity: float) -> None:
    solver = ExactCip(mode=mode)
    ours = model(smoothness=1.3, strong_convexity=convexity, solver=solver).double()
    x = QUERIES[:6].double().requires_grad_()
    with torch.no_grad():
        found = [ours.trace(x + side * 1e-6) for side in (-1, 0, 1)]
    assert all(torch.equal(t.neighbors.indices, found[0].neighbors.indices) for t in found)
    assert torch.autograd.gradcheck(ours, x, eps=1e-6, atol=1e-6, rtol=1e-4, fast_mode=True)
    (slope,) = torch.autograd.grad(ours(x)[:, 0].sum(), x)
    assert (slope.norm(dim=1) > 1e-3).sum() >= 3  # where one neighbor has all weight it is 0


@pytest.mark.parametrize("scope", ["local", "global"])
def test_a_state_dict_travels_to_a_fresh_module(scope: str) -> None:
    old, fresh = model(seed=1, scope=scope), model(seed=2, scope=scope, smoothness=9.0)
    with torch.no_grad():
        expected, before = old(QUERIES), fresh(QUERIES)  # both have built search and map by now
        assert not torch.equal(expected, before)
        fresh.load_state_dict(old.state_dict())
        assert torch.equal(fresh.bank_inputs, old.bank_inputs)
    assert fresh.bank_fingerprint == old.bank_fingerprint != model(seed=2).bank_fingerprint
    assert fresh.bank.fingerprint == old.bank_fingerprint
    assert all(isinstance(value, Tensor) for value in old.state_dict().values())
    assert ("answerer.levels" in old.state_dict()) == (scope == "global")
    if scope == "global":  # levels carry their curvature; a solver does not
        assert (fresh.smoothness, fresh.potential.sweeps) == (old.smoothness, old.potential.sweeps)
        assert torch.equal(fresh(QUERIES), expected)
    else:
        assert torch.equal(fresh.replace(smoothness=2.0)(QUERIES), expected)
        state = model(seed=3).state_dict()
        del state["_extra_state"]  # a bank without its name is searched anew, too
        fresh.load_state_dict(state, strict=False)
        assert torch.equal(fresh.bank_inputs, state["bank_inputs"])
        assert fresh._searched is None


@pytest.mark.parametrize("scope", ["local", "global"])
def test_a_bank_that_is_not_resident(tmp_path: Path, scope: str) -> None:
    resident = model(scope=scope)
    mapped = model(scope=scope, resident=False, bank_path=str(tmp_path / "bank.safetensors"))
    assert torch.equal(mapped(QUERIES), resident(QUERIES))
    absent = set(resident.state_dict()) - set(mapped.state_dict())
    assert absent == {"bank_inputs", "bank_features", "bank_labels"}
    mapped.load_state_dict(mapped.state_dict())
    with pytest.raises(InputError, match=r"state_dict: .*bank .*, got one with"):
        mapped.load_state_dict(model(seed=1, scope=scope, resident=False).state_dict())
    if scope == "global":
        other = model(scope=scope, resident=False, smoothness=9.0)
        mapped.load_state_dict(other.state_dict())
        assert torch.equal(mapped(QUERIES), other(QUERIES))


@pytest.mark.parametrize(("scope", "kind"), [("local", TorchSearch), ("global", WholeBank)])
def test_search_and_map_are_built_once_and_again_for_other_points(
    monkeypatch: pytest.MonkeyPatch, scope: str, kind: type
) -> None:
    built, create = [], kind.__init__

    def counting(self: object, *args: object, **options: object) -> None:
        built.append(self)
        create(self, *args, **options)

    ours, other = model(scope=scope), model(seed=1, scope=scope)
    monkeypatch.setattr(kind, "__init__", counting)
    for _ in range(3):
        ours(QUERIES)
    assert len(built) == 1
    ours.load_state_dict(other.state_dict())
    ours(QUERIES)
    assert len(built) == 2
    ours.bank_inputs[0] += 0.1
    ours(QUERIES)
    ours(QUERIES)
    assert len(built) == 3
    ours.double()(QUERIES.double())
    assert len(built) == 4


def test_a_search_that_was_given_is_forgotten_when_the_bank_changes_in_place() -> None:
    ours = model()
    ours.use_search(TorchSearch(ours.bank_inputs.clone()))
    assert copy.deepcopy(ours)._given is not None
    ours.bank_inputs[:] = ours.bank_inputs.flip(0)
    keys = ours.query_keys(QUERIES)
    expected = TorchSearch(ours.bank_inputs)(keys, K).indices
    for one in (copy.deepcopy(ours), ours):
        assert torch.equal(one.neighbors(keys, K).indices, expected)


def test_batches_of_any_size_agree() -> None:
    ours = model()
    x = points(20, 7)
    with torch.no_grad():
        whole = ours.trace(x)
        single = [ours.trace(row) for row in x.split(1)]
    indices = torch.cat([trace.neighbors.indices for trace in single])
    assert torch.equal(indices, whole.neighbors.indices)
    outputs = torch.cat([trace.outputs for trace in single])
    torch.testing.assert_close(outputs, whole.outputs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scope", ["local", "global"])
def test_a_copy_is_whole_but_for_search_and_map(scope: str) -> None:
    ours = model(scope=scope)
    expected = ours(QUERIES)
    twin = copy.deepcopy(ours)
    assert twin._searched is getattr(twin.answerer, "_map", None) is None
    assert torch.equal(twin(QUERIES), expected)
    assert twin.bank_inputs is not ours.bank_inputs


def test_a_model_made_or_loaded_in_inference_mode_is_like_any_other(tmp_path: Path) -> None:
    backbone, x = net(), points(N, 0)
    with torch.inference_mode():
        made = defend(backbone, x, (3 * x[:, 0]).long(), n_neighbors=K)
        made.save(tmp_path)
        loaded = load(tmp_path)
        expected = made(QUERIES)
    for ours in (made, loaded):
        queries = QUERIES.clone().requires_grad_()
        outputs = ours(queries)
        assert torch.equal(outputs, expected)
        outputs.sum().backward()
        assert queries.grad is not None


def test_defending_a_plain_sequential() -> None:
    """Its weights are shared and its features are those before the last layer."""
    net, x = sequential(), points(N, 0)
    ours = defend(net, x, torch.arange(N) % 3, n_neighbors=K)
    torch.testing.assert_close(ours.bank_features, net[:-1](x).detach())
    torch.testing.assert_close(ours(x), net(x), rtol=1e-3, atol=1e-4)
    assert ours.backbone.head.weight is net[-1].weight
    values = trained(nn.Linear(D, D), nn.Dropout(0.9), nn.Linear(D, 1)).train()
    defended = defend(values, x, x.sum(1), n_neighbors=K)
    assert defended(QUERIES).shape == (40,)
    torch.testing.assert_close(defended.bank_features, values[0](x).detach())  # no dropout
    torch.testing.assert_close(defended(x), values(x)[:, 0], rtol=1e-3, atol=1e-4)
    flat = nn.Sequential(nn.Flatten(), *net)
    images = defend(flat, x[:, None, None], torch.arange(N) % 3, n_neighbors=K)
    assert torch.equal(images(QUERIES[:, None, None]), ours(QUERIES))
    shifted = x - 0.5
    plain, in_place = (
        defend(nn.Sequential(nn.ReLU(inplace=how), *net), shifted, torch.arange(N) % 3)
        for how in (False, True)
    )
    assert torch.equal(in_place.bank_inputs, shifted)
    assert torch.equal(shifted, x - 0.5)
    assert torch.equal(in_place(QUERIES), plain(QUERIES))


X, Y = points(N, 0), torch.arange(N) % 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"x": torch.full((N, D), torch.nan)}, r"x: expected finite values, got nan at \(0, 0\)"),
        ({"x": {1.0}}, r"x: expected a torch.Tensor.*, got set"),
        ({"y": ["a"] * N}, "y: expected class numbers, as the model has no names"),
        ({"y": Y + 1}, "y: expected labels from 0 to 2, got the unknown label 3"),
        ({"y": Y[1:]}, r"y: expected shape \(70,\) with one target per input, got \(69,\)"),
        ({"n_neighbors": N + 1}, "n_neighbors: expected at most the 70 points .* got 71$"),
        ({"n_neighbors": N, "solver": ExactCip(spares=1)}, "got 70 and 1 spares"),
        ({"n_neighbors": 0}, "n_neighbors: expected an integer of at least 1, got 0"),
        ({"smoothness": 0.0}, "smoothness: expected a finite value above 0 .* got 0"),
        ({"smoothness": torch.inf}, "smoothness: .* got inf"),
        ({"smoothness": torch.nan}, "smoothness: .* got nan"),
        ({"strong_convexity": 2.0}, r"above strong_convexity \(2.0\), got 2"),
        ({"strong_convexity": torch.nan}, r"above strong_convexity \(nan\), got 2"),
        ({"solver": ExactCip(max_smoothness=1.0)}, "max_smoothness: expected at least .* 2.0, got"),
        ({"search": "annoy"}, "search: expected one of torch, faiss, got 'annoy'"),
        ({"bank_dtype": torch.float64}, "dtype: expected float16, bfloat16 or float32"),
        ({"net": None}, "net: expected a module, or inputs='pixels'"),
        ({"inputs": "rows"}, "inputs: expected one of auto, features, pixels, got 'rows'"),
        ({"bounds": (0.0, 2.0)}, "bounds: expected None, .* None, got .*2.0"),
    ],
)
def test_refused_settings(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        defend(**({"net": net(), "x": X, "y": Y} | options))


def test_a_model_refuses_bad_queries_other_banks_and_settings_early(monkeypatch) -> None:
    ours = defend(net(bounds=(0, 1)), X, Y)
    for x, message in (
        (torch.zeros(2, D + 1), r"x: expected shape \(2, 5\) as the net declares, got \(2, 6\)"),
        (torch.full((2, D), 1.5), r"declared bounds \(0.0, 1.0\), got values from 1.5 to 1.5"),
    ):
        with pytest.raises(InputError, match=message):
            ours(x)
    with pytest.raises(InputError, match=r"bank: expected features of dimension 5 .* got 2"):
        OTAD(net(), FeatureBank(*[torch.zeros(9, 2)] * 2, torch.zeros(9).long(), "two"))
    values = fc_resnet((D,), 1, task="regression", blocks=1)
    for other, labels, message in (
        (net(), Y.float(), "bank: expected labels from 0 to 2, .* got values"),
        (net(), Y + 7, "bank: expected labels from 0 to 2, .* got labels up to 9"),
        (values, Y, "bank: expected values, got labels up to 2"),
    ):
        with pytest.raises(InputError, match=message):
            OTAD(other, FeatureBank(X, X, labels, "other"))
    monkeypatch.setattr(FeatureBank, "build", None)
    with pytest.raises(InputError, match="n_neighbors"):
        defend(net(), X, Y, n_neighbors=N + 1)
    with pytest.raises(TypeError, match="not callable"):
        defend(net(), X, Y)


@pytest.mark.parametrize("shape", [(1,), (1, 1, 1)])
def test_inputs_of_one_number(shape: tuple[int, ...]) -> None:
    x = points(30, dim=1).view(-1, *shape)
    ours = defend(fc_resnet(shape, 2, blocks=1), x, (x.flatten() > 0.5).long(), n_neighbors=3)
    assert ours(x).shape == (30, 2)
    shown = "bank=30 points, n_neighbors=3, smoothness=2, strong_convexity=0, mode=consistent"
    assert shown in repr(ours)


@pytest.mark.parametrize(
    ("name", "value"), [("n_neighbors", 3), ("metric", nn.Identity()), ("smoothness", 2.0)]
)
def test_settings_of_a_finished_model_stay(name: str, value: object) -> None:
    made = model()
    refuses(setattr, made, name, value, match=f"{name}: expected no change .*`replace`")
    assert made.replace(n_neighbors=3).n_neighbors == 3 != made.n_neighbors


def test_a_model_prints_no_tensor_that_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """To print a bank takes long, and on a GPU reads it back, which no graph allows."""
    made, x = model(), points(3, seed=1)
    monkeypatch.setattr(torch.Tensor, "__repr__", lambda *_, **__: pytest.fail("it is printed"))
    assert made(x).shape == (3, 3)
    assert made.replace(n_neighbors=3)(x).shape == (3, 3)
