"""Seeded splits and subsets. The same seed gives the same rows on every machine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from otad.checks import check_choice, check_count, check_shape, check_tensor, require
from otad.data.dataset import TASKS, Dataset, Task


class TrainValidation(NamedTuple):
    """The train part of a data set, divided into a training and a validation part.

    Attributes
    ----------
    train_x, train_y, validation_x, validation_y : Tensor
        Inputs (N, ...) and targets (N,) of each part.

    Examples
    --------
    >>> from otad import data
    >>> parts = data.split(data.load("wine"), validation=0.25)
    >>> len(parts.train_x), len(parts.validation_x)
    (106, 36)
    """

    train_x: Tensor
    train_y: Tensor
    validation_x: Tensor
    validation_y: Tensor


def split(dataset: Dataset, validation: float = 0.1, seed: int = 0) -> TrainValidation:
    """Hold out a fraction of the train part for validation, stratified by class.

    The test part of the data set is not touched.

    Parameters
    ----------
    dataset : Dataset
        The data set whose train part is divided.
    validation : float
        The fraction to hold out, between 0 and 1.
    seed : int
        Determines which rows are held out.

    Examples
    --------
    >>> from otad import data
    >>> train_x, train_y, validation_x, validation_y = data.split(data.load("wine"))
    >>> train_x.shape, validation_x.shape
    (torch.Size([127, 13]), torch.Size([15, 13]))
    """
    x, y = dataset.train_x, dataset.train_y
    kept, held = holdout(y, validation, seed, task=dataset.task, name="validation")
    return TrainValidation(x[kept], y[kept], x[held], y[held])


def split_rows(
    x: Tensor,
    y: Tensor,
    test_fraction: float,
    seed: int,
    *,
    classes: tuple[str, ...],
    names: Sequence[str] = (),
    **about: Any,
) -> Dataset:
    """Make a data set of x (N, ...) and y (N,), with a fraction held out as the test part. Without
    `classes` it is a regression. `names` are those of the N rows, if they have any."""
    task: Task = "classification" if classes else "regression"
    kept, held = holdout(y, test_fraction, seed, task=task, name="test_fraction")
    parts = x[kept], y[kept], x[held], y[held]
    if names:
        about["train_names"], about["test_names"] = (
            tuple(names[row] for row in rows.tolist()) for rows in (kept, held)
        )
    return Dataset(about.pop("name"), *parts, task=task, classes=classes, **about)


def holdout(
    targets: Tensor, fraction: float, seed: int, *, task: Task, name: str = "fraction"
) -> tuple[Tensor, Tensor]:
    """Choose rows to hold out, of every class in proportion.

    Parameters
    ----------
    targets : Tensor (N,)
        Labels or values.
    fraction : float
        `ceil(fraction * N)` rows are held out. At least one row of each class is kept.
    seed : int
        Determines which rows are chosen.
    task : "classification" or "regression"
        Whether to hold out every class in proportion.
    name : str
        What the caller calls the fraction, for error messages.

    Returns
    -------
    tuple of two Tensors
        The ascending indices of the rows that are kept, and of those that are held out.

    Examples
    --------
    >>> import torch
    >>> from otad.data import holdout
    >>> labels = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    >>> kept, held = holdout(labels, 0.25, seed=0, task="classification")
    >>> labels[held]
    tensor([0, 1])
    """
    require(targets.dim() == 1, "targets", "one value per row (N,)", tuple(targets.shape))
    total, stratified = len(targets), check_choice(task, "task", TASKS) == "classification"
    require(0.0 < fraction < 1.0, name, "a number between 0 and 1", repr(fraction))
    held_count = math.ceil(fraction * total - 1e-9)  # 0.07 * 100 is a hair above 7
    require(held_count < total, name, f"less than all {total} rows", fraction)
    generator = torch.Generator().manual_seed(seed)
    if stratified:
        most = total - len(targets.unique())
        kept = f"at most {most} of the {total} rows, so that each class keeps one for training"
        require(held_count <= most, name, kept, held_count)
        held = _stratified(targets, held_count, generator)
    else:
        held = torch.randperm(total, generator=generator)[:held_count]
    mask = torch.zeros(total, dtype=torch.bool)
    mask[held] = True
    return (~mask).nonzero().flatten(), mask.nonzero().flatten()


def subset_per_class(labels: Tensor, per_class: int, generator: torch.Generator) -> Tensor:
    """Return the ascending indices of `per_class` random rows of every class in `labels` (N,).

    Raises
    ------
    InputError
        If a class has fewer rows than `per_class`.

    Examples
    --------
    >>> import torch
    >>> from otad.data import subset_per_class
    >>> labels = torch.tensor([0, 0, 0, 1, 1, 1])
    >>> rows = subset_per_class(labels, 2, torch.Generator().manual_seed(0))
    >>> labels[rows]
    tensor([0, 0, 1, 1])
    """
    check_tensor(labels, "labels", "N", dtypes=(torch.int64,))
    by_class = _rows_by_class(labels, check_count(per_class, "per_class"))
    return torch.cat([_draw(rows, per_class, generator) for rows in by_class]).sort().values


def most_central(
    points: Tensor, labels: Tensor, per_class: int, *, among: Tensor | None = None
) -> Tensor:
    """Return the ascending indices of the `per_class` points of each class nearest to its mean.

    Parameters
    ----------
    points : Tensor (N, m)
        Inputs, features or keys.
    labels : Tensor (N,)
        The class of each point, int64.
    per_class : int
        How many points to choose of each class.
    among : Tensor (N,) of bool or None
        The points to choose from and to take means of, such as those that a classifier gets right
        under attack. If None, all of them.

    Examples
    --------
    >>> import torch
    >>> from otad.data import most_central
    >>> points = torch.tensor([[0.0], [1.0], [5.0], [7.0], [9.0]])
    >>> most_central(points, torch.tensor([0, 0, 0, 1, 1]), 1)
    tensor([1, 3])
    """
    check_tensor(points, "points", "N,m")
    check_tensor(labels, "labels", "N", dtypes=(torch.int64,))
    check_shape(labels, "labels", (len(points),), "with one label per point")
    if among is not None:
        check_tensor(among, "among", "N", dtypes=(torch.bool,))
        check_shape(among, "among", (len(points),), "with one truth value per point")
        rows = among.nonzero().flatten()
        missing = {*labels.tolist()} - {*labels[rows].tolist()}
        require(not missing, "among", "points of each class", f"none of {sorted(missing)[:5]}")
        return rows[most_central(points[rows], labels[rows], per_class)]
    chosen = []
    for rows in _rows_by_class(labels, check_count(per_class, "per_class")):
        own = points[rows].double()
        off = (own - own.mean(0)).square().sum(1)
        chosen.append(rows[off.argsort(stable=True)[:per_class]])
    return torch.cat(chosen).sort().values


def _rows_by_class(labels: Tensor, least: int) -> Iterator[Tensor]:
    """Yield the rows of each class; a class with fewer than `least` rows is refused."""
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
        for label in roomy[:short]:
            take[label] += 1
    return torch.cat([_draw(rows[label], take[label], generator) for label in classes])


def _draw(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return rows[torch.randperm(len(rows), generator=generator)[:count]]
