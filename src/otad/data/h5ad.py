"""AnnData `.h5ad` files (extra `singlecell`)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy import sparse

from otad.data.cells import CellPreparation, CellTable
from otad.data.dataset import Dataset
from otad.data.files import find_first
from otad.data.labels import class_names, encode_labels
from otad.data.splits import holdout
from otad.errors import InputError, MissingExtraError


def read_h5ad(path: Path, label: str | None = None, *, may_miss: bool = False) -> CellTable:
    """The matrix X, the gene names and, if asked for, the `obs` column `label`, which cells without
    labels do not have: that is refused unless they `may_miss` it."""
    try:
        from anndata import read_h5ad as read
    except ImportError as error:
        raise MissingExtraError("anndata", "singlecell") from error
    find_first([path], "AnnData file")
    try:
        with warnings.catch_warnings():  # anndata remarks on files of its older layouts
            warnings.simplefilter("ignore")
            content = read(path)
        values = None if content.X is None else _rows_of(content.X)
    except Exception as error:  # a damaged file may raise anything within h5py and anndata
        raise InputError(f"{path}: not a readable .h5ad file ({error})") from error
    if values is None:
        raise InputError(f"{path}: expected values in X, got none")
    cells = content.obs
    labels = None
    if label is not None and (label in cells or not may_miss):
        if label not in cells:
            raise InputError(
                f"{path}: no obs column {label!r}, expected one of {', '.join(cells.columns)}"
            )
        if cells[label].isna().any():
            raise InputError(f"{path}: obs column {label!r} has cells without a value")
        labels = tuple(str(value) for value in cells[label])
    return CellTable(values, tuple(str(gene) for gene in content.var_names), labels)


def _rows_of(matrix: object) -> sparse.csr_matrix:
    values = sparse.csr_matrix(matrix, dtype=np.float32)
    values.check_format(full_check=True)  # places beyond the end would be read from there
    return values


def load_h5ad(
    path: Path,
    label: str,
    *,
    drop: Sequence[str] = (),
    genes: int | None = None,
    normalize: bool = True,
    scale: bool = True,
    clip: float | None = 10.0,
    test_fraction: float = 0.2,
    seed: int = 0,
    name: str | None = None,
    source: str = "the user's AnnData file",
) -> Dataset:
    """Cells labeled by the obs column `label`, prepared as `CellPreparation` says.

    `drop` leaves out the cells with these labels, such as 'Ambiguous'.
    """
    cells = read_h5ad(path, label)
    labels = cells.labels or ()
    dropped = (drop,) if isinstance(drop, str) else tuple(drop)
    for unwanted in dropped:
        if unwanted not in labels:
            known = ", ".join(class_names(labels))
            raise InputError(f"drop: unknown label {unwanted!r}, expected one of {known}")
    wanted = [row for row, value in enumerate(labels) if value not in dropped]
    if not wanted:
        raise InputError(f"drop: no cell is left of {len(labels)}")
    cells = cells.rows(wanted)
    labels = cells.labels or ()
    classes = class_names(labels)
    y = encode_labels(labels, classes, str(path))
    kept, held = holdout(y, test_fraction, seed, task="classification")
    train, test = cells.rows(kept.tolist()), cells.rows(held.tolist())
    prepare = CellPreparation.fit(train, genes=genes, normalize=normalize, scale=scale, clip=clip)
    return Dataset(
        name=name or path.stem,
        train_x=prepare(train),
        train_y=y[kept],
        test_x=prepare(test),
        test_y=y[held],
        task="classification",
        source=source,
        classes=classes,
        feature_names=prepare.genes,
        preparation=prepare,
    )
