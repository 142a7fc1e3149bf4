"""Training CIP-net: what it learns, from whom, and that it goes on where it was stopped."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cip.instances import normal, random_problem, rows_of
from cip.small_nets import DIM, TEACHER, TINY, K, changed, family, make_net, mean_square
from torch import Tensor
from torch.testing import assert_close

from otad.cip import CipProblem, CipSolution, ExactCip
from otad.cip.surrogate import CipNetEpoch, leave_one_out, train_cip_net
from otad.cip.surrogate.training import TeacherImages
from otad.errors import InputError
from otad.io.tensor_files import fingerprint


def test_training_imitates_the_teacher_on_problems_it_has_not_seen() -> None:
    problems, unseen = family(0, 512), family(1, 256)
    config = replace(TINY, epochs=8, batch_size=32, learning_rate=3e-3)
    net = make_net("hull", width=32)
    result = train_cip_net(net, problems, config, held_out=unseen)
    assert not net.training
    truth = TEACHER(unseen).image
    with torch.no_grad():
        error = mean_square(net(unseen).image - truth)
    baseline = mean_square(unseen.images.mean(1) - truth)
    assert error < 0.5 * baseline
    assert result.history[-1].held_out_error == pytest.approx(error / result.unit, rel=1e-4)
    assert result.history[-1].error is not None
    assert result.history[-1].error < 0.5 * baseline / result.unit


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on a CPU without bfloat16
def test_the_precision_is_that_of_the_config_within_any_autocast() -> None:
    found: dict[bool, set[str]] = {False: set(), True: set()}
    for mixed, autocast in itertools.product((False, True), repeat=2):
        net, kinds = make_net(), set()
        net.blocks[0].attn.proj.register_forward_hook(
            lambda _layer, _given, output, kinds=kinds: kinds.add(output.dtype)
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            train_cip_net(net, family(0, 48), replace(TINY, mixed_precision=mixed))
        assert kinds == {torch.bfloat16 if mixed else torch.float32}
        assert {weight.dtype for weight in net.parameters()} == {torch.float32}
        found[mixed].add(fingerprint(net.state_dict()))
    assert len(found[False]) == len(found[True]) == 1
    assert found[False] != found[True]


def own_features_of(problem: CipProblem) -> Tensor:
    """Something else than the teacher says."""
    return problem.images.mean(1) + 2 * (problem.query - problem.anchors.mean(1))


def test_without_the_teacher_the_net_fits_its_own_features() -> None:
    problems, unseen = family(0, 512), family(1, 256)
    config = replace(TINY, epochs=8, batch_size=32, learning_rate=3e-3)

    def refuse(problem: object) -> CipSolution:
        raise AssertionError("alpha = 0 needs no teacher")

    net, own = make_net(width=32), own_features_of(problems)
    result = train_cip_net(net, problems, config, teacher=refuse, alpha=0.0, own_features=own)
    assert result.history[-1].error is None
    with torch.no_grad():
        image = net(unseen).image
    target = own_features_of(unseen)
    to_own, to_teacher = (mean_square(image - one) for one in (target, TEACHER(unseen).image))
    assert to_own < 0.5 * mean_square(unseen.images.mean(1) - target)
    assert to_own < to_teacher


@pytest.mark.parametrize("alpha", [1.0, 0.2, 0.0])
def test_the_objective_is_the_mixture(alpha: float) -> None:
    """Of a net that stays what it is at the start: the mean feature."""
    problems = family(0, 24)
    own = own_features_of(problems)
    still = replace(TINY, epochs=1, learning_rate=1e-12)
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


class _StopError(Exception):
    pass


def stop_after(epoch: int) -> Callable[[CipNetEpoch], None]:
    def report(record: CipNetEpoch) -> None:
        if record.epoch == epoch:
            raise _StopError

    return report


def test_a_run_that_was_stopped_ends_like_an_uninterrupted_one(tmp_path: Path) -> None:
    problems, config = family(0, 40), replace(TINY, epochs=5)
    own = own_features_of(problems)
    options = {"alpha": 0.6, "own_features": own}
    whole = make_net()
    expected = train_cip_net(whole, problems, config, checkpoint_dir=tmp_path / "whole", **options)
    options["checkpoint_dir"] = tmp_path / "cut"
    for epoch in (2, 5):
        with pytest.raises(_StopError):
            train_cip_net(make_net(), problems, config, progress=stop_after(epoch), **options)
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


def test_errors_on_problems_held_out_are_those_of_the_problems_given(tmp_path: Path) -> None:
    problems, kept = family(0, 40), {"checkpoint_dir": tmp_path}
    first = train_cip_net(make_net(), problems, TINY, held_out=family(1, 8), **kept)
    again = train_cip_net(make_net(), problems, TINY, held_out=family(1, 8), **kept)
    assert again == first
    assert again.resumed_after == TINY.epochs
    for other in (family(2, 8), None):
        with pytest.raises(InputError, match=r"differs in held_out\.anchors"):
            train_cip_net(make_net(), problems, TINY, held_out=other, **kept)


def test_a_teacher_is_recognized_wherever_it_lies_in_memory(tmp_path: Path) -> None:
    def teacher_of(exact: ExactCip) -> Callable[[CipProblem], CipSolution]:
        def teach(problem: CipProblem) -> CipSolution:
            return exact(problem)

        return teach

    def resumed_after(teacher: Callable[[CipProblem], CipSolution]) -> int:
        asked = {"teacher": teacher, "checkpoint_dir": tmp_path}
        return train_cip_net(make_net(), family(0, 8), TINY, **asked).resumed_after

    assert [resumed_after(teacher_of(TEACHER)) for _ in range(2)] == [0, TINY.epochs]


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
        ({"alpha": 1.5}, "alpha: expected a number from 0 to 1, got 1.5"),
        ({"alpha": 0.5}, "own_features: expected them for alpha = 0.5"),
        ({"own_features": torch.zeros(8, DIM + 1)}, "own_features: expected shape"),
        ({"own_features": torch.full((8, DIM), torch.nan)}, "own_features: expected finite"),
        ({"save_seconds": -1.0}, "save_seconds: expected a number from 0"),
        ({"max_seconds": 1.0}, "max_seconds: expected with a checkpoint_dir"),
        ({"config": replace(TINY, device="cuda")}, "device: expected 'cpu' like the problems"),
        ({"config": replace(TINY, optimizer="sgd", learning_rate=1e30)}, "learning_rate: expected"),
    ],
)
def test_impossible_trainings_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        train_cip_net(make_net(), family(0, 8), **{"config": TINY} | options)


def test_a_teacher_that_abstains_is_refused(generator: torch.Generator) -> None:
    problem = random_problem(generator, 12, K, DIM)
    against = changed(problem, images=-problem.images)  # decreasing: no convex potential
    silent = ExactCip(on_failure="abstain")
    assert silent(against).failed.any()
    with pytest.raises(InputError, match=r"teacher: .*NaN"):
        train_cip_net(make_net().double(), against, TINY, teacher=silent)
    train_cip_net(make_net().double(), rows_of(against, slice(0, 4)), TINY)
