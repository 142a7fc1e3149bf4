"""Progress bars: by default after a while and on a terminal alone, and never where not wanted."""

from __future__ import annotations

import os
import pty
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import groupby
from typing import Any

import pytest
import torch
from factories import model, net, points, queries
from torch import nn

import otad
from otad import progress
from otad.attacks import Pgd
from otad.model.defend import defend
from otad.model.prototypes import prototype_net
from otad.nets import PretrainedMetric, lifted_net
from otad.training import MetricConfig, TrainConfig, fit_backbone, train, train_metric


@contextmanager
def on_terminal(**environment: str) -> Iterator[list[str]]:
    """Stderr is a terminal; at the end the list has what it showed."""
    outer, inner = pty.openpty()
    shown: list[str] = []
    with pytest.MonkeyPatch.context() as patch, os.fdopen(inner, "w") as stderr:
        for name, value in ({"TERM": "xterm", "COLUMNS": "80"} | environment).items():
            patch.setenv(name, value)
        patch.setattr(sys, "stderr", stderr)
        patch.setattr(progress, "SHOW_AFTER", 0.05)
        yield shown
    with (
        os.fdopen(outer, "rb", buffering=0) as screen,
        suppress(OSError),
    ):  # the other end is closed
        while part := screen.read(1000):
            shown.append(part.decode())


