"""OTAD as a module: what it computes, how it travels, what it refuses."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path

import pytest
import torch
from factories import D, N, model, net, points
from torch import Tensor, nn

from otad.cip import CipProblem, ExactCip, Status
from otad.errors import InputError
from otad.model import bank as bank_file
from otad.model import otad as defense
from otad.model.bank import FeatureBank
from otad.model.defend import defend
from otad.model.otad import OTAD
from otad.nets import SequentialBackbone, fc_resnet
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
        bank = FeatureBank(
            ours.bank_inputs[others], ours.bank_features[others], ours.bank_labels[others], "less"
        )
        without = OTAD(ours.backbone, bank, n_neighbors=K)
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


def test_a_bank_that_is_not_resident(tmp_path: Path) -> None:
    resident = model()
    mapped = model(resident=False, bank_path=str(tmp_path / "bank.safetensors"))
    assert torch.equal(mapped(QUERIES), resident(QUERIES))
    names = {"backbone." + name for name in resident.backbone.state_dict()} | {"_extra_state"}
    assert set(mapped.state_dict()) == names
    assert set(resident.state_dict()) - names == {"bank_inputs", "bank_features", "bank_labels"}
    mapped.load_state_dict(mapped.state_dict())
    with pytest.raises(InputError, match=r"state_dict: .*bank .*, got one with"):
        mapped.load_state_dict(model(seed=1, resident=False).state_dict())


def test_batches_of_any_size_agree() -> None:
    ours = model()
    x = points(64, 7)
    with torch.no_grad():
        whole = ours.trace(x)
        single = [ours.trace(row) for row in x.split(1)]
    indices = torch.cat([trace.neighbors.indices for trace in single])
    assert torch.equal(indices, whole.neighbors.indices)
    outputs = torch.cat([trace.outputs for trace in single])
    torch.testing.assert_close(outputs, whole.outputs, rtol=1e-5, atol=1e-6)


def test_the_search_is_built_once_and_again_for_other_points(monkeypatch) -> None:
    built = Counter()

    class Counting(TorchSearch):
        def __init__(self, points: Tensor) -> None:
            built["searches"] += 1
            super().__init__(points)

    monkeypatch.setitem(bank_file.SEARCHES, "torch", Counting)
    ours = model()
    for _ in range(3):
        ours(QUERIES)
    assert built["searches"] == 1
    ours.load_state_dict(model(seed=1).state_dict())
    ours(QUERIES)
    assert built["searches"] == 2
    ours.double()(QUERIES.double())
    assert built["searches"] == 3


def test_a_bank_that_comes_without_its_name_is_searched_anew() -> None:
    ours, theirs = (model(seed) for seed in (0, 1))
    ours(QUERIES)
    state = theirs.state_dict()
    del state["_extra_state"]
    ours.load_state_dict(state, strict=False)
    assert ours._searched is None
    assert torch.equal(ours(QUERIES), theirs(QUERIES))


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
        loaded = defense.load(tmp_path)
        expected = made(QUERIES)
    for ours in (made, loaded):
        queries = QUERIES.clone().requires_grad_()
        outputs = ours(queries)
        assert torch.equal(outputs, expected)
        outputs.sum().backward()
        assert queries.grad is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_precision_bank_is_near(dtype: torch.dtype) -> None:
    half = model(bank_dtype=dtype)
    assert half.bank_inputs.dtype == half.bank_features.dtype == dtype
    agree = (half(QUERIES).argmax(1) == model()(QUERIES).argmax(1)).float().mean()
    assert agree >= 0.9


def test_defending_a_plain_sequential() -> None:
    """Its weights are shared and its features are those before the last layer."""
    net, x = sequential(), points(N, 0)
    ours = defend(net, x, torch.arange(N) % 3, n_neighbors=K)
    torch.testing.assert_close(ours.bank_features, net[:-1](x).detach())
    torch.testing.assert_close(ours(x), net(x), rtol=1e-3, atol=1e-4)
    assert ours.backbone.head.weight is net[-1].weight
    values = trained(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, 1))
    defended = defend(values, x, x.sum(1), n_neighbors=K)
    assert defended(QUERIES).shape == (40,)
    torch.testing.assert_close(defended(x), values(x)[:, 0], rtol=1e-3, atol=1e-4)
    images = defend(
        nn.Sequential(nn.Flatten(), *net), x[:, None, None], torch.arange(N) % 3, n_neighbors=K
    )
    assert torch.equal(images(QUERIES[:, None, None]), ours(QUERIES))


def test_defending_a_net_that_works_in_place() -> None:
    """The bank keeps the inputs themselves, and x is left as it is."""
    layers, x = sequential(), points(N, 0) - 0.5
    plain, in_place = (
        defend(nn.Sequential(nn.ReLU(inplace=how), *layers), x, torch.arange(N) % 3, n_neighbors=K)
        for how in (False, True)
    )
    assert torch.equal(in_place.bank_inputs, x)
    assert torch.equal(x, points(N, 0) - 0.5)
    assert torch.equal(in_place.bank_features, plain.bank_features)
    assert torch.equal(in_place(QUERIES), plain(QUERIES))


def test_dimensions_must_be_equal() -> None:
    with pytest.raises(InputError, match=r"dimension 5 .* got dimension 4"):
        defend(sequential(width=4), points(N, 0), torch.arange(N) % 3)
    with pytest.raises(InputError, match=r"bank: expected features of dimension 5 .* got 2"):
        OTAD(net(), FeatureBank(*[torch.zeros(9, 2)] * 2, torch.zeros(9).long(), "two"))


def test_defending_reports_progress_and_leaves_dropout_off() -> None:
    told: list[tuple[int, int]] = []
    net = trained(nn.Linear(D, D), nn.Dropout(0.9), nn.Linear(D, 3)).train()
    x, y = points(N, 0), torch.arange(N) % 3
    ours = defend(net, x, y, batch_size=50, progress=lambda *rows: told.append(rows))
    assert told == [(50, N), (N, N)]
    torch.testing.assert_close(ours.bank_features, net[0](x).detach())


X, Y = points(N, 0), torch.arange(N) % 3
BAD_INPUTS = [
    (torch.full((2, D), torch.nan), r"x: expected finite values, got nan at \(0, 0\)"),
    (torch.zeros(2, D + 1), r"x: expected shape \(2, 5\) as the net declares, got \(2, 6\)"),
    (torch.zeros(2, 1, D), r"x: expected 2 axes \(B,5\), got shape \(2, 1, 5\)"),
    (torch.zeros(2, D).double(), "x: expected dtype float32, got float64"),
    (torch.zeros(2, D).byte(), "x: expected dtype float32, got uint8"),
    (torch.full((2, D), 1.5), r"declared bounds \(0.0, 1.0\), got values from 1.5 to 1.5"),
    (torch.zeros(0, D), r"x: expected at least one entry along B, got shape \(0, 5\)"),
    ([[0.0] * D], r"x: expected a torch.Tensor \(B,5\), got list"),
]


@pytest.mark.parametrize(("x", "message"), BAD_INPUTS)
def test_refused_inputs(x: object, message: str) -> None:
    bounded = net(bounds=(0, 1))
    ours = defend(bounded, X, Y)
    with pytest.raises(InputError, match=message):
        ours(x)
    with pytest.raises(InputError, match=message):
        defend(bounded, x, Y)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"y": Y + 1}, "y: expected labels from 0 to 2, got the unknown label 3"),
        ({"y": Y - 1}, "y: expected labels from 0 to 2, got the unknown label -1"),
        ({"y": Y[1:]}, r"y: expected shape \(70,\) with one target per input, got \(69,\)"),
        ({"y": Y.float()}, "y: expected dtype int64, got float32"),
        ({"y": Y.tolist()}, r"y: expected a torch.Tensor \(B\), got list"),
        ({"n_neighbors": N + 1}, "n_neighbors: expected at most the 70 points .* got 71 and 0"),
        ({"n_neighbors": N, "solver": ExactCip(spares=1)}, "got 70 and 1 spares"),
        ({"n_neighbors": 0}, "n_neighbors: expected an integer of at least 1, got 0"),
        ({"smoothness": 0.0}, "smoothness: expected a finite value above 0 .* got 0"),
        ({"smoothness": torch.inf}, "smoothness: expected a finite value above 0 .* got inf"),
        ({"smoothness": torch.nan}, "smoothness: expected a finite value above 0 .* got nan"),
        ({"strong_convexity": 2.0}, r"above strong_convexity \(2.0\), got 2"),
        ({"strong_convexity": torch.nan}, r"above strong_convexity \(nan\), got 2"),
        ({"solver": ExactCip(max_smoothness=1.0)}, "max_smoothness: expected at least .* 2.0, got"),
        ({"search": "annoy"}, "search: expected one of torch, faiss, got 'annoy'"),
        ({"bank_dtype": torch.float64}, "dtype: expected float16, bfloat16 or float32"),
        ({"net": nn.Linear(D, 3)}, "net: expected a Backbone or a non-empty nn.Sequential"),
    ],
)
def test_refused_settings(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        defend(**({"net": net(), "x": X, "y": Y} | options))


def test_settings_are_refused_before_the_bank_is_built() -> None:
    class Never(SequentialBackbone):
        def transport(self, e: Tensor) -> tuple[Tensor, Tensor]:
            raise RuntimeError("the bank was built")

    never = Never(None, [], nn.Linear(D, 3), input_shape=(D,))
    with pytest.raises(InputError, match="n_neighbors"):
        defend(never, X, Y, n_neighbors=N + 1)
    with pytest.raises(RuntimeError, match="the bank was built"):
        defend(never, X, Y)


@pytest.mark.parametrize("shape", [(1,), (1, 1, 1)])
def test_inputs_of_one_number(shape: tuple[int, ...], generator: torch.Generator) -> None:
    x = torch.randn(30, *shape, generator=generator)
    y = (x.flatten() > 0).long()
    ours = defend(fc_resnet(shape, 2, blocks=1), x, y, n_neighbors=3)
    assert ours(x).shape == (30, 2)
    shown = "bank=30 points, n_neighbors=3, smoothness=2, strong_convexity=0, mode=consistent"
    assert shown in repr(ours)
