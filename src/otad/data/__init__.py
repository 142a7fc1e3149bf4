"""Data sets: named ones, readers for your own files, and seeded splits. Nothing is downloaded."""

from __future__ import annotations

from otad.arguments import guard
from otad.data import named  # noqa: F401, it registers the data sets
from otad.data.cells import CellPreparation, CellTable, load_h5ad, read_h5ad
from otad.data.dataset import Dataset, Standardizer, Task
from otad.data.images import list_images, load_image_folder, read_images
from otad.data.registry import (
    DatasetInfo,
    MissingDataError,
    describe,
    load,
    names,
    register_dataset,
)
from otad.data.splits import TrainValidation, holdout, most_central, split, subset_per_class
from otad.data.user_files import Table, load_csv, load_npz, read_npz, read_table

__all__ = [
    "CellPreparation", "CellTable", "Dataset", "DatasetInfo", "MissingDataError", "Standardizer",
    "Table", "Task", "TrainValidation", "describe", "holdout", "list_images", "load", "load_csv",
    "load_h5ad", "load_image_folder", "load_npz", "most_central", "names", "read_h5ad",
    "read_images", "read_npz", "read_table", "register_dataset", "split", "subset_per_class",
]  # fmt: skip

guard(globals(), __all__)