@pytest.mark.parametrize(
    ("asked", "seconds", "environment", "drawn"),
    [
        (None, 0.4, {}, True),
        (None, 0.0, {}, False),
        (None, 0.4, {"OTAD_PROGRESS": "0"}, False),
        (False, 0.4, {}, False),
        (True, 0.0, {}, True),
        (True, 0.0, {"OTAD_PROGRESS": "0"}, False),
        (lambda *_: None, 0.4, {}, False),
    ],
)
def test_bars_on_a_terminal(
    asked: Any,
    seconds: float,
    environment: dict[str, str],
    drawn: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with on_terminal(**environment) as shown, progress.progress_bar("some work", asked) as report:
        report(1, 4)
        time.sleep(seconds)
        print("result")  # noqa: T201
    assert ("some work" in "".join(shown)) == drawn
    assert bool(shown) == drawn
    assert capsys.readouterr() == ("result\n", "")  # what is printed to a file is not drawn


def test_nothing_is_drawn_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    assert not progress.can_draw()
    with progress.progress_bar("work") as report:
        report(1, 2)
    assert capfd.readouterr() == ("", "")


def test_lines_at_each_tenth_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> list[str]:
        with progress.part_bars(True) as draw:
            for done in range(1, 41):
                draw("work", done, 40, "good\x1b" if done > 38 else None)
        return capsys.readouterr().err.splitlines()

    assert work() == ["otad: work, 40 of 40: good\\x1b"]  # it took less than two seconds
    monkeypatch.setattr(progress, "SHOW_AFTER", 0.0)
    expected = [f"otad: work, {done} of 40" for done in range(4, 40, 4)]
    assert work() == [*expected, *(f"otad: work, {n} of 40: good\\x1b" for n in (39, 40))]
    with progress.part_bars(True) as draw:
        for done in (0, 0.5, 1.5, 3):
            draw("epochs", done, 3)
    expected = [f"otad: epochs, {done} of 3" for done in (0.5, 1.5, 3)]
    assert capsys.readouterr().err.splitlines() == expected
    monkeypatch.setenv("OTAD_PROGRESS", "0")
    assert work() == []


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The parts of all bars, as on a terminal."""
    parts: list[str] = []

    class Recorded:
        def __init__(self, *, passing: bool) -> None:
            parts.append(f"passing {passing}")

        def draw(self, part: str, *_: object) -> None:
            parts.append(part)

        def start(self) -> None: ...

        stop = start

    monkeypatch.setattr(progress, "can_draw", lambda: True)
    monkeypatch.setattr(progress, "_PartBars", Recorded)
    yield parts
    assert not progress._running.locked()


def fit(shown: bool | None) -> object:
    verbose = None if shown is None else 0
    clf = otad.OTADClassifier(5, epochs=1, n_blocks=1, verbose=verbose)
    x = points().numpy()
    return clf.fit(x, x[:, 0] > 0.5).predict(x)


X, Y = points(), (3 * points()[:, 0]).long()
LONG: dict[str, tuple[Callable[[bool | None], object], set[str]]] = {
    "evaluate": (
        lambda it: otad.evaluate(
            model(), X[:3], Y[:3], otad.L2(0.1), attacks=[Pgd(steps=1)], flags=False, progress=it
        ),
        {"attacking"},
    ),
    "certify": (
        lambda it: otad.certify(model(), queries(model(), 2), progress=it),
        {"building the bank", "certifying"},
    ),
    "global": (
        lambda it: defend(net(), X, Y, scope="global", progress=it),
        {"building the bank", "integrating the bank, sweeps"},
    ),
    "train": (lambda it: train(net(), (X, Y), TrainConfig(epochs=1), progress=it), {"training"}),
    "fit": (fit, {"training", "building the bank", "predicting"}),
    "prototypes": (
        lambda it: prototype_net(lifted_net((5,), 3, blocks=0), X, Y, progress=it),
        {"placing prototypes"},
    ),
}


@pytest.mark.parametrize("name", LONG)
def test_long_work_draws_by_default(name: str, drawn: list[str]) -> None:
    work, expected = LONG[name]
    work(None)
    assert {*drawn} >= expected
    drawn.clear()
    work(False)
    assert not {*drawn} & (expected - {"building the bank"})


def test_one_display_at_a_time(drawn: list[str]) -> None:
    def other() -> None:
        with progress.progress_bar("thread") as report:
            report(1, 2)

    with progress.progress_bar("outer") as report:
        report(1, 2)
        other()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert drawn == ["passing True", "outer"]
    calls: list[tuple[int, int]] = []
    with progress.progress_bar("own", lambda *now: calls.append(now)) as report:
        report(3, 4)
        other()
    assert calls == [(3, 4)]
    assert drawn == ["passing True", "outer"]
    with pytest.raises(ZeroDivisionError), progress.progress_bar("broken"):
        _ = 1 / 0
    other()
    assert drawn[-1] == "thread"


def test_a_function_is_called_and_results_are_the_same(drawn: list[str]) -> None:
    seen: list[tuple[int, int]] = []
    one, x = model(), queries(model())
    drawn.clear()
    found = otad.certify(one, x, progress=lambda *now: seen.append(now), batch_size=7)
    assert seen == [(7, 20), (14, 20), (20, 20)]
    assert drawn == []
    assert torch.equal(found.radius, otad.certify(one, x, batch_size=7).radius)


@pytest.mark.parametrize("name", ["train", "fit_backbone", "train_metric"])
def test_the_bar_of_a_training_moves_within_an_epoch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[float, str | None]] = []

    class Recorded(progress._PartBars):
        def draw(self, part: str, done: float, total: Any = None, text: Any = None) -> None:
            shown.append((done / total, None if text is None else text.partition(":")[0]))

    monkeypatch.setattr(progress, "can_draw", lambda: True)
    monkeypatch.setattr(progress, "_PartBars", Recorded)
    options = {"epochs": 2, "batch_size": len(X) // 2}
    runs: dict[str, Callable[[Any], object]] = {
        "train": lambda it: train(net(), (X, Y), TrainConfig(**options), progress=it),
        "fit_backbone": lambda it: fit_backbone(
            (X, Y), TrainConfig(**options), n_outputs=3, progress=it
        ),
        "train_metric": lambda it: train_metric(
            PretrainedMetric(nn.Linear(5, 4), input_shape=(5,)),
            (X, Y),
            MetricConfig(**options),
            progress=it,
        ),
    }
    runs[name](None)
    first, last = "epoch 1", "epoch 2"
    steps = [(0, None), (0.25, None), (0.5, first), (0.75, first), (1, last)]
    assert [one for one, _ in groupby(shown)] == steps
    shown.clear()
    records: list[Any] = []
    runs[name](records.append)
    assert {record.epoch for record in records} == {1, 2}
    assert shown == []
