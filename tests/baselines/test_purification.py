"""Purifiers against independent programs and closed forms; files, refusals and stopped runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.ndimage import median_filter
from sklearn.decomposition import sparse_encode
from torch import Tensor, nn

import otad
from otad.baselines import (
    ApeGan,
    Diffusion,
    MedianFilter,
    Purified,
    Purifier,
    SparseCoding,
    train_purifier,
)
from otad.errors import InputError, MissingExtraError
from otad.evaluate.identity import Identity
from otad.nets import Backbone, fc_resnet

SHAPE, BOUNDS = (1, 8, 8), (0.0, 1.0)
KINDS = ["sparse_coding", "ape_gan", "diffusion"]
NO_EXTRA = "needs the extra purification"


def classifier(**options: Any) -> Backbone:
    return fc_resnet(SHAPE, 3, blocks=1, hidden=8, **{"bounds": BOUNDS, **options})


def images(count: int, generator: torch.Generator, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.rand(count, *shape, generator=generator)


def coder(**options: Any) -> SparseCoding:
    return SparseCoding(SHAPE, patch=4, stride=2, atoms=12, **{"bounds": BOUNDS, **options})


def diffusion(**options: Any) -> Diffusion:
    pytest.importorskip("diffusers", reason=NO_EXTRA)
    return Diffusion(SHAPE, widths=(8,), depth=1, **options)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_median_is_that_of_scipy(size: int, generator: torch.Generator) -> None:
    x = images(3, generator, (2, 7, 9))
    ours = MedianFilter(x.shape[1:], size=size)(x)
    theirs = median_filter(x.numpy(), size=(1, 1, size, size), mode="nearest")
    np.testing.assert_array_equal(ours.numpy(), theirs)


def test_codes_are_those_of_scikit_learn(generator: torch.Generator) -> None:
    purifier = coder(penalty=0.05, steps=2000)
    patches, _ = purifier.patches(images(2, generator))
    assert torch.allclose(patches.mean(2), torch.zeros(2, 9), atol=1e-6)
    atoms = purifier.unit_atoms().detach()
    codes, rows = purifier.encode(patches).flatten(0, 1), patches.flatten(0, 1)
    options = {"algorithm": "lasso_cd", "alpha": 0.05, "max_iter": 5000}
    theirs = sparse_encode(rows.double().numpy(), atoms.double().numpy(), **options)

    def objective(found: Tensor) -> Tensor:
        return (rows - found @ atoms).square().sum(1) / 2 + 0.05 * found.abs().sum(1)

    assert (codes == 0).float().mean() > 0.2
    assert torch.allclose(codes, torch.tensor(theirs).float(), atol=2e-3)
    assert (objective(codes) <= objective(torch.tensor(theirs).float()) + 1e-5).all()


def test_patches_that_need_no_code_give_the_image_back(generator: torch.Generator) -> None:
    """Almost without penalty and with a complete dictionary, and for flat images always."""
    x = images(2, generator)
    full = SparseCoding(SHAPE, patch=4, stride=2, atoms=64, penalty=1e-5, steps=500)
    assert torch.allclose(full(x), x, atol=1e-2)
    flat = torch.full((1, *SHAPE), 0.25)
    assert torch.allclose(coder()(flat), flat)


def test_gan_trains_generator_and_discriminator_each_for_itself(generator: torch.Generator) -> None:
    gan, (x, attacked) = ApeGan(SHAPE, width=2), images(8, generator).split(4)
    gan.loss(x, attacked).backward()
    got = [weight.grad.clone() for weight in gan.discriminator.parameters()]
    gan.zero_grad()
    clean, made = gan.normalize(x), gan.generator(gan.normalize(attacked)).detach()
    judged = torch.cat([gan.discriminator(clean), gan.discriminator(made)])
    truth = torch.cat([torch.ones(4, 1), torch.zeros(4, 1)])
    (2 * nn.functional.binary_cross_entropy_with_logits(judged, truth)).backward()
    for mine, weight in zip(got, gan.discriminator.parameters(), strict=True):
        assert torch.allclose(mine, weight.grad, atol=1e-5)


def test_noise_of_diffusion_has_its_closed_form(generator: torch.Generator) -> None:
    purifier = diffusion()
    x, noise = images(2, generator), images(2, generator)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0)
    times = torch.tensor([0, 700])
    share = kept[times].view(2, 1, 1, 1)
    expected = share.sqrt() * x + (1 - share).sqrt() * noise
    assert torch.allclose(purifier.add_noise(x, noise, times).double(), expected, atol=1e-5)


def test_purification_by_diffusion_follows_the_formula(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise up to time 60, then DDPM's posterior at the times 60, 30 and 0 (Ho et al. 2020)."""
    purifier = diffusion(noise_step=60, calls=3)
    monkeypatch.setattr(purifier, "predict_noise", lambda noisy, time: 0.9 * noisy)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)
    x = images(2, generator)
    torch.manual_seed(3)
    pure = purifier.purify(x)
    torch.manual_seed(3)
    u = kept[60].sqrt() * (2 * x - 1) + (1 - kept[60]).sqrt() * torch.randn_like(x)
    for now, then in ((60, 30), (30, 0), (0, None)):
        before = torch.ones(()) if then is None else kept[then]
        alpha = kept[now] / before
        clean = ((u - (1 - kept[now]).sqrt() * 0.9 * u) / kept[now].sqrt()).clamp(-1, 1)
        mean = before.sqrt() * (1 - alpha) * clean + alpha.sqrt() * (1 - before) * u
        u = mean / (1 - kept[now])
        if then is not None:
            spread = (1 - alpha) * (1 - before) / (1 - kept[now])
            u = u + spread.sqrt() * torch.randn_like(x)
    assert torch.allclose(pure, (u + 1) / 2, atol=1e-5)


