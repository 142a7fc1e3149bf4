"""What a vision transformer is trained with: averages, precision, bytes, clipping, CUDA graphs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from factories import refuses
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.utils._python_dispatch import TorchDispatchMode
from training.small_vision import images, small_cnn, small_vit, weights_print

from otad.errors import InputError
from otad.nets import LipschitzMetric, ResNet, ResNetMetric, fc_resnet, vision_transformer
from otad.training import MetricConfig, TrainConfig, backbone, recipe, train, train_metric
from otad.training.adversary import Adversary
from otad.training.augmentation import mix_some
from otad.training.loop import Averaged, epoch_batches

# A CPU without bfloat16 warns once and computes it all the same.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
PLAIN = TrainConfig(epochs=3, batch_size=16, learning_rate=0.01, optimizer="adamw")
WHOLE = recipe("vit_cifar10", epochs=4, batch_size=16, warmup=1, ema=0.8, energy_weight=1e-4)
ON_GPU = replace(WHOLE, mixed_precision=False, device="cuda")
METRIC = MetricConfig(epochs=4, batch_size=16, warmup=1, ema=0.8, device="cuda")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_the_recipe_learns() -> None:
    x, y = images(120)
    net = small_vit()
    # A tiny net on few images needs neither policies that hide a row nor a long average.
    config = replace(WHOLE, epochs=15, learning_rate=0.02, augment="none", mixing=0.2)
    result = train(net, (x[:90], y[:90], x[90:], y[90:]), config)
    assert result.final.val_score > 0.9
    assert (net(x[90:]).argmax(1) == y[90:]).double().mean() > 0.9
    assert result.final.train_score > 0.7
    assert result.finished


def test_the_average_is_that_of_the_weights_after_every_step() -> None:
    data = images(16)
    config = replace(PLAIN, schedule="constant", ema=0.75)
    averaged, states = small_vit(), []
    train(averaged, data, config)
    for epochs in (1, 2, 3):  # one step each
        net = small_vit()
        train(net, data, replace(config, epochs=epochs, ema=0.0))
        states.append(net.state_dict())
    for name, value in averaged.state_dict().items():
        closed = 0.75**2 * states[0][name] + 0.25 * (0.75 * states[1][name] + states[2][name])
        torch.testing.assert_close(value, closed)


def test_whole_numbers_are_copied_into_the_average_and_statistics_averaged() -> None:
    metric = small_cnn()
    run = Averaged(metric, 0.9)
    for number, first in ((1, True), (2, False)):
        for value in metric.state_dict().values():
            value.fill_(number)
        run.update(first=first)
    kinds = set()
    for value in run.best.state_dict().values():
        kinds.add(value.is_floating_point())
        expected = 1.1 if value.is_floating_point() else 2
        torch.testing.assert_close(value, torch.full_like(value, expected))
    assert kinds == {True, False}
    assert Averaged(metric, 0.0).best is metric


@pytest.mark.parametrize("mixing", [0.0, 1.0])
def test_one_step_follows_the_smoothed_labels_and_the_energy(
    mixing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = images(12)
    net, reference = small_vit(), small_vit()
    config = TrainConfig(
        epochs=1, batch_size=12, learning_rate=0.1, weight_decay=0.02, momentum=0.0,
        schedule="constant", energy_weight=1e-3, label_smoothing=0.2, mixing=mixing,
    )  # fmt: skip
    seen: list[tuple[Tensor, Tensor]] = []

    def mix_and_note(*args, **options) -> tuple[Tensor, Tensor]:
        seen.append(mix_some(*args, **options))
        return seen[-1]

    monkeypatch.setattr(backbone, "mix_some", mix_and_note)
    record = train(net, (x, y), config).final
    inputs, shares = seen[0] if mixing else (x, nn.functional.one_hot(y, 3).float())
    z, energy = reference.transport(reference.embed(inputs))
    smooth = 0.8 * shares + 0.2 / 3
    loss = -(smooth * reference.head(z).log_softmax(1)).sum(1).mean()
    (loss + 1e-3 * energy.mean()).backward()
    for trained, start in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(trained, start - 0.1 * (start.grad + 0.02 * start))
    assert record.loss == pytest.approx(loss.item(), rel=1e-5)
    assert record.energy == pytest.approx(energy.mean().item(), rel=1e-5)
    assert len(seen) == (1 if mixing else 0)


def test_gradients_are_clipped_to_their_common_length() -> None:
    data, sgd = images(16), replace(PLAIN, optimizer="sgd", schedule="constant", epochs=1)
    config = replace(sgd, momentum=0.0, weight_decay=0.0, learning_rate=1.0)

    def moved(clip: float) -> Tensor:
        net = small_vit()
        train(net, data, replace(config, gradient_clip=clip))
        steps = zip(net.parameters(), small_vit().parameters(), strict=True)
        return torch.cat([(after - before).detach().flatten() for after, before in steps])

    free = moved(0.0)
    torch.testing.assert_close(moved(0.01), 0.01 * free / free.norm(), atol=2e-6, rtol=1e-3)
    torch.testing.assert_close(moved(1e9), free)


def test_mixed_precision_is_bfloat16_but_for_weights_and_energies() -> None:
    x, _ = images(8)
    net, kinds = small_vit(), []
    for layer in (net.blocks[0].mlp.fc2, net.head):
        layer.register_forward_hook(lambda _layer, _given, output: kinds.append(output.dtype))
    exact = net.transport(net.embed(x))[1]
    with torch.autocast("cpu", torch.bfloat16):
        energies = net.transport(net.embed(x))[1]
    assert energies.dtype == torch.float32
    torch.testing.assert_close(energies, exact, rtol=0.01, atol=0)
    # bfloat16 itself could not tell energies apart that differ by less than 1 in 256.
    assert not torch.equal(energies.bfloat16().float(), energies)
    kinds.clear()
    full, half = (
        train(net, images(), replace(PLAIN, epochs=1, mixed_precision=mixed)).final
        for mixed in (False, True)
    )
    assert kinds[: len(kinds) // 2] == (len(kinds) // 2) * [torch.float32]
    assert kinds[len(kinds) // 2 :] == (len(kinds) // 2) * [torch.bfloat16]
    assert all(weight.dtype == torch.float32 for weight in net.parameters())
    assert half.loss != full.loss


def test_bytes_are_trained_on_like_the_floats_they_stand_for() -> None:
    x, y = images()
    levels = (x * 255).round().to(torch.uint8)
    config = replace(PLAIN, epochs=2, augment="light")
    metric = MetricConfig(epochs=2, batch_size=16)
    for make, fit, settings in ((small_vit, train, config), (small_cnn, train_metric, metric)):
        by_floats, by_bytes = make(), make()
        expected = fit(by_floats, (x[:45], y[:45], x[45:], y[45:]), settings)
        assert fit(by_bytes, (levels[:45], y[:45], levels[45:], y[45:]), settings) == expected
        assert weights_print(by_bytes) == weights_print(by_floats)
    wide = fc_resnet((3, 8, 8), 3, blocks=1, hidden=4, bounds=(-1, 1))
    torch.testing.assert_close(wide.from_bytes(levels), 2 * x - 1)


def test_several_batches_are_augmented_at_once_and_all_rows_met(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backbone, "_AUGMENTED_ROWS", 40)
    x, y = images()
    met: list[Tensor] = []

    def note(images: Tensor, generator: torch.Generator) -> Tensor:
        assert generator.device == images.device
        met.append(images)
        return images

    train(small_vit(), (x, y), replace(PLAIN, epochs=1), augment=note)
    assert [len(images) for images in met] == [32, 28]
    assert torch.equal(torch.cat(met).flatten(1).sum(1).sort()[0], x.flatten(1).sum(1).sort()[0])


class _Questions(TorchDispatchMode):
    """Counts what the host must wait for on a GPU: values, and shapes that depend on them."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __torch_dispatch__(self, operation, _types, args=(), options=None):
        name = operation.__name__.partition(".")[0]
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"):
            self.asked.append(name)
        return operation(*args, **(options or {}))


