"""CIP-net: what it promises by construction, its place in a defense, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cip.instances import converted, normal, random_problem
from cip.small_nets import DIM, TINY, B, K, changed, family, make_net, stirred
from torch import Tensor
from torch.testing import assert_close

from otad.cip import BankProblem, CipProblem, ExactCip, Status
from otad.cip.surrogate import CipNet, train_cip_net
from otad.errors import InputError
from otad.io.tensor_files import fingerprint, read_tensors, write_tensors


def test_an_estimate_claims_nothing_it_does_not_know(generator: torch.Generator) -> None:
    problem = random_problem(generator, B, K, DIM)
    solution = stirred()(problem)
    assert solution.image.isfinite().all()
    assert solution.status.tolist() == [Status.ESTIMATED] * B
    assert not solution.failed.any()
    assert solution.active.all()
    exact = ExactCip()(problem)
    unknown = {"value", "multipliers", "potentials", "smoothness", "strong_convexity", "residual"}
    for name in unknown | {"image", "status", "active"}:
        part, expected = getattr(solution, name), getattr(exact, name)
        assert (part.shape, part.dtype) == (expected.shape, expected.dtype), name
        assert part.isnan().all() == (name in unknown), name
    assert problem.residual(solution).tolist() == [torch.inf] * B
    assert solution.rows(slice(2, 5)).image.shape == (3, DIM)


def test_in_the_hull_the_image_is_made_of_the_multipliers(generator: torch.Generator) -> None:
    problem = random_problem(generator, B, K, DIM)
    solution = stirred("hull")(problem)
    weights = solution.multipliers
    assert_close(weights.sum(1), torch.ones(B, dtype=torch.float64))
    assert (weights > 0).all()
    assert (weights - 1 / K).abs().amax() > 0.1
    assert_close(solution.image, (weights[:, None] @ problem.images)[:, 0])


@pytest.mark.parametrize("readout", ["free", "hull"])
def test_a_fresh_net_answers_with_the_mean_feature(generator, readout) -> None:
    problem = random_problem(generator, B, K, DIM)
    assert_close(make_net(readout).double()(problem).image, problem.images.mean(1))


def test_a_bank_and_blocks_of_rows_change_nothing(generator, monkeypatch) -> None:
    points, features = normal(generator, 20, DIM), normal(generator, 20, DIM)
    indices = torch.randint(20, (B, K), generator=generator)
    query = normal(generator, B, DIM)
    named = BankProblem(query, points, features, indices, 2.0, 0.3)
    spelled = CipProblem(query, points[indices], features[indices], 2.0, 0.3)
    net = stirred()
    expected = net(spelled).image
    assert_close(net(named).image, expected)
    monkeypatch.setattr("otad.cip.surrogate.net._BLOCK_BYTES", 2 * 2 * K * DIM * 8)
    assert_close(net(named).image, expected)
    halves = BankProblem(query, points.half(), features.half(), indices, 2.0, 0.3)
    assert_close(net(halves).image, expected, rtol=0, atol=0.05)


SHIFT = torch.linspace(-3.0, 5.0, DIM, dtype=torch.float64)
ORDER = [2, 0, 3, 1]
UNITS = {"query": 50, "anchors": 50, "images": 1 / 8}


def unbent(p: CipProblem) -> CipProblem:
    """The problem for l = 0 of the shifted images."""
    low = p.strong_convexity
    images = p.images - low[:, None, None] * (p.anchors - p.query[:, None])
    return changed(p, images=images, smoothness=p.smoothness - low, strong_convexity=0 * low)


def in_other_units(p: CipProblem) -> CipProblem:
    units = UNITS | {"smoothness": 1 / 400, "strong_convexity": 1 / 400}
    return changed(p, **{name: getattr(p, name) * unit for name, unit in units.items()})


# A change of the problem, and what becomes of its answer.
SYMMETRIES: dict[str, tuple[Callable[[CipProblem], CipProblem], Callable[[Tensor], Tensor]]] = {
    "inputs moved": (
        lambda p: changed(p, query=p.query + SHIFT, anchors=p.anchors + SHIFT),
        lambda image: image,
    ),
    "features moved": (lambda p: changed(p, images=p.images + SHIFT), lambda image: image + SHIFT),
    "neighbors reordered": (
        lambda p: changed(p, anchors=p.anchors[:, ORDER], images=p.images[:, ORDER]),
        lambda image: image,
    ),
    "other units": (in_other_units, lambda image: image / 8),
    "strong convexity taken off": (unbent, lambda image: image),
}


@pytest.mark.parametrize("name", SYMMETRIES)
def test_the_net_has_the_symmetries_of_the_solver(generator: torch.Generator, name: str) -> None:
    change, expected = SYMMETRIES[name]
    problem = random_problem(generator, B, K, DIM, strong_convexity=0.3)
    for solve in (stirred(), stirred("hull"), ExactCip()):
        before, after = solve(problem).image, solve(change(problem)).image
        assert_close(after, expected(before), rtol=1e-9, atol=1e-9)
        assert (before - problem.images.mean(1)).norm(dim=1).amin() > 1e-3


def test_the_net_sees_query_curvature_and_pairing(generator: torch.Generator) -> None:
    problem = random_problem(generator, B, K, DIM)
    net = stirred()
    before = net(problem).image
    for other in (
        changed(problem, query=problem.query + 0.3),
        changed(problem, smoothness=2 * problem.smoothness),
        changed(problem, anchors=problem.anchors.roll(1, 1)),
    ):
        assert (net(other).image - before).norm(dim=1).amin() > 1e-4


@pytest.mark.parametrize("readout", ["free", "hull"])
@pytest.mark.parametrize("strong_convexity", [0.0, -0.4])
def test_the_gradient_in_the_query_is_that_of_finite_differences(
    generator, readout, strong_convexity
) -> None:
    problem = random_problem(generator, 3, K, DIM, strong_convexity=strong_convexity)
    net = stirred(readout, scale=0.1)

    def image(query: Tensor) -> Tensor:
        return net(changed(problem, query=query)).image

    query = problem.query.clone().requires_grad_()
    assert torch.autograd.gradcheck(image, (query,), atol=1e-6)
    (slope,) = torch.autograd.grad(image(query).square().sum(), query)
    assert slope.norm(dim=1).amin() > 1e-3


def test_neighbors_that_are_all_alike_are_answered_exactly(generator: torch.Generator) -> None:
    anchors = normal(generator, B, 1, DIM).expand(B, K, DIM)
    images = normal(generator, B, 1, DIM).expand(B, K, DIM)
    query = normal(generator, B, DIM)
    query[0] = anchors[0, 0]
    problem = CipProblem(query.requires_grad_(), anchors, images, 2.0)
    solution = stirred()(problem)
    assert_close(solution.image, images[:, 0])
    (slope,) = torch.autograd.grad(solution.image.sum(), query)
    assert slope.isfinite().all()


def test_numbers_out_of_range_are_an_abstention() -> None:
    problem = family(0, B)
    images = problem.images.clone()
    images[2] *= 1e25
    for readout in ("free", "hull"):
        solution = make_net(readout)(changed(problem, images=images))
        expected = [Status.ESTIMATED] * B
        expected[2] = Status.UNSOLVED
        assert solution.status.tolist() == expected
        assert solution.image.isnan().any(1).tolist() == solution.failed.tolist()
        assert solution.multipliers[2].isnan().all()


@pytest.mark.parametrize("readout", ["free", "hull"])
def test_a_net_is_made_again_from_its_config_and_state(tmp_path: Path, readout: str) -> None:
    problem = family(0, 16)
    net = make_net(readout, hidden=24)
    train_cip_net(net, problem, replace(TINY, epochs=1))
    path = tmp_path / "net.safetensors"
    write_tensors(path, net.state_dict(), {"config": net.config()})
    state, header = read_tensors(path)
    config = json.loads(json.dumps(header["config"]))
    again = CipNet.from_config(config)
    again.load_state_dict(state)
    assert again.config() == net.config()
    assert torch.equal(again(problem).image, net(problem).image)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16
def test_a_net_of_less_precision_answers_nearly_the_same_in_the_same_dtype() -> None:
    problem = family(0, 16)
    net = make_net("free")
    train_cip_net(net, problem, replace(TINY, epochs=2))
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
    first, second, other = make_net(seed=3), make_net(seed=3), make_net(seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    assert fingerprint(first.state_dict()) == fingerprint(second.state_dict())
    assert fingerprint(first.state_dict()) != fingerprint(other.state_dict())


def wrong(**change: object) -> dict[str, object]:
    return {"dim": DIM, "n_neighbors": K, "width": 16, "heads": 2} | change


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (wrong(dim=0), "dim: .*1.*0"),
        (wrong(n_neighbors=0), "n_neighbors: .*1.*0"),
        (wrong(heads=3), "heads: .*16.*3"),
        (wrong(blocks=0), "blocks: .*1.*0"),
        (wrong(hidden=0), "hidden: .*1.*0"),
        (wrong(readout="best"), "readout: .*free, hull.*best"),
        (wrong(precision="int8"), "precision: .*float32, bfloat16.*int8"),
        (wrong(depth=3), "config: .*depth"),
    ],
)
def test_impossible_nets_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        CipNet.from_config(options)


def test_foreign_problems_are_refused(generator: torch.Generator) -> None:
    net = make_net()
    for count, dim in ((K - 1, DIM), (K, DIM + 1)):
        other = converted(random_problem(generator, 3, count, dim), torch.float32)
        with pytest.raises(InputError, match=f"expected 4 neighbors in dimension 5.*got {count}"):
            net(other)
        with pytest.raises(InputError, match="expected 4 neighbors"):
            train_cip_net(net, other, TINY)
        with pytest.raises(InputError, match="expected 4 neighbors"):
            train_cip_net(net, family(0, 8), TINY, held_out=other)
    with pytest.raises(InputError, match=r"query: expected torch\.float32"):
        net(random_problem(generator, 3, K, DIM))
    query = family(0, 3).query.clone()
    query[1, 2] = torch.nan
    with pytest.raises(InputError, match="query: expected finite values"):
        net(changed(family(0, 3), query=query))
