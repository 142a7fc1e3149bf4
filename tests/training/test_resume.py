"""A run that was stopped, killed or out of time ends with the weights of one that was not."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training.small_vision import (
    FILE,
    StopError,
    images,
    small_cnn,
    small_vit,
    stop_after,
    weights_print,
)

from otad.errors import InputError
from otad.io.tensor_files import read_tensors, write_tensors
from otad.nets import SequentialBackbone, fc_resnet
from otad.training import MetricConfig, TrainConfig, TrainResult, loop, recipe, train, train_metric
from otad.training.adversary import Adversary
from otad.training.augmentation import Compose, RandomFlip

# A CPU without bfloat16 warns once and computes it all the same.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")

CONFIG = TrainConfig(epochs=4, batch_size=16, learning_rate=0.05, energy_weight=0.01, warmup=1)
VIT = recipe("vit_cifar10", epochs=4, batch_size=16, warmup=1, ema=0.8, energy_weight=1e-4)
METRIC = MetricConfig(epochs=4, batch_size=16, learning_rate=0.01)
ATTACKED = replace(METRIC, adversary=Adversary(0.3, steps=2))


def table(rows: int = 100) -> tuple[Tensor, ...]:
    x = torch.rand(rows, 3, generator=torch.Generator().manual_seed(0))
    y = (x.sum(1) > 1.5).long()
    return x[20:], y[20:], x[:20], y[:20]


def pictures() -> tuple[Tensor, ...]:
    x, y = images()
    return x[:50], y[:50], x[50:], y[50:]


def small_net(seed: int = 0, **options: Any):
    return fc_resnet((3,), 2, blocks=2, seed=seed, bounds=(0, 1), **options)


def channels_last() -> nn.Module:
    return small_cnn().to(memory_format=torch.channels_last)


Case = tuple[Callable[[], nn.Module], Any]
CASES: dict[str, Case] = {
    "sgd": (small_net, CONFIG),
    "adamw": (small_net, replace(CONFIG, optimizer="adamw")),
    "vit": (small_vit, VIT),
    "vit, sgd": (small_vit, replace(VIT, optimizer="sgd", mixed_precision=False)),
    "vit, no average": (small_vit, replace(VIT, augment="light", ema=0)),
    "metric": (small_cnn, replace(METRIC, optimizer="sgd", ema=0.5, augment="light")),
    "metric, bank": (small_cnn, replace(ATTACKED, references="bank")),
    "metric, mixed": (small_cnn, replace(ATTACKED, mixed_precision=True, channels_last=True)),
    "metric, weights perturbed": (
        small_cnn,
        replace(METRIC, adversary=Adversary(0.3, steps=1, weight_share=0.01), ema=0.5),
    ),
    "weights in another memory layout": (channels_last, replace(METRIC, optimizer="sgd")),
    "weights in another memory layout, adamw": (channels_last, METRIC),
}
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def fit(case: Case, net: nn.Module, **options: Any) -> TrainResult:
    trainer: Any = train_metric if isinstance(case[1], MetricConfig) else train
    return trainer(net, table() if case[0] is small_net else pictures(), case[1], **options)


@EVERY
def test_a_stopped_run_ends_like_an_uninterrupted_one(tmp_path: Path, case: Case) -> None:
    whole, resumed, bare, finished = (case[0]() for _ in range(4))
    expected = fit(case, whole, checkpoint_dir=tmp_path / "whole")
    for epoch in (1, 3):
        with pytest.raises(StopError):
            fit(case, case[0](), checkpoint_dir=tmp_path / "cut", progress=stop_after(epoch))
    result = fit(case, resumed, checkpoint_dir=tmp_path / "cut")
    assert (result, result.resumed_after) == (expected, 3)
    torch.manual_seed(123)  # the global generator has no influence, and keeps its state
    state = torch.random.get_rng_state()
    assert fit(case, bare) == expected
    assert torch.equal(state, torch.random.get_rng_state())
    before = (tmp_path / "cut" / FILE).read_bytes()
    again = fit(case, finished, checkpoint_dir=tmp_path / "cut", progress=stop_after(4))
    assert again.resumed_after == 4
    assert len({weights_print(net) for net in (whole, resumed, bare, finished)}) == 1
    assert (tmp_path / "whole" / FILE).read_bytes() == before
    assert (tmp_path / "cut" / FILE).read_bytes() == before
    assert os.listdir(tmp_path / "cut") == [FILE]


class Clock:
    """Every look at it takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def test_a_run_out_of_time_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "monotonic", Clock())
    data, config = images(), replace(VIT, epochs=7)
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
    monkeypatch.setattr(loop, "monotonic", Clock())
    saved: list[int] = []
    save = loop.save_run

    def note(*args: Any) -> None:
        saved.append(len(args[-1]))
        save(*args)

    monkeypatch.setattr(loop, "save_run", note)
    config = replace(CONFIG, epochs=8)
    train(small_net(), table(), config, checkpoint_dir=tmp_path / "rare", save_seconds=2.5)
    assert saved == [3, 6, 8]
    train(small_net(), table(), config, checkpoint_dir=tmp_path / "each")
    assert saved[3:] == list(range(1, 9))
    assert (tmp_path / "rare" / FILE).read_bytes() == (tmp_path / "each" / FILE).read_bytes()


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
    assert reached == sorted(set(reached))  # every run resumed where the last one was killed
    assert (tmp_path / "whole" / FILE).read_bytes() == (tmp_path / "cut" / FILE).read_bytes()