def test_diffusion_learns_saves_and_is_described(
    generator: torch.Generator, tmp_path: Path
) -> None:
    purifier, x = diffusion(noise_step=40, calls=2), images(8, generator)
    losses = train_purifier(purifier, x, settings={"epochs": 2, "learning_rate": 3e-3})
    assert losses[1] < losses[0]
    model = Purified(classifier(), purifier)
    model.save(tmp_path / "model")
    for one in (model, Purified.load(tmp_path / "model")):
        torch.manual_seed(0)
        answers = one(x.requires_grad_())
        answers.sum().backward()
    torch.manual_seed(0)
    assert torch.equal(model(x), answers)
    assert x.grad is not None
    assert x.grad.abs().sum() > 0
    described = Identity()
    described.model(model)
    assert not described.unknown


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(MissingExtraError, match=r"otad\[purification\]"):
        Diffusion(SHAPE, widths=(8,))


def test_mixed_precision_rounds(generator: torch.Generator) -> None:
    x, net = images(8, generator), classifier().eval()
    options: dict[str, Any] = {"net": net, "threat": otad.Linf(0.1)}
    exact, rounded = (
        train_purifier(
            ApeGan(SHAPE, width=2), x, settings={"epochs": 1, "mixed_precision": mixed}, **options
        )[0]
        for mixed in (False, True)
    )
    assert exact != rounded
    assert rounded == pytest.approx(exact, rel=0.1)


class StoppedError(Exception):
    pass


