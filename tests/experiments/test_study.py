"""The models of rows are those a user would make; their parts are made once, and resume."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from experiments.toml_files import KEYS, VISION, WINE, study_of, written
from torch import nn
from torch.testing import assert_close

from otad.errors import InputError
from otad.experiments import rows as rows_module
from otad.experiments.cache import UnfinishedError, WorkFolder
from otad.experiments.records import Candidate
from otad.experiments.study import Study
from otad.io.codec import read_json
from otad.model.defend import defend
from otad.nets import feature_lift
from otad.scores import share_score
from otad.training import Adversary


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


def test_a_row_with_unread_directions_lifts_the_outputs_of_its_net(tmp_path: Path) -> None:
    added = """
[nets.orthogonal]
data = "digits"
kind = "orthogonal"
blocks = 1
options = { width = 16 }
train = { epochs = 1, optimizer = "orthogonal_muon", loss = "soft_margin" }
[rows]
head = { net = "orthogonal", method = "net", certify = { eps = [0.1] } }
whole = { net = "orthogonal", method = "otad", scope = "global", smoothness = 2.0, unread = 1.0 }
less = { net = "orthogonal", method = "otad", scope = "global", smoothness = 2.0, unread = 0.2 }
"""
    start = VISION[: VISION.index("[otad]")]
    own = study_of(written(tmp_path, start + added), tmp_path / "work")
    data, net = own.source("digits").data, own.net("orthogonal").net
    for key, unread in (("whole", 1.0), ("less", 0.2)):
        lift = feature_lift(net, unread)
        known = defend(lift, data.train_x, data.train_y, scope="global", smoothness=2.0)
        assert_close(own.defended(key)(data.test_x[:30]), known(data.test_x[:30]))
    assert own.identity("whole") != own.identity("less")
    assert 0 <= own.row("head").certified["0.1"].value <= own.row("head").score.value


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


def test_a_bank_of_points_that_the_classifier_gets_right_under_attack(tmp_path: Path) -> None:
    study = study_of(written(tmp_path, KEYS), tmp_path / "work")
    net, data = study.net("robust").net, study.source("digits").data
    first, tuned = (study.defended(name) for name in ("softmax", "tuned"))
    assert_close(first.query_keys(data.test_x), net(data.test_x).softmax(1))
    rows, right = study.bank_rows(study.experiment.rows["softmax"]), study.right("robust")
    ball = Adversary(0.3).ball(net)
    start, goal = data.train_x, data.train_y
    gradient = torch.autograd.functional.jacobian(
        lambda x: nn.functional.cross_entropy(net(x), goal, reduction="sum"), start
    )
    one_step = net(ball.clip(start + 0.1 * ball.steepest(gradient), start)).argmax(1) == goal
    assert rows is not None
    assert bool(right[rows].all())
    assert 0.5 < right.double().mean() < (net(start).argmax(1) == goal).double().mean()
    assert (one_step == right).double().mean() > 0.9  # an attack by hand breaks the same points
    plain = study.bank_rows(replace(study.experiment.rows["softmax"], robust=False))
    assert study.identity("softmax") != study.identity("tuned")
    assert plain is not None
    assert not torch.equal(plain, rows)
    # The tuned metric has another network, and the same bank points with its own keys.
    assert torch.equal(tuned.bank_inputs, first.bank_inputs)
    assert tuned.metric is not None
    inputs = data.train_x[rows]
    assert torch.allclose(tuned.metric(inputs), tuned.bank_keys, atol=1e-6)
    assert not torch.allclose(tuned.bank_keys, first.bank_keys, atol=1e-4)


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


def test_a_row_without_its_model_is_read(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = study.row("exact"), study.attack("exact", "push"), study.regularity("vit")
    monkeypatch.setattr(Study, "defended", lambda self, key: pytest.fail("measured again"))
    change = ('method = "otad", metric', 'method = "otad", label = "new", metric')
    again = study_of(written(tmp_path, VISION, change), study.work.folder)
    assert again.experiment.rows["exact"].label == "new", "which changes nothing"
    assert (again.row("exact"), again.attack("exact", "push"), again.regularity("vit")) == first
    monkeypatch.setattr(rows_module, "VERSION", 2)
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        study.row("exact")


def _flip_a_digit(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"7.0", b"6.0"))


def _unseal(file: Path) -> None:
    file.write_text(json.dumps(read_json(file)["content"]))


@pytest.mark.parametrize("damage", [_flip_a_digit, _unseal, Path.unlink])
def test_a_damaged_part_is_computed_again(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folder, values = WorkFolder(tmp_path), iter((7.0, 7.5, 8.0))

    def found() -> float:
        return folder.part(Candidate, "n", lambda: Candidate(next(values), share_score(1, 2))).value

    assert [found(), found()] == [7.0, 7.0]
    (file,) = (tmp_path / "parts").iterdir()
    damage(file)
    assert [found(), found()] == [7.5, 7.5]


def test_weights_are_learned_once_and_their_seconds_add_up(tmp_path: Path) -> None:
    def killed(progress: Any, **saving: Any) -> tuple[int, dict[str, float]]:
        progress(SimpleNamespace(epoch=1, seconds=2.0))
        progress(SimpleNamespace(epoch=2, seconds=3.0))
        raise KeyboardInterrupt

    def learn(progress: Any, checkpoint_dir: Path, **saving: Any) -> tuple[int, dict[str, float]]:
        progress(SimpleNamespace(epoch=2, seconds=4.0))  # again, as it was not saved yet
        (checkpoint_dir / "checkpoint.safetensors").write_bytes(b"large")
        return 2, {"train_score": 0.5}

    def never(**saving: Any) -> tuple[int, dict[str, float]]:
        raise AssertionError("learned again")

    def trained(value: float, train: Any) -> tuple[dict[str, Any], float]:
        net = nn.Linear(1, 1)
        nn.init.constant_(net.weight, value)
        found = WorkFolder(tmp_path).trained("nets", "name", net, 2, train, lambda *_: None)
        return found, float(net.weight.detach())

    with pytest.raises(KeyboardInterrupt):
        trained(1.0, killed)
    first = trained(2.0, learn)
    assert first == ({"train_score": 0.5, "seconds": 6.0}, 2.0)
    assert trained(3.0, never) == first
    (place,) = (tmp_path / "nets").iterdir()
    assert {path.name for path in place.iterdir()} == {"weights.safetensors", "seconds.json"}


KINDS = {"net": "vit", "metric": "learned", "surrogate": "imitation"}


@pytest.mark.parametrize("kind", list(KINDS))
def test_training_out_of_time_resumes_to_the_same_weights(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, VISION, ("epochs = 1", "epochs = 2"))
    study = study_of(path, tmp_path / "pieces")
    if kind == "surrogate":
        study.defended("exact")
    monkeypatch.setattr(study.work, "_seconds_left", lambda: 1e-6)  # enough for one epoch
    with pytest.raises(UnfinishedError, match="after epoch 1 of 2"):
        getattr(study, kind)(KINDS[kind])
    late = study_of(path, tmp_path / "late", deadline=time.time() - 1)
    with pytest.raises(UnfinishedError, match="out of time"):
        getattr(late, kind)(KINDS[kind])
    works = (tmp_path / "pieces", tmp_path / "whole")
    found = [getattr(study_of(path, work), kind)(KINDS[kind]) for work in works]
    assert found[0].identity == found[1].identity


def test_what_is_learned_is_loaded_unless_its_settings_changed(tmp_path: Path) -> None:
    work = tmp_path / "work"
    first, second = (study_of(written(tmp_path, VISION), work) for _ in range(2))
    surrogate = first.surrogate("imitation")
    files = sorted(work.rglob("*.safetensors"))
    assert [file.parent.parent.name for file in files] == ["metrics", "nets", "surrogates"]
    times = [file.stat().st_mtime_ns for file in files]
    again = second.surrogate("imitation")
    assert (again.identity, again.record) == (surrogate.identity, surrogate.record)
    assert surrogate.record.seconds > 0
    assert surrogate.record.results["held_out_error"] is not None
    assert [file.stat().st_mtime_ns for file in files] == times
    seconds = read_json(files[0].parent / "seconds.json")["content"]
    assert len(seconds) == 2, "one entry an epoch"
    for old, new in (("bors = 3", "bors = 3\nsmoothness = 5.0"), ("steps = 1", "steps = 2")):
        study_of(written(tmp_path, VISION, (old, new)), work).surrogate("imitation")
    names = [file.parent.parent.name for file in work.rglob("weights.safetensors")]
    assert Counter(names) == {"nets": 1, "metrics": 2, "surrogates": 3}


def test_prototypes_drawn_differently_are_told_apart(tmp_path: Path) -> None:
    def weights(neighbors: int, work: str) -> str:
        options = f'kind = "prototypes"\noptions = {{ neighbors = {neighbors}, per_class = 2 }}'
        changes = ("blocks = 1", options), ("epochs = 1", 'epochs = 1, loss = "margin"')
        net = study_of(written(tmp_path, WINE, *changes), tmp_path / work).net("right")
        return net.identity["weights"]

    near, far = weights(1, "shared"), weights(9, "shared")
    assert near != far == weights(9, "alone")


@pytest.mark.parametrize(
    ("old", "new", "kind", "message"),
    [
        ("epochs = 1,", "epoch = 1,", "net", "train: .*epoch"),
        ("patch = 4,", "path = 4,", "net", "options: .*'vit'.*path"),
        ("width = 8,", f"width = {2**62},", "net", "width|dim|options"),
        ("test_fraction = 0.9", "test_fraction = [1]", "net", "data.digits: .*options|fraction: "),
        ("batch_size = 64,", "size = 64,", "metric", "train: .*size"),
        ("steps = 1", "step = 1", "metric", "train: .*step"),
        ("key_dim = 4", "keys = 4", "metric", "options of cnn.*keys"),
        ("epochs = 2, warmup", "epoch = 2, warmup", "surrogate", "train: .*epoch"),
        ("heads = 2, blocks", "head = 2, blocks", "surrogate", "options: .*head"),
    ],
)
def test_unknown_settings(tmp_path: Path, old: str, new: str, kind: str, message: str) -> None:
    study = study_of(written(tmp_path, VISION, (old, new)), tmp_path / "work")
    with pytest.raises(InputError, match=message):
        getattr(study, kind)(KINDS[kind])


def test_a_row_sets_its_solver(tmp_path: Path) -> None:
    asked = 'few = { max_smoothness = 1e9, spares = 2, potential = "lowest", net = "vit",'
    study = study_of(written(tmp_path, VISION, ('few = { net = "vit",', asked)), tmp_path / "work")
    solver = study.defended("few").solver
    assert (solver.max_smoothness, solver.spares, solver.potential) == (1e9, 2, "lowest")
    memory = study.net("vit").record.results
    assert memory["device_memory"] is None
    assert memory["resident"] > 2**20
