"""Runs that save and stop by the clock, and go on from there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from training.small_vision import images, small_vit, weights_print

from otad.io.tensor_files import read_tensors
from otad.nets.metric_nets import CNNMetric
from otad.training import MetricConfig, TrainConfig, loop, recipe, train
from otad.training.metric import train_metric

# A CPU without bfloat16 says so once, and computes it all the same.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")

FILE = "checkpoint.safetensors"
PLAIN = TrainConfig(epochs=3, batch_size=16, learning_rate=0.01, optimizer="adamw")
WHOLE = recipe("vit_cifar10", epochs=4, batch_size=16, warmup=1, ema=0.8, energy_weight=1e-4)


class _Clock:
    """Every look at it takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def test_a_run_out_of_time_goes_on_in_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "monotonic", _Clock())
    data, config = images(), replace(WHOLE, epochs=7)
    whole, net = small_vit(), small_vit()
    expected = train(whole, data, config)
    reached = []
    for _ in range(9):
        net = small_vit()
        result = train(net, data, config, checkpoint_dir=tmp_path, max_seconds=8)
        reached.append((result.resumed_after, len(result.history), result.finished))
        if result.finished:
            break
        assert not net.training
        assert len(read_tensors(tmp_path / FILE).header["history"]) == len(result.history)
    assert [start for start, _, _ in reached[1:]] == [end for _, end, _ in reached[:-1]]
    assert 2 <= len(reached) <= 4
    assert result == expected
    assert weights_print(net) == weights_print(whole)
    single = train(small_vit(), data, config, checkpoint_dir=tmp_path / "one", max_seconds=1e-9)
    assert (len(single.history), single.finished) == (1, False)


def test_checkpoints_may_be_rarer_than_epochs_but_the_last_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "monotonic", _Clock())
    saved: list[int] = []
    save = loop.save_run

    def note(*args) -> None:
        saved.append(len(args[-1]))
        save(*args)

    monkeypatch.setattr(loop, "save_run", note)
    config = replace(PLAIN, epochs=8)
    train(small_vit(), images(), config, checkpoint_dir=tmp_path / "rare", save_seconds=2.5)
    assert saved == [3, 6, 8]
    train(small_vit(), images(), config, checkpoint_dir=tmp_path / "each")
    assert saved[3:] == list(range(1, 9))
    assert (tmp_path / "rare" / FILE).read_bytes() == (tmp_path / "each" / FILE).read_bytes()


def test_a_metric_too_is_trained_in_several_runs(tmp_path: Path) -> None:
    data, config = images(), MetricConfig(epochs=3, batch_size=20, ema=0.5, augment="light")
    whole, net = (CNNMetric((3, 8, 8), widths=(3, 4), bounds=(0, 1)) for _ in range(2))
    expected = train_metric(whole, data, config)
    for epoch in (1, 2, 3):
        net = CNNMetric((3, 8, 8), widths=(3, 4), bounds=(0, 1))
        result = train_metric(net, data, config, checkpoint_dir=tmp_path, max_seconds=1e-9)
        assert (len(result.history), result.finished) == (epoch, epoch == 3)
    assert result == expected
    assert weights_print(net) == weights_print(whole)
