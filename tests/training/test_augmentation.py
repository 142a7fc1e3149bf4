"""Augmentations: every op against a plain reference for one image, bounds, and randomness."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from factories import refuses
from PIL import Image, ImageEnhance, ImageOps
from scipy.ndimage import map_coordinates
from torch import Tensor

from otad.training.augmentation import (
    IMAGE_OPS,
    Compose,
    Cutout,
    RandomAffine,
    RandomCrop,
    RandomFlip,
    TrivialAugment,
    cutmix,
    mix_some,
    mixup,
)

LEVEL = 1 / 255
ALL = Compose((RandomCrop(2), RandomFlip(), TrivialAugment(), Cutout(3)))


def _images(rows: int = 5, channels: int = 3, height: int = 9, width: int = 12) -> Tensor:
    """8-bit images with smooth parts, as PIL sees them too."""
    generator = torch.Generator().manual_seed(3)
    drawn = torch.rand(rows, channels, height, width, generator=generator)
    return (25 + drawn**2 * 180).round() / 255


@pytest.mark.parametrize("name", IMAGE_OPS)
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_ops_keep_shape_and_bounds_and_treat_images_one_by_one(name: str, channels: int) -> None:
    x, amount = _images(channels=channels), torch.tensor([-1.0, -0.4, 0.0, 0.3, 1.0])
    changed = IMAGE_OPS[name](x, amount)
    assert changed.shape == x.shape
    assert 0 <= changed.min() <= changed.max() <= 1
    torch.testing.assert_close(changed[2], x[2], atol=2e-6, rtol=0)  # amount 0
    for k in range(5):
        alone = IMAGE_OPS[name](x[k : k + 1], amount[k : k + 1])
        torch.testing.assert_close(changed[k : k + 1], alone)


PIL_OPS = {
    "brightness": lambda image, a: ImageEnhance.Brightness(image).enhance(1 + a),
    "contrast": lambda image, a: ImageEnhance.Contrast(image).enhance(1 + a),
    "saturation": lambda image, a: ImageEnhance.Color(image).enhance(1 + a),
    "sharpness": lambda image, a: ImageEnhance.Sharpness(image).enhance(1 + a),
    "posterize": lambda image, a: ImageOps.posterize(image, 8 - round(6 * abs(a))),
    "autocontrast": lambda image, a: ImageOps.autocontrast(image),
    "equalize": lambda image, a: ImageOps.equalize(image),
}


@pytest.mark.parametrize("name", PIL_OPS)
def test_colors_change_as_in_pil(name: str) -> None:
    # PIL rounds to whole levels at every step.
    slack = {"posterize": 1e-6, "equalize": 1e-6}.get(name, 2.5 * LEVEL)
    x, amount = _images(height=30, width=40), torch.tensor([-0.9, -0.5, 0.2, 0.5, 0.9])
    changed = IMAGE_OPS[name](x, amount)
    assert (changed - x).abs().max() > 5 * LEVEL
    for image, result, a in zip(x, changed, amount.tolist(), strict=True):
        picture = Image.fromarray((image * 255).round().byte().movedim(0, 2).numpy())
        expected = torch.from_numpy(np.array(PIL_OPS[name](picture, a))).movedim(2, 0) / 255
        torch.testing.assert_close(result, expected, atol=slack, rtol=0)


def test_images_without_inner_pixels_or_contrast_are_unchanged() -> None:
    flat, low, narrow = torch.full((1, 3, 8, 8), 0.3), _images(1, 3, 1, 9), _images(1, 3, 9, 2)
    cases = [("autocontrast", flat), ("equalize", flat), ("sharpness", low), ("sharpness", narrow)]
    for name, x in cases:
        assert torch.equal(IMAGE_OPS[name](x, torch.ones(1)), x)
    x = torch.tensor([0.1, 0.5, 0.7, 1.0]).view(1, 1, 2, 2)
    inverted = IMAGE_OPS["solarize"](x, torch.tensor([-0.4]))  # what is brighter than 0.6
    torch.testing.assert_close(inverted.flatten(), torch.tensor([0.1, 0.5, 0.3, 0.0]))


def _moved(image: Tensor, name: str, a: float) -> Tensor:
    """One image, pixel by pixel, by SciPy's bilinear interpolation; gray outside."""
    _, height, width = image.shape
    middle_y, middle_x = (height - 1) / 2, (width - 1) / 2
    y, x = np.mgrid[:height, :width] - np.array([middle_y, middle_x])[:, None, None]
    cosine, sine = math.cos(math.radians(135 * a)), math.sin(math.radians(135 * a))
    source = {
        "rotate": (sine * x + cosine * y, cosine * x - sine * y),
        "shear_x": (y, x + a * y),
        "shear_y": (y + a * x, x),
        "translate_x": (y, x - a * width),
        "translate_y": (y - a * height, x),
    }[name]
    at = [source[0] + middle_y + 1, source[1] + middle_x + 1]
    padded = np.pad(image.numpy(), ((0, 0), (1, 1), (1, 1)), constant_values=0.5)
    channels = [map_coordinates(one, at, order=1, cval=0.5) for one in padded]
    return torch.from_numpy(np.stack(channels))


