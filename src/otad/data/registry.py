"""The data sets known by name: one table, one way to load."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from otad.data import bundled, cifar, named, synthetic
from otad.data.dataset import Dataset
from otad.data.files import data_root
from otad.errors import InputError

_BUILT_IN = "nothing to get: it comes with the installation"


@dataclass(frozen=True)
class DatasetInfo:
    """What `describe` tells about a data set without loading it."""

    name: str
    summary: str
    source: str
    where: str
    options: tuple[str, ...]
    needs_folder: bool


@dataclass(frozen=True)
class _Entry:
    build: Callable[..., Dataset]
    summary: str
    source: str
    where: str = _BUILT_IN


def _cells(
    name: str,
    file: str,
    summary: str,
    source: str,
    *,
    label: str = "cell_type",
    counts: bool = True,
) -> _Entry:
    build = named.cell_set(name, file, label, source, counts=counts)
    return _Entry(build, summary, source, named.cell_hint(file, label, source))


_ENTRIES: dict[str, _Entry] = {
    "mnist": _Entry(
        named.mnist,
        "70,000 digits, 1 x 28 x 28, official split 60,000 / 10,000",
        named.MNIST_SOURCE,
        named.MNIST_HINT,
    ),
    "fashion_mnist": _Entry(
        named.fashion_mnist,
        "70,000 garments, 1 x 28 x 28, official split 60,000 / 10,000",
        named.FASHION_SOURCE,
        named.FASHION_HINT,
    ),
    "cifar10": _Entry(
        cifar.load_cifar10,
        "60,000 photographs, 3 x 32 x 32, official split 50,000 / 10,000",
        cifar.SOURCE,
        cifar.HINT,
    ),
    "imagenette": _Entry(
        named.imagenette,
        "photographs of 10 ImageNet classes, 3 x 224 x 224, split into train and val",
        named.IMAGENETTE_SOURCE,
        named.IMAGENETTE_HINT,
    ),
    "red_wine": _Entry(
        named.red_wine,
        "1,599 red wines, 11 measurements, a quality score (regression unless asked otherwise)",
        named.RED_WINE_SOURCE,
        named.RED_WINE_HINT,
    ),
    "merfish_mousePOA": _cells(
        "merfish_mousePOA",
        "merfish_mousePOA.h5ad",
        "6,509 cells of the mouse preoptic area, 155 genes, 16 types of which one is 'Ambiguous'",
        "MERFISH, Moffitt et al. 2018, by way of https://github.com/JEFworks-Lab/SEraster",
    ),
    "human_kidney": _cells(
        "human_kidney",
        "human_kidney_top2000.h5ad",
        "5,685 cells of the human kidney, 2,000 genes, 11 types",
        "https://github.com/ttgump/scDCC, the 2,000 most variable genes",
    ),
    "starmap_mpfc": _cells(
        "starmap_mpfc",
        "starmap_mpfc.h5ad",
        "3,704 cells of the mouse prefrontal cortex, 158 genes, 16 types of which one is 'NA'",
        "STARmap, Wang et al. 2018, by way of https://github.com/YosefLab/scVI-data",
    ),
    "pbmc68k": _cells(
        "pbmc68k",
        "10x_pbmc68k_reduced.h5ad",
        "700 blood cells, 765 genes already log-normalized and scaled, 10 types",
        "10x Genomics PBMC 68k, the reduced file bundled with scanpy",
        label="bulk_labels",
        counts=False,
    ),
    "synthetic": _Entry(
        synthetic.synthetic_gaussians,
        "Gaussian classes around points of the unit sphere in R^128, 50,000 / 10,000",
        synthetic.SOURCE,
    ),
    "digits": _Entry(bundled.digits, "1,797 digits, 1 x 8 x 8", bundled.DIGITS_SOURCE),
    "breast_cancer": _Entry(
        bundled.breast_cancer, "569 tumors, 30 measurements, 2 classes", bundled.CANCER_SOURCE
    ),
    "diabetes": _Entry(
        bundled.diabetes, "442 patients, 10 measurements, regression", bundled.DIABETES_SOURCE
    ),
    "wine": _Entry(bundled.wine, "178 wines, 13 measurements, 3 cultivars", bundled.WINE_SOURCE),
}
_BY_KEY = {name.lower(): name for name in _ENTRIES}


def names() -> tuple[str, ...]:
    """The names `load` knows."""
    return tuple(_ENTRIES)


def describe(name: str) -> DatasetInfo:
    """Summary, source and licence, where to get the files, and the options of `load`."""
    known = _canonical(name)
    entry = _ENTRIES[known]
    return DatasetInfo(
        name=known,
        summary=entry.summary,
        source=entry.source,
        where=entry.where,
        options=tuple(option for option in _keywords(entry) if option != "seed"),
        needs_folder=entry.where != _BUILT_IN,
    )


def load(
    name: str, data_dir: str | Path | None = None, *, seed: int = 0, **options: Any
) -> Dataset:
    """A data set by name (upper or lower case, hyphen or underscore).

    Files are looked for in `data_dir`, else in the folder named by OTAD_DATA; nothing is
    downloaded. `seed` fixes the split (or the draw) of a set that has no official split.
    """
    known = _canonical(name)
    entry = _ENTRIES[known]
    allowed = _keywords(entry)
    for option in options:
        if option not in allowed:
            usable = ", ".join(key for key in allowed if key != "seed") or "no options"
            raise InputError(f"{known}: unknown option {option!r}, expected {usable}")
    if "seed" in allowed:
        options["seed"] = seed
    folder = () if entry.where == _BUILT_IN else (data_root(data_dir),)
    return entry.build(*folder, **options)


def _canonical(name: str) -> str:
    key = name.lower().replace("-", "_")
    if key not in _BY_KEY:
        raise InputError(f"unknown data set {name!r}, expected one of {', '.join(names())}")
    return _BY_KEY[key]


def _keywords(entry: _Entry) -> tuple[str, ...]:
    parameters = inspect.signature(entry.build).parameters.values()
    return tuple(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)
