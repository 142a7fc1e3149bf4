"""Prices by an index of FAISS: maximum inner product search on (z~_i, s_i) against (q, 1).

It looks into a few cells of the bank only, so it may miss the best point; what it finds is worth
entering all the same, and an exact round has the last word.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otad.cip.whole_bank.pairs import Pairs
from otad.errors import MissingExtraError

FEWEST_CELLED = 4_096  # below, all points are one cell
POINTS_PER_CELL = 256
PROBED = 8  # cells looked into
TRAINING_ROWS = 64  # per cell, to place it


class IndexPrices:
    """An inverted-file index of the points that were not left out; it lives on the CPU."""

    def __init__(self, pairs: Pairs, lines: Tensor) -> None:
        faiss = _faiss()
        self.places = pairs.kept.nonzero()[:, 0]
        # One more coordinate, as long as the others: an inner product knows no scale.
        self.unit = float(lines[pairs.kept].abs().max()) or 1.0
        width, count = pairs.dim + 1, len(self.places)
        cells = count // POINTS_PER_CELL
        metric = faiss.METRIC_INNER_PRODUCT
        self._index: Any = faiss.IndexFlatIP(width)
        if count >= FEWEST_CELLED:
            self._index = faiss.IndexIVFFlat(self._index, width, cells, metric)
            self._index.nprobe = PROBED
            step = max(1, count // (TRAINING_ROWS * cells))
            self._index.train(self._rows(pairs, lines, self.places[::step]))
        for part in self.places.split(max(1, 2**26 // width)):
            self._index.add(self._rows(pairs, lines, part))

    def best(self, asked: Tensor, lines: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """`count` points (b,count) of large price for each query (b,d), in the index's opinion."""
        del lines  # those that the index was made with
        rows = torch.nn.functional.pad(asked, (0, 1), value=self.unit)
        found = self._index.search(_array(rows), min(count, len(self.places)))[1]
        places = torch.from_numpy(found).to(asked.device)
        places = torch.where(places < 0, places[:, :1], places)  # fewer in the cells probed
        places = self.places[places.clamp_min(0)]
        return places, torch.ones_like(places, dtype=torch.bool)

    def _rows(self, pairs: Pairs, lines: Tensor, places: Tensor) -> np.ndarray[Any, Any]:
        heights = lines[places] / self.unit
        return _array(torch.cat([pairs.images(places), heights[:, None]], dim=1))


def _array(rows: Tensor) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(rows.float().cpu().numpy())


def _faiss() -> Any:
    try:
        return importlib.import_module("faiss")
    except ImportError as error:
        raise MissingExtraError("faiss", "index") from error
