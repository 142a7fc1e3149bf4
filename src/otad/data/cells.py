"""Single cells: AnnData files (extra `singlecell`), log-normalization, choice of genes, scaling."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from otad.checks import check_count, check_positive, check_shape, require
from otad.data.dataset import (
    Dataset,
    Standardizer,
    class_names,
    encode_labels,
    is_coarse,
    refuse_repeats,
)
from otad.data.registry import find_first
from otad.data.splits import holdout
from otad.errors import InputError, MissingExtraError
from otad.io.files import most_unpacked

CLIP = 10.0  # of scaled values
_CARD = {"genes", "target_sum", "mean", "std", "clip", "counts"}


@dataclass(frozen=True, eq=False)
class CellTable:
    """Cells by genes, as read from an AnnData file.

    Parameters
    ----------
    values : scipy.sparse.csr_matrix (N, G)
        Counts or other finite values.
    genes : tuple of str
        The G names of the genes.
    labels : tuple of str, optional
        One label for each cell.
    names : tuple of str
        The name of each cell, such as its bar code; by default its number from 0.

    Examples
    --------
    >>> from scipy import sparse
    >>> from otad.data import CellTable
    >>> counts = sparse.csr_matrix([[3.0, 0.0], [0.0, 4.0]])
    >>> cells = CellTable(counts, genes=("Gad1", "Slc17a6"), labels=("a", "b"))
    >>> cells.rows([1]).labels
    ('b',)
    """

    values: sparse.csr_matrix
    genes: tuple[str, ...]
    labels: tuple[str, ...] | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        cells, count = self.values.shape
        require(cells > 0 and count > 0, "cells", "at least one cell and gene", self.values.shape)
        require(count == len(self.genes), "genes", f"{count} names", len(self.genes))
        named = cells if self.labels is None else len(self.labels)
        require(named == cells, "labels", f"{cells}, one for each cell", named)
        object.__setattr__(self, "names", self.names or tuple(map(str, range(cells))))
        require(len(self.names) == cells, "names", f"{cells}, one for each cell", len(self.names))
        refuse_repeats(self.genes, "genes")
        require(np.isfinite(self.values.data).all(), "cells", "finite values", "NaN or infinity")

    def rows(self, indices: Sequence[int]) -> CellTable:
        """Return the table of these rows only."""
        labels = None if self.labels is None else tuple(self.labels[i] for i in indices)
        names = tuple(self.names[i] for i in indices)
        return CellTable(self.values[list(indices)], self.genes, labels, names)


@dataclass(frozen=True, eq=False)
class CellPreparation:
    """What was done to the cells of a data set, to be repeated on new cells.

    1. Each cell is divided by its total over all genes and multiplied by `target_sum`, and then
       `log(1 + x)` is taken. If `target_sum` is None, this step is skipped. A cell without counts
       stays zero.
    2. The columns of `genes` are selected.
    3. The values are scaled and then clipped to `[-clip, clip]`.

    Calling it with a `CellTable` returns the inputs, float32 (N, number of genes). Genes are found
    by name, so the table may have them in any order; a missing gene is refused.

    Parameters
    ----------
    genes : tuple of str
        The genes that are used.
    target_sum : float or None
        The total to which each cell is normalized.
    scaling : Standardizer
        Mean and standard deviation of each gene.
    clip : float
        The largest absolute value after scaling.
    counts : bool
        Whether cells must have counts, which are whole numbers, so that values that are normalized
        already are not normalized again.

    Examples
    --------
    >>> from scipy import sparse
    >>> from otad.data import CellPreparation, CellTable
    >>> counts = sparse.csr_matrix([[3.0, 1.0, 0.0], [0.0, 4.0, 0.0], [2.0, 2.0, 1.0]])
    >>> cells = CellTable(counts, ("Gad1", "Slc17a6", "Actb"))
    >>> prepare = CellPreparation.fit(cells, genes=2)
    >>> prepare.genes, prepare.target_sum
    (('Gad1', 'Slc17a6'), 4.0)
    >>> prepare(cells).shape
    torch.Size([3, 2])
    """

    genes: tuple[str, ...]
    target_sum: float | None
    scaling: Standardizer
    clip: float = CLIP
    counts: bool = False

    def __post_init__(self) -> None:
        check_positive(self.clip, "clip")
        check_positive(1.0 if self.target_sum is None else self.target_sum, "target_sum")
        shape = (len(self.genes),)
        check_shape(self.scaling.mean, "mean", shape, "with one number for each gene")

    @classmethod
    def fit(
        cls, cells: CellTable, *, genes: int | None = None, normalize: bool | None = None
    ) -> CellPreparation:
        """Learn the preparation from the cells of the train part.

        Parameters
        ----------
        cells : CellTable
            The cells of the train part.
        genes : int, optional
            How many genes to use; those of largest variance are chosen. If None, all.
        normalize : bool, optional
            Whether to normalize each cell to the median total and to take the logarithm. If None,
            this is done, and values other than counts are refused, also in new cells. Pass False
            for values that are normalized already, and True to normalize other values as well.
        """
        counts = normalize is None
        if counts:
            _check_counts(cells.values)
        from sklearn.utils.sparsefuncs import mean_variance_axis  # loads pandas, too

        mean, variance = mean_variance_axis(cells.values.astype(np.float64), axis=0)
        dtype = np.float64 if is_coarse(mean, np.sqrt(variance)) else np.float32
        raw = cells.values.astype(dtype)
        target_sum = None if normalize is False else float(np.median(_totals(raw)))
        require(target_sum != 0, "cells", "counts", "a median total of zero")
        values, chosen = _log_normalize(raw, target_sum), cells.genes
        if genes is not None:
            enough = check_count(genes, "genes") <= len(cells.genes)
            require(enough, "genes", f"at most {len(cells.genes)}", genes)
            _, variance = mean_variance_axis(values.astype(np.float64), axis=0)
            columns = np.sort(np.argsort(-variance, kind="stable")[:genes])
            chosen = tuple(cells.genes[column] for column in columns)
            values = values[:, columns]
        dense = torch.from_numpy(values.toarray().astype(dtype))
        scaling = Standardizer.fit(dense, names=chosen)
        return cls(chosen, target_sum, scaling, counts=counts)

    def __call__(self, cells: CellTable) -> Tensor:
        """float32 (N, genes); genes are found by name, so `cells` may have them in any order."""
        position = {gene: column for column, gene in enumerate(cells.genes)}
        missing = [gene for gene in self.genes if gene not in position]
        without = f"cells without {len(missing)} of them: {', '.join(missing[:5])}"
        require(not missing, "cells", f"the {len(self.genes)} genes of the preparation", without)
        columns = [position[gene] for gene in self.genes]
        if self.counts:
            _check_counts(cells.values[:, columns])
        wide = self.scaling.mean.dtype == torch.float64
        raw = cells.values.astype(np.float64 if wide else np.float32)
        values = _log_normalize(raw, self.target_sum)
        chosen = values[:, columns].toarray()
        scaled = self.scaling(torch.from_numpy(chosen).to(self.scaling.mean))
        return scaled.float().clamp(-self.clip, self.clip)

    def to_json(self) -> dict[str, Any]:
        """Return the preparation as plain JSON values."""
        scaling = {"mean": self.scaling.mean.tolist(), "std": self.scaling.std.tolist()}
        chosen = {"genes": list(self.genes), "target_sum": self.target_sum}
        return chosen | scaling | {"clip": self.clip, "counts": self.counts}

    @classmethod
    def from_json(cls, card: dict[str, Any]) -> CellPreparation:
        """Make the preparation that `to_json` described."""
        card = {"counts": False} | card  # which cards of earlier versions do not have
        require(set(card) == _CARD, "preparation", str(sorted(_CARD)), sorted(card))
        mean, std = (torch.tensor(card[key], dtype=torch.float64) for key in ("mean", "std"))
        if torch.equal(mean, mean.float().double()):  # they were found in float32
            mean, std = mean.float(), std.float()
        scaling = Standardizer(mean, std)
        return cls(tuple(card["genes"]), card["target_sum"], scaling, card["clip"], card["counts"])


def _check_counts(values: sparse.csr_matrix) -> None:
    """Refuse values that are probably normalized already."""
    others = values.data[values.data != np.rint(values.data)][:1]
    remedy = "give counts, or train with normalize=False (--no-normalize) on values that are "
    remedy += "normalized already, or normalize=True (--normalize) on others"
    found = f"{others.item():g}: {remedy}" if len(others) else ""
    require(not found, "cells", "counts, which are whole numbers", found)


def _totals(values: sparse.csr_matrix) -> np.ndarray:
    least = values.data.min(initial=0)
    what = "counts of at least 0 (for scaled values pass normalize=False or --no-normalize)"
    require(least >= 0, "cells", what, least)
    return np.asarray(values.sum(axis=1), dtype=np.float64).ravel()


def _log_normalize(values: sparse.csr_matrix, target_sum: float | None) -> sparse.csr_matrix:
    if target_sum is None:
        return values
    totals = _totals(values)
    factors = target_sum / np.where(totals > 0, totals, 1.0)
    return sparse.csr_matrix(sparse.diags(factors) @ values).log1p()


def read_h5ad(path: Path, label: str | None = None, *, may_miss: bool = False) -> CellTable:
    """Read the matrix X, the names of cells and genes and, if asked for, a column of labels.

    If two cells have the same name, the names are left out.

    It needs the extra `singlecell`.

    Parameters
    ----------
    path : Path
        An AnnData file, `.h5ad`.
    label : str, optional
        The column of `obs` that holds the label of each cell.
    may_miss : bool
        Whether a file without that column is accepted. New cells have no labels.

    Raises
    ------
    InputError
        If the file is not readable, has no such column, or refers to data in other files.

    Examples
    --------
    >>> import anndata, numpy as np
    >>> from otad.data import read_h5ad
    >>> table = anndata.AnnData(np.array([[3.0, 0.0], [0.0, 4.0]], dtype=np.float32))
    >>> table.obs["cell_type"] = ["a", "b"]
    >>> table.write_h5ad("cells.h5ad")
    >>> read_h5ad("cells.h5ad", "cell_type").labels
    ('a', 'b')
    """
    try:
        from anndata import read_h5ad as read
    except ImportError as error:
        raise MissingExtraError("anndata", "singlecell") from error
    find_first([path], "AnnData file")
    try:
        _check_contents(path)
        with warnings.catch_warnings():  # anndata warns about files of its older layouts
            warnings.simplefilter("ignore")
            content = read(path)
        require(content.X is not None, str(path), "values in X", "none")
        dtype = np.result_type(content.X.dtype, np.float32)
        values = sparse.csr_matrix(content.X, dtype=dtype)
        values.check_format(full_check=True)  # a place beyond the end would be read from there
    except InputError:
        raise
    except Exception as error:  # a damaged file may raise anything within h5py and anndata
        raise InputError(f"{path}: not a readable .h5ad file ({error})") from error
    cells, labels = content.obs, None
    if label is not None and (label in cells or not may_miss):
        known = f"an obs column, one of {', '.join(cells.columns)}"
        require(label in cells, str(path), known, repr(label))
        unknown = cells[label].isna().any()
        require(not unknown, str(path), f"a value of {label!r} for every cell", "missing ones")
        labels = tuple(str(value) for value in cells[label])
    genes, names = (tuple(map(str, index)) for index in (content.var_names, content.obs_names))
    return CellTable(values, genes, labels, names if len({*names}) == len(names) else ())


def _check_contents(path: Path) -> None:
    """Refuse data in other files, which HDF5 can name, and more of it than fits in memory."""
    import h5py

    sizes, most = [0], most_unpacked(path)

    def is_outside(name: str, link: object) -> str | None:
        outside = isinstance(link, h5py.ExternalLink)
        if isinstance(found := None if outside else file.get(name), h5py.Dataset):
            sizes.append(found.nbytes)
            outside = found.is_virtual or found.external is not None
        return name if outside else None  # a name ends the visit

    with h5py.File(path) as file:
        outside = file.visititems_links(is_outside)
    require(outside is None, str(path), "all data in the file itself", f"{outside!r} in another")
    require(sum(sizes) <= most, str(path), f"at most {most} bytes unpacked", sum(sizes))


def load_h5ad(
    path: Path,
    label: str,
    *,
    drop: str | Sequence[str] = (),
    genes: int | None = None,
    normalize: bool | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    name: str | None = None,
    source: str = "the user's AnnData file",
) -> Dataset:
    """Make a data set of an AnnData file whose cells are labeled in a column of `obs`.

    It needs the extra `singlecell`. The values are prepared as `CellPreparation` describes, and
    rows have the names of the cells, `obs_names`.

    Parameters
    ----------
    path : Path
        An AnnData file, `.h5ad`.
    label : str
        The column of `obs` that holds the label of each cell.
    drop : str or sequence of str
        Labels whose cells are left out, such as "Ambiguous".
    genes : int, optional
        How many genes to use; those of largest variance are chosen. If None, all.
    normalize : bool, optional
        Whether the values need normalization and the logarithm. If None, they do, and have to be
        counts; see `CellPreparation.fit`.
    test_fraction : float
        The fraction of cells in the test part, stratified by label.
    seed : int
        Determines the split.
    name, source : str
        For reports; by default the name of the file, and "the user's AnnData file".

    Examples
    --------
    >>> import anndata, numpy as np
    >>> from otad.data import load_h5ad
    >>> counts = np.random.default_rng(0).poisson(2.0, (20, 5)).astype(np.float32)
    >>> table = anndata.AnnData(counts)
    >>> table.obs["cell_type"] = ["a", "b"] * 10
    >>> table.write_h5ad("cells.h5ad")
    >>> load_h5ad("cells.h5ad", "cell_type", genes=3)
    Dataset('cells', classification of 2 classes, 16 train and 4 test inputs (3,))
    """
    cells = read_h5ad(path, label)
    labels = cells.labels or ()
    dropped = (drop,) if isinstance(drop, str) else tuple(drop)
    encode_labels(dropped, sorted(set(labels)), "drop")  # refuses unknown ones
    wanted = [row for row, value in enumerate(labels) if value not in dropped]
    require(wanted, "drop", f"less than all {len(labels)} cells", len(labels))
    cells, labels = cells.rows(wanted), tuple(labels[row] for row in wanted)
    classes = class_names(labels)
    y = encode_labels(labels, classes, label)
    kept, held = holdout(y, test_fraction, seed, task="classification", name="test_fraction")
    train, test = cells.rows(kept.tolist()), cells.rows(held.tolist())
    prepare = CellPreparation.fit(train, genes=genes, normalize=normalize)
    parts = prepare(train), y[kept], prepare(test), y[held]
    about: dict[str, Any] = {"feature_names": prepare.genes, "preparation": prepare}
    about |= {"train_names": train.names, "test_names": test.names}
    return Dataset(name or path.stem, *parts, "classification", source, classes, **about)
