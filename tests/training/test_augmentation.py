"""Augmentations: every op against a plain reference for one image, bounds, and randomness."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from otad.errors import InputError
from otad.training.augmentation import (
    IMAGE_OPS,
    TRIVIAL_OPS,
    Compose,
    Cutout,
    RandomCrop,
    RandomFlip,
    TrivialAugment,
    cutmix,
    host_rng,
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


def _pil(image: Tensor) -> Image.Image:
    return Image.fromarray((image * 255).round().byte().movedim(0, 2).numpy())


def _tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).movedim(2, 0) / 255


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
        expected = _tensor(PIL_OPS[name](_pil(image), a))
        torch.testing.assert_close(result, expected, atol=slack, rtol=0)


def test_images_without_inner_pixels_or_contrast_are_unchanged() -> None:
    flat = torch.full((1, 3, 8, 8), 0.3)
    thin = (_images(1, 3, *sides) for sides in ((1, 9), (9, 2)))
    cases = [("autocontrast", flat), ("equalize", flat), *(("sharpness", x) for x in thin)]
    for name, x in cases:
        assert torch.equal(IMAGE_OPS[name](x, torch.ones(1)), x)


def test_solarize_inverts_what_is_brighter_than_the_threshold() -> None:
    x = torch.tensor([0.1, 0.5, 0.7, 1.0]).view(1, 1, 2, 2)
    changed = IMAGE_OPS["solarize"](x, torch.tensor([-0.4]))
    torch.testing.assert_close(changed.flatten(), torch.tensor([0.1, 0.5, 0.3, 0.0]))


def _sample(image: Tensor, row: float, column: float) -> Tensor:
    """Bilinear, gray outside."""
    total = torch.zeros(image.shape[0])
    top, left = math.floor(row), math.floor(column)
    for r in (top, top + 1):
        for c in (left, left + 1):
            inside = 0 <= r < image.shape[1] and 0 <= c < image.shape[2]
            value = image[:, r, c] if inside else torch.full_like(total, 0.5)
            total += (1 - abs(row - r)) * (1 - abs(column - c)) * value
    return total


def _moved(image: Tensor, name: str, a: float) -> Tensor:
    """One image, pixel by pixel: where does each come from?"""
    channels, height, width = image.shape
    result = torch.empty(channels, height, width)
    middle_y, middle_x = (height - 1) / 2, (width - 1) / 2
    turn = math.radians(135 * a)
    for row in range(height):
        for column in range(width):
            y, x = row - middle_y, column - middle_x
            cosine, sine = math.cos(turn), math.sin(turn)
            source = {
                "rotate": (sine * x + cosine * y, cosine * x - sine * y),
                "shear_x": (y, x + a * y),
                "shear_y": (y + a * x, x),
                "translate_x": (y, x - a * width),
                "translate_y": (y - a * height, x),
            }[name]
            result[:, row, column] = _sample(image, source[0] + middle_y, source[1] + middle_x)
    return result


@pytest.mark.parametrize("name", ["rotate", "shear_x", "shear_y", "translate_x", "translate_y"])
def test_geometry_is_that_of_one_pixel_after_another(name: str) -> None:
    x, amount = _images(3), torch.tensor([-0.7, 0.21, 0.5])
    changed = IMAGE_OPS[name](x, amount)
    for image, result, a in zip(x, changed, amount.tolist(), strict=True):
        torch.testing.assert_close(result, _moved(image, name, a), atol=1e-5, rtol=0)


def test_a_quarter_turn_and_whole_pixel_moves_are_exact() -> None:
    x = _images(1, height=9, width=9)
    turned = IMAGE_OPS["rotate"](x, torch.tensor([90 / 135]))
    torch.testing.assert_close(turned, x.rot90(1, (2, 3)), atol=1e-5, rtol=0)
    moved = IMAGE_OPS["translate_x"](x, torch.tensor([2 / 9]))
    torch.testing.assert_close(moved[..., 2:], x[..., :-2], atol=1e-5, rtol=0)
    torch.testing.assert_close(moved[..., :2], torch.full_like(x[..., :2], 0.5))


def test_crops_are_windows_of_the_padded_image_at_all_places() -> None:
    x = _images(200, 1, 5, 6)
    changed = RandomCrop(1)(x, torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(x, [1] * 4)
    places = set()
    for k in range(200):
        windows = {(i, j): padded[k, :, i : i + 5, j : j + 6] for i in range(3) for j in range(3)}
        (place,) = (at for at, window in windows.items() if torch.equal(changed[k], window))
        places.add(place)
    assert len(places) == 9


def test_flips_mirror_some_images_whole() -> None:
    x = _images(200, 1)
    changed = RandomFlip(0.3)(x, torch.Generator().manual_seed(0))
    flipped = (changed == x.flip(3)).flatten(1).all(1)
    assert torch.equal(flipped, (changed != x).flatten(1).any(1))
    assert 0.2 < flipped.double().mean() < 0.4
    assert torch.equal(RandomFlip(0.0)(x, torch.Generator()), x)


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


def test_every_image_meets_one_of_the_ops_at_its_own_amount() -> None:
    x = _images(1).expand(300, -1, -1, -1).contiguous()
    names = ("identity", "brightness", "autocontrast")
    changed = TrivialAugment(strength=0.8, ops=names)(x, torch.Generator().manual_seed(0))
    same = (changed == x).flatten(1).all(1)
    stretched = (changed == IMAGE_OPS["autocontrast"](x, torch.ones(300))).flatten(1).all(1)
    rest = changed[~same & ~stretched]
    for part in (same, stretched):
        assert 70 < int(part.sum()) < 130
    assert len(rest) == len(torch.unique(rest, dim=0))  # each amount is new
    lit = x[0] > 0
    factors = (rest / x[0])[:, lit].amin(1)  # clamped pixels only lower it
    assert 0.19 < factors.min() < 0.3


def test_in_small_batches_too_every_op_has_the_same_chance() -> None:
    """Two images and three ops: one op has none, each as often as another."""
    x, generator = _images(1).expand(2, -1, -1, -1), torch.Generator().manual_seed(0)
    policy = TrivialAugment(ops=("identity", "brightness", "autocontrast"))
    stretched = IMAGE_OPS["autocontrast"](x, torch.ones(2))[0]
    met = {"same": 0, "stretched": 0, "other": 0}
    for _ in range(300):
        for image in policy(x, generator):
            whole = torch.equal(image, stretched)
            met["same" if torch.equal(image, x[0]) else "stretched" if whole else "other"] += 1
    assert all(160 < count < 240 for count in met.values())


def test_the_host_s_numbers_follow_the_generator_and_move_it_on() -> None:
    first, again = (torch.Generator().manual_seed(4) for _ in range(2))
    drawn = [host_rng(first).random() for _ in range(3)]
    assert drawn == [host_rng(again).random() for _ in range(3)]
    assert len(set(drawn)) == 3
    assert host_rng(torch.Generator().manual_seed(5)).random() != drawn[0]


def test_at_strength_zero_the_policy_is_the_identity() -> None:
    x = _images(60)
    changed = TrivialAugment(strength=0.0)(x, torch.Generator())
    torch.testing.assert_close(changed, x, atol=1e-5, rtol=0)
    assert len(TRIVIAL_OPS) == 14


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
    assert repr(ALL) == repr(Compose(ALL.steps))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomCrop(-1), "padding: expected an integer of at least 0"),
        (lambda: RandomFlip(1.5), "probability: expected a number from 0 to 1, got 1.5"),
        (lambda: Cutout(0), "size: expected an integer"),
        (lambda: TrivialAugment(strength=2), "strength: expected a number from 0 to 1"),
        (lambda: TrivialAugment(ops=("twirl",)), "ops: expected one of identity, brightness"),
        (lambda: TrivialAugment(ops=()), "ops: expected at least one"),
    ],
)
def test_bad_settings_are_refused(make, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


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
        torch.testing.assert_close(shares.sum(1), torch.ones(6))
        if torch.equal(mixed, x):
            assert torch.equal(shares, torch.eye(6)) or shares.max() < 1
            kinds["none" if torch.equal(shares, torch.eye(6)) else "cutmix"] += 1
        else:
            kinds["cutmix" if set(mixed.unique().tolist()) == {0.0, 1.0} else "mixup"] += 1
    assert 60 < kinds["mixup"] < 140
    assert kinds["cutmix"] > 40
    assert torch.equal(mix_some(x, y, 6, generator, probability=0.0)[0], x)
