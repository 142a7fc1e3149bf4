"""A run that was stopped, killed or out of time ends with the weights of one that was not."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import refuses
from together import forked
from torch import Tensor, nn
from training.small_vision import FILE, images, small_cnn, small_vit, weights_print

from otad.errors import InputError
from otad.io.tensor_files import read_tensors, write_tensors
from otad.nets import LinfDistNet, OrthogonalNet, SequentialBackbone, SOCNet, fc_resnet
from otad.training import MetricConfig, TrainConfig, TrainResult, loop, recipe, train, train_metric
from otad.training.adversary import Adversary
from otad.training.augmentation import Compose, RandomFlip

# A CPU without bfloat16 warns once and computes it all the same.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")

CONFIG = TrainConfig(epochs=3, batch_size=16, learning_rate=0.05, energy_weight=0.01, warmup=1)
SOFT = replace(CONFIG, energy_weight=0.0, loss="soft_margin", optimizer="orthogonal_muon")
VIT = recipe("vit_cifar10", epochs=3, batch_size=16, warmup=1, ema=0.8, energy_weight=1e-4)
METRIC = MetricConfig(epochs=3, batch_size=16, learning_rate=0.01)
ATTACKED = replace(METRIC, adversary=Adversary(0.3, steps=2))


def table(rows: int = 100) -> tuple[Tensor, ...]:
    x = torch.rand(rows, 3, generator=torch.Generator().manual_seed(0))
    y = (x.sum(1) > 1.5).long()
    return x[20:], y[20:], x[:20], y[:20]


def small_net(seed: int = 0, **options: Any):
    return fc_resnet((3,), 2, blocks=2, seed=seed, bounds=(0, 1), **options)


def linf_dist() -> LinfDistNet:
    return LinfDistNet((3, 8, 8), 3, widths=(8,), bounds=(0, 1))


def orthogonal() -> OrthogonalNet:
    return OrthogonalNet((3, 8, 8), 3, width=16, blocks=2, bounds=(0, 1))


def soc() -> SOCNet:
    return SOCNet((3, 8, 8), 3, widths=(4,), bounds=(0, 1))


def channels_last() -> nn.Module:
    return small_cnn().to(memory_format=torch.channels_last)


Case = tuple[Callable[[], nn.Module], Any]
CASES: dict[str, Case] = {
    "sgd": (small_net, CONFIG),
    "adamw": (small_net, replace(CONFIG, optimizer="adamw")),
    "vit": (small_vit, VIT),
    "vit, sgd": (small_vit, replace(VIT, optimizer="sgd", mixed_precision=False)),
    "linf_dist": (linf_dist, replace(CONFIG, energy_weight=0.0, loss="margin", ema=0.5)),
    "orthogonal": (orthogonal, replace(SOFT, ema=0.5, mixed_precision=True)),
    "soc": (soc, replace(CONFIG, energy_weight=0.0, loss="fit_margin")),
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
    x, y = images(48)
    data = table() if case[0] is small_net else (x[:34], y[:34], x[34:], y[34:])
    return trainer(net, data, case[1], **options)


class StopError(Exception):
    pass


def stop_after(epoch: int) -> Callable[[Any], None]:
    def report(record: Any) -> None:
        if record.epoch == epoch:
            raise StopError

    return report


@EVERY
def test_a_stopped_run_ends_like_an_uninterrupted_one(tmp_path: Path, case: Case) -> None:
    whole, resumed, bare, finished = (case[0]() for _ in range(4))
    expected = fit(case, whole, checkpoint_dir=tmp_path / "whole")
    with pytest.raises(StopError):
        fit(case, case[0](), checkpoint_dir=tmp_path / "cut", progress=stop_after(2))
    result = fit(case, resumed, checkpoint_dir=tmp_path / "cut")
    assert (result, result.resumed_after) == (expected, 2)
    torch.manual_seed(123)  # the global generator has no influence, and keeps its state
    state = torch.random.get_rng_state()
    assert fit(case, bare) == expected
    assert torch.equal(state, torch.random.get_rng_state())
    before = (tmp_path / "cut" / FILE).read_bytes()
    again = fit(case, finished, checkpoint_dir=tmp_path / "cut", progress=stop_after(3))
    assert again.resumed_after == 3
    assert len({weights_print(net) for net in (whole, resumed, bare, finished)}) == 1
    assert (tmp_path / "whole" / FILE).read_bytes() == before
    assert (tmp_path / "cut" / FILE).read_bytes() == before
    assert {*os.listdir(tmp_path / "cut")} == {FILE, loop.LOCK}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at it takes a second."""
    monkeypatch.setattr(loop, "monotonic", partial(next, itertools.count(1.0)))


