"""Data sets: one registry, one frozen type, loaders that say what they miss. Downloads nothing."""

from __future__ import annotations

from otad.data.cells import CellPreparation, CellTable
from otad.data.dataset import Dataset, Task
from otad.data.files import MissingDataError
from otad.data.h5ad import load_h5ad, read_h5ad
from otad.data.image_folder import list_images, load_image_folder, read_images
from otad.data.preprocess import Standardizer
from otad.data.registry import DatasetInfo, describe, load, names
from otad.data.splits import TrainValidation, holdout, most_central, split, subset_per_class
from otad.data.table import Table, load_csv, read_table

__all__ = [
    "CellPreparation",
    "CellTable",
    "Dataset",
    "DatasetInfo",
    "MissingDataError",
    "Standardizer",
    "Table",
    "Task",
    "TrainValidation",
    "describe",
    "holdout",
    "list_images",
    "load",
    "load_csv",
    "load_h5ad",
    "load_image_folder",
    "most_central",
    "names",
    "read_h5ad",
    "read_images",
    "read_table",
    "split",
    "subset_per_class",
]
