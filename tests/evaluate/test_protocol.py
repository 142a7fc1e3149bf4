"""The attack protocol against closed forms, kills and damage; and attacks by name: which are made,
with what inside, and why others are missing."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluate import small
from evaluate.small import Plane, Slant, Walk, Wander, plane_data, run_plane, timeless, two_sides
from factories import refuses
from safetensors.torch import load_file
from torch import Tensor

from otad.attacks import L2, Attack, Linf, LpBall, needs, register_attack
from otad.attacks.target import Target
from otad.baselines import MajorityKnn
from otad.errors import InputError
from otad.evaluate import ATTACKS, PRESETS, Evaluation, make_attack
from otad.evaluate.identity import generator_for
from otad.evaluate.protocol import HALVINGS, run_attacks
from otad.evaluate.suite import suite
from otad.model.defend import defend
from otad.model.otad import OTAD
from otad.nets import fc_resnet


def distances_along(x: Tensor, factor: float) -> Tensor:
    return x[:, 0].double().abs() * factor


def test_survivors_are_those_of_the_closed_form() -> None:
    x, y = plane_data()
    right = (x[:, 0] > 0).long() == y
    record = run_plane()
    assert record.clean_right == tuple(right.nonzero()[:, 0].tolist())
    assert record.clean["model"].value == 100 * float(right.double().mean())
    survivors = right.clone()
    expected = []
    for eps in record.eps:
        for factor in (2**0.5, 1.0):  # Slant, then Walk
            attacked = survivors.nonzero()[:, 0].tolist()
            survivors = survivors & (distances_along(x, factor) > eps)
            broken = [row for row in attacked if not survivors[row]]
            expected.append((eps, attacked, broken))
    found = [(one.eps, list(one.attacked), list(one.broken)) for one in record.attacks]
    assert found == expected
    assert [one.attack for one in record.attacks] == ["slant", "walk"] * 3


def test_attacks_on_all_rows_and_the_nearest_examples_they_find() -> None:
    """Every attack runs on every right row; adversarial examples are drawn back to the boundary,
    and the curve of the worst case is that of the nearest."""
    x, _ = plane_data()
    record = run_plane(survivors_only=False)
    for one in record.attacks:
        assert one.attacked == record.clean_right
        length = distances_along(x, 2**0.5 if one.attack == "slant" else 1.0)
        assert one.broken == tuple(row for row in one.attacked if length[row] <= one.eps)
        for row, distance in zip(one.broken, one.distances, strict=True):
            assert length[row] - 1e-6 <= distance <= length[row] + one.eps / 2**HALVINGS + 1e-6
        assert one.forwards == len(one.attacked) * 2 + len(one.broken) * (HALVINGS + 1)
        assert one.backwards == 0
    share = len(record.clean_right) - len(record.attacks[2].broken)
    assert record.per_attack["slant"] == pytest.approx(share / record.n)
    right = torch.zeros(len(x), dtype=torch.bool)
    right[list(record.clean_right)] = True
    values = []
    for eps in (0.0, 0.1, 0.25, 0.4, 0.5, 0.6):
        most = right & (distances_along(x, 1.0) + 0.6 / 2**HALVINGS > eps)
        fewest = right & (distances_along(x, 1.0) > eps)
        values.append(record.worst_case(eps).value / 100)
        assert float(fewest.double().mean()) <= values[-1] <= float(most.double().mean())
    assert values == sorted(values, reverse=True)
    assert record.worst_case_accuracy == record.worst_case(0.4).value / 100


def test_the_record_and_the_nearest_adversarial_examples_are_written(tmp_path: Path) -> None:
    x, y = plane_data()
    record = run_plane(folder=tmp_path)
    assert Evaluation.read(tmp_path / "evaluation.json") == record
    saved = load_file(tmp_path / "adversarial.safetensors")
    nearest = record.distances()
    broken = [row for row in record.clean_right if nearest[row] < math.inf]
    assert saved["rows"].tolist() == broken
    assert (Plane()(saved["inputs"]).argmax(1) != y[saved["rows"]]).all()
    measured = L2(1.0).distance(saved["inputs"], x[saved["rows"]])
    assert measured.tolist() == [nearest[row] for row in broken]


def test_a_run_killed_after_any_batch_ends_with_the_same_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attacks = [Wander(), Walk()]
    whole = run_plane(attacks=attacks, folder=tmp_path / "whole")
    files = sorted(path.name for path in (tmp_path / "whole" / "parts").iterdir())
    for batches in (0, 1, 4, 9):
        folder = tmp_path / str(batches)
        monkeypatch.setattr(small, "BATCHES_LEFT", [batches])
        with pytest.raises(KeyboardInterrupt):
            run_plane(attacks=attacks, folder=folder)
        monkeypatch.setattr(small, "BATCHES_LEFT", [])
        again = run_plane(attacks=attacks, folder=folder)
        assert timeless(again) == timeless(whole)
        assert sorted(path.name for path in (folder / "parts").iterdir()) == files
        files_of = [one / "adversarial.safetensors" for one in (folder, tmp_path / "whole")]
        assert torch.equal(*(load_file(path)["inputs"] for path in files_of))


def test_a_finished_run_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run_plane(attacks=[Wander()], folder=tmp_path)
    monkeypatch.setattr(small, "BATCHES_LEFT", [0])
    again = run_plane(attacks=[Wander()], folder=tmp_path)
    assert timeless(again) == timeless(whole)
    assert [one.seconds for one in again.attacks] == [one.seconds for one in whole.attacks]
    assert again.seconds > sum(one.seconds for one in whole.attacks), "earlier work counts"


class Diary(Attack):
    """Notes down how many rows it met."""

    name, family = "diary", "random"

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
    monkeypatch.setattr(small, "BATCHES_LEFT", [0])
    with pytest.raises(KeyboardInterrupt):
        run_plane(**({"attacks": [Wander()], "folder": tmp_path} | change))


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
    steps = 3 * math.ceil(len(x) / 7)
    assert {total for _, total in reported} == {steps}
    assert reported[-1] == (steps, steps)
    assert found.saved_seconds > 0


IMAGE = (1, 10, 10)
INSTALLED = [
    name
    for name, attack in ATTACKS.items()
    if attack.needs.package is None or importlib.util.find_spec(attack.needs.package)
]
NEED_LINES = [name for name, attack in ATTACKS.items() if attack.needs.affine_keys]


@pytest.fixture(scope="module")
def images() -> OTAD:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(30, *IMAGE, generator=generator)
    net = fc_resnet(IMAGE, 3, blocks=1, bounds=(0.0, 1.0))
    return defend(net, x, torch.arange(30) % 3, n_neighbors=2)


def test_the_network_inside_is_found(images) -> None:
    for model in (images, MajorityKnn(images)):
        bpda = make_attack("bpda", model, steps=3)
        assert (bpda.network, bpda.steps) == (images.backbone, 3)
        assert make_attack("transfer", model).source is images.backbone
        assert make_attack("metric", model).metric == images.backbone.embed


def test_presets_hold_known_names_and_options_and_grow(images) -> None:
    for affine, absent in ((True, {"keys"}), (False, {*NEED_LINES})):
        names = {
            preset: {one.name for one in choices if one.affine in (None, affine)}
            for preset, choices in PRESETS.items()
        }
        assert names["quick"] <= names["standard"] < names["full"] == {*ATTACKS} - absent
    for choices in PRESETS.values():
        for name, options, *_ in choices:
            if name in INSTALLED:
                made = make_attack(name, images, **options)
                assert made.name == name
                assert all(getattr(made, option) == value for option, value in options.items())


def test_each_attack_of_a_preset_is_made_or_missing_with_a_reason(images) -> None:
    ball, vectors = L2(1.0, bounds=(0.0, 1.0)), two_sides(points=30)[0]
    cases = (images, IMAGE, ball), (vectors, (2,), L2(1.0)), (Plane(), (3,), Linf(1.0))
    for model, shape, threat in cases:
        for preset, choices in PRESETS.items():
            attacks, missing = suite(model, preset, shape, "classification", threat)
            made = [attack.name for attack in attacks]
            listed = [one.name for one in choices if one.affine is not False and not one.groups]
            assert made == [name for name in listed if name not in missing]
            assert all(missing.values())
            assert model is not images or set(missing) <= {"ngopt", "autoattack"}


@pytest.mark.parametrize(
    ("threat", "shape", "task", "reason"),
    [
        (L2(1.0), IMAGE, "classification", "bounded"),
        (L2(1.0, bounds=(0, 1), scale=torch.ones(IMAGE)), IMAGE, "classification", "alike"),
        (L2(1.0, bounds=(0, 1)), (1, 4, 4), "classification", "tile"),
        (L2(1.0, bounds=(0, 1)), IMAGE, "regression", "regression"),
        (L2(1.0, bounds=(0, 1)), (100,), "classification", "images"),
    ],
)
def test_autoattack_is_missing_where_it_cannot_run(images, threat, shape, task, reason) -> None:
    pytest.importorskip("pyautoattack", reason="needs the extra `attacks`")
    _, missing = suite(images, "full", shape, task, threat)
    assert reason in missing["autoattack"]
    assert "random_search" not in missing
    names = ["pgd", "autoattack"]
    refuses(suite, images, names, shape, task, threat, match=f"autoattack.*{reason}")


def test_a_missing_extra_is_named(images, monkeypatch) -> None:
    monkeypatch.setattr(needs, "find_spec", lambda package: None)
    _, missing = suite(images, "full", IMAGE, "classification", L2(1.0, bounds=(0, 1)))
    assert {"autoattack", "ngopt"} == set(missing)
    assert "pip install 'otad[attacks]'" in missing["ngopt"]
    refuses(make_attack, "ngopt", images, match=r"ngopt.*nevergrad")


def test_attacks_on_lines_to_bank_points_need_a_plain_embedding(images) -> None:
    class Shifted(type(images.backbone)):  # type: ignore[misc]
        def embed(self, x: Tensor) -> Tensor:
            return super().embed(x) + 1

    net = Shifted(IMAGE, 3, blocks=1, bounds=(0.0, 1.0)).eval()
    model = OTAD(net, images.bank, n_neighbors=2)
    attacks, missing = suite(model, "standard", IMAGE, "classification")
    names = {attack.name for attack in attacks}
    assert {"keys", "soft_knn", "metric", "pgd", "apgd", "bpda", "transfer"} <= names
    assert not names & {"straight", *NEED_LINES}
    assert "train_x" in missing["straight"]
    for name in NEED_LINES:
        refuses(make_attack, name, model, match=f"attack.*{name}.*keys")


def test_unknown_names_and_options_are_refused(images) -> None:
    for name, options, pattern in (("fgsm", {}, "attack.*fgsm"), ("pgd", {"stepz": 3}, "stepz")):
        refuses(make_attack, name, images, **options, match=pattern)
    refuses(suite, images, "huge", IMAGE, "classification", match=r"attacks.*quick.*full.*huge")
    with pytest.raises(InputError, match=r"name.*'pgd'"):

        @register_attack
        class Other(Attack):
            name = "pgd"

            def run(self, *args: Any) -> Tensor: ...


def test_generators_depend_on_every_name() -> None:
    names = (0, "pgd", 1), (1, "pgd", 1), (0, "apgd", 1), (0, "pgd", 2), (0, "pgd", 1)
    drawn = [float(torch.rand((), generator=generator_for(*one))) for one in names]
    assert drawn[0] == drawn[-1]
    assert len({*drawn}) == 4
