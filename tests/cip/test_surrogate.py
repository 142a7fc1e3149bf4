"""CIP-net: what it promises by construction and what it refuses; what training teaches it, by
which teacher, and that a stopped run resumes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cip.instances import DIM, B, K, changed, family, make_net, normal, random_problem, rows_of
from factories import BRIEF
from torch import Tensor
from torch.testing import assert_close

from otad.cip import BankProblem, CipProblem, CipSolution, ExactCip, Status
from otad.cip.surrogate import CipNet, CipNetEpoch, leave_one_out, train_cip_net
from otad.cip.surrogate.training import TeacherImages
from otad.errors import InputError
from otad.io.tensor_files import fingerprint

TEACHER = ExactCip(on_failure="fallback")
LONGER = replace(BRIEF, epochs=8, batch_size=32, learning_rate=3e-3)
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


def test_a_plain_encoder_reads_the_query_token(generator: torch.Generator) -> None:
    """Without symmetries, and whatever the curvature."""
    problem, net = random_problem(generator, B, K, DIM), random_net("plain", blocks=1)
    query, pairs = problem.query[:, None], (problem.anchors, problem.images)
    parts = [net.from_input(query), net.from_input(pairs[0]), net.from_feature(pairs[1])]
    tokens = torch.cat([part + kind for part, kind in zip(parts, net.kinds, strict=True)], dim=1)
    expected = net.correction(net.norm(net.blocks[0](tokens)[0])[:, 0])
    found = net(problem)
    assert_close(found.image, expected)
    assert found.multipliers.isnan().all()
    same = CipNet.from_config(net.config()).double()
    same.load_state_dict(net.state_dict())
    assert torch.equal(same(problem).image, found.image)
    steeper = changed(problem, smoothness=9 * problem.smoothness)
    assert torch.equal(net(steeper).image, found.image)
    moved = changed(problem, query=problem.query + 1, anchors=problem.anchors + 1)
    assert not torch.allclose(net(moved).image, found.image, atol=1e-3)


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


def mean_square(difference: Tensor) -> float:
    return float(difference.double().square().sum(1).mean())


def own_features_of(problem: CipProblem) -> Tensor:
    """Other than the images of the teacher."""
    return problem.images.mean(1) + 2 * (problem.query - problem.anchors.mean(1))


def test_training_imitates_the_teacher_on_problems_it_has_not_seen() -> None:
    unseen, net = family(1, 256), make_net("hull", width=32)
    result = train_cip_net(net, family(0, 512), LONGER, held_out=unseen)
    assert not net.training
    truth = TEACHER(unseen).image
    with torch.no_grad():
        error = mean_square(net(unseen).image - truth)
    baseline = mean_square(unseen.images.mean(1) - truth)
    assert error < 0.5 * baseline
    assert result.history[-1].held_out_error == pytest.approx(error / result.unit, rel=1e-4)
    assert result.history[-1].error < 0.5 * baseline / result.unit


def test_without_the_teacher_the_net_fits_its_own_features() -> None:
    problems, unseen, net = family(0, 512), family(1, 256), make_net(width=32)

    def refuse(problem: object) -> CipSolution:
        raise AssertionError("alpha = 0 needs no teacher")

    options = {"teacher": refuse, "alpha": 0.0, "own_features": own_features_of(problems)}
    result = train_cip_net(net, problems, LONGER, **options)
    assert result.history[-1].error is None
    with torch.no_grad():
        image = net(unseen).image
    target = own_features_of(unseen)
    to_own, to_teacher = (mean_square(image - one) for one in (target, TEACHER(unseen).image))
    assert to_own < 0.5 * mean_square(unseen.images.mean(1) - target)
    assert to_own < to_teacher


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on a CPU without bfloat16
def test_the_precision_is_that_of_the_config_within_any_autocast() -> None:
    found: dict[bool, set[str]] = {False: set(), True: set()}
    for mixed, autocast in itertools.product((False, True), repeat=2):
        net, kinds = make_net(), set()
        net.blocks[0].attn.proj.register_forward_hook(
            lambda _layer, _given, output, kinds=kinds: kinds.add(output.dtype)
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            train_cip_net(net, family(0, 48), replace(BRIEF, epochs=1, mixed_precision=mixed))
        assert kinds == {torch.bfloat16 if mixed else torch.float32}
        assert {weight.dtype for weight in net.parameters()} == {torch.float32}
        found[mixed].add(fingerprint(net.state_dict()))
    assert len(found[False]) == len(found[True]) == 1
    assert found[False] != found[True]


@pytest.mark.parametrize("alpha", [1.0, 0.2, 0.0])
def test_the_objective_is_the_mixture(alpha: float) -> None:
    """Of a net that stays what it is at the start: the mean feature."""
    problems = family(0, 24)
    own = own_features_of(problems)
    still = replace(BRIEF, epochs=1, learning_rate=1e-12)
    result = train_cip_net(make_net(), problems, still, alpha=alpha, own_features=own)
    mean = problems.images.mean(1)
    to_teacher = mean_square(mean - TEACHER(problems).image)
    expected = alpha * to_teacher + (1 - alpha) * mean_square(mean - own)
    spread = float((problems.images - mean[:, None]).square().sum(2).mean())
    assert result.unit == pytest.approx(spread)
    assert result.history[0].loss == pytest.approx(expected / spread, rel=1e-4)
    if alpha > 0:
        assert result.history[0].error == pytest.approx(to_teacher / spread, rel=1e-4)


@pytest.mark.parametrize("mode", ["consistent", "paper"])
@pytest.mark.parametrize("cached", [True, False])
def test_the_answers_are_those_of_the_teacher(generator, mode, cached) -> None:
    """Also where l falls, and where there is no solution but the nearest neighbor."""
    problem = random_problem(generator, 40, K, DIM, strong_convexity=0.3, noise=0.5)
    teacher = ExactCip(mode=mode, climb=(0.5, 0.1), max_smoothness=3.0, on_failure="fallback")
    solution = teacher(problem)
    assert solution.status.unique().numel() > 1
    targets = TeacherImages(teacher, problem, 16, cached=cached)
    rows = torch.randperm(40, generator=generator)[:25]
    assert_close(targets(rows), solution.image[rows])


def test_a_run_that_was_stopped_ends_like_an_uninterrupted_one(tmp_path: Path) -> None:
    """The teacher and the problems held out are recognized by what they are, not by where they are
    in memory."""
    problems, config = family(0, 40), replace(BRIEF, epochs=5)
    own = own_features_of(problems)

    def options(folder: str = "cut", exact: ExactCip = TEACHER) -> dict[str, object]:
        parts = {"alpha": 0.6, "own_features": own, "teacher": lambda problem: exact(problem)}
        return parts | {"held_out": family(1, 8), "checkpoint_dir": tmp_path / folder}

    whole = make_net()
    expected = train_cip_net(whole, problems, config, **options("whole"))
    for last in (2, 5):

        def stop(record: CipNetEpoch, last: int = last) -> None:
            if record.epoch == last:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            train_cip_net(make_net(), problems, config, progress=stop, **options())
    again = make_net()
    result = train_cip_net(again, problems, config, **options())
    assert result.resumed_after == 5
    assert result == expected
    assert fingerprint(again.state_dict()) == fingerprint(whole.state_dict())
    files = [(tmp_path / part / "cip-net.safetensors").read_bytes() for part in ("whole", "cut")]
    assert files[0] == files[1]
    for message, change in (
        ("checkpoint of this run", {"alpha": 0.5}),
        ("checkpoint of this run", {"teacher": ExactCip(mode="paper", on_failure="fallback")}),
        ("checkpoint of this run", {"own_features": own + 1}),
        (r"held_out\.anchors", {"held_out": family(2, 8)}),
        (r"held_out\.anchors", {"held_out": None}),
    ):
        with pytest.raises(InputError, match=message):
            train_cip_net(make_net(), problems, config, **options() | change)
    with pytest.raises(InputError, match=r"initial_weights"):
        train_cip_net(make_net(seed=9), problems, config, **options())


def test_leaving_one_out_names_the_nearest_others(generator: torch.Generator) -> None:
    points, features = (normal(generator, 30, DIM).half() for _ in range(2))
    points[5] = points[4]  # a twin is a neighbor; only the point itself is left out
    rows = torch.tensor([4, 17, 2])
    problem = leave_one_out(points, features, K, 2.0, 0.1, rows=rows)
    distances = torch.cdist(points.double(), points.double()).fill_diagonal_(torch.inf)
    assert torch.equal(problem.indices, distances[rows].sort(stable=True).indices[:, :K])
    assert torch.equal(problem.query, points[rows].float())
    assert problem.strong_convexity.tolist() == [0.1] * 3
    assert leave_one_out(points, features, K, 2.0).shape == (30, K, DIM)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 1.5}, "alpha: .*0 to 1.*1.5"),
        ({"alpha": 0.5}, "own_features: .*alpha is 0.5"),
        ({"own_features": torch.zeros(8, DIM + 1)}, "own_features: .*shape"),
        ({"own_features": torch.full((8, DIM), torch.nan)}, "own_features: .*finite"),
        ({"save_seconds": -1.0}, "save_seconds: .*from 0"),
        ({"max_seconds": 1.0}, "max_seconds: .*checkpoint_dir"),
        ({"config": replace(BRIEF, device="cuda")}, "device: .*'cpu'"),
        ({"config": replace(BRIEF, optimizer="sgd", learning_rate=1e30)}, "learning_rate"),
    ],
)
def test_impossible_trainings_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        train_cip_net(make_net(), family(0, 8), **{"config": BRIEF} | options)


def test_a_teacher_that_abstains_is_refused(generator: torch.Generator) -> None:
    problem = random_problem(generator, 12, K, DIM)
    against = changed(problem, images=-problem.images)  # decreasing: no convex potential
    silent = ExactCip(on_failure="abstain")
    assert silent(against).failed.any()
    with pytest.raises(InputError, match=r"teacher: .*NaN"):
        train_cip_net(make_net().double(), against, BRIEF, teacher=silent)
    train_cip_net(make_net().double(), rows_of(against, slice(0, 4)), BRIEF)
