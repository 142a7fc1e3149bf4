"""Rows with metrics, surrogates, subsets of the bank and banks on disk answer as they should."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.small_vision import study_of, vision
from torch import Tensor, nn
from torch.testing import assert_close

from otad.cip import ExactCip
from otad.cip.surrogate import CipNet
from otad.experiments import study as study_module
from otad.experiments.attacked import inputs_of_bank
from otad.experiments.nets import identity_of
from otad.experiments.potentials import PotentialFound
from otad.experiments.study import Study
from otad.io.codec import digest_of
from otad.model.defend import defend
from otad.model.otad import OTAD
from otad.nets import PretrainedMetric, VisionTransformer, vision_transformer

WHOLE = (
    "[rows]",
    '[rows]\nwhole = { net = "vit", method = "otad", scope = "global", smoothness = 9 }',
)
"""A row in global scope, as an edit of the small experiment."""


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    folder = tmp_path_factory.mktemp("vision")
    return study_of(vision(folder), folder / "work")


def test_a_row_by_a_metric_is_the_model_a_user_would_make(study: Study) -> None:
    data, net = study.net("vit").data, study.net("vit").net
    metric = study.metric("learned").metric
    own = defend(
        net,
        data.train_x,
        data.train_y,
        n_neighbors=3,
        metric=metric,
        bank_dtype=torch.float16,
    )
    model = study.defended("exact")
    assert model.bank_inputs.dtype == torch.float16
    assert torch.equal(model(data.test_x), own(data.test_x))
    assert isinstance(model.solver, ExactCip)
    estimated = study.defended("estimated")
    assert isinstance(estimated.solver, CipNet)
    assert estimated.solver is study.surrogate("imitation").net
    assert not torch.equal(estimated(data.test_x), own(data.test_x))


def test_keys_are_made_once(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = study.experiment.rows
    first = study.base(rows["exact"]).bank_keys

    def never(*args: object) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr(study_module, "keys_of", never)
    assert study.base(rows["exact"]).bank_keys is first
    assert study.base(rows["few"]).bank_keys is not None


def test_some_points_a_class(study: Study) -> None:
    rows, data = study.experiment.rows, study.net("vit").data
    few, whole = study.base(rows["few"]), study.base(rows["exact"])
    assert few.bank_labels.bincount().tolist() == [2] * 10
    assert few.bank_fingerprint != whole.bank_fingerprint
    inputs = inputs_of_bank(few, study.bank_rows(rows["few"]), data)
    assert inputs is not None
    assert torch.equal(few.backbone.embed(inputs).half(), few.bank_inputs)
    metric = study.metric("learned").metric
    assert few.bank_keys is not None
    assert torch.allclose(metric(inputs), few.bank_keys, atol=1e-6)
    assert inputs_of_bank(whole, study.bank_rows(rows["exact"]), data) is data.train_x


def test_the_most_central_points_of_a_class(study: Study) -> None:
    row = replace(study.experiment.rows["few"], central=True)
    chosen, data = study.bank_rows(row), study.net("vit").data
    keys = study.metric("learned").metric(data.train_x).detach()
    assert chosen is not None
    for label in range(10):
        own = (data.train_y == label).nonzero().flatten()
        off = (keys[own] - keys[own].mean(0)).norm(dim=1)
        assert set(own[off.argsort()[:2]].tolist()) == set(
            chosen[data.train_y[chosen] == label].tolist()
        )
    assert torch.equal(study.base(row).bank_labels, data.train_y[chosen])


def test_pixels_are_the_inputs(study: Study) -> None:
    base = study.base(study.experiment.rows["pixels"])
    assert torch.equal(base.bank_points, study.net("vit").data.train_x.flatten(1))


def test_every_part_of_a_model_is_in_its_identity(study: Study) -> None:
    exact, estimated = study.identity("exact"), study.identity("estimated")
    assert exact["metric"] == study.metric("learned").identity
    assert "surrogate" not in exact
    assert estimated["surrogate"] == study.surrogate("imitation").identity
    assert study.identity("few") != exact
    assert study.identity("pixels")["metric"] != exact["metric"]


def test_settings_that_weights_do_not_show_are_in_the_identity(tmp_path: Path) -> None:
    norms = ("free", "unit")
    rows = []
    for norm in norms:
        options = f'kind = "pixels"\noptions = {{ key_norm = "{norm}" }}'
        experiment = vision(tmp_path, 'kind = "pixels"', options)
        studies = [study_of(experiment, tmp_path / work) for work in ("shared", norm)]
        shared, alone = (study.row("pixels").score.value for study in studies)
        assert shared == alone, "not what another metric left behind"
        rows.append((studies[0].metric("pixels").weights, shared))
    (free, free_score), (unit, unit_score) = rows
    assert free == unit, "a record has the name of the weights alone"
    assert free_score != unit_score


def test_nets_of_equal_weights_and_other_settings_have_other_names() -> None:
    nets = [
        vision_transformer((1, 8, 8), 10, seed=0, patch=4, width=8, blocks=1, heads=heads)
        for heads in (1, 2)
    ]
    metrics = [
        PretrainedMetric(nn.Flatten(), input_shape=(4,), key_norm=n) for n in ("unit", "free")
    ]
    surrogates = [
        CipNet(4, 3, width=8, heads=heads, blocks=1, generator=torch.Generator().manual_seed(0))
        for heads in (1, 2)
    ]
    for pair in (nets, metrics, surrogates):
        one, other = (identity_of(net) for net in pair)
        assert one["weights"] == other["weights"]
        assert one != other
        assert identity_of(pair[0]) == one


def test_learned_nets_and_metrics_stay_in_their_folders(study: Study) -> None:
    # Named by what they learn from and how, in this very way: weights of earlier runs are found.
    for kind, key, found in (
        ("net", "vit", study.net("vit").net),
        ("metric", "learned", study.metric("learned").metric),
    ):
        data = study.source("digits").fingerprint
        config = getattr(study, kind)(key).config
        depends = {kind: found.config(), "normalize": "none", "config": asdict(config)}
        place = study.work / f"{kind}s" / digest_of(depends | {"data": data})
        assert (place / "weights.safetensors").exists()


def test_banks_in_other_dtypes_have_potentials_of_their_own(tmp_path: Path) -> None:
    wide = vision(tmp_path, *WHOLE)
    narrow = replace(wide, nets={"vit": replace(wide.nets["vit"], bank="bfloat16")})
    study_of(wide, tmp_path / "shared").model("whole")
    shared, alone = (study_of(narrow, tmp_path / work) for work in ("shared", "alone"))
    first, second = (study.defended("whole") for study in (shared, alone))
    assert_close(first.answerer.levels, second.answerer.levels, rtol=0, atol=0, equal_nan=True)
    assert len(list((tmp_path / "shared" / "potentials").iterdir())) == 2


def test_two_who_ask_for_a_potential_at_once_find_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    studies = [study_of(vision(tmp_path, *WHOLE), tmp_path / "work") for _ in range(2)]
    for study in studies:
        study.bank("vit")
    find, found = study_module.PotentialFound.find, []

    def slowly(*args: Any, **options: Any) -> PotentialFound:
        found.append(1)
        time.sleep(0.3)
        return find(*args, **options)

    monkeypatch.setattr(study_module.PotentialFound, "find", slowly)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda study: study.defended("whole"), studies)
    assert found == [1]
    assert_close(one.answerer.levels, other.answerer.levels, rtol=0, atol=0, equal_nan=True)


def test_a_bank_on_disk_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = study_of(vision(tmp_path), tmp_path / "work")
    experiment = vision(tmp_path, 'bank = "float16"', 'bank = "float16"\nresident = false')
    first = study_of(experiment, tmp_path / "work").defended("exact")
    (path,) = (tmp_path / "work" / "banks").rglob("*.safetensors")
    assert path.stat().st_size > first.bank_inputs.nbytes + first.bank_features.nbytes

    def never(*args: object, **options: object) -> OTAD:
        raise AssertionError("made again")

    monkeypatch.setattr("otad.experiments.banks.defend", never)
    second = study_of(experiment, tmp_path / "work").defended("exact")
    assert not second.resident
    assert not any(name.startswith("bank_inputs") for name, _ in second.named_buffers())
    monkeypatch.undo()
    x = memory.net("vit").data.test_x
    assert torch.equal(second(x), memory.defended("exact")(x))


def test_other_code_makes_a_bank_on_disk_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = vision(tmp_path, 'bank = "float16"', 'bank = "float16"\nresident = false')
    before = study_of(experiment, tmp_path / "work").bank("vit").bank_features
    carry = VisionTransformer.transport

    def doubled(self: VisionTransformer, e: Tensor) -> tuple[Tensor, Tensor]:
        features, energy = carry(self, e)
        return 2 * features, energy

    monkeypatch.setattr(VisionTransformer, "transport", doubled)
    monkeypatch.setattr(study_module, "code_fingerprint", lambda: "other code")
    after = study_of(experiment, tmp_path / "work").bank("vit").bank_features
    assert_close(after, 2 * before)
