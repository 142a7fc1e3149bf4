"""The hull rule finds what its formula says, whatever is pruned; and what the cell rule rests on:
one set of neighbors, one map. What cannot be certified is refused, with the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from certify.small import distance_to, global_model, plane_model, queries
from factories import refuses
from torch import Tensor, nn

from otad.certify import Certificate, bisectors, certify, certify_values, hull
from otad.certify.bisectors import BankBisectors
from otad.certify.cell import cell_radius, steady_map
from otad.certify.half_spaces import HalfSpaces
from otad.certify.hull import Entrance
from otad.certify.input_reach import input_reach
from otad.certify.rules import Batch
from otad.cip import CipProblem, ExactCip, Status
from otad.errors import InputError, SolverError
from otad.model.bank import FeatureBank
from otad.model.defend import defend
from otad.model.otad import OTAD
from otad.nets import LinearHead, SequentialBackbone, fc_resnet

ZERO = torch.zeros(1, 2)


def slow_radius(model: OTAD, x: Tensor) -> np.ndarray:
    """min_i max(K-th largest_j b_ij, turn_i), as it is written down, in loops."""
    bank = model.bank_inputs.double().numpy()
    features = model.bank_features.double().numpy()
    weight = model.backbone.head.weight.detach().double().numpy()
    bias = model.backbone.head.bias.detach().double().numpy()
    low, searched = model.strong_convexity, model.n_searched
    std = model.backbone.std.double().numpy()
    chosen = model(x).argmax(1).numpy()
    result = []
    for query, c in zip(model.backbone.embed(x).double().numpy(), chosen, strict=True):
        squares = ((bank - query) ** 2).sum(1)
        radii = []
        for i in range(len(bank)):
            gaps = np.linalg.norm((bank[i] - bank) / std, axis=1)
            fronts = ((squares[i] - squares) / 2)[gaps > 0] / gaps[gaps > 0]
            enter = max(0.0, sorted(fronts)[-searched]) if len(fronts) >= searched else 0.0
            vote = weight @ (features[i] + low * (query - bank[i])) + bias
            rivals = np.delete(np.arange(len(vote)), c)
            margins = np.maximum(vote[c] - vote[rivals], 0)
            pulls = abs(low) * np.linalg.norm((weight[c] - weight[rivals]) / std, axis=1)
            with np.errstate(all="ignore"):
                turns = np.where(margins > 0, margins / pulls, 0)
            radii.append(max(enter, turns.min()))
        result.append(min(radii))
    return np.array(result)


@pytest.mark.parametrize("low", [0.0, -0.4, 0.3])
@pytest.mark.parametrize("neighbors", [1, 4])
def test_pruned_search_finds_the_least(
    monkeypatch: pytest.MonkeyPatch, low: float, neighbors: int
) -> None:
    settings = {"points": 35, "copies": 4, "std": (0.5, 1.5)}
    model = plane_model(3, n_neighbors=neighbors, strong_convexity=low, **settings)
    x = queries(model, 10, 3)
    monkeypatch.setattr(hull.Entrance, "group", 1)  # the K-th largest, no groups
    monkeypatch.setattr(hull.Entrance, "spare", 100)
    found, expected = certify(model, x), slow_radius(model, x)
    radius = found.radius.numpy()
    hulls = np.isfinite(expected) & [rule == "hull" for rule in found.rules]
    assert np.allclose(radius[hulls], expected[hulls], atol=3e-5)
    assert (hulls & (expected > 0)).sum() >= 3
    assert (radius >= expected - 3e-5).all()


def test_groups_only_help(monkeypatch: pytest.MonkeyPatch) -> None:
    model = plane_model(4, points=80, n_neighbors=2, noise=0.2)
    x = queries(model, 30, 4)
    grouped = certify(model, x).radius
    monkeypatch.setattr(hull.Entrance, "group", 1)
    single = certify(model, x).radius
    assert (grouped >= single - 1e-9).all()
    assert (grouped > 1.02 * single).sum() >= 4


@pytest.mark.parametrize("scope", ["local", "global"])
def test_small_blocks_and_little_memory_change_nothing(
    monkeypatch: pytest.MonkeyPatch, scope: str
) -> None:
    model = plane_model(6, points=150, n_neighbors=3, strong_convexity=-0.1)
    if scope == "global":
        model = global_model(6)
    x = queries(model, 25, 6)
    whole = certify(model, x)
    reported: list[tuple[int, int]] = []
    monkeypatch.setattr(bisectors, "FIRST_BLOCK", 2)
    monkeypatch.setattr(bisectors, "LARGEST_BLOCK", 5)
    monkeypatch.setattr(bisectors, "BYTES", 2**10)
    parts = certify(model, x, batch_size=7, progress=lambda *steps: reported.append(steps))
    rounding = 1e-9 if scope == "local" else 1e-5
    assert torch.allclose(parts.radius, whole.radius, rtol=rounding, atol=rounding / 100)
    assert parts.rules == whole.rules
    assert reported == [(7, 25), (14, 25), (21, 25), (25, 25)]


def test_far_from_the_origin_the_nearest_are_still_the_rivals() -> None:
    """In float64, where the embedding loses nothing there."""
    drawn_by = torch.Generator().manual_seed(9)
    bank, place = torch.randn(400, 2, generator=drawn_by), torch.randn(20, 2, generator=drawn_by)
    stretch = torch.ones(2, dtype=torch.float64)
    every, limit = torch.arange(400).expand(20, 400), torch.full((20,), torch.inf).double()
    found = []
    for away in (0.0, 2.0**20):
        points = (bank.double() * 2**20).round() / 2**20 + away
        queries = (place.double() * 2**20).round() / 2**20 + away
        around = BankBisectors(queries, points, stretch)
        found.append(Entrance(around, 3)(torch.arange(20), every, limit))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_joint_distance_is_a_tight_bound(count: int) -> None:
    drawn = np.random.default_rng(count)
    ratios = []
    for _ in range(60):
        normals = drawn.normal(size=(count, 5)) + 1.0
        heights = drawn.uniform(-0.3, 1.0, size=count)
        exact = distance_to(normals, heights)
        gram = torch.tensor(normals @ normals.T)
        found = joint_distance(gram, torch.tensor(heights), gram.diagonal().clone())
        assert found <= exact * (1 + 1e-9)
        if exact > 0.05:
            ratios.append(found / exact)
    assert np.mean(ratios) > 0.97
    zero = torch.zeros(2, 2, dtype=torch.float64)
    assert joint_distance(zero, zero[0], zero[0]) == 0


def joint_distance(*given: Tensor) -> float:
    spaces = HalfSpaces.of(*given)
    return float(spaces.distance(spaces.weights()))


def test_a_far_bank_point_does_not_change_the_radii() -> None:
    """An entry that stands for a missing one, say, at any place of the bank."""
    model = plane_model(3, points=200)
    x = queries(model, 10, 3)
    plain = certify(model, x).radius
    parts = model.bank_inputs, model.bank_features, model.bank_labels
    for place in (0, 100):
        longer = [torch.cat([part[:place], 0 * part[:1], part[place:]]) for part in parts]
        longer[0][place] = 1e6
        bank = FeatureBank(*longer, "one far point")
        found = certify(OTAD(model.backbone, bank, n_neighbors=3).eval(), x).radius
        torch.testing.assert_close(found, plain, rtol=1e-6, atol=1e-6)
    assert int((plain > 0.01).sum()) >= 3


def random_set(seed: int, noise: float) -> tuple[Tensor, Tensor]:
    drawn_by = torch.Generator().manual_seed(seed)
    anchors = torch.randn(5, 3, dtype=torch.float64, generator=drawn_by)
    return anchors, anchors + noise * torch.randn(5, 3, dtype=torch.float64, generator=drawn_by)


def test_potentials_depend_on_neither_query_nor_order() -> None:
    order = torch.tensor([3, 0, 4, 1, 2])
    statuses = set()
    for seed in range(8):
        anchors, images = random_set(seed, 0.2)
        near, far = torch.zeros(1, 3).double(), torch.full((1, 3), 2.0).double()
        for solver in (ExactCip(), ExactCip(mode="paper", climb=(0.2, 0.1))):
            first = solver(CipProblem(near, anchors[None], images[None], 1.3, -0.2))
            moved = solver(CipProblem(far, anchors[None], images[None], 1.3, -0.2))
            turned = solver(CipProblem(near, anchors[None, order], images[None, order], 1.3, -0.2))
            assert torch.allclose(first.potentials, moved.potentials, atol=1e-9)
            assert torch.allclose(first.potentials[:, order], turned.potentials, atol=1e-9)
            statuses.add(int(first.status))
    assert statuses == {Status.SOLVED, Status.RAISED}


def test_which_point_is_left_out_does_depend_on_the_query() -> None:
    """So rows that had to be repaired are not covered by the rule."""
    solver, differing = ExactCip(max_smoothness=1.5), 0
    for seed in range(8):
        anchors, images = random_set(seed, 0.4)
        problems = (CipProblem(e, anchors[None], images[None], 1.5) for e in anchors[[0, -1], None])
        differing += not torch.equal(*(solver(problem).active for problem in problems))
    assert differing > 0


def parts(model: OTAD, x: Tensor) -> tuple[BankBisectors, Tensor, Tensor]:
    """Bisectors, neighbors, and up to where the map is known to be steady."""
    reach = input_reach(model, None, None, None)
    batch = Batch(reach, x)
    steady = steady_map(model, batch, reach.votes)
    return batch.bisectors, batch.trace.neighbors.indices, steady.reach


def test_neighbors_stay_within_the_cell_and_no_longer() -> None:
    model = plane_model(3, points=80, n_neighbors=3)
    x = queries(model, 20, 3)
    around, neighbors, _ = parts(model, x)
    radius = cell_radius(around, neighbors, torch.full((20,), 9.0, dtype=torch.float64))
    angle = torch.linspace(0, 6.2832, 400)
    circle = torch.stack([angle.cos(), angle.sin()], dim=1)
    own = neighbors.sort(dim=1).values
    for row in range(len(x)):
        inside, outside = (
            model.neighbors(model.backbone.embed(x[row] + size * float(radius[row]) * circle))
            for size in (0.9999, 1.01)
        )
        assert (inside.indices.sort(dim=1).values == own[row]).all()
        assert (outside.indices.sort(dim=1).values != own[row]).any()


def test_steady_rows_are_solved_ones_with_room() -> None:
    smooth = plane_model(1, n_neighbors=4, noise=0.02)
    assert (parts(smooth, queries(smooth, 10, 1))[2] > 0).all()
    torn = plane_model(1, n_neighbors=4, noise=5.0)
    x = queries(torn, 30, 1)
    solved = torn.trace(x).solution.status == int(Status.SOLVED)
    assert not bool(solved.all())
    assert (parts(torn, x)[2][~solved] == 0).all()
    # Copies with one feature are no contradiction, but rounding could make them one.
    copied = plane_model(1, n_neighbors=4, copies=15, noise=0.0)
    around = parts(copied, queries(copied, 10, 1))
    twins = around[1] % 15
    doubled = torch.tensor([len(set(row.tolist())) < 4 for row in twins])
    assert doubled.any()
    assert (around[2][doubled] == 0).all()


class Bent(LinearHead):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).tanh()


def linear(weight: list[list[float]]) -> nn.Linear:
    layer = nn.Linear(2, 2)
    layer.weight.data, layer.bias.data = torch.tensor(weight), torch.zeros(2)
    return layer


def embedded_model(*, embed: nn.Module) -> OTAD:
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(3))
    head = linear([[-1.0, 0.2], [1.0, 0.1]])
    net = SequentialBackbone(embed, [nn.Identity()], head, input_shape=(2,))
    return defend(net, x, (x[:, 0] > 0).long(), n_neighbors=2)


@pytest.mark.parametrize("eps", [-0.1, float("nan"), float("inf")])
def test_no_accuracy_at_an_impossible_distance(eps: float) -> None:
    found = Certificate(torch.ones(2), torch.tensor([0, 1]), ("hull",) * 2, ())
    for ask in (found.accuracy, found.holds):
        with pytest.raises(InputError, match=f"eps: .*{eps}"):
            ask(torch.tensor([0, 1]), eps)


@pytest.mark.parametrize("make", [plane_model, global_model], ids=["local", "global"])
def test_another_task_or_head(make: Any) -> None:
    model, values = make(0), make(0, task="regression")
    refuses(certify_values, model, ZERO, 0.1, match=r"regression.*classification.*certify")
    refuses(certify, values, ZERO, match=r"classification.*regression.*certify_values")
    model.backbone.head.__class__ = Bent
    refuses(certify, model, ZERO, match=r"head.*LinearHead.*Bent")


def test_a_solver_that_climbs_by_a_known_curvature_or_raises() -> None:
    certify(plane_model(0, solver={"climb": (0.5, 0.0)}), ZERO)
    certify(plane_model(0, solver={"climb": (0.5, 0.1), "mode": "paper"}), ZERO)
    model = plane_model(0, on_failure="raise", n_neighbors=1)
    assert any("raises an error" in words for words in certify(model, ZERO).assumptions)
    torn = plane_model(0, on_failure="raise", copies=10, points=20, n_neighbors=20)
    with pytest.raises(SolverError):
        certify(torn, ZERO)


def test_unknown_embedding_needs_a_constant() -> None:
    model = embedded_model(embed=linear([[1.2, -0.5], [0.5, 1.2]]))  # a rotation, times 1.3
    x = torch.randn(12, 2, generator=torch.Generator().manual_seed(1))
    for constant in (None, -1.0):
        refuses(certify, model, x, embedding_lipschitz=constant, match=f"embedding.*{constant}")
    found = certify(model, x, embedding_lipschitz=1.3001)
    assert any("1.3" in words for words in found.assumptions)
    # The same points and features seen without the rotation: radii are 1.3 times larger there.
    inner = SequentialBackbone(None, [nn.Identity()], nn.Linear(2, 2), input_shape=(2,))
    inner.head.weight, inner.head.bias = model.backbone.head.weight, model.backbone.head.bias
    plain = OTAD(inner.eval(), model.bank, n_neighbors=2)
    inside = certify(plain, model.backbone.embed(x).detach())
    assert torch.allclose(found.radius * 1.3001, inside.radius, rtol=1e-4, atol=1e-5)
    model.backbone.train()
    refuses(certify, model, x, embedding_lipschitz=1.3001, match="evaluation mode")


def test_known_embedding_takes_no_constant() -> None:
    class Squashed(SequentialBackbone):
        def normalize(self, x: Tensor) -> Tensor:
            return x.tanh()

    model = embedded_model(embed=nn.Flatten())
    certify(model, ZERO)
    refuses(certify, model, ZERO, embedding_lipschitz=1.0, match=r"embedding_lipschitz.*1\.0")
    model.backbone.__class__ = Squashed  # whose normalization is its own
    refuses(certify, model, ZERO, match=r"embedding_lipschitz.*Squashed")


def without_number() -> OTAD:
    model = plane_model(0)
    with torch.no_grad():
        model.backbone.head.bias.fill_(torch.nan)
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(1, 3)}, "expected shape"),
        ({"x": torch.full((1, 2), torch.nan)}, "expected finite values"),
        ({"x": torch.zeros(1, 2, dtype=torch.int64)}, "expected dtype"),
        ({"x": {0.0}}, r"expected a torch\.Tensor"),
        ({"unit": torch.ones(3)}, r"unit.*\(3,\)"),
        ({"unit": torch.tensor([1.0, 0.0])}, r"unit.*positive.*0\.0"),
        ({"unit": torch.tensor([1.0, torch.inf])}, r"unit.*finite"),
        ({"unit": 1.0}, r"unit.*float"),
        ({"batch_size": 0}, r"batch_size.*0"),
        ({"model": fc_resnet((2,), 2)}, r"model.*OTAD.*FCResNet"),
        ({"model": plane_model(0, on_failure="abstain")}, r"on_failure.*'abstain'"),
        ({"model": plane_model(0, solver={"climb": (0.5, 0.1)})}, r"climb.*0\.1"),
        ({"model": without_number()}, "model.*nan"),
        *(({"eps": eps}, f"eps.*{eps}") for eps in (-0.1, torch.inf, torch.nan)),
    ],
)
def test_arguments(change: dict[str, Any], message: str) -> None:
    task = "regression" if "eps" in change else "classification"
    given = {"model": plane_model(0, task=task), "x": ZERO} | change
    refuses(certify_values if "eps" in change else certify, **given, match=message)


def test_certificate_counts_and_converts() -> None:
    one = Certificate(torch.tensor([0.5, 2.0, 3.0]), torch.tensor([1, 1, 0]), ("hull",) * 3, ())
    assert one.holds(torch.tensor([1, 0, 0]), 1.0).tolist() == [False, False, True]
    assert one.accuracy(torch.tensor([1, 1, 0]), 1.0) == pytest.approx(2 / 3)
    named = replace(one, classes=("cat", "dog"))
    assert named.accuracy(np.array(["dog", "dog", "cat"]), 1.0) == pytest.approx(2 / 3)
    assert named.accuracy([1, 1, 0], 1.0) == pytest.approx(2 / 3)
    refuses(one.accuracy, ["dog"] * 3, 1.0, match="y: expected class numbers, as the model has no")
    assert one.linf_radius(4).tolist() == [0.25, 1.0, 1.5]
    refuses(one.linf_radius, 0, match=r"n_mutable.*0")
    refuses(one.holds, torch.tensor([1]), 1.0, match=r"y.*\(3,\).*\(1,\)")


def test_bank_in_half_precision_and_elsewhere() -> None:
    """A bank that is not resident, in float16, gives the radii of its rounded points."""
    model = plane_model(2, n_neighbors=2)
    pairs = model.bank_inputs.half(), model.bank_features.half()
    x, radii = queries(model, 8, 2), []
    for inputs, features in (pairs, [part.float() for part in pairs]):
        bank = FeatureBank(inputs, features, model.bank_labels, "rounded")
        radii.append(certify(model.replace(bank=bank, resident=False), x).radius)
    assert torch.allclose(radii[0], radii[1], rtol=1e-9)
