"""Training on several processes: the curve of one process, whatever their number."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from filelock import FileLock
from together import needs_gloo, together
from torch import Tensor, nn
from torch import distributed as dist

from otad.errors import InputError
from otad.nets import CNNMetric, LinfDistNet, ResNet, fc_resnet, lifted_net
from otad.training import (
    Adversary,
    EpochRecord,
    MetricConfig,
    TrainConfig,
    TrainResult,
    loop,
    train,
    train_metric,
)  # fmt: skip

pytestmark = needs_gloo
Runs = dict[str, tuple[list[EpochRecord], list[Tensor]]]


def table() -> tuple[Tensor, ...]:
    """21 + 7 rows: with batches of ten, the last one has a single row and no share for a second."""
    x = torch.rand(28, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = (3 * x[:, 0]).long()
    return x[:21], y[:21], x[21:], y[21:]


def pictures() -> tuple[Tensor, ...]:
    x = torch.rand(23, 1, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = (x.mean((1, 2, 3)) > 0.5).long()
    return x[:17], y[:17], x[17:], y[17:]


def trained(
    data: tuple[Tensor, ...], make: Callable[[], Any], learn: Any, config: Any, **options: Any
) -> Any:
    net = make().double()
    result = learn(net, data, config, **options)
    return list(result.history), [weight.detach() for weight in net.parameters()]


def plain() -> nn.Module:
    return fc_resnet((3,), 3, blocks=1, hidden=4, bounds=(0.0, 1.0))


def every_kind() -> Runs:
    """Trainings that draw random numbers, and losses that look across the batch."""
    brief: dict[str, Any] = {"epochs": 2, "batch_size": 10}
    ascent = Adversary(0.2, steps=2, weight_share=0.01)
    fair = dict(data=table(), make=plain, learn=train)
    seen = dict(data=pictures(), learn=train)
    small = {"widths": (2, 2), "key_dim": 3, "bounds": (0.0, 1.0)}
    keyed = dict(data=pictures(), learn=train_metric, make=lambda: CNNMetric((1, 8, 8), **small))
    kinds = {
        "energy": fair | {"config": TrainConfig(**brief, energy_weight=0.1, ema=0.5)},
        "weighted": fair | {"config": TrainConfig(**brief), "weights": torch.arange(1.0, 22.0)},
        "trades": fair | {"config": TrainConfig(**brief, adversary=ascent, loss="trades")},
        "margin and pairs": fair
        | {"make": lambda: lifted_net((3,), 3, blocks=1)}
        | {"config": TrainConfig(**brief, loss="fit_margin", beta=0.1, pair_weight=0.1)},
        "augmented": seen
        | {"make": lambda: fc_resnet((1, 8, 8), 2, blocks=1, hidden=4, bounds=(0.0, 1.0))}
        | {"config": TrainConfig(**brief, augment="strong", mixing=0.5)},
        "normalized": seen
        | {"make": lambda: ResNet((1, 8, 8), 2, widths=(2, 2), depth=1)}
        | {"config": TrainConfig(**brief)},
        "metric": keyed | {"config": MetricConfig(**brief, adversary=ascent, whole_batches=False)},
        "metric, bank": keyed | {"config": MetricConfig(**brief, references="bank")},
        "metric, means": keyed | {"config": MetricConfig(**brief, loss="means")},
        "metric, triplets": keyed | {"config": MetricConfig(**brief, loss="triplet")},
    }
    return {name: trained(**kind) for name, kind in kinds.items()}


def test_curves_and_weights_are_those_of_one_process(tmp_path) -> None:
    alone, found = every_kind(), together(tmp_path / "two", every_kind)
    for name, (history, weights) in alone.items():
        for rank, runs in enumerate(found):
            for one, other in zip(history, runs[name][0], strict=True):
                values = {**vars(one), "seconds": 0.0}
                # Keys are compared in float32 in any case.
                near = 1e-4 if "metric" in name else 1e-9
                got = {**vars(other), "seconds": 0.0}
                assert got == pytest.approx(values, rel=near), (name, rank)
            torch.testing.assert_close(runs[name][1], weights, rtol=near, atol=near)
            for mine, first in zip(runs[name][1], found[0][name][1], strict=True):
                assert torch.equal(mine, first), name
    third = together(tmp_path / "three", lambda: trained(*_fit()), 3)
    torch.testing.assert_close(third[2][1], trained(*_fit())[1], rtol=1e-9, atol=1e-9)


def _fit(epochs: int = 2) -> tuple[Any, ...]:
    return table(), plain, train, TrainConfig(epochs=epochs, batch_size=10, optimizer="adamw")


def test_a_run_resumes_on_another_number_of_processes(tmp_path) -> None:
    whole, _ = trained(*_fit(4))

    def run(folder: str, **options: Any) -> TrainResult:
        data, make, _, config = _fit(4)
        return train(make().double(), data, config, checkpoint_dir=tmp_path / folder, **options)

    def until_killed() -> str:
        def kill(record: EpochRecord) -> None:
            if dist.get_rank() == 1 and record.epoch == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        with pytest.raises(RuntimeError) as error:
            run("killed", progress=kill)
        return str(error.value)

    said = together(tmp_path / "until killed", until_killed)
    assert said[0]
    assert said[1] is None
    resumed = run("killed")  # by one process
    assert resumed.resumed_after in (1, 2)  # the message of the last epoch may be lost
    for one, other in zip(whole, resumed.history, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-9)

    assert len(run("stopped", max_seconds=1e-9).history) == 1
    for result in together(tmp_path / "after", lambda: run("stopped")):
        assert result.resumed_after == 1
        for one, other in zip(whole, result.history, strict=True):
            assert other.loss == pytest.approx(one.loss, rel=1e-9)


def test_processes_stop_together_and_save_once(tmp_path, monkeypatch) -> None:
    def stopped() -> tuple[int, int]:
        saves: list[object] = []
        monkeypatch.setattr(loop, "save_run", lambda *run: saves.append(run))
        data, make, _, config = _fit(50)
        late = 1e-9 if dist.get_rank() == 0 else 1e9  # the clock of the first process counts
        done = train(make().double(), data, config, checkpoint_dir=tmp_path, max_seconds=late)
        return len(done.history), len(saves)

    assert together(tmp_path / "two", stopped) == [(1, 1), (1, 0)]


def test_what_would_not_be_equal_is_refused(tmp_path) -> None:
    def refusals() -> list[str]:
        data, make, _, config = _fit()
        shifted = (data[0] * 0.9 ** dist.get_rank(), *data[1:])
        images, said = pictures(), []
        for net, given in (
            (make(), shifted),
            (LinfDistNet((1, 8, 8), 2, widths=(4, 4)), images),
            (ResNet((1, 8, 8), 2, widths=(2, 2), depth=1), (images[0][:11], images[1][:11])),
        ):
            with pytest.raises(InputError) as error:
                train(net.double(), given, config)
            said.append(str(error.value))
        with pytest.raises(InputError, match="no other training"):
            train(make().double(), data, config, checkpoint_dir=tmp_path)
        with pytest.raises(InputError, match="locked: expected a folder"):
            train(make().double(), data, config, checkpoint_dir=tmp_path / "locked")
        return said

    (tmp_path / "locked" / ".training.lock").mkdir(parents=True)
    with FileLock(tmp_path / ".training.lock"):
        for rank, said in enumerate(together(tmp_path / "two", refusals)):
            assert f"others in process [{1 - rank}] than in process {rank}" in said[0]
            assert "DistanceLayer at 'layers.0'" in said[1]
            assert "expected at least 2 rows in the last batch" in said[2]
