"""The one potential of a bank in global scope: found once for a net, kept in a file, recorded."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from otad.cip.whole_bank.potential import BankPotential
from otad.experiments.records import PotentialRecord
from otad.io.codec import from_plain, to_plain
from otad.io.tensor_files import read_tensors, write_tensors
from otad.model.answerer_options import potential_of
from otad.model.bank import FeatureBank


@dataclass(frozen=True, eq=False)
class PotentialFound:
    """The potential of a bank, and what is recorded of it."""

    potential: BankPotential
    record: PotentialRecord

    @staticmethod
    def find(
        bank: FeatureBank,
        smoothness: float | None,
        strong_convexity: float,
        report: Callable[[int, int], None],
        *,
        lift: int,
    ) -> PotentialFound:
        """See `potential_of`; how many sweeps it takes is not known before the last."""
        started = time.perf_counter()
        found = potential_of(
            bank,
            smoothness,
            strong_convexity,
            progress=lambda sweep, gain: report(sweep, sweep + 1),
            lift=lift,
        )
        report(1, 1)
        record = PotentialRecord(
            smoothness=found.smoothness,
            strong_convexity=found.strong_convexity,
            left_out=tuple(found.left_out.tolist()),
            sweeps=found.sweeps,
            violation=found.violation,
            seconds=time.perf_counter() - started,
        )
        return PotentialFound(found, record)

    def write(self, path: Path) -> None:
        write_tensors(path, {"levels": self.potential.levels.cpu()}, to_plain(self.record))

    @staticmethod
    def read(path: Path) -> PotentialFound:
        tensors, header = read_tensors(path)
        record: PotentialRecord = from_plain(PotentialRecord, header, path.name)
        potential = BankPotential(
            tensors["levels"],
            record.smoothness,
            record.strong_convexity,
            torch.tensor(record.left_out, dtype=torch.int64),
            record.sweeps,
            record.violation,
        )
        return PotentialFound(potential, record)