def test_a_checkpoint_of_another_run_is_refused_by_naming_the_difference(tmp_path: Path) -> None:
    train(small_net(), table(), CONFIG, checkpoint_dir=tmp_path)
    x, y, *held_out = table()
    changed = x.clone()
    changed[7, 1] += 1e-3
    frozen = small_net()
    frozen.blocks.requires_grad_(False)
    flipped = {"augment": RandomFlip(0.25)}
    others = [
        (r"config\.learning_rate \(0\.1 here, 0\.05 there\)", {"learning_rate": 0.1}, {}),
        (r"config\.epochs \(6 here, 4 there\)", {"epochs": 6}, {}),
        (r"config\.ema \(0\.5 here, 0\.0 there\)", {"ema": 0.5}, {}),
        (r"augment \('RandomFlip\(probability=0\.25\)' here, None there\)", {}, flipped),
        (r"net\.initial_weights", {}, {"net": small_net(seed=1)}),
        (r"net\.hidden \(4 here, 3 there\); net\.initial", {}, {"net": small_net(hidden=4)}),
        (r"net\.frozen \(\['blocks.* here, 'nothing' there\)", {}, {"net": frozen}),
        (r"data\.train_x", {}, {"data": (changed, y, *held_out)}),
        (r"data\.val_x \('nothing' here, '\w+' there\); data\.val_y", {}, {"data": (x, y)}),
    ]
    for message, changes, options in others:
        call = {"net": small_net(), "data": table(), "config": replace(CONFIG, **changes)} | options
        start = weights_print(call["net"])
        with pytest.raises(InputError, match=f"differs in {message}"):
            train(**call, checkpoint_dir=tmp_path)
        assert weights_print(call["net"]) == start
    assert train(small_net(), table(), replace(CONFIG, log_every=3), checkpoint_dir=tmp_path)


def test_a_checkpoint_of_another_metric_training_is_refused(tmp_path: Path) -> None:
    config = replace(ATTACKED, epochs=1)
    train_metric(small_cnn(), images(), config, checkpoint_dir=tmp_path)
    others = {
        r"config\.adversary\.eps": {"adversary": Adversary(0.4, steps=2)},
        r"config\.adversary\.norm": {"adversary": Adversary(0.3, steps=2, norm="linf")},
        r"config\.temperature": {"temperature": 0.2},
    }
    for message, changes in others.items():
        with pytest.raises(InputError, match=f"differs in {message}"):
            train_metric(small_cnn(), images(), replace(config, **changes), checkpoint_dir=tmp_path)


def test_own_modules_are_recognized_by_their_structure(tmp_path: Path) -> None:
    class Half(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / 2

    def resumed_after(*blocks: nn.Module) -> int:
        net = SequentialBackbone(None, blocks, small_net().head, input_shape=(3,))
        return train(net, table(), CONFIG, checkpoint_dir=tmp_path).resumed_after

    assert (resumed_after(Half()), resumed_after(Half())) == (0, 4)
    with pytest.raises(InputError, match=r"differs in net\.structure"):
        resumed_after(Half(), Half())


def test_own_augmentations_are_recognized_at_any_memory_address(tmp_path: Path) -> None:
    def dimming(share: float) -> Compose:
        def dim(x: Tensor, _: torch.Generator) -> Tensor:
            return share * x

        return Compose((dim, RandomFlip(share)))

    def resumed_after(augment: Compose) -> int:
        net = fc_resnet((3, 8, 8), 3, blocks=1, hidden=4, bounds=(0, 1))
        return train(net, images(), CONFIG, augment=augment, checkpoint_dir=tmp_path).resumed_after

    assert (resumed_after(dimming(0.5)), resumed_after(dimming(0.5))) == (0, 4)
    with pytest.raises(InputError, match=r"differs in augment .*RandomFlip\(probability=0\.25\)"):
        resumed_after(dimming(0.25))


def test_a_file_that_is_no_whole_checkpoint_is_refused(tmp_path: Path) -> None:
    path, config = tmp_path / FILE, replace(CONFIG, epochs=1, warmup=0)
    train(small_net(), table(), config, checkpoint_dir=tmp_path)
    good = path.read_bytes()
    flipped = good[:-9] + bytes([good[-9] ^ 4]) + good[-8:]
    for content in (b"", good[:7], good[:100], good[:-1], flipped, pickle.dumps({"a": 1})):
        path.write_bytes(content)
        with pytest.raises(InputError, match=FILE):
            train(small_net(), table(), config, checkpoint_dir=tmp_path)


def test_shared_weights_are_saved(tmp_path: Path) -> None:
    shared = torch.zeros(3)
    write_tensors(tmp_path / FILE, {"a": shared, "b": shared, "c": shared[:2]}, {})
    assert set(read_tensors(tmp_path / FILE).tensors) == {"a", "b", "c"}