@pytest.mark.parametrize("name", ["rotate", "shear_x", "shear_y", "translate_x", "translate_y"])
def test_geometry_is_that_of_scipy(name: str) -> None:
    x, amount = _images(3), torch.tensor([-0.7, 0.21, 0.5])
    changed = IMAGE_OPS[name](x, amount)
    for image, result, a in zip(x, changed, amount.tolist(), strict=True):
        torch.testing.assert_close(result, _moved(image, name, a), atol=1e-5, rtol=0)


def test_crops_are_windows_of_the_padded_image_at_all_places() -> None:
    x = _images(200, 1, 5, 6)
    changed = RandomCrop(1)(x, torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(x, [1] * 4)
    windows = padded.unfold(2, 5, 1).unfold(3, 6, 1).flatten(2, 3)  # (200, 1, 9, 5, 6)
    found = (windows == changed[:, :, None]).flatten(3).all(3).squeeze(1)
    assert bool((found.sum(1) == 1).all())
    assert bool(found.any(0).all())


def test_affine_changes_are_small_and_black_outside() -> None:
    """A turn, a factor and a shift in pixels, against interpolation by SciPy."""
    x, generator = _images(6, height=11, width=11), torch.Generator()
    affine = RandomAffine(degrees=10, scale=0.2, shift=2.0)
    found = affine(x, generator.manual_seed(5))
    drawn = 2 * torch.rand(4, 6, generator=generator.manual_seed(5), dtype=x.dtype) - 1
    for row, (turn, grow, across, down) in enumerate(drawn.T.tolist()):
        angle, size = math.radians(10) * turn, 1 + 0.2 * grow
        py, px = np.mgrid[:11, :11] - 5.0
        at_x = (math.cos(angle) * px - math.sin(angle) * py) / size - 2 * across
        at_y = (math.sin(angle) * px + math.cos(angle) * py) / size - 2 * down
        for channel, image in enumerate(x[row].numpy()):
            padded, places = np.pad(image, 4), [at_y + 9, at_x + 9]
            expected = map_coordinates(padded, places, order=1, mode="constant")
            assert np.allclose(found[row, channel].numpy(), expected, atol=1e-4)
    still = RandomAffine(degrees=0, scale=0, shift=0)(x, generator)
    assert torch.allclose(still, x, atol=1e-5)
    for name in ("degrees", "scale", "shift"):
        refuses(RandomAffine, **{name: -1}, match=f"{name}.*-1")


def test_flips_mirror_some_images_whole() -> None:
    x = _images(200, 1)
    changed = RandomFlip(0.3)(x, torch.Generator().manual_seed(0))
    flipped = (changed == x.flip(3)).flatten(1).all(1)
    assert torch.equal(flipped, (changed != x).flatten(1).any(1))
    assert 0.2 < flipped.double().mean() < 0.4


def test_cutout_grays_a_square() -> None:
    x = torch.zeros(100, 2, 10, 12)
    changed = Cutout(4)(x, torch.Generator().manual_seed(0))
    sizes = set()
    for image in changed:
        assert torch.equal(image[0], image[1])
        rows, columns = image[0].nonzero(as_tuple=True)
        height, width = (int(part.max() - part.min()) + 1 for part in (rows, columns))
        assert len(rows) == height * width  # a full box
        sizes.add((height, width))
    assert (4, 4) in sizes
    assert max(max(size) for size in sizes) == 4
    assert set(changed.unique().tolist()) == {0.0, 0.5}


@pytest.mark.parametrize("rows", [2, 300])
def test_every_image_meets_one_of_the_ops_at_its_own_amount(rows: int) -> None:
    """Each op as often as another; also in batches of two, where one of three ops has no image."""
    x, generator = _images(1), torch.Generator().manual_seed(0)
    policy = TrivialAugment(strength=0.8, ops=("identity", "brightness", "autocontrast"))
    batches = [policy(x.expand(rows, -1, -1, -1), generator) for _ in range(600 // rows)]
    changed, stretched = torch.cat(batches), IMAGE_OPS["autocontrast"](x, torch.ones(1))
    met = [(changed == one).flatten(1).all(1) for one in (x, stretched)]
    rest = changed[~met[0] & ~met[1]]
    assert all(160 < count < 240 for count in (*(one.sum() for one in met), len(rest)))
    assert len(rest) == len(torch.unique(rest, dim=0))  # each amount is new
    factors = (rest / x[0])[:, x[0] > 0].amin(1)  # clamped pixels only lower it
    assert 0.19 < factors.min() < 0.3


def test_a_pipeline_is_decided_by_its_generator_and_stays_in_bounds() -> None:
    x = _images(64)
    before, state = x.clone(), torch.random.get_rng_state()
    first, again, other = (ALL(x, torch.Generator().manual_seed(s)) for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(x, before)
    assert torch.equal(state, torch.random.get_rng_state())
    assert first.shape == x.shape
    assert 0 <= first.min() <= first.max() <= 1
    weakest = TrivialAugment(strength=0.0)(x, torch.Generator())
    torch.testing.assert_close(weakest, x, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (RandomCrop, {"padding": -1}, "at least 0, got -1"),
        (RandomFlip, {"probability": 1.5}, "from 0 to 1, got 1.5"),
        (Cutout, {"size": 0}, "at least 1, got 0"),
        (TrivialAugment, {"strength": 2}, "from 0 to 1, got 2"),
        (TrivialAugment, {"ops": ("twirl",)}, "brightness.*'twirl'"),
        (TrivialAugment, {"ops": ()}, "at least one"),
    ],
)
def test_bad_settings_are_refused(kind: type, options: dict, message: str) -> None:
    refuses(kind, **options, match=f"{next(iter(options))}: .*{message}")


def test_mixup_mixes_images_and_labels_by_one_share(generator: torch.Generator) -> None:
    x, y = torch.eye(6).view(6, 1, 2, 3), torch.arange(6)
    mixed, shares = mixup(x, y, 6, generator)
    torch.testing.assert_close(mixed.flatten(1), shares)  # image k is its own label here
    torch.testing.assert_close(shares.sum(1), torch.ones(6))
    assert 0 < shares[0, 0] < 1


def test_cutmix_labels_are_shares_of_the_area(generator: torch.Generator) -> None:
    x = torch.arange(6.0).view(6, 1, 1, 1).expand(6, 2, 8, 10) / 6
    seen = set()
    for _ in range(20):
        mixed, shares = cutmix(x, torch.arange(6), 6, generator)
        for k in range(6):
            counts = torch.bincount((mixed[k, 0] * 6).round().long().flatten(), minlength=6)
            torch.testing.assert_close(shares[k], counts / 80)
        seen.add(round(float(shares.max()), 4))
    assert len(seen) > 5


def test_some_batches_are_mixed_one_way_or_the_other(generator: torch.Generator) -> None:
    x, y = torch.eye(6).view(6, 1, 2, 3), torch.arange(6)
    kinds = {"none": 0, "mixup": 0, "cutmix": 0}
    for _ in range(400):
        mixed, shares = mix_some(x, y, 6, generator, probability=0.5)
        if torch.equal(mixed, x):
            kinds["none" if torch.equal(shares, torch.eye(6)) else "cutmix"] += 1
        else:
            kinds["cutmix" if set(mixed.unique().tolist()) == {0.0, 1.0} else "mixup"] += 1
    assert 60 < kinds["mixup"] < 140
    assert kinds["cutmix"] > 40
    assert torch.equal(mix_some(x, y, 6, generator, probability=0.0)[0], x)
    for by in ("mixup", "cutmix"):
        values = {
            len(mix_some(x, y, 6, generator, probability=1.0, by=by)[0].unique()) for _ in range(9)
        }
        assert values == {2 if by == "cutmix" else 3}  # 0 and 1, or 0 and both shares