@pytest.mark.usefixtures("clock")
def test_a_run_out_of_time_resumes(tmp_path: Path) -> None:
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


@pytest.mark.usefixtures("clock")
def test_checkpoints_may_be_rarer_than_epochs_but_the_last_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_run_killed_six_times_ends_with_the_same_file(tmp_path: Path) -> None:
    """SIGKILL before a rename, then at random function calls."""
    x = torch.rand(32, 3, generator=torch.Generator().manual_seed(0))
    data = x, (x.sum(1) > 1.5).long()
    adversary = Adversary(0.1, steps=1, weight_share=0.01, warmup=10)
    settings = {"energy_weight": 0.01, "ema": 0.9, "adversary": adversary}
    config = TrainConfig(epochs=14, batch_size=16, **settings)
    config.make_optimizer(nn.Linear(1, 1))  # torch's lazy imports

    def attempt(
        name: str, last_rename: int | None = None, last_call: int | None = None
    ) -> tuple[int | None, int, int]:
        """Killed at a rename, or at a function call after the first one. Return how it ended, the
        epochs it reached and the number of files."""
        folder = tmp_path / name

        def work(_: int) -> None:
            renames = calls = 0

            def count(frame: object, event: str, function: object) -> None:
                nonlocal renames, calls
                calls += renames > 0
                renames += event == "c_call" and function is os.replace
                if renames == last_rename or calls == last_call:
                    os.kill(os.getpid(), signal.SIGKILL)

            sys.setprofile(count)
            train(fc_resnet((3,), 2, blocks=1), data, config, checkpoint_dir=folder)
            sys.setprofile(None)
            (tmp_path / "calls").write_text(str(calls))

        (ended,) = forked(work, 1)
        epochs = len(read_tensors(folder / FILE).header["history"])
        return ended, epochs, len([*folder.iterdir()])

    whole = attempt("whole")
    per_epoch = int((tmp_path / "calls").read_text()) // (config.epochs - 1)
    unrenamed, dice = attempt("cut", last_rename=3), random.Random(0)
    reaches = [dice.randrange(1, per_epoch * 3 // 2) for _ in range(5)]
    at_random = [attempt("cut", last_call=reach) for reach in reaches]
    assert whole == attempt("cut") == (0, config.epochs, 2)  # the checkpoint and the lock
    assert unrenamed == (-signal.SIGKILL, 2, 3)  # the new file is written, not yet in its place
    assert [ended for ended, _, _ in at_random] == 5 * [-signal.SIGKILL]
    reached = [epochs for _, epochs, _ in at_random]
    assert reached == sorted(set(reached))  # every run resumed where the last one was killed
    assert (tmp_path / "whole" / FILE).read_bytes() == (tmp_path / "cut" / FILE).read_bytes()


@pytest.mark.parametrize("header", [{}, [1], {"run": [], "history": 5}])
def test_a_forged_checkpoint_is_one_error(tmp_path: Path, header: Any) -> None:
    write_tensors(tmp_path / FILE, {"odd": torch.zeros(1)}, header)
    with pytest.raises(InputError, match=f"{FILE}: expected a checkpoint of this run"):
        train(small_net(), table(), CONFIG, checkpoint_dir=tmp_path)


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
        (r"config\.epochs \(6 here, 3 there\)", {"epochs": 6}, {}),
        (r"config\.ema \(0\.5 here, 0\.0 there\)", {"ema": 0.5}, {}),
        (r"augment \('RandomFlip\(probability=0\.25\)' here, None there\)", {}, flipped),
        ("net.initial_weights; .* --force .* starts anew", {}, {"net": small_net(seed=1)}),
        (r"net\.hidden \(4 here, 3 there\); net\.initial", {}, {"net": small_net(hidden=4)}),
        (r"net\.frozen \(\['blocks.* here, 'nothing' there\)", {}, {"net": frozen}),
        (r"data\.train_x", {}, {"data": (changed, y, *held_out)}),
        (r"data\.val_x; data\.val_y; ", {}, {"data": (x, y)}),
    ]
    for message, changes, options in others:
        call = {"net": small_net(), "data": table(), "config": replace(CONFIG, **changes)} | options
        start = weights_print(call["net"])
        refuses(train, **call, checkpoint_dir=tmp_path, match=f"differs in {message}")
        assert weights_print(call["net"]) == start
    assert train(small_net(), table(), replace(CONFIG, log_every=3), checkpoint_dir=tmp_path)


def test_a_run_that_replaces_results_resumes_only_its_own_unfinished_one(tmp_path: Path) -> None:
    net, result = tmp_path / "net", tmp_path / "result"
    for path in (net, result):
        path.touch()

    def begun_after(stop: int, **changes: Any) -> int:
        """Return the epoch after which a run begins, which is stopped after another one."""
        epochs: list[int] = []

        def report(record: Any) -> None:
            epochs.append(record.epoch)
            if record.epoch == stop:
                assert not net.exists()
                assert not result.exists()
                raise StopError

        options: dict[str, Any] = {"checkpoint_dir": tmp_path, "replaces": ("net", "result")}
        with pytest.raises(StopError):
            train(small_net(), table(), replace(CONFIG, **changes), **options, progress=report)
        return epochs[0] - 1

    refuses(
        train, small_net(), table()[:1], CONFIG, checkpoint_dir=tmp_path, replaces=["net"],
        match="data",
    )  # fmt: skip
    assert net.exists()
    assert begun_after(2) == 0
    net.touch()  # as if killed between the two results
    assert begun_after(3) == 2
    assert begun_after(2, learning_rate=0.1) == 0
    train(small_net(), table(), replace(CONFIG, learning_rate=0.1), checkpoint_dir=tmp_path)
    result.touch()  # finished
    assert begun_after(1, learning_rate=0.1) == 0


def test_a_checkpoint_of_another_metric_training_is_refused(tmp_path: Path) -> None:
    config, data = replace(ATTACKED, epochs=1), images(16)
    train_metric(small_cnn(), data, config, checkpoint_dir=tmp_path)
    for name, value in {"eps": 0.4, "norm": "linf"}.items():
        other = replace(config, adversary=replace(config.adversary, **{name: value}))
        with pytest.raises(InputError, match=rf"differs in config\.adversary\.{name}"):
            train_metric(small_cnn(), data, other, checkpoint_dir=tmp_path)


class Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def test_own_modules_and_augmentations_are_recognized_at_any_address(tmp_path: Path) -> None:
    def resumed_after(n_blocks: int, share: float) -> int:
        def dim(x: Tensor, _: torch.Generator) -> Tensor:
            return share * x

        blocks, head = [Half() for _ in range(n_blocks)], fc_resnet((192,), 3, blocks=1).head
        net = SequentialBackbone(None, blocks, head, input_shape=(3, 8, 8))
        options = {"augment": Compose((dim, RandomFlip(share))), "checkpoint_dir": tmp_path}
        return train(net, images(), CONFIG, **options).resumed_after

    assert (resumed_after(1, 0.5), resumed_after(1, 0.5)) == (0, 3)
    refuses(resumed_after, 1, 0.25, match=r"differs in augment .*RandomFlip\(probability=0\.25\)")
    refuses(resumed_after, 2, 0.5, match=r"differs in net\.structure")


def test_a_file_that_is_no_whole_checkpoint_is_refused(tmp_path: Path) -> None:
    path, config = tmp_path / FILE, replace(CONFIG, epochs=1, warmup=0)
    train(small_net(), table(), config, checkpoint_dir=tmp_path)
    good = path.read_bytes()
    flipped = good[:-9] + bytes([good[-9] ^ 4]) + good[-8:]
    for content in (b"", good[:7], good[:100], good[:-1], flipped, pickle.dumps({"a": 1})):
        path.write_bytes(content)
        refuses(train, small_net(), table(), config, checkpoint_dir=tmp_path, match=FILE)
