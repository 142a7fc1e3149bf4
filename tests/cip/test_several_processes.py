"""The potential of the global map on several processes: that of one process, bit for bit."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest
import torch
from together import needs_gloo, together
from torch import Tensor
from torch import distributed as dist

from otad.cip.whole_bank import contradictions, pairs
from otad.cip.whole_bank.contradictions import PairRatios
from otad.cip.whole_bank.lifted_bank import lifted_potential
from otad.cip.whole_bank.potential import BankPotential, integrate_most, least_bank_smoothness
from otad.cip.whole_bank.pricing import Prices
from otad.errors import InputError, SolverError

pytestmark = needs_gloo
N, D, LIFT = 90, 5, 2


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch) -> None:
    monkeypatch.setattr(pairs, "BLOCK_BYTES", 2**12)  # 5 blocks of at most 22 points
    monkeypatch.setattr(contradictions, "BLOCK", {"cpu": 16})  # 21 blocks of pairs


def bank() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=generator)
    return x, x.tanh() + 0.3 * torch.randn(N, D, generator=generator)


def lifted_bank() -> tuple[Tensor, Tensor]:
    x, z = bank()
    inputs = torch.cat([x[:, LIFT:], torch.zeros(N, LIFT)], 1)
    return inputs, torch.cat([x[:, LIFT:], z[:, :LIFT]], 1)


def potentials() -> dict[str, Any]:
    smooth = bank()[0], bank()[0].tanh()
    found = {
        "least": least_bank_smoothness(*smooth, -0.5),
        "most": integrate_most(*bank(), 4.0),
        "lifted": lifted_potential(*lifted_bank(), LIFT),
        "lifted, most": lifted_potential(*lifted_bank(), LIFT, 1.0),
    }
    with pytest.raises(SolverError) as error:
        integrate_most(*bank(), 1e-3)
    return {name: _plain(one) for name, one in found.items()} | {"error": str(error.value)}


def test_different_banks_are_refused(tmp_path) -> None:
    def work() -> list[str]:
        said = []
        for found, given in ((integrate_most, bank()), (lifted_potential, lifted_bank())):
            given[1][-1, -1] += dist.get_rank()
            with pytest.raises(InputError, match="expected the same in all processes") as error:
                found(*given, 2)
            said.append(str(error.value))
        return said

    for said in together(tmp_path / "two", work):
        assert said[0].startswith("inputs, features and smoothness")
        assert said[1].startswith("points and answers")


def _plain(found: BankPotential) -> list[Any]:
    return [part.tolist() if isinstance(part, Tensor) else part for part in astuple(found)]


def test_potentials_are_those_of_one_process_bit_for_bit(tmp_path) -> None:
    alone = potentials()
    assert alone["most"][3], "some points contradict others"
    for count in (2, 6):  # of six processes one has no block of points
        for found in together(tmp_path / str(count), potentials, count):
            assert repr(found) == repr(alone)  # NaN where points are left out


def test_each_process_raises_its_share_of_the_points(tmp_path, monkeypatch) -> None:
    largest = Prices.largest

    def work() -> tuple[int, int]:
        asked: list[int] = []

        def counting(self: Prices, queries: Tensor, lines: Tensor) -> Any:
            asked.append(len(queries))
            return largest(self, queries, lines)

        monkeypatch.setattr(Prices, "largest", counting)
        after: list[int] = []
        integrate_most(*bank(), 20.0, progress=lambda *_: after.append(sum(asked)))
        return after[0], len(after)

    (first, sweeps), (second, others) = together(tmp_path / "two", work)
    assert (first, second) == (66, 24)  # three of the five blocks, and two
    assert sweeps == others


class Rounded(PairRatios):
    """Ratios whose bounds are too low or too high by up to half of them."""

    def __init__(self, seed: int) -> None:
        super().__init__(N, 1, torch.device("cpu"))
        generator = torch.Generator().manual_seed(seed)
        self.ratios = torch.rand(N, N, generator=generator, dtype=torch.float64)
        self.wrong = self.ratios * (0.5 + torch.rand(N, N, generator=generator))

    def read(self, rows: slice) -> tuple[Tensor, ...]:
        return (torch.arange(N)[rows],)

    def bounds(self, own: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> Tensor:
        return self.wrong[own[0]][:, other[0]].float()

    def exact(self, first: Tensor, second: Tensor) -> Tensor:
        return self.ratios[first, second]


def test_the_largest_ratio_is_that_of_one_process_whatever_float32_hides(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(contradictions, "FINALISTS", 1)
    true, alone = [], []
    for seed in range(12):
        one = Rounded(seed)
        true.append(float(one.ratios.triu(1).max()))
        alone.append(one.largest())
    assert true != alone, "some bounds hide the largest ratio"

    def work() -> list[float]:
        return [Rounded(seed).largest() for seed in range(12)]

    for found in together(tmp_path / "two", work):
        assert found == alone
