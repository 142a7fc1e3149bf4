"""Attacks by name: which are made, with what inside, and why others are missing."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
import torch
from evaluate.small import Plane, two_sides
from torch import Tensor

from otad.attacks import L2, Attack, Linf, needs, register_attack
from otad.baselines import MajorityKnn
from otad.errors import InputError
from otad.evaluate import ATTACKS, PRESETS, make_attack
from otad.evaluate.identity import generator_for
from otad.evaluate.suite import suite
from otad.model.defend import defend
from otad.model.otad import OTAD
from otad.nets import fc_resnet

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
        for name, options, _ in choices:
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
            listed = [one.name for one in choices if one.affine is not False]
            assert made == [name for name in listed if name not in missing]
            assert all(missing.values())
            assert model is not images or set(missing) <= {"ngopt", "square", "autoattack"}


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
    with pytest.raises(InputError, match=f"autoattack.*{reason}"):
        suite(images, ["pgd", "autoattack"], shape, task, threat)


def test_a_missing_extra_is_named(images, monkeypatch) -> None:
    monkeypatch.setattr(needs, "find_spec", lambda package: None)
    _, missing = suite(images, "full", IMAGE, "classification", L2(1.0, bounds=(0, 1)))
    assert {"square", "autoattack", "ngopt"} == set(missing)
    assert "pip install 'otad[attacks]'" in missing["ngopt"]
    with pytest.raises(InputError, match=r"ngopt.*nevergrad"):
        make_attack("ngopt", images)


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
        with pytest.raises(InputError, match=f"attack.*{name}.*keys"):
            make_attack(name, model)


def test_unknown_names_and_options_are_refused(images) -> None:
    for name, options, pattern in (("fgsm", {}, "attack.*fgsm"), ("pgd", {"stepz": 3}, "stepz")):
        with pytest.raises(InputError, match=pattern):
            make_attack(name, images, **options)
    with pytest.raises(InputError, match=r"preset.*quick, standard, full.*huge"):
        suite(images, "huge", IMAGE, "classification")
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
