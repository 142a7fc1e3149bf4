"""Single cells: the preparation against dense formulas, and the .h5ad reader."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from scipy import sparse

from otad.data import CellPreparation, CellTable, load, load_h5ad, read_h5ad
from otad.errors import InputError, MissingExtraError

COUNTS = np.random.default_rng(0).poisson(2.0, (40, 6)).astype(np.float32)
COUNTS[:, 1] = 0  # a gene nobody expresses
COUNTS[:, 4] *= 30  # a gene with a large variance
COUNTS[7] = 0  # a cell without counts
GENES = tuple("abcdef")


def table(counts: np.ndarray = COUNTS, genes: tuple[str, ...] = GENES) -> CellTable:
    return CellTable(sparse.csr_matrix(counts), genes)


def log_normalized(counts: np.ndarray, target: float) -> np.ndarray:
    totals = counts.sum(axis=1, keepdims=True)
    return np.log1p(counts / np.where(totals == 0, 1, totals) * target)


def test_log_normalization_and_scaling_match_the_formulas() -> None:
    prepare = CellPreparation.fit(table())
    expected = log_normalized(COUNTS, float(np.median(COUNTS.sum(axis=1))))
    std = expected.std(axis=0)
    expected = (expected - expected.mean(axis=0)) / np.where(std == 0, 1, std)
    np.testing.assert_allclose(prepare(table()).numpy(), expected, atol=1e-4)


def test_genes_of_largest_variance_in_the_order_of_the_file() -> None:
    for seed in range(5):  # rates from rare to common, so that zeros matter
        rates = np.random.default_rng(seed).uniform(0.1, 5.0, 6)
        counts = np.random.default_rng(seed).poisson(rates, (40, 6)).astype(np.float32)
        prepare = CellPreparation.fit(table(counts), genes=3)
        expected = log_normalized(counts, float(np.median(counts.sum(axis=1))))
        columns = np.sort(np.argsort(-expected.var(axis=0))[:3])
        assert prepare.genes == tuple(GENES[c] for c in columns)
        unscaled = prepare.scaling.inverse(prepare(table(counts))).numpy()
        np.testing.assert_allclose(unscaled, expected[:, columns], atol=1e-5)


def test_scaled_values_are_clipped_and_normalized_ones_only_scaled() -> None:
    prepare = CellPreparation.fit(table(COUNTS - 1), normalize=False)
    unscaled = prepare.scaling.inverse(prepare(table(COUNTS - 1)))
    np.testing.assert_allclose(unscaled.numpy(), COUNTS - 1, atol=1e-5)
    assert float(prepare(table(1e6 * COUNTS)).max()) == 10.0


def test_values_that_are_no_counts_are_not_normalized_again_in_silence() -> None:
    logs = table(np.log1p(COUNTS / 3))
    message = r"cells: expected counts, .*whole numbers, got 0\.\d+: .*normalize=False \(--no-nor"
    with pytest.raises(InputError, match=message):
        CellPreparation.fit(logs)
    prepare = CellPreparation.fit(table())
    again = CellPreparation.from_json(json.loads(json.dumps(prepare.to_json())))
    for prepared in (prepare, again):
        with pytest.raises(InputError, match=message):
            prepared(logs)
    wider = np.hstack([COUNTS, np.full((len(COUNTS), 1), 0.5)])
    assert prepare(table(wider, (*GENES, "a score"))).isfinite().all()  # no gene of the model
    asked = CellPreparation.fit(logs, normalize=True)  # as for counts per volume
    values = np.log1p(COUNTS / 3)
    expected = log_normalized(values, float(np.median(values.sum(axis=1))))
    np.testing.assert_allclose(asked.scaling.inverse(asked(logs)), expected, atol=1e-4)
    card = asked.to_json()
    del card["counts"]  # as earlier versions wrote it
    assert torch.equal(CellPreparation.from_json(card)(logs), asked(logs))


def test_new_cells_are_matched_by_gene_name_and_use_the_train_statistics() -> None:
    prepare = CellPreparation.fit(table(), genes=3)
    shuffled = [3, 5, 0, 1, 4, 2]
    new = table(COUNTS[:5, shuffled], tuple(GENES[k] for k in shuffled))
    assert torch.equal(prepare(new), prepare(table(COUNTS[:5])))
    with pytest.raises(InputError, match="1 of them: e"):
        prepare(table(COUNTS[:, :4], GENES[:4]))


def test_the_preparation_survives_json() -> None:
    prepare = CellPreparation.fit(table(), genes=4)
    again = CellPreparation.from_json(json.loads(json.dumps(prepare.to_json())))
    assert torch.equal(again(table()), prepare(table()))
    with pytest.raises(InputError, match="preparation: expected"):
        CellPreparation.from_json({"genes": []})


@pytest.mark.parametrize(
    ("counts", "names", "genes", "message"),
    [
        (COUNTS - 1, GENES, None, r"cells: .*got -1.0"),
        (COUNTS, GENES, 7, "genes: .*6, got 7"),
        (COUNTS * 0, GENES, None, "cells: .*median total of zero"),
        (COUNTS, tuple("abcdea"), None, "genes: .*repeated a"),
        (COUNTS, ("a", "b"), None, "genes: .*6.*2"),
        (np.where(COUNTS[3, 3] == COUNTS, np.nan, COUNTS), GENES, None, "cells: .*NaN"),
    ],
)
def test_refusals_of_the_preparation(
    counts: np.ndarray, names: tuple[str, ...], genes: int | None, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        CellPreparation.fit(table(counts, names), genes=genes)


def test_without_the_extra_the_error_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "anndata", None)
    with pytest.raises(MissingExtraError, match=r"otad\[singlecell\]"):
        read_h5ad(tmp_path / "a.h5ad")


@pytest.fixture
def h5ad(tmp_path: Path) -> Path:
    reason = "needs the extra 'singlecell'"
    anndata = pytest.importorskip("anndata", reason=reason)
    pandas = pytest.importorskip("pandas", reason=reason)
    kinds = ["neuron", "glia", "Ambiguous", "glia"] * 10
    path = tmp_path / "single_cell" / "merfish_mousePOA.h5ad"
    path.parent.mkdir()
    anndata.AnnData(
        sparse.csr_matrix(COUNTS),
        obs=pandas.DataFrame(
            {"cell_type": kinds, "holes": [None, *kinds[1:]]}, index=[f"c{k}" for k in range(40)]
        ),
        var=pandas.DataFrame(index=list(GENES)),
    ).write_h5ad(path)
    return path


def test_h5ad_files_are_read_split_and_prepared_from_train_cells(h5ad: Path) -> None:
    read = read_h5ad(h5ad, "cell_type")
    np.testing.assert_array_equal(read.values.toarray(), COUNTS)
    assert read.genes == GENES
    assert read.names == tuple(f"c{k}" for k in range(40))
    dataset = load("merfish-mousepoa", h5ad.parent.parent, genes=4)
    assert dataset.classes == ("Ambiguous", "glia", "neuron")
    assert torch.bincount(dataset.test_y).tolist() == [2, 4, 2]
    assert dataset.preparation is not None
    assert dataset.feature_names == dataset.preparation.genes
    torch.testing.assert_close(dataset.train_x.mean(dim=0), torch.zeros(4), atol=1e-5, rtol=0)
    assert float(dataset.test_x.mean(dim=0).abs().max()) > 1e-3  # its own mean was not used
    dataset = load_h5ad(h5ad, "cell_type", drop=["Ambiguous"])
    assert dataset.classes == ("glia", "neuron")
    assert len(dataset.train_x) + len(dataset.test_x) == 30
    assert load_h5ad(h5ad, "cell_type", drop="Ambiguous").fingerprint() == dataset.fingerprint()
    named = {*dataset.train_names, *dataset.test_names}
    assert named == {name for k, name in enumerate(read.names) if k % 4 != 2}
    for x, names in ((dataset.train_x, dataset.train_names), (dataset.test_x, dataset.test_names)):
        again = dataset.preparation(read.rows([int(name[1:]) for name in names]))
        torch.testing.assert_close(again, x)


def test_an_offset_costs_nothing() -> None:
    far = table(COUNTS.astype(np.float64) + 1.7e9)
    prepare, near = (CellPreparation.fit(cells, normalize=False) for cells in (far, table()))
    again = CellPreparation.from_json(json.loads(json.dumps(prepare.to_json())))
    for found in (prepare(far), again(far.rows([3, 5]))):
        expected = near(table() if len(found) == 40 else table().rows([3, 5]))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip": 0.0}, "clip: .*positive.*0.0"),
        ({"clip": float("nan")}, "clip: .*nan"),
        ({"target_sum": -1.0}, "target_sum: .*-1.0"),
        ({"genes": ["a"]}, r"mean: expected shape \(1,\)"),
    ],
)
def test_a_preparation_that_makes_no_sense_is_refused(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        CellPreparation.from_json(CellPreparation.fit(table()).to_json() | change)


def test_no_cells_and_other_labels_are_refused() -> None:
    with pytest.raises(InputError, match=r"at least one cell.*\(0, 6\)"):
        table(COUNTS[:0])
    with pytest.raises(InputError, match=r"labels: expected 40, .* got 1"):
        CellTable(sparse.csr_matrix(COUNTS), GENES, ("glia",))
    with pytest.raises(InputError, match=r"names: expected 40, .* got 1"):
        CellTable(sparse.csr_matrix(COUNTS), GENES, names=("c0",))


@pytest.mark.parametrize("how", ["link", "storage", "virtual"])
def test_data_of_other_files_is_refused(h5ad: Path, how: str) -> None:
    h5py = pytest.importorskip("h5py")
    other = h5ad.with_name("other.h5")
    with h5py.File(other, "w") as file:
        values = file["data"] = np.ones(5, np.float32)
    with h5py.File(h5ad, "r+") as file:
        if how == "link":
            file["uns/more"] = h5py.ExternalLink(str(other), "data")
        elif how == "storage":
            file.create_dataset("uns/more", (5,), "u1", external=[(str(other), 0, 5)])
        else:
            layout = h5py.VirtualLayout((5,), values.dtype)
            layout[:] = h5py.VirtualSource(str(other), "data", (5,))
            file.create_virtual_dataset("uns/more", layout)
    with pytest.raises(InputError, match="the file itself, got 'uns/more' in another"):
        read_h5ad(h5ad)


def test_no_more_is_unpacked_than_stated(h5ad: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("otad.data.cells.most_unpacked", lambda path: 999)
    with pytest.raises(InputError, match="at most 999 bytes"):
        read_h5ad(h5ad)


def test_refusals_of_the_reader(h5ad: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    h5py = pytest.importorskip("h5py")
    with monkeypatch.context() as patch:
        patch.setattr("anndata.read_h5ad", Mock(side_effect=MemoryError("damaged")))
        with pytest.raises(InputError, match=r"not a readable .h5ad file \(damaged\)"):
            load_h5ad(h5ad, "cell_type")
    for label, drop, message in (
        ("cell_type", ["Unsure"], "drop: .*Ambiguous, glia, neuron, got 'Unsure'"),
        ("cell_type", ["Ambiguous", "glia", "neuron"], "drop: .*40"),
        ("kind", [], "cell_type, holes, got 'kind'"),
        ("holes", [], "'holes' for every cell"),
    ):
        with pytest.raises(InputError, match=message):
            load_h5ad(h5ad, label, drop=drop)
    with h5py.File(h5ad, "r+") as file:
        file["X/indices"][3] = 10**6  # beyond the genes
    for damage in (bytes, lambda content: content[:500]):
        h5ad.write_bytes(damage(h5ad.read_bytes()))
        with pytest.raises(InputError, match=r"not a readable .h5ad file"):
            load_h5ad(h5ad, "cell_type")
    h5ad.unlink()
    with pytest.raises(InputError, match=r"merfish_mousePOA.h5ad"):
        load("merfish_mousePOA", h5ad.parent.parent)
