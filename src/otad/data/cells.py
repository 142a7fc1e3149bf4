"""Single cells: log-normalization, choice of genes, scaling; fitted on train cells only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from otad.checks import check_count
from otad.data.preprocess import Standardizer
from otad.errors import InputError


@dataclass(frozen=True, eq=False)
class CellTable:
    """Cells by genes: values (N, G) in a sparse row format, gene names (G), one label a cell."""

    values: sparse.csr_matrix
    genes: tuple[str, ...]
    labels: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.values.shape[1] != len(self.genes):
            raise InputError(f"genes: expected {self.values.shape[1]} names, got {len(self.genes)}")
        if len(set(self.genes)) != len(self.genes):
            twice = next(gene for gene in self.genes if self.genes.count(gene) > 1)
            raise InputError(f"genes: expected distinct names, got {twice!r} more than once")
        if not np.isfinite(self.values.data).all():
            raise InputError("cells: expected finite values, got NaN or infinity")

    def rows(self, indices: Sequence[int]) -> CellTable:
        labels = None if self.labels is None else tuple(self.labels[i] for i in indices)
        return CellTable(self.values[list(indices)], self.genes, labels)


@dataclass(frozen=True, eq=False)
class CellPreparation:
    """What was done to the cells of a data set, to be repeated on new cells.

    1. each cell divided by its total over ALL genes, times `target_sum`, then log(1 + x)
       (left out when `target_sum` is None; a cell without counts stays zero);
    2. the columns `genes`;
    3. `scaling`, then clipping to [-clip, clip] (left out when None).
    """

    genes: tuple[str, ...]
    target_sum: float | None
    scaling: Standardizer | None
    clip: float | None

    @classmethod
    def fit(
        cls,
        cells: CellTable,
        *,
        genes: int | None = None,
        normalize: bool = True,
        scale: bool = True,
        clip: float | None = 10.0,
    ) -> CellPreparation:
        """From train cells: the median total, the `genes` of largest variance, mean and std."""
        target_sum = float(np.median(_totals(cells.values))) if normalize else None
        if target_sum is not None and target_sum <= 0:
            raise InputError("cells: expected counts, got a median total of zero")
        values = _log_normalize(cells.values, target_sum)
        chosen = cells.genes
        if genes is not None:
            if check_count(genes, "genes") > len(cells.genes):
                raise InputError(f"genes: expected at most {len(cells.genes)}, got {genes}")
            columns = np.sort(np.argsort(-_variance(values), kind="stable")[:genes])
            chosen = tuple(cells.genes[column] for column in columns)
            values = values[:, columns]
        scaling = Standardizer.fit(_dense(values)) if scale else None
        return cls(chosen, target_sum, scaling, clip if scale else None)

    def __call__(self, cells: CellTable) -> Tensor:
        """float32 (N, genes); genes are found by name, so their order in `cells` is free."""
        position = {gene: column for column, gene in enumerate(cells.genes)}
        missing = [gene for gene in self.genes if gene not in position]
        if missing:
            shown = ", ".join(missing[:5])
            raise InputError(
                f"cells: expected the {len(self.genes)} genes of the preparation, "
                f"{len(missing)} are missing: {shown}"
            )
        values = _log_normalize(cells.values, self.target_sum)
        x = _dense(values[:, [position[gene] for gene in self.genes]])
        if self.scaling is not None:
            x = self.scaling(x)
        return x if self.clip is None else x.clamp(-self.clip, self.clip)

    def to_json(self) -> dict[str, Any]:
        scaling = self.scaling
        return {
            "genes": list(self.genes),
            "target_sum": self.target_sum,
            "mean": None if scaling is None else scaling.mean.tolist(),
            "std": None if scaling is None else scaling.std.tolist(),
            "clip": self.clip,
        }

    @classmethod
    def from_json(cls, card: dict[str, Any]) -> CellPreparation:
        expected = {"genes", "target_sum", "mean", "std", "clip"}
        if set(card) != expected:
            raise InputError(f"preparation: expected {sorted(expected)}, got {sorted(card)}")
        scaling = None
        if card["mean"] is not None:
            mean, std = (torch.tensor(card[key], dtype=torch.float32) for key in ("mean", "std"))
            scaling = Standardizer(mean, std)
        return cls(tuple(card["genes"]), card["target_sum"], scaling, card["clip"])


def _totals(values: sparse.csr_matrix) -> np.ndarray:
    if values.data.size and values.data.min() < 0:
        raise InputError(
            f"cells: expected counts, which are not negative, got {values.data.min()}; "
            "for values that are scaled already pass normalize=False (--no-normalize)"
        )
    return np.asarray(values.sum(axis=1), dtype=np.float64).ravel()


def _log_normalize(values: sparse.csr_matrix, target_sum: float | None) -> sparse.csr_matrix:
    if target_sum is None:
        return values
    totals = _totals(values)
    factors = target_sum / np.where(totals > 0, totals, 1.0)
    return sparse.csr_matrix(sparse.diags(factors) @ values).log1p()


def _variance(values: sparse.csr_matrix) -> np.ndarray:
    """Two passes, so that a large mean does not eat the digits of a small variance."""
    count = values.shape[0]
    mean = np.asarray(values.mean(axis=0, dtype=np.float64)).ravel()
    columns = values.tocsc().astype(np.float64)
    stored = np.diff(columns.indptr)
    columns.data = (columns.data - np.repeat(mean, stored)) ** 2
    spread = np.asarray(columns.sum(axis=0)).ravel() + (count - stored) * mean**2
    return np.asarray(spread / count)


def _dense(values: sparse.csr_matrix) -> Tensor:
    return torch.from_numpy(values.toarray().astype(np.float32))
