"""Models that were saved by an earlier version answer as they did, kind by kind.

All names of the library are in `cases.py` and `trainings.py`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from golden.arrays import (
    HERE,
    MODELS,
    differences,
    given_in,
    only,
    read_arrays,
    start_in,
    training_data_in,
)
from golden.cases import (
    CASES,
    answers_of,
    attack_answers,
    evaluation_answers,
    evaluation_of,
    evaluation_of_file,
    flag_answers,
    loaded,
)
from golden.trainings import RESUMED, TRAININGS, bank_answers, command_answers, training_answers

ATTACKED = [name for name, case in CASES.items() if case.attacked]
EVALUATED = [name for name, case in CASES.items() if case.evaluated]
FLAGGED = [name for name, case in CASES.items() if case.flagged]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_there_is_a_file_for_everything_and_no_other() -> None:
    kinds = {*CASES, "bank", "train_command", "evaluation"}
    assert {path.name for path in MODELS.iterdir()} == {*kinds, "checkpoints"}
    assert {path.stem for path in HERE.glob("*.npz")} == {*kinds, "trainings"}


@pytest.mark.parametrize("kind", CASES)
def test_answers(kind: str) -> None:
    golden, case = read_arrays(HERE / f"{kind}.npz"), CASES[kind]
    found = answers_of(loaded(kind), case, *given_in(golden))
    kept = only(golden, without=("given/", "attack/", "evaluation/", "flag/"))
    assert differences(found, kept, precise=case.precise) == []


@pytest.mark.parametrize("kind", CASES)
def test_a_model_saved_anew_answers_alike(kind: str, tmp_path: Path) -> None:
    model = loaded(kind)
    x, _ = given_in(read_arrays(HERE / f"{kind}.npz"))
    model.save(tmp_path)
    again = loaded(tmp_path)
    torch.testing.assert_close(again(x), model(x), rtol=0, atol=0, equal_nan=True)
    assert again.notes == {"kind": kind}


@pytest.mark.parametrize("kind", ATTACKED)
def test_attacks(kind: str) -> None:
    golden, case = read_arrays(HERE / f"{kind}.npz"), CASES[kind]
    found = attack_answers(loaded(kind), case, *given_in(golden))
    assert differences(found, only(golden, within="attack/")) == []


@pytest.mark.parametrize("kind", EVALUATED)
def test_evaluation(kind: str) -> None:
    golden, case = read_arrays(HERE / f"{kind}.npz"), CASES[kind]
    record = evaluation_of(loaded(kind), case, *given_in(golden))
    kept = only(golden, within="evaluation/")
    assert differences(evaluation_answers(record), kept) == []


@pytest.mark.usefixtures("brief_flags")
@pytest.mark.parametrize("kind", FLAGGED)
def test_flags(kind: str) -> None:
    golden, case = read_arrays(HERE / f"{kind}.npz"), CASES[kind]
    found = flag_answers(loaded(kind), case, *given_in(golden))
    assert differences(found, only(golden, within="flag/")) == []


@pytest.mark.parametrize("name", TRAININGS)
def test_training(name: str) -> None:
    golden = read_arrays(HERE / "trainings.npz")
    found = training_answers(name, training_data_in(golden), lambda net: None)
    assert differences(found, only(golden, within=f"{name}/")) == []


@pytest.mark.parametrize("name", RESUMED)
def test_a_training_goes_on_from_its_checkpoint(name: str, tmp_path: Path) -> None:
    golden = read_arrays(HERE / "trainings.npz")
    shutil.copytree(MODELS / "checkpoints" / name, tmp_path, dirs_exist_ok=True)

    def start(net: torch.nn.Module) -> None:
        net.load_state_dict(start_in(golden, name))

    data = training_data_in(golden)
    found = training_answers(name, data, start, checkpoint_dir=tmp_path)
    assert found.pop(f"{name}/resumed") == 1
    kept = only(golden, within=f"{name}/", without=(f"{name}/resumed",))
    assert differences(found, kept) == []


def test_net_of_the_train_command(tmp_path: Path) -> None:
    golden = read_arrays(HERE / "train_command.npz")
    x = torch.from_numpy(golden["given/x"])
    found = command_answers(MODELS / "train_command", tmp_path / "model", x)
    assert differences(found, only(golden, without=("given/",))) == []


def test_bank_file() -> None:
    found = bank_answers(MODELS / "bank" / "bank.safetensors")
    assert differences(found, read_arrays(HERE / "bank.npz"), precise=True) == []


def test_evaluation_file() -> None:
    record = evaluation_of_file(MODELS / "evaluation" / "evaluation.json")
    golden = read_arrays(HERE / "evaluation.npz")
    assert differences(evaluation_answers(record), golden, precise=True) == []