def test_the_host_asks_the_device_nothing_within_an_epoch() -> None:
    def asked(rows: int) -> list[str]:
        with _Questions() as questions:
            train(small_vit(), images(rows), replace(WHOLE, epochs=2, energy_weight=1e-3))
        return questions.asked

    few, many = asked(32), asked(96)
    assert few  # at the end of an epoch, and when data are checked
    assert many == few


def test_rows_without_a_whole_batch_wait_for_another_epoch() -> None:
    whole = replace(PLAIN, whole_batches=True)
    batches = [epoch_batches(20, whole, epoch) for epoch in range(1, 30)]
    left_out = [set(range(20)) - set(rows.tolist()) for (rows,) in batches]
    assert {len(rows) for rows in left_out} == {4}
    assert set.union(*left_out) == set(range(20))
    cases = {(20, PLAIN): [16, 4], (5, whole): [5], (16, whole): [16], (32, whole): [16, 16]}
    for (rows, config), sizes in cases.items():
        assert [len(batch) for batch in epoch_batches(rows, config, 1)] == sizes


@pytest.mark.parametrize(
    "more", [{"energy_weight": 1e-3}, {"adversary": Adversary(0.1, steps=2), "loss": "trades"}]
)
def test_the_transformer_compiles_in_one_piece_to_the_same_net(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = partial(torch.compile, backend="eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", whole)
    plain, fused = small_vit(), small_vit()
    config = replace(PLAIN, epochs=1, whole_batches=True, mixed_precision=True, **more)
    expected = train(plain, images(), config)
    result = train(fused, images(), replace(config, compiled=True))
    torch._dynamo.reset()
    assert result.final.loss == pytest.approx(expected.final.loss, rel=1e-3)
    for one, two in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=2e-3, rtol=1e-2)


