"""Images and labels mixed by the same shares."""

from __future__ import annotations

import torch

from otad.training.augmentation import cutmix, mix_some, mixup


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
