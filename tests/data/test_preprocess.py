"""`Standardizer` against scikit-learn's scaler."""

from __future__ import annotations

import pytest
import torch
from sklearn.preprocessing import StandardScaler

from otad.data import Standardizer
from otad.errors import InputError


@pytest.fixture
def table() -> torch.Tensor:
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)) * 7 + 1000
    x[:, 2] = 0.1  # constant, and not exact in binary
    return x


def test_features_match_scikit_learn(table: torch.Tensor) -> None:
    ours = Standardizer.fit(table)
    expected = torch.from_numpy(StandardScaler().fit_transform(table.double().numpy()))
    torch.testing.assert_close(ours(table).double(), expected, atol=1e-4, rtol=0)
    assert float(ours.std[2]) == 1.0
    assert float(ours(table)[:, 2].abs().max()) == 0.0
    scale = Standardizer.fit(table.double())
    torch.testing.assert_close(scale.inverse(scale(table.double())), table.double())


def test_a_constant_is_known_through_rounding() -> None:
    """Averaging 0.1 some number of times is not always 0.1, so its std is not always zero."""
    for rows in range(2, 60):
        scale = Standardizer.fit(torch.full((rows, 1), 0.1, dtype=torch.float64))
        assert float(scale.std) == 1.0


def test_one_pair_a_channel_or_one_for_all() -> None:
    images = torch.rand(9, 3, 5, 5, generator=torch.Generator().manual_seed(1))
    images[:, 1] += 2
    channels = Standardizer.fit(images, per="channel")
    assert channels.mean.shape == (3, 1, 1)
    torch.testing.assert_close(channels(images).mean(dim=(0, 2, 3)), torch.zeros(3))
    torch.testing.assert_close(
        channels(images).std(dim=(0, 2, 3), correction=0), torch.ones(3), atol=1e-5, rtol=0
    )
    whole = Standardizer.fit(images, per="all")
    assert whole.mean.shape == ()
    torch.testing.assert_close(whole(images).mean(), torch.tensor(0.0))


def test_refusals(table: torch.Tensor) -> None:
    for mean, std, message in (
        (torch.zeros(2), torch.tensor([1.0, 0.0]), "std: .*positive"),
        (torch.tensor(float("nan")), torch.tensor(1.0), "mean: .*finite"),
        (torch.zeros(2), torch.ones(3), "std: .*like mean"),
    ):
        with pytest.raises(InputError, match=message):
            Standardizer(mean, std)
    with pytest.raises(InputError, match="per: expected one of"):
        Standardizer.fit(table, per="row")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="4 axes"):
        Standardizer.fit(table, per="channel")
    table[0, 0] = float("inf")
    with pytest.raises(InputError, match="finite"):
        Standardizer.fit(table)
