"""The models of rows are those a user would make, and their parts are made once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.toml_files import VISION, study_of, written
from torch.testing import assert_close

from otad.experiments import study as study_module
from otad.experiments.study import Study
from otad.model.defend import defend


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    folder = tmp_path_factory.mktemp("vision")
    return study_of(written(folder, VISION), folder / "work")


def test_a_row_is_the_model_a_user_would_make(study: Study) -> None:
    data, net = study.source("digits").data, study.net("vit").net
    pairs = net, data.train_x, data.train_y
    metric, half = study.metric("learned").net, torch.float16
    own = defend(*pairs, n_neighbors=3, metric=metric, bank_dtype=half)
    model = study.defended("exact")
    assert model.bank_inputs.dtype == half
    assert study.defended("exact").bank_keys is model.bank_keys, "made once"
    assert study.model("net") is net
    assert torch.equal(model(data.test_x), own(data.test_x))
    estimated = study.defended("estimated")
    assert estimated.solver is study.surrogate("imitation").net
    assert not torch.equal(estimated(data.test_x), own(data.test_x))
    whole = defend(*pairs, scope="global", smoothness=9, bank_dtype=half)
    assert_close(study.defended("whole")(data.test_x), whole(data.test_x))


def test_some_points_a_class(study: Study) -> None:
    rows, data = study.experiment.rows, study.source("digits").data
    few, whole = study.base(rows["few"]), study.base(rows["exact"])
    assert few.bank_labels.bincount().tolist() == [2] * 10
    assert few.bank_fingerprint != whole.bank_fingerprint
    inputs = study.train_inputs(rows["few"])
    assert inputs is not None
    assert torch.equal(few.backbone.embed(inputs).half(), few.bank_inputs)
    assert few.bank_keys is not None
    assert torch.allclose(study.metric("learned").net(inputs), few.bank_keys, atol=1e-6)
    assert study.train_inputs(rows["exact"]) is data.train_x


def test_the_most_central_points_of_a_class(study: Study) -> None:
    row = replace(study.experiment.rows["few"], central=True)
    chosen, data = study.bank_rows(row), study.source("digits").data
    keys = study.metric("learned").net(data.train_x).detach()
    assert chosen is not None
    for label in range(10):
        own = (data.train_y == label).nonzero().flatten()
        off = (keys[own] - keys[own].mean(0)).norm(dim=1)
        central = chosen[data.train_y[chosen] == label]
        assert set(own[off.argsort()[:2]].tolist()) == set(central.tolist())
    assert torch.equal(study.base(row).bank_labels, data.train_y[chosen])


def test_pixels_are_the_inputs(study: Study) -> None:
    data, metric = study.source("digits").data, study.metric("pixels").net
    base = study.base(study.experiment.rows["pixels"])
    assert torch.equal(base.bank_points, data.train_x.flatten(1))
    assert torch.equal(metric(data.test_x), data.test_x.flatten(1))


def test_every_part_of_a_model_is_in_its_identity(study: Study) -> None:
    exact, estimated = study.identity("exact"), study.identity("estimated")
    assert exact["metric"] == study.metric("learned").identity
    assert exact["surrogate"] is None
    assert estimated["surrogate"] == study.surrogate("imitation").identity
    assert study.identity("few") != exact
    assert study.identity("pixels")["metric"] != exact["metric"]


def test_settings_that_weights_do_not_show_are_in_the_identity(tmp_path: Path) -> None:
    scores, weights = [], []
    for norm in ("free", "unit"):
        options = f'kind = "pixels"\noptions = {{ key_norm = "{norm}" }}'
        path = written(tmp_path, VISION, ('kind = "pixels"', options))
        studies = [study_of(path, tmp_path / work) for work in ("shared", norm)]
        shared, alone = (study.row("pixels").score.value for study in studies)
        assert shared == alone, "not what another metric left behind"
        scores.append(shared)
        weights.append(studies[0].metric("pixels").identity["weights"])
    assert weights[0] == weights[1]
    assert scores[0] != scores[1]


def test_banks_in_other_dtypes_have_potentials_of_their_own(tmp_path: Path) -> None:
    study_of(written(tmp_path, VISION), tmp_path / "shared").defended("whole")
    narrow = written(tmp_path, VISION, ('bank = "float16"', 'bank = "bfloat16"'))
    first, second = (
        study_of(narrow, tmp_path / work).defended("whole") for work in ("shared", "alone")
    )
    levels = [model.answerer.state_dict()["levels"] for model in (first, second)]
    assert_close(*levels, rtol=0, atol=0, equal_nan=True)
    assert len(list((tmp_path / "shared" / "potentials").iterdir())) == 2


def test_two_that_need_a_potential_at_once_find_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, VISION)
    studies = [study_of(path, tmp_path / "work") for _ in range(2)]
    for study in studies:
        study.bank("vit")
    write, found = study_module.write_tensors, []

    def slowly(*args: Any) -> None:
        found.append(1)
        time.sleep(0.3)
        write(*args)

    monkeypatch.setattr(study_module, "write_tensors", slowly)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda study: study.potential("whole"), studies)
    assert found == [1]
    assert one[1] == other[1]
    assert_close(one[0].levels, other[0].levels, rtol=0, atol=0, equal_nan=True)


def test_a_row_without_its_model_is_read(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = study.row("exact"), study.attack("exact", "push"), study.regularity("vit")
    monkeypatch.setattr(Study, "defended", lambda self, key: pytest.fail("measured again"))
    change = ('method = "otad", metric', 'method = "otad", label = "new", metric')
    again = study_of(written(tmp_path, VISION, change), study.work.folder)
    assert again.experiment.rows["exact"].label == "new", "which changes nothing"
    assert (again.row("exact"), again.attack("exact", "push"), again.regularity("vit")) == first
    monkeypatch.setattr(study_module, "VERSION", 2)
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        study.row("exact")
