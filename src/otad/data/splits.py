"""Seeded splits and subsets: the same seed gives the same rows on every machine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from otad.checks import check_choice, check_count, check_shape, check_tensor, require
from otad.data.dataset import TASKS, Dataset, Task


class TrainValidation(NamedTuple):
    """The train part of a data set, cut in two."""

    train_x: Tensor
    train_y: Tensor
    validation_x: Tensor
    validation_y: Tensor


def split(dataset: Dataset, validation: float = 0.1, seed: int = 0) -> TrainValidation:
    """Hold out a share of the train part, stratified by class; the test part is left alone."""
    x, y = dataset.train_x, dataset.train_y
    kept, held = holdout(y, validation, seed, task=dataset.task)
    return TrainValidation(x[kept], y[kept], x[held], y[held])


def split_rows(
    x: Tensor, y: Tensor, test_fraction: float, seed: int, *, classes: tuple[str, ...], **about: Any
) -> Dataset:
    """x (N, ...) and y (N,), a share of them held out to test; a regression without `classes`."""
    task: Task = "classification" if classes else "regression"
    kept, held = holdout(y, test_fraction, seed, task=task)
    parts = x[kept], y[kept], x[held], y[held]
    return Dataset(about.pop("name"), *parts, task=task, classes=classes, **about)


def holdout(targets: Tensor, fraction: float, seed: int, *, task: Task) -> tuple[Tensor, Tensor]:
    """Ascending row indices (kept, held) with ceil(fraction * N) rows held out: of every class in
    proportion (largest remainder), but at least one row of each is kept for training."""
    require(targets.dim() == 1, "targets", "one value per row (N,)", tuple(targets.shape))
    total, stratified = len(targets), check_choice(task, "task", TASKS) == "classification"
    require(0.0 < fraction < 1.0, "fraction", "a number between 0 and 1", repr(fraction))
    held_count = math.ceil(fraction * total - 1e-9)  # 0.07 * 100 is a hair above 7
    require(held_count < total, "fraction", f"less than all {total} rows", fraction)
    generator = torch.Generator().manual_seed(seed)
    if stratified:
        held = _stratified(targets, held_count, generator)
    else:
        held = torch.randperm(total, generator=generator)[:held_count]
    mask = torch.zeros(total, dtype=torch.bool)
    mask[held] = True
    return (~mask).nonzero().flatten(), mask.nonzero().flatten()


def subset_per_class(labels: Tensor, per_class: int, generator: torch.Generator) -> Tensor:
    """Ascending indices of `per_class` random rows of every class in `labels` (N,)."""
    check_tensor(labels, "labels", "N", dtypes=(torch.int64,))
    by_class = _rows_by_class(labels, check_count(per_class, "per_class"))
    return torch.cat([_draw(rows, per_class, generator) for rows in by_class]).sort().values


def most_central(points: Tensor, labels: Tensor, per_class: int) -> Tensor:
    """Ascending indices of the `per_class` points (N,m) of each class nearest to its mean."""
    check_tensor(points, "points", "N,m")
    check_tensor(labels, "labels", "N", dtypes=(torch.int64,))
    check_shape(labels, "labels", (len(points),), "with one label per point")
    chosen = []
    for rows in _rows_by_class(labels, check_count(per_class, "per_class")):
        own = points[rows].double()
        off = (own - own.mean(0)).square().sum(1)
        chosen.append(rows[off.argsort(stable=True)[:per_class]])
    return torch.cat(chosen).sort().values


def _rows_by_class(labels: Tensor, least: int) -> Iterator[Tensor]:
    """The rows of each class, at least `least`."""
    for label in labels.unique().tolist():
        rows = (labels == label).nonzero().flatten()
        available = f"at most {len(rows)}, the rows of class {label}"
        require(len(rows) >= least, "per_class", available, least)
        yield rows


def _stratified(labels: Tensor, held_count: int, generator: torch.Generator) -> Tensor:
    classes = labels.unique().tolist()
    rows = {label: (labels == label).nonzero().flatten() for label in classes}
    share = {label: held_count * len(rows[label]) / len(labels) for label in classes}
    take = {label: math.floor(share[label]) for label in classes}
    by_remainder = sorted(classes, key=lambda label: take[label] - share[label])
    while (short := held_count - sum(take.values())) > 0:
        roomy = [label for label in by_remainder if take[label] < len(rows[label]) - 1]
        most = len(labels) - len(classes)
        require(roomy, "fraction", f"at most {most} rows, so each class keeps one", held_count)
        for label in roomy[:short]:
            take[label] += 1
    return torch.cat([_draw(rows[label], take[label], generator) for label in classes])


def _draw(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return rows[torch.randperm(len(rows), generator=generator)[:count]]