def test_a_failure_to_compile_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    when_called = Mock(return_value=Mock(side_effect=TorchDynamoException("no compiler\nand more")))
    at_once = Mock(side_effect=RuntimeError("not on this Python"))
    for compile, reason in ((when_called, "no compiler$"), (at_once, "this Python$")):
        monkeypatch.setattr(torch, "compile", compile)
        with pytest.raises(InputError, match=f"compiled: expected a net and .* {reason}"):
            train(small_vit(), images(), replace(PLAIN, compiled=True))


_X, _Y = images(12)
_BYTES = (_X * 255).to(torch.uint8)
_UNBOUNDED = partial(vision_transformer, (3, 8, 8), 3, width=4, blocks=1, heads=1)
_REGRESSION = partial(fc_resnet, (2,), 1, task="regression", blocks=1)
_VALUES = torch.rand(8, 2), torch.rand(8)


@pytest.mark.parametrize(
    ("net", "data", "changes", "options", "message"),
    [
        (small_vit, (_BYTES[:, :2], _Y), {}, {}, r"train_x: .*\(12, 3, 8, 8\)"),
        (small_vit, (_BYTES, _Y, _X - 1, _Y), {}, {}, "val_x"),
        (_UNBOUNDED, (_BYTES, _Y), {}, {}, "train_x: .*uint8"),
        (_UNBOUNDED, (_X, _Y), {"augment": "light"}, {}, r"augment: .*'light'.*\(3, 8, 8\)"),
        (_REGRESSION, _VALUES, {"mixing": 0.5}, {}, "mixing: .*classified, got 0.5 for regression"),
        (_REGRESSION, _VALUES, {"label_smoothing": 0.1}, {}, "label_smoothing: .*0.1"),
        (small_vit, (_X, _Y), {"loss": "margin", "label_smoothing": 0.1}, {}, "smoothing: .*0.1"),
        (small_vit, (_X, _Y), {"loss": "margin", "mixing": 0.5}, {}, "mixing: expected 0 .*0.5"),
        (_REGRESSION, _VALUES, {"loss": "margin"}, {}, "loss: expected 'fit' .* got 'margin'"),
        (small_vit, (_X, _Y), {"augment": "light"}, {"augment": math.exp}, "augment: .*exp"),
        (small_vit, (_X, _Y), {}, {"max_seconds": 5}, "max_seconds: .*checkpoint_dir.*5"),
        (small_vit, (_X, _Y), {}, {"max_seconds": 0}, "max_seconds: .*positive.*0"),
        (small_vit, (_X, _Y), {}, {"save_seconds": -1}, "save_seconds: .*-1"),
    ],
)
def test_bad_calls_are_refused(net, data, changes: dict, options: dict, message: str) -> None:
    refuses(train, net(), data, replace(PLAIN, **changes), **options, match=message)


