"""CIP-net: what it promises by construction, its place in a defense, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cip.instances import DIM, B, K, changed, family, make_net, normal, random_problem
from factories import BRIEF
from torch import Tensor
from torch.testing import assert_close

from otad.cip import BankProblem, CipProblem, ExactCip, Status
from otad.cip.surrogate import CipNet, train_cip_net
from otad.errors import InputError
from otad.io.tensor_files import fingerprint

READOUTS = pytest.mark.parametrize("readout", ["free", "hull"])


def random_net(readout: str = "free", scale: float = 0.5, **options: int) -> CipNet:
    """A net in double precision whose every parameter matters."""
    net = make_net(readout, **options).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(scale * normal(generator, *parameter.shape))
    return net


def test_an_estimate_claims_nothing_it_does_not_know(generator: torch.Generator) -> None:
    problem = random_problem(generator, B, K, DIM)
    solution, exact = random_net()(problem), ExactCip()(problem)
    assert solution.image.isfinite().all()
    assert solution.status.tolist() == [Status.ESTIMATED] * B
    assert not solution.failed.any()
    assert solution.active.all()
    unknown = {"value", "multipliers", "potentials", "smoothness", "strong_convexity", "residual"}
    for name in unknown | {"image", "status", "active"}:
        part, expected = getattr(solution, name), getattr(exact, name)
        assert (part.shape, part.dtype) == (expected.shape, expected.dtype), name
        assert part.isnan().all() == (name in unknown), name
    assert problem.residual(solution).tolist() == [torch.inf] * B
    assert solution.rows(slice(2, 5)).image.shape == (3, DIM)


def test_in_the_hull_the_image_is_made_of_the_multipliers(generator: torch.Generator) -> None:
    problem = random_problem(generator, B, K, DIM)
    solution = random_net("hull")(problem)
    weights = solution.multipliers
    assert_close(weights.sum(1), torch.ones(B, dtype=torch.float64))
    assert (weights > 0).all()
    assert (weights - 1 / K).abs().amax() > 0.1
    assert_close(solution.image, (weights[:, None] @ problem.images)[:, 0])


@READOUTS
def test_a_fresh_net_answers_with_the_mean_feature(generator, readout) -> None:
    problem = random_problem(generator, B, K, DIM)
    assert_close(make_net(readout).double()(problem).image, problem.images.mean(1))


def test_a_bank_and_blocks_of_rows_change_nothing(generator, monkeypatch) -> None:
    points, features = normal(generator, 2, 20, DIM)
    indices = torch.randint(20, (B, K), generator=generator)
    query, net = normal(generator, B, DIM), random_net()
    expected = net(CipProblem(query, points[indices], features[indices], 2.0, 0.3)).image
    bank = BankProblem(query, points, features, indices, 2.0, 0.3)
    assert_close(net(bank).image, expected)
    monkeypatch.setattr("otad.cip.surrogate.net._BLOCK_BYTES", 2 * 2 * K * DIM * 8)
    assert_close(net(bank).image, expected)
    halves = BankProblem(query, points.half(), features.half(), indices, 2.0, 0.3)
    assert_close(net(halves).image, expected, rtol=0, atol=0.05)


SHIFT = torch.linspace(-3.0, 5.0, DIM, dtype=torch.float64)
ORDER = [2, 0, 3, 1]
UNITS = {"query": 50, "anchors": 50, "images": 1 / 8}
UNITS |= {"smoothness": 1 / 400, "strong_convexity": 1 / 400}


def without_strong_convexity(p: CipProblem) -> CipProblem:
    """The problem for l = 0 of the shifted images."""
    low = p.strong_convexity
    images = p.images - low[:, None, None] * (p.anchors - p.query[:, None])
    return changed(p, images=images, smoothness=p.smoothness - low, strong_convexity=0 * low)


# Changes of a problem, and what becomes of its image where it does not stay the same.
SYMMETRIES: dict[str, Callable[[CipProblem], CipProblem]] = {
    "inputs moved": lambda p: changed(p, query=p.query + SHIFT, anchors=p.anchors + SHIFT),
    "features moved": lambda p: changed(p, images=p.images + SHIFT),
    "reordered": lambda p: changed(p, anchors=p.anchors[:, ORDER], images=p.images[:, ORDER]),
    "units": lambda p: changed(p, **{name: getattr(p, name) * UNITS[name] for name in UNITS}),
    "strong convexity taken off": without_strong_convexity,
}
IMAGES = {"features moved": lambda image: image + SHIFT, "units": lambda image: image / 8}


@pytest.mark.parametrize("name", SYMMETRIES)
def test_the_net_has_the_symmetries_of_the_solver(generator: torch.Generator, name: str) -> None:
    change, expected = SYMMETRIES[name], IMAGES.get(name, lambda image: image)
    problem = random_problem(generator, B, K, DIM, strong_convexity=0.3)
    for solve in (random_net(), random_net("hull"), ExactCip()):
        before, after = solve(problem).image, solve(change(problem)).image
        assert_close(after, expected(before), rtol=1e-9, atol=1e-9)
        assert (before - problem.images.mean(1)).norm(dim=1).amin() > 1e-3


def test_the_net_sees_query_curvature_and_pairing(generator: torch.Generator) -> None:
    problem, net = random_problem(generator, B, K, DIM), random_net()
    for change in (
        {"query": problem.query + 0.3},
        {"smoothness": 2 * problem.smoothness},
        {"anchors": problem.anchors.roll(1, 1)},
    ):
        difference = net(changed(problem, **change)).image - net(problem).image
        assert difference.norm(dim=1).amin() > 1e-4


@READOUTS
@pytest.mark.parametrize("strong_convexity", [0.0, -0.4])
def test_the_gradient_in_the_query_is_that_of_finite_differences(
    generator, readout, strong_convexity
) -> None:
    problem = random_problem(generator, 3, K, DIM, strong_convexity=strong_convexity)
    net = random_net(readout, scale=0.1)

    def image(query: Tensor) -> Tensor:
        return net(changed(problem, query=query)).image

    query = problem.query.clone().requires_grad_()
    assert torch.autograd.gradcheck(image, (query,), atol=1e-6)
    (slope,) = torch.autograd.grad(image(query).square().sum(), query)
    assert slope.norm(dim=1).amin() > 1e-3


def test_neighbors_that_are_all_alike_are_answered_exactly(generator: torch.Generator) -> None:
    anchors, images = normal(generator, 2, B, 1, DIM).expand(2, B, K, DIM)
    query = normal(generator, B, DIM)
    query[0] = anchors[0, 0]
    solution = random_net()(CipProblem(query.requires_grad_(), anchors, images, 2.0))
    assert_close(solution.image, images[:, 0])
    (slope,) = torch.autograd.grad(solution.image.sum(), query)
    assert slope.isfinite().all()


@READOUTS
def test_numbers_out_of_range_are_an_abstention(readout: str) -> None:
    problem = family(0, B)
    images = problem.images.clone()
    images[2] *= 1e25
    solution = make_net(readout)(changed(problem, images=images))
    expected = [Status.ESTIMATED] * B
    expected[2] = Status.UNSOLVED
    assert solution.status.tolist() == expected
    assert solution.image.isnan().any(1).tolist() == solution.failed.tolist()
    assert solution.multipliers[2].isnan().all()


@READOUTS
def test_a_net_is_made_again_from_its_config_and_state(readout: str) -> None:
    net = random_net(readout, hidden=24).float()
    again = CipNet.from_config(json.loads(json.dumps(net.config())))
    again.load_state_dict(net.state_dict())
    assert again.config() == net.config()
    assert torch.equal(again(family(0, 16)).image, net(family(0, 16)).image)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16
def test_a_net_of_less_precision_answers_nearly_the_same_in_the_same_dtype() -> None:
    problem, net = family(0, 16), make_net()
    train_cip_net(net, problem, replace(BRIEF, epochs=2))
    rough = CipNet.from_config(net.config() | {"precision": "bfloat16"})
    rough.load_state_dict(net.state_dict())
    query = problem.query.clone().requires_grad_()
    image, exact = rough(changed(problem, query=query)).image, net(problem).image
    assert image.dtype == exact.dtype == torch.float32
    assert not torch.equal(image, exact)
    assert (image - exact).norm() < 0.02 * exact.norm()
    (slope,) = torch.autograd.grad(image.sum(), query)
    assert slope.norm(dim=1).amin() > 0


def test_weights_come_from_the_generator_alone() -> None:
    before = torch.get_rng_state()
    first, second, other = (fingerprint(make_net(seed=seed).state_dict()) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert first == second != other


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 0}, "dim: .*1.*0"),
        ({"n_neighbors": 0}, "n_neighbors: .*1.*0"),
        ({"heads": 3}, "heads: .*16.*3"),
        ({"blocks": 0}, "blocks: .*1.*0"),
        ({"hidden": 0}, "hidden: .*1.*0"),
        ({"readout": "best"}, "readout: .*free, hull.*best"),
        ({"precision": "int8"}, "precision: .*float32, bfloat16.*int8"),
        ({"depth": 3}, "config: .*depth"),
    ],
)
def test_impossible_nets_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        CipNet.from_config({"dim": DIM, "n_neighbors": K, "width": 16, "heads": 2} | change)


def test_problems_of_another_kind_are_refused(generator: torch.Generator) -> None:
    net, problem = make_net(), family(0, 3)
    pairs = {"anchors": problem.anchors[:, 1:], "images": problem.images[:, 1:]}
    shorter = (part[..., 1:] for part in (problem.query, problem.anchors, problem.images))
    query = problem.query.clone()
    query[1, 2] = torch.nan
    for other in (changed(problem, **pairs), CipProblem(*shorter, 3.0)):
        for work in (
            lambda other: net(other),
            lambda other: train_cip_net(net, other, BRIEF),
            lambda other: train_cip_net(net, problem, BRIEF, held_out=other),
        ):
            with pytest.raises(InputError, match="4 neighbors in dimension 5"):
                work(other)
    with pytest.raises(InputError, match=r"query: .*float32"):
        net(random_problem(generator, 3, K, DIM))
    with pytest.raises(InputError, match=r"query: .*finite"):
        net(changed(problem, query=query))
