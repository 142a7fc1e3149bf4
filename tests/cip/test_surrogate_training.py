"""Training CIP-net: what it learns, from which teacher, and that a stopped run resumes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cip.instances import DIM, K, changed, family, make_net, normal, random_problem, rows_of
from factories import BRIEF
from torch import Tensor
from torch.testing import assert_close

from otad.cip import CipProblem, CipSolution, ExactCip
from otad.cip.surrogate import CipNetEpoch, CipNetResult, leave_one_out, train_cip_net
from otad.cip.surrogate.training import TeacherImages
from otad.errors import InputError
from otad.io.tensor_files import fingerprint

TEACHER = ExactCip(on_failure="fallback")
LONGER = replace(BRIEF, epochs=8, batch_size=32, learning_rate=3e-3)


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
    problems, config = family(0, 40), replace(BRIEF, epochs=5)
    own = own_features_of(problems)
    options = {"alpha": 0.6, "own_features": own}
    whole = make_net()
    expected = train_cip_net(whole, problems, config, checkpoint_dir=tmp_path / "whole", **options)
    options["checkpoint_dir"] = tmp_path / "cut"
    for last in (2, 5):

        def stop(record: CipNetEpoch, last: int = last) -> None:
            if record.epoch == last:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            train_cip_net(make_net(), problems, config, progress=stop, **options)
    again = make_net()
    result = train_cip_net(again, problems, config, **options)
    assert result.resumed_after == 5
    assert result == expected
    assert fingerprint(again.state_dict()) == fingerprint(whole.state_dict())
    files = [(tmp_path / part / "cip-net.safetensors").read_bytes() for part in ("whole", "cut")]
    assert files[0] == files[1]
    for change in (
        {"alpha": 0.5},
        {"teacher": ExactCip(mode="paper", on_failure="fallback")},
        {"own_features": own + 1},
        {"held_out": family(1, 8)},
    ):
        with pytest.raises(InputError, match="checkpoint of this run"):
            train_cip_net(make_net(), problems, config, **options | change)
    with pytest.raises(InputError, match=r"initial_weights"):
        train_cip_net(make_net(seed=9), problems, config, **options)


def test_a_run_is_recognized_by_its_teacher_and_by_the_problems_held_out(tmp_path: Path) -> None:
    """By what they are, not by where they are in memory."""

    def trained(held_out: CipProblem | None, exact: ExactCip = TEACHER) -> CipNetResult:
        def teach(problem: CipProblem) -> CipSolution:
            return exact(problem)

        options = {"held_out": held_out, "teacher": teach, "checkpoint_dir": tmp_path}
        return train_cip_net(make_net(), family(0, 8), BRIEF, **options)

    first, again = trained(family(1, 8)), trained(family(1, 8))
    assert again == first
    assert (first.resumed_after, again.resumed_after) == (0, BRIEF.epochs)
    for other in (family(2, 8), None):
        with pytest.raises(InputError, match=r"held_out\.anchors"):
            trained(other)


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
        ({"alpha": 0.5}, "own_features: .*alpha = 0.5"),
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
