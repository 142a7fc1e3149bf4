"""A run that was stopped or killed ends with the weights of one that was not."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from training.small_vision import images

from otad.errors import InputError
from otad.io.tensor_files import fingerprint, read_tensors, write_tensors
from otad.nets import SequentialBackbone, fc_resnet
from otad.nets.metric_nets import CNNMetric
from otad.training import EpochRecord, MetricConfig, TrainConfig, train, train_metric
from otad.training.augmentation import Compose, RandomFlip

CONFIG = TrainConfig(epochs=5, batch_size=16, learning_rate=0.05, energy_weight=0.01, warmup=1)
FILE = "checkpoint.safetensors"


def _data(rows: int = 100, seed: int = 0) -> tuple[Tensor, ...]:
    x = torch.rand(rows, 3, generator=torch.Generator().manual_seed(seed))
    y = (x.sum(1) > 1.5).long()
    return x[20:], y[20:], x[:20], y[:20]


def _net(seed: int = 0, **options):
    return fc_resnet((3,), 2, blocks=2, seed=seed, bounds=(0, 1), **options)


class _StopError(Exception):
    pass


def _stop_after(epoch: int):
    def report(record: EpochRecord) -> None:
        if record.epoch == epoch:
            raise _StopError

    return report


def _same_state(folder: Path, other: Path) -> bool:
    return (folder / FILE).read_bytes() == (other / FILE).read_bytes()


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_run_stopped_twice_ends_like_an_uninterrupted_one(tmp_path: Path, optimizer: str) -> None:
    config = replace(CONFIG, optimizer=optimizer)
    whole = _net()
    expected = train(whole, _data(), config, checkpoint_dir=tmp_path / "whole")
    for epoch in (1, 3):
        with pytest.raises(_StopError):
            train(_net(), _data(), config, checkpoint_dir=tmp_path / "cut",
                  progress=_stop_after(epoch))  # fmt: skip
    resumed = _net()
    result = train(resumed, _data(), config, checkpoint_dir=tmp_path / "cut")
    assert result.resumed_after == 3
    assert result == expected
    assert fingerprint(resumed.state_dict()) == fingerprint(whole.state_dict())
    assert _same_state(tmp_path / "whole", tmp_path / "cut")
    without_files = _net()
    assert train(without_files, _data(), config) == expected
    assert fingerprint(without_files.state_dict()) == fingerprint(whole.state_dict())


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_weights_may_lie_in_memory_in_any_order(tmp_path: Path, optimizer: str) -> None:
    whole, cut, resumed = (
        CNNMetric((3, 8, 8), widths=(3, 4), bounds=(0, 1)).to(memory_format=torch.channels_last)
        for _ in range(3)
    )
    config = MetricConfig(epochs=4, batch_size=20, learning_rate=0.01, optimizer=optimizer)
    train_metric(whole, images(), config)
    with pytest.raises(_StopError):
        train_metric(cut, images(), config, checkpoint_dir=tmp_path, progress=_stop_after(2))
    train_metric(resumed, images(), config, checkpoint_dir=tmp_path)
    assert fingerprint(resumed.state_dict()) == fingerprint(whole.state_dict())


def test_a_finished_run_is_only_loaded(tmp_path: Path) -> None:
    first, again = _net(), _net()
    train(first, _data(), CONFIG, checkpoint_dir=tmp_path)
    bytes_before = (tmp_path / FILE).read_bytes()
    result = train(again, _data(), CONFIG, checkpoint_dir=tmp_path, progress=_stop_after(5))
    assert result.resumed_after == 5
    assert fingerprint(first.state_dict()) == fingerprint(again.state_dict())
    assert (tmp_path / FILE).read_bytes() == bytes_before
    assert os.listdir(tmp_path) == [FILE]


def test_a_run_killed_twenty_times_ends_with_the_same_file(tmp_path: Path) -> None:
    script = Path(__file__).with_name("kill_repeatedly.py")
    paths = os.pathsep.join(path for path in sys.path if path)
    output = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        timeout=120,
    ).stdout
    whole, unrenamed, *random_kills, final = (json.loads(line) for line in output.splitlines())
    assert whole == final == {"killed": False, "epochs": 100, "files": [FILE]}
    assert (unrenamed["killed"], unrenamed["epochs"], len(unrenamed["files"])) == (True, 2, 2)
    reached = [kill["epochs"] for kill in random_kills]
    assert [kill["killed"] for kill in random_kills] == 20 * [True]
    assert reached == sorted(set(reached))  # every run went on from where the last one was killed
    assert _same_state(tmp_path / "whole", tmp_path / "cut")


def test_a_checkpoint_of_another_run_is_refused_by_naming_the_difference(tmp_path: Path) -> None:
    train(_net(), _data(), CONFIG, checkpoint_dir=tmp_path)
    x, y, *held_out = _data()
    changed = x.clone()
    changed[7, 1] += 1e-3
    others = {
        r"config\.learning_rate \(0\.1 here, 0\.05 there\)": (
            _net(), _data(), replace(CONFIG, learning_rate=0.1)),
        r"config\.epochs \(6 here, 5 there\)": (_net(), _data(), replace(CONFIG, epochs=6)),
        r"net\.initial_weights": (_net(seed=1), _data(), CONFIG),
        r"net\.hidden \(4 here, 3 there\); net\.initial_weights": (
            _net(hidden=4), _data(), CONFIG),
        r"data\.train_x": (_net(), (changed, y, *held_out), CONFIG),
        r"data\.val_x \('nothing' here, '\w+' there\); data\.val_y": (_net(), (x, y), CONFIG),
    }  # fmt: skip
    for message, (net, data, config) in others.items():
        start = fingerprint(net.state_dict())
        with pytest.raises(InputError, match=f"differs in {message}"):
            train(net, data, config, checkpoint_dir=tmp_path)
        assert fingerprint(net.state_dict()) == start
    assert train(_net(), _data(), replace(CONFIG, log_every=3), checkpoint_dir=tmp_path)


def test_weights_that_are_held_belong_to_the_run(tmp_path: Path) -> None:
    held = _net()
    held.blocks.requires_grad_(False)
    train(held, _data(), CONFIG, checkpoint_dir=tmp_path)
    with pytest.raises(InputError, match=r"differs in net\.frozen \('nothing' here, \['blocks"):
        train(_net(), _data(), CONFIG, checkpoint_dir=tmp_path)


def test_own_modules_are_recognized_by_their_structure(tmp_path: Path) -> None:
    class Half(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / 2

    def net(*blocks: torch.nn.Module) -> SequentialBackbone:
        return SequentialBackbone(None, blocks, _net().head, input_shape=(3,))

    train(net(Half()), _data(), CONFIG, checkpoint_dir=tmp_path)
    assert train(net(Half()), _data(), CONFIG, checkpoint_dir=tmp_path).resumed_after == 5
    with pytest.raises(InputError, match=r"differs in net\.structure"):
        train(net(Half(), Half()), _data(), CONFIG, checkpoint_dir=tmp_path)


def test_own_augmentations_are_recognized_wherever_they_lie_in_memory(tmp_path: Path) -> None:
    def dimming(share: float) -> Compose:
        def dim(x: Tensor, _: torch.Generator) -> Tensor:
            return share * x

        return Compose((dim, RandomFlip(share)))

    pixels = torch.rand(40, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    data = (pixels, torch.arange(40) % 2)

    def resumed_after(augment: Compose) -> int:
        net = fc_resnet((1, 2, 2), 2, blocks=1, bounds=(0, 1))
        return train(net, data, CONFIG, augment=augment, checkpoint_dir=tmp_path).resumed_after

    assert resumed_after(dimming(0.5)) == 0
    assert resumed_after(dimming(0.5)) == 5
    with pytest.raises(InputError, match=r"differs in augment .*RandomFlip\(probability=0\.25\)"):
        resumed_after(dimming(0.25))


def test_a_damaged_checkpoint_is_refused_wherever_the_damage_is(tmp_path: Path) -> None:
    path = tmp_path / FILE
    tensors = {"a": torch.arange(6.0), "b": torch.tensor(3), "c": torch.ones(2, dtype=torch.int8)}
    write_tensors(path, tensors, {"history": [0.1, None], "run": "x"})
    good = path.read_bytes()
    loaded = read_tensors(path)
    assert fingerprint(loaded.tensors) == fingerprint(tensors)
    assert loaded.header == {"history": [0.1, None], "run": "x"}
    length = int.from_bytes(good[:8], "little")
    spaces = good[8 : 8 + length].rstrip(b" ")  # padding behind the header carries nothing
    for position in (*range(8 + len(spaces)), *range(8 + length, len(good))):
        damaged = bytearray(good)
        damaged[position] ^= 0x04
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=FILE):
            read_tensors(path)
    for size in (0, 7, 100, len(good) - 1):
        path.write_bytes(good[:size])
        with pytest.raises(InputError, match="safetensors file"):
            read_tensors(path)


def test_a_pickle_or_a_foreign_safetensors_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(InputError, match="safetensors file"):
        train(_net(), _data(), CONFIG, checkpoint_dir=tmp_path)
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(InputError, match=r"expected format 'otad-tensors', got \[\]"):
        train(_net(), _data(), CONFIG, checkpoint_dir=tmp_path)


def test_shared_weights_are_saved(tmp_path: Path) -> None:
    shared = torch.zeros(3)
    write_tensors(tmp_path / FILE, {"a": shared, "b": shared, "c": shared[:2]}, {})
    assert set(read_tensors(tmp_path / FILE).tensors) == {"a", "b", "c"}