def stop(record: Any) -> None:
    if record.epoch == 2:
        raise StoppedError


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_training_ends_like_an_uninterrupted_one(
    kind: str, generator: torch.Generator, tmp_path: Path
) -> None:
    x, net = images(20, generator), classifier().eval()
    makers = [coder, lambda: ApeGan(SHAPE, width=2), diffusion]
    make = dict(zip(KINDS, makers, strict=True))
    options: dict[str, Any] = {"settings": {"epochs": 3, "batch_size": 10, "ema": 0.5}}
    if kind == "ape_gan":
        options |= {"net": net, "threat": otad.Linf(0.1), "steps": 2}
    whole, resumed = make[kind](), make[kind]()
    losses = train_purifier(whole, x, **options)
    with pytest.raises(StoppedError):
        train_purifier(resumed, x, progress=stop, checkpoint_dir=tmp_path, **options)
    resumed = make[kind]()
    assert train_purifier(resumed, x, checkpoint_dir=tmp_path, **options) == losses
    for one, other in zip(*(net.state_dict().values() for net in (whole, resumed)), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(InputError, match="differs in data"):
        train_purifier(make[kind](), x / 2, checkpoint_dir=tmp_path, **options)


@pytest.mark.parametrize("purifier", [MedianFilter(SHAPE, bounds=BOUNDS), coder(), ApeGan(SHAPE)])
def test_models_are_saved_whole(
    purifier: Purifier, generator: torch.Generator, tmp_path: Path
) -> None:
    model, x = Purified(classifier(), purifier), images(4, generator)
    model.save(tmp_path / "model", note="mine")
    same = Purified.load(tmp_path / "model")
    assert torch.equal(same(x), model(x))
    assert (same.input_shape, same.bounds, same.task) == (SHAPE, BOUNDS, "classification")
    assert same.straight_through is not purifier.differentiable
    assert same.purifier.config() == purifier.config()
    pure = same.purify(x)
    assert pure.min() >= 0
    assert pure.max() <= 1


def test_bad_arguments_are_refused(generator: torch.Generator, tmp_path: Path) -> None:
    net, x = classifier(), images(4, generator)
    with pytest.raises(InputError, match="straight_through: expected True"):
        Purified(net, coder(), straight_through=False)
    with pytest.raises(InputError, match="bounds"):
        Purified(net, coder(bounds=None))
    with pytest.raises(InputError, match="input_shape"):
        Purified(net, MedianFilter((3, 8, 8), bounds=BOUNDS))
    with pytest.raises(InputError, match=r"images \(C,H,W\)"):
        MedianFilter((8,))
    with pytest.raises(InputError, match="size: expected an integer of at most 8"):
        MedianFilter(SHAPE, size=9)
    with pytest.raises(InputError, match="stride"):
        SparseCoding(SHAPE, patch=4, stride=3)
    with pytest.raises(InputError, match="sides that 4 divides"):
        ApeGan((1, 6, 8))
    for bounds in (None, (0.0,), (1.0, 0.0), "01"):
        with pytest.raises(InputError, match="bounds: expected two finite numbers"):
            ApeGan(SHAPE, bounds=bounds)
    with pytest.raises(InputError, match="calls"):
        Diffusion(SHAPE, noise_step=3, calls=5)
    with pytest.raises(InputError, match="net: expected weights to train"):
        train_purifier(MedianFilter(SHAPE, bounds=BOUNDS), x)
    with pytest.raises(InputError, match="net: expected one whose attacks are undone"):
        train_purifier(ApeGan(SHAPE, width=2), x)
    with pytest.raises(InputError, match="net: expected None"):
        train_purifier(coder(), x, net=net)
    with pytest.raises(InputError, match="train_x"):
        train_purifier(coder(), x + 1)
    otad.nets.save_net(net, tmp_path / "net")
    with pytest.raises(InputError, match="expected a purified model"):
        Purified.load(tmp_path / "net")


def test_training_does_not_change_the_classifier_that_it_attacks() -> None:
    net = otad.nets.ResNet((1, 8, 8), 3, widths=(4, 8), bounds=(0.0, 1.0))  # in training mode
    before = {name: value.clone() for name, value in net.state_dict().items()}
    settings = {"epochs": 1, "batch_size": 12}
    given = {"net": net, "threat": otad.L2(0.5), "settings": settings, "progress": False}
    otad.baselines.train_purifier(
        otad.baselines.ApeGan((1, 8, 8), width=4), torch.rand(12, 1, 8, 8), **given
    )
    assert net.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
