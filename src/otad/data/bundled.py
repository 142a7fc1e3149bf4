"""Data sets that ship inside scikit-learn: no file, no download."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from otad.data.dataset import Dataset, Task
from otad.data.splits import holdout

DIGITS_SOURCE = "UCI Optical Recognition of Handwritten Digits (Alpaydin, Kaynak 1998), CC BY 4.0"
CANCER_SOURCE = "UCI Breast Cancer Wisconsin Diagnostic (Wolberg 1995), CC BY 4.0"
WINE_SOURCE = "UCI Wine (Aeberhard, Forina 1992), CC BY 4.0"
DIABETES_SOURCE = (
    "Efron, Hastie, Johnstone, Tibshirani 2004; as shipped with scikit-learn, BSD-3-Clause"
)


def digits(*, test_fraction: float = 0.2, seed: int = 0) -> Dataset:
    """1,797 handwritten digits, 8 x 8 pixels of 17 gray levels."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().unsqueeze(1).div_(16)
    return _build(
        "digits",
        images,
        bunch.target,
        "classification",
        DIGITS_SOURCE,
        test_fraction,
        seed,
        classes=[str(k) for k in range(10)],
        bounds=(0.0, 1.0),
    )


def breast_cancer(*, test_fraction: float = 0.2, seed: int = 0) -> Dataset:
    """569 tumors, 30 measurements, malignant or benign."""
    from sklearn.datasets import load_breast_cancer

    bunch = load_breast_cancer()
    return _build(
        "breast_cancer",
        torch.from_numpy(bunch.data).float(),
        bunch.target,
        "classification",
        CANCER_SOURCE,
        test_fraction,
        seed,
        classes=bunch.target_names,
        feature_names=bunch.feature_names,
    )


def wine(*, test_fraction: float = 0.2, seed: int = 0) -> Dataset:
    """178 wines of three cultivars, 13 chemical measurements (not the red wine quality set)."""
    from sklearn.datasets import load_wine

    bunch = load_wine()
    return _build(
        "wine",
        torch.from_numpy(bunch.data).float(),
        bunch.target,
        "classification",
        WINE_SOURCE,
        test_fraction,
        seed,
        classes=bunch.target_names,
        feature_names=bunch.feature_names,
    )


def diabetes(*, test_fraction: float = 0.2, seed: int = 0) -> Dataset:
    """442 patients, 10 measurements in their own units; disease progression after a year."""
    from sklearn.datasets import load_diabetes

    bunch = load_diabetes(scaled=False)
    return _build(
        "diabetes",
        torch.from_numpy(bunch.data).float(),
        bunch.target,
        "regression",
        DIABETES_SOURCE,
        test_fraction,
        seed,
        feature_names=bunch.feature_names,
    )


def _build(
    name: str,
    x: Tensor,
    targets: np.ndarray,
    task: Task,
    source: str,
    test_fraction: float,
    seed: int,
    *,
    classes: Sequence[str] = (),
    bounds: tuple[float, float] | None = None,
    feature_names: Sequence[str] | None = None,
) -> Dataset:
    y = torch.from_numpy(targets)
    y = y.long() if task == "classification" else y.float()
    kept, held = holdout(y, test_fraction, seed, task=task)
    return Dataset(
        name=name,
        train_x=x[kept],
        train_y=y[kept],
        test_x=x[held],
        test_y=y[held],
        task=task,
        source=source,
        classes=tuple(str(label) for label in classes),
        bounds=bounds,
        feature_names=None if feature_names is None else tuple(map(str, feature_names)),
    )
