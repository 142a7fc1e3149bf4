"""The runner against closed forms, kills, damage and wrong arguments."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from evaluate.small import (
    Plane,
    Slant,
    Slope,
    Walk,
    Wander,
    plane_data,
    timeless,
    two_sides,
)
from safetensors.torch import load_file
from torch import Tensor

from otad.attacks import L2, Attack, Linf, LpBall
from otad.attacks.adaptive import Straight
from otad.attacks.base import Target
from otad.attacks.random_search import RandomNoise
from otad.baselines import MajorityKnn, MeanFeatureKnn
from otad.cip import CipSolution, ExactCip, Status
from otad.cip.protocols import RowProblem
from otad.errors import InputError
from otad.evaluate import Evaluation, evaluate
from otad.evaluate.flags import CHECKS
from otad.evaluate.protocol import HALVINGS, run_attacks
from otad.model.bank import FeatureBank
from otad.model.diagnostics import problem_of
from otad.model.otad import OTAD
from otad.nets import FCResNet

RADII = (0.2, 0.4, 0.6)


def run_plane(**options: object) -> Evaluation:
    x, y = plane_data()
    settings = {"eps": RADII, "attacks": [Slant(), Walk()], "batch_size": 7, "flags": False}
    return evaluate(Plane().eval(), x, y, L2(0.4), **(settings | options))  # type: ignore[arg-type]


def distances_along(x: Tensor, factor: float) -> Tensor:
    return x[:, 0].double().abs() * factor


def test_survivors_are_those_of_the_closed_form() -> None:
    x, y = plane_data()
    right = (x[:, 0] > 0).long() == y
    record = run_plane()
    assert record.clean_right == tuple(right.nonzero()[:, 0].tolist())
    assert record.clean["model"].value == 100 * float(right.double().mean())
    standing = right.clone()
    expected = []
    for eps in RADII:
        for factor in (2**0.5, 1.0):  # Slant, then Walk
            attacked = standing.nonzero()[:, 0].tolist()
            standing = standing & (distances_along(x, factor) > eps)
            broken = [row for row in attacked if not standing[row]]
            expected.append((eps, attacked, broken))
    found = [(one.eps, list(one.attacked), list(one.broken)) for one in record.attacks]
    assert found == expected
    assert [one.attack for one in record.attacks] == ["slant", "walk"] * 3


def test_every_attack_meets_every_right_row_if_nobody_is_spared() -> None:
    x, _ = plane_data()
    record = run_plane(survivors_only=False)
    for one in record.attacks:
        assert one.attacked == record.clean_right
        length = distances_along(x, 2**0.5 if one.attack == "slant" else 1.0)
        assert one.broken == tuple(row for row in one.attacked if length[row] <= one.eps)
    share = len(record.clean_right) - len(record.attacks[2].broken)
    assert record.per_attack["slant"] == pytest.approx(share / record.n)


def test_adversarial_examples_are_drawn_back_to_the_boundary() -> None:
    x, _ = plane_data()
    for one in run_plane(survivors_only=False).attacks:
        length = distances_along(x, 2**0.5 if one.attack == "slant" else 1.0)
        for row, distance in zip(one.broken, one.distances, strict=True):
            assert length[row] - 1e-6 <= distance <= length[row] + one.eps / 2**HALVINGS + 1e-6
        asked = len(one.attacked) * 2 + len(one.broken) * (HALVINGS + 1)
        assert one.forwards == asked
        assert one.backwards == 0


def test_the_curve_of_the_worst_case_is_that_of_the_nearest_examples() -> None:
    x, _ = plane_data()
    record = run_plane(survivors_only=False)
    right = torch.zeros(len(x), dtype=torch.bool)
    right[list(record.clean_right)] = True
    values = []
    for eps in (0.0, 0.1, 0.25, 0.4, 0.5, 0.6):
        standing = right & (distances_along(x, 1.0) + 0.6 / 2**HALVINGS > eps)
        fewest = right & (distances_along(x, 1.0) > eps)
        found = record.worst_case(eps).value / 100
        assert float(fewest.double().mean()) <= found <= float(standing.double().mean())
        values.append(found)
    assert values == sorted(values, reverse=True)
    assert record.worst_case_accuracy == record.worst_case(0.4).value / 100


def test_the_record_survives_its_file(tmp_path: Path) -> None:
    record = run_plane(folder=tmp_path)
    assert Evaluation.read(tmp_path / "evaluation.json") == record


def test_the_nearest_adversarial_examples_are_kept(tmp_path: Path) -> None:
    x, y = plane_data()
    record = run_plane(folder=tmp_path)
    kept = load_file(tmp_path / "adversarial.safetensors")
    nearest = record.distances()
    broken = [row for row in record.clean_right if nearest[row] < math.inf]
    assert kept["rows"].tolist() == broken
    assert (Plane()(kept["inputs"]).argmax(1) != y[kept["rows"]]).all()
    measured = L2(1.0).distance(kept["inputs"], x[kept["rows"]])
    assert measured.tolist() == [nearest[row] for row in broken]


def test_a_run_killed_after_any_batch_ends_with_the_same_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attacks = [Wander(), Walk()]
    whole = run_plane(attacks=attacks, folder=tmp_path / "whole")
    files = sorted(path.name for path in (tmp_path / "whole" / "parts").iterdir())
    for batches in (0, 1, 4, 9):
        folder = tmp_path / str(batches)
        monkeypatch.setattr(Wander, "limit", batches)
        with pytest.raises(KeyboardInterrupt):
            run_plane(attacks=attacks, folder=folder)
        monkeypatch.setattr(Wander, "limit", None)
        again = run_plane(attacks=attacks, folder=folder)
        assert timeless(again) == timeless(whole)
        assert sorted(path.name for path in (folder / "parts").iterdir()) == files
        first, second = (
            load_file(one / "adversarial.safetensors") for one in (folder, tmp_path / "whole")
        )
        assert torch.equal(first["inputs"], second["inputs"])


def test_a_finished_run_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run_plane(attacks=[Wander()], folder=tmp_path)
    monkeypatch.setattr(Wander, "limit", 0)
    again = run_plane(attacks=[Wander()], folder=tmp_path)
    assert timeless(again) == timeless(whole)
    assert [one.seconds for one in again.attacks] == [one.seconds for one in whole.attacks]
    assert again.seconds > sum(one.seconds for one in whole.attacks), "earlier work counts"


class Diary(Attack):
    """Notes down how many rows it met."""

    name = "diary"
    family = "random"

    def __init__(self) -> None:
        self.pages: list[int] = []

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        self.pages.append(len(x))
        return x


def test_what_an_attack_notes_down_is_no_setting_of_it(tmp_path: Path) -> None:
    first, resumed = (run_plane(attacks=[Diary()], folder=tmp_path) for _ in range(2))
    assert first.attacks[0].settings == {"pages": []}
    assert timeless(first) == timeless(resumed)


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"batch_size": 8}, {"eps": (0.3, 0.4)}, {"attacks": [Walk(), Wander()]}],
)
def test_other_arguments_do_not_meet_old_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object]
) -> None:
    run_plane(attacks=[Wander()], folder=tmp_path)
    monkeypatch.setattr(Wander, "limit", 0)
    with pytest.raises(KeyboardInterrupt):
        run_plane(**({"attacks": [Wander()], "folder": tmp_path} | change))


def test_another_model_does_not_meet_old_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_plane(attacks=[Wander()], folder=tmp_path)
    monkeypatch.setattr(Wander, "limit", 0)
    x, y = plane_data()
    model = Plane().eval()
    with torch.no_grad():
        model.weight[1] = 1e-3
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, x, y, L2(0.4), eps=RADII, attacks=[Wander()], batch_size=7, folder=tmp_path)


@pytest.mark.parametrize("damage", [b"", b"\0\0", b"not a safetensors file"])
def test_damaged_parts_are_computed_again(tmp_path: Path, damage: bytes) -> None:
    whole = run_plane(attacks=[Wander()], folder=tmp_path)
    for number, path in enumerate(sorted((tmp_path / "parts").iterdir())):
        content = path.read_bytes()
        path.write_bytes(damage if number % 2 else content[:-4] + b"\0\1\2\3")
    assert timeless(run_plane(attacks=[Wander()], folder=tmp_path)) == timeless(whole)


def test_seeds_matter_and_nothing_else_is_random() -> None:
    first, same, other = (run_plane(attacks=[Wander()], seed=seed) for seed in (0, 0, 1))
    assert timeless(first) == timeless(same)
    assert first.attacks[2].distances != other.attacks[2].distances


def test_progress_rises_to_the_end_with_a_falling_worst_case() -> None:
    told: list[tuple[str, int, int, float]] = []
    record = run_plane(eps=(0.4,), progress=lambda *now: told.append(now))
    assert [now[:2] for now in told][:2] == [("certificates", 0), ("slant, eps 0.4", 1)]  # before
    assert told[-1][0] == "done"
    done, worst = [now[1] for now in told], [now[3] for now in told]
    assert done == sorted(done)
    assert done[-1] == told[-1][2]
    assert worst == sorted(worst, reverse=True)
    assert worst[-1] == record.worst_case_accuracy


def test_progress_counts_the_checks_too() -> None:
    told: list[tuple[str, int, int, float]] = []
    run_plane(eps=(0.4,), flags=True, progress=lambda *now: told.append(now))
    count = len(CHECKS)
    assert [now[0] for now in told if "red flag" in now[0]] == [
        f"red flag {place} of {count}" for place in range(1, count + 1)
    ]
    done = [now[1] for now in told]
    assert done == sorted(done)
    assert done[-1] == told[-1][2]


def test_an_embedding_of_its_own_is_certified_by_its_constant() -> None:
    model, x, y = two_sides()
    attacks = [RandomNoise(draws=3)]
    plain = evaluate(model, x, y, L2(0.1), attacks=attacks, flags=False).certificate

    class Twice(FCResNet):
        def embed(self, x: Tensor) -> Tensor:
            return 2 * super().embed(x)

    net = Twice((2,), 2, blocks=1, bounds=(-1.0, 1.0))
    net.load_state_dict(model.backbone.state_dict())
    bank = FeatureBank(2 * model.bank_inputs, model.bank_features, model.bank_labels, "twice")
    other = OTAD(net, bank, n_neighbors=3, smoothness=1.5).eval()
    without = evaluate(other, x, y, L2(0.1), attacks=attacks, flags=False)
    assert without.certificate is None
    assert "embedding_lipschitz: expected a number" in without.missing["certificate"]
    record = evaluate(
        other, x, y, L2(0.1), attacks=attacks, flags=False, embedding_lipschitz=2.0
    )  # fmt: skip
    assert record.certificate is not None
    assert plain is not None
    assert "the embedding stretches by 2 at most, as stated" in record.certificate.assumptions
    hull = [row for row, rule in enumerate(plain.rules) if rule == "hull"]
    assert len(hull) > 10
    for row in hull:  # distances and bound are twice as large, so the radius is the same
        assert record.certificate.radius[row] == pytest.approx(plain.radius[row], abs=1e-5)


def test_a_constant_without_use_is_refused_before_any_attack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Wander, "limit", 0)
    model, x, y = two_sides()
    with pytest.raises(InputError, match="embedding_lipschitz: expected None, as this embedding"):
        evaluate(model, x, y, L2(0.1), attacks=[Wander()], embedding_lipschitz=1.0)
    with pytest.raises(InputError, match=r"only OTAD models are certified, got 1\.0 for Plane"):
        run_plane(attacks=[Wander()], embedding_lipschitz=1.0)


def test_regression_records_errors_of_all_rows(tmp_path: Path) -> None:
    x, _ = plane_data()
    y = 2 * x[:, 0] - 0.5  # the model is too high by 0.5, and Walk makes it higher
    record = evaluate(
        Slope().eval(), x, y, L2(0.3), eps=(0.1, 0.3, 0.6), attacks=[Walk()], folder=tmp_path
    )
    assert record.task == "regression"
    assert record.clean_right == tuple(range(len(x)))
    assert record.clean_errors == pytest.approx([0.5] * len(x), abs=1e-6)
    for one in record.attacks:
        assert one.broken == ()
        assert one.errors == pytest.approx([0.5 + 2 * one.eps] * len(x), abs=1e-5)
    assert record.worst_errors() == pytest.approx([1.1] * len(x), abs=1e-5)
    kept = load_file(tmp_path / "adversarial.safetensors")
    assert len(kept["rows"]) == len(x)
    assert L2(1.0).distance(kept["inputs"], x) == pytest.approx([0.3] * len(x), abs=1e-6)
    with pytest.raises(InputError, match="expected an evaluation of a classifier"):
        record.worst_case()


@pytest.mark.parametrize("survivors_only", [True, False])
def test_the_strongest_inputs_of_all_rows_are_found(tmp_path: Path, survivors_only: bool) -> None:
    """Along x_0 the margin of the wrong class is 2 (eps - |x_0|), broken or not."""
    x, y = plane_data()
    model, attacks = Plane().eval(), [Walk((0.0, 1.0, 0.0)), Walk(), Slant()]
    options = {"strongest": True, "survivors_only": survivors_only, "batch_size": 7}
    reported: list[tuple[int, int]] = []
    for _ in range(2):  # the second time from saved batches
        found = run_attacks(
            model, x, y, L2(0.4), attacks, **options, folder=tmp_path,
            progress=lambda _, done, total, worst: reported.append((done, total)),
        )  # fmt: skip
    margins = 2 * (0.4 - x[:, 0].double().abs())
    assert found.gains[found.right].tolist() == pytest.approx(
        margins[found.right].tolist(), abs=1e-6
    )
    assert found.found.tolist() == found.right.tolist()
    moved = (found.inputs - x)[found.right]
    assert moved[:, 0].abs().tolist() == pytest.approx([0.4] * len(moved))
    assert [one.attack for one in found.records] == ["walk", "walk", "slant"]
    broken = found.records[1]
    assert broken.distances == pytest.approx([0.4] * len(broken.broken))  # not shortened
    fell = len(broken.broken) if survivors_only else 0
    assert len(found.records[2].attacked) == int(found.right.sum()) - fell
    steps = 3 * math.ceil(int(found.right.sum()) / 7)
    assert {total for _, total in reported} == {steps}
    assert reported[-1] == (steps, steps)
    assert found.saved_seconds > 0


def test_otad_is_compared_with_its_relatives_and_accounts_for_its_solver() -> None:
    model, x, y = two_sides()
    record = evaluate(model, x, y, L2(0.1), attacks=[Wander()], flags=False, batch_size=11)
    with torch.no_grad():
        answers = {
            "net": model.backbone(x),
            "otad": model(x),
            "knn_majority": MajorityKnn(model)(x),
            "knn_mean_feature": MeanFeatureKnn(model)(x),
        }
        trace = model.trace(x)
    for name, outputs in answers.items():
        right = (outputs.argmax(1) == y).double().mean()
        assert record.clean[name].value == pytest.approx(100 * float(right))
    assert next(iter(record.clean)) == record.model["kind"] == "otad"
    assert record.threat["bounds"] == [-1.0, 1.0]  # the model's own
    assert record.solver is not None
    solved = float((trace.solution.status == Status.SOLVED).double().mean())
    assert record.solver.statuses["solved"] == pytest.approx(solved)
    assert record.solver.smoothness.least == pytest.approx(float(trace.solution.smoothness.min()))
    assert record.solver.residual is not None
    assert record.solver.residual < 1e-5


@dataclass(frozen=True)
class HalfGuessed(ExactCip):
    """Answers every second row as a network would: by an image, and nothing else."""

    def __call__(self, problem: RowProblem) -> CipSolution:
        solution = super().__call__(problem)
        guessed = torch.arange(len(solution.status)) % 2 == 0
        return replace(
            solution,
            status=solution.status.masked_fill(guessed, int(Status.ESTIMATED)),
            value=solution.value.masked_fill(guessed, torch.nan),
            residual=solution.residual.masked_fill(guessed, torch.nan),
        )


def test_the_residual_is_over_the_rows_that_were_solved() -> None:
    model, x, y = two_sides()
    ours = model.replace(solver=HalfGuessed())
    record = evaluate(ours, x, y, L2(0.1), attacks=[Wander()], flags=False)
    assert record.solver is not None
    assert record.solver.statuses["estimated"] == 0.5
    with torch.no_grad():
        trace = ours.trace(x)
        problem = problem_of(ours, ours.backbone.embed(x), trace.neighbors.indices)
        residual = problem.residual(trace.solution)
    assert record.solver.residual == pytest.approx(float(residual[1::2].max()))
    assert not bool(residual[::2].isfinite().any())


def test_a_knn_rule_is_evaluated_by_the_bank_it_shares() -> None:
    model, x, y = two_sides()
    knn = MajorityKnn(model).eval()
    record = evaluate(knn, x, y, L2(0.3), attacks=[Straight(points=3)], flags=False)
    assert record.model["kind"] == "knn_majority"
    assert record.solver is None
    assert "certificate" in record.missing
    assert record.worst_case_accuracy < record.clean["knn_majority"].value / 100


def test_certified_and_attacked_accuracy_enclose_the_truth() -> None:
    model, x, y = two_sides()
    attacks = [Straight(points=3, shares=(1.0,)), RandomNoise(draws=3)]
    record = evaluate(model, x, y, L2(0.2), eps=(0.05, 0.2), attacks=attacks, flags=False)
    assert record.certificate is not None
    assert max(record.certificate.radius) > 0
    for eps in record.eps:
        certified = record.certified_accuracy(eps)
        assert certified is not None
        assert certified.value <= record.worst_case(eps).value
    assert record.is_sound


def test_a_foreign_module_has_neither_bank_nor_certificate() -> None:
    x, y = plane_data()
    record = evaluate(Plane().eval(), x, y, Linf(0.3), attacks="quick", flags=False)
    assert {"straight", "soft_knn", "bpda", "transfer", "square"} <= set(record.missing)
    assert "bank" in record.missing["straight"]
    assert record.certificate is None
    assert record.attacks[0].attack == "pgd"
    right = len(record.clean_right)
    standing = sum(float(x[row, 0].abs()) > 0.3 for row in record.clean_right)
    assert standing < right
    assert record.worst_case_accuracy == pytest.approx(standing / record.n)


def test_an_eps_of_zero_and_a_model_that_is_never_right_are_no_special_cases() -> None:
    x, _ = plane_data()
    still = run_plane(eps=(0.0, 0.4))
    assert still.worst_case(0.0).value == still.clean["model"].value
    wrong = evaluate(Plane().eval(), x, 1 - (x[:, 0] > 0).long(), L2(0.4), attacks=[Walk()])
    assert wrong.worst_case_accuracy == 0.0
    assert wrong.attacks[0].attacked == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eps": ()}, "eps.* at least one"),
        ({"eps": (0.3, 0.2)}, r"eps.*ascending.*0\.3, 0\.2"),
        ({"eps": (0.3, math.inf)}, "eps.*finite.*inf"),
        ({"attacks": "thorough"}, "preset.*quick.*thorough"),
        ({"attacks": ["pdg"]}, "attack.*pdg"),
        ({"attacks": ["straight"]}, "straight.*bank"),
        ({"attacks": ["bpda"]}, "bpda.*pgd"),
        ({"attacks": ["pixle"]}, "pixle.*images"),
        ({"attacks": [Walk(), Walk()]}, "each name once"),
        ({"attacks": []}, "attacks.*at least one"),
        ({"attacks": [3]}, "attacks.*int"),
        ({"batch_size": 0}, "batch_size.*1"),
    ],
)
def test_wrong_settings_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run_plane(**change)


def test_wrong_examples_are_refused() -> None:
    x, y = plane_data()
    model = Plane().eval()
    with pytest.raises(InputError, match="y: expected one answer for each of the 40"):
        evaluate(model, x, y[:3], L2(0.1), attacks=[Walk()])
    with pytest.raises(InputError, match="unknown label 2"):
        evaluate(model, x, y + 1, L2(0.1), attacks=[Walk()])
    with pytest.raises(InputError, match="x: expected finite values"):
        evaluate(model, x / 0, y, L2(0.1), attacks=[Walk()])
    with pytest.raises(InputError, match="x: expected a torch"):
        evaluate(model, x.numpy(), y, L2(0.1), attacks=[Walk()])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="threat: expected a ball"):
        evaluate(model, x, y, 0.1, attacks=[Walk()])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="evaluation mode"):
        evaluate(Plane().train(), x, y, L2(0.1), attacks=[Walk()])
    otad, points, labels = two_sides()
    with pytest.raises(InputError, match="threat: expected bounds within"):
        evaluate(otad, points, labels, L2(0.1, bounds=(-2.0, 1.0)), attacks=["pgd"])


def test_a_record_with_quantiles_of_the_curvature_alone_is_read(tmp_path: Path) -> None:
    model, x, y = two_sides()
    record = evaluate(model, x, y, L2(0.1), attacks=[Wander()], flags=False, folder=tmp_path)
    path = tmp_path / "evaluation.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    whole = content["solver"].pop("smoothness")
    for used in ([1.5, 1.5, 1.6, 2.0, 2.5], []):
        content["solver"]["smoothness"] = used
        path.write_text(json.dumps(content), encoding="utf-8")
        solver = Evaluation.read(path).solver
        assert solver is not None
        found = solver.smoothness
        assert (found is None) == (not used)
        if found is not None:
            assert [found.least, found.median, found.most] == [1.5, 1.5, 2.5]
            assert found.count == record.n == whole["count"]


def test_a_record_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.json"
    path.write_text(json.dumps({"format": "something-else"}), encoding="utf-8")
    with pytest.raises(InputError, match="expected an evaluation of format otad-evaluation-1"):
        Evaluation.read(path)