def test_a_metric_that_solves_systems_is_refused() -> None:
    metric = LipschitzMetric((3, 8, 8), widths=(4, 8), key_dim=4)
    config = replace(METRIC, cuda_graph=True, device="cpu")
    refuses(train_metric, metric, images(50), config, match="cuda_graph: .*False.*LipschitzMetric")


def same_when_captured(make: Callable, fit: Callable, config, tolerance: float) -> None:
    plain, captured = make(), make()
    expected = fit(plain, images(200), config)
    result = fit(captured, images(200), replace(config, cuda_graph=True))
    for one, two in zip(result.history, expected.history, strict=True):
        found, known = (one.loss, one.energy), (two.loss, two.energy)
        assert found == pytest.approx(known, rel=tolerance)
    for one, two in zip(captured.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=tolerance, rtol=tolerance)


@needs_gpu
@pytest.mark.parametrize(
    "adversary", [None, Adversary(0.3, steps=3), Adversary(0.3, steps=3, weight_share=0.01)]
)
@pytest.mark.parametrize("loss", ["neighborhood", "means", "triplet"])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_captured_training_of_a_metric_is_the_same(adversary, loss: str, mixed: bool) -> None:
    settings = {"adversary": adversary, "loss": loss, "mixed_precision": mixed}
    config = replace(METRIC, augment="light", channels_last=True, **settings)
    make = partial(ResNetMetric, (3, 8, 8), widths=(4, 8), depth=1, key_dim=4, bounds=(0, 1))
    # Rounding changes the steps of the adversary, and these the training.
    same_when_captured(make, train_metric, config, 5e-2 if mixed or adversary else 1e-3)


@needs_gpu
@pytest.mark.parametrize(("mixed", "tolerance"), [(False, 1e-4), (True, 1e-2)])
def test_a_captured_training_is_the_same(mixed: bool, tolerance: float) -> None:
    same_when_captured(small_vit, train, replace(ON_GPU, mixed_precision=mixed), tolerance)


@needs_gpu
@pytest.mark.parametrize("loss", ["fit", "trades", "mart"])
@pytest.mark.parametrize("share", [0.0, 0.01])
def test_a_captured_adversarial_training_by_sgd_is_the_same(loss: str, share: float) -> None:
    settings = {"optimizer": "sgd", "nesterov": True, "loss": loss, "channels_last": True}
    settings |= {"label_smoothing": 0.0, "mixing": 0.0, "augment": "light"}
    adversary = Adversary(0.3, steps=3, weight_share=share)
    config = replace(ON_GPU, adversary=adversary, learning_rate=0.02, **settings)
    make = partial(ResNet, (3, 8, 8), 3, widths=(4, 8), depth=1, bounds=(0, 1))
    same_when_captured(make, train, config, 5e-2)


def test_on_the_cpu_nothing_is_captured() -> None:
    config = replace(ON_GPU, device="cpu")
    plain, asked = small_vit(), small_vit()
    expected = train(plain, images(50), config)
    assert train(asked, images(50), replace(config, cuda_graph=True)) == expected
    assert weights_print(asked) == weights_print(plain)


def test_on_the_cpu_memory_is_laid_out_as_ever() -> None:
    """Some oneDNN kernels for images with channels last write past their memory."""
    seen: list[bool] = []
    net = ResNet((3, 8, 8), 3, widths=(4, 8), depth=1, bounds=(0, 1))
    net.stem[0].register_forward_pre_hook(lambda _, given: seen.append(given[0].is_contiguous()))
    settings = {"learning_rate": 0.02, "optimizer": "sgd", "device": "cpu"}
    train(net, images(50), replace(ON_GPU, channels_last=True, **settings))
    assert seen
    assert all(seen)


@needs_gpu
def test_a_captured_training_resumes(tmp_path: Path) -> None:
    config = replace(ON_GPU, cuda_graph=True)
    whole, parted = small_vit(), small_vit()
    train(whole, images(200), config)
    first = train(parted, images(200), config, checkpoint_dir=tmp_path, max_seconds=1e-6)
    assert not first.finished
    again = small_vit()
    assert train(again, images(200), config, checkpoint_dir=tmp_path).resumed_after == 1
    for one, two in zip(again.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)
