"""The registered data sets: published ones, those that come with scikit-learn, a synthetic one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from otad.checks import check_count, require
from otad.data.cells import load_h5ad
from otad.data.dataset import Dataset, Task
from otad.data.images import load_cifar10, load_idx, load_image_folder
from otad.data.registry import find_first, register_dataset
from otad.data.splits import split_rows
from otad.data.user_files import load_csv

DIGITS = tuple(str(k) for k in range(10))
FASHION = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag",
    "Ankle boot",
)  # fmt: skip
IMAGENETTE = {
    "n01440764": "tench", "n02102040": "English springer", "n02979186": "cassette player",
    "n03000684": "chain saw", "n03028079": "church", "n03394916": "French horn",
    "n03417042": "garbage truck", "n03425413": "gas pump", "n03445777": "golf ball",
    "n03888257": "parachute",
}  # fmt: skip


@register_dataset(
    "mnist",
    "70,000 digits, 1 x 28 x 28, official split 60,000 / 10,000",
    source="MNIST, LeCun, Cortes, Burges 1998; CC BY-SA 3.0 as usually stated",
    where="the four files train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, "
    "t10k-images-idx3-ubyte.gz, t10k-labels-idx1-ubyte.gz of https://yann.lecun.com/exdb/mnist, "
    "into the folder mnist/",
)
def mnist(root: Path, **about: Any) -> Dataset:
    # MNIST and Fashion-MNIST have the same file names: only the name of the folder separates them.
    own = [] if "fashion" in root.absolute().name.lower() else [root]
    return load_idx([root / "mnist", root / "MNIST/raw", *own], classes=DIGITS, **about)


@register_dataset(
    "fashion_mnist",
    "70,000 garments, 1 x 28 x 28, official split 60,000 / 10,000",
    source="Fashion-MNIST, Xiao, Rasul, Vollgraf 2017; MIT",
    where="the Debian package dataset-fashion-mnist (then data_dir is /usr/share/datasets), or the "
    "four .gz files of https://github.com/zalandoresearch/fashion-mnist, into fashion-mnist/",
)
def fashion_mnist(root: Path, **about: Any) -> Dataset:
    own = [root] if "fashion" in root.absolute().name.lower() else []
    folders = [root / "fashion-mnist", root / "FashionMNIST/raw", *own]
    return load_idx(folders, classes=FASHION, **about)


register_dataset(
    "cifar10",
    "60,000 photographs, 3 x 32 x 32, official split 50,000 / 10,000",
    source="CIFAR-10, Krizhevsky 2009 (free for research, no formal license)",
    where="cifar-10-binary.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html, unpacked in "
    "the data folder",
)(load_cifar10)


@register_dataset(
    "imagenette",
    "photographs of 10 ImageNet classes, 3 x 224 x 224, split into train and val",
    source="Imagenette, fast.ai, Apache-2.0; images under the ImageNet terms",
    where="https://github.com/fastai/imagenette, unpacked as imagenette/train and imagenette/val",
)
def imagenette(root: Path, *, size: int = 224, resize: int | None = None, **about: Any) -> Dataset:
    folder = find_first([root / "imagenette" / "train"], "imagenette").parent
    return load_image_folder(folder, size=size, resize=resize, class_labels=IMAGENETTE, **about)


@register_dataset(
    "red_wine",
    "1,599 red wines, 11 measurements, a quality score (regression unless asked otherwise)",
    source="Red wine quality, Cortez et al. 2009, UCI; CC BY 4.0",
    where="https://archive.ics.uci.edu/dataset/186/wine+quality, winequality-red.csv into wine/",
)
def red_wine(
    root: Path, *, task: Task = "regression", test_fraction: float = 0.2, seed: int = 0, **more: Any
) -> Dataset:
    places = [root / "wine/winequality-red.csv", root / "winequality-red.csv"]
    path = find_first(places, "red_wine")
    return load_csv(path, "quality", task=task, test_fraction=test_fraction, seed=seed, **more)


def _register_cells(
    name: str, file: str, summary: str, source: str, label: str = "cell_type", counts: bool = True
) -> None:
    """A data set in single_cell/FILE; `counts` says whether its values still need log1p."""
    form = f"single_cell/{file} with cells by genes in X and the cell type in obs[{label!r}]"
    where = f"{source}; as an AnnData file {form}"

    @register_dataset(name, summary, source=source, where=where, options_of=load_h5ad)
    def build(root: Path, **options: Any) -> Dataset:
        path = find_first([root / "single_cell" / file, root / file], name)
        return load_h5ad(path, label, **{"normalize": counts} | options)


_register_cells("merfish_mousePOA", "merfish_mousePOA.h5ad",
    "6,509 cells of the mouse preoptic area, 155 genes, 16 types of which one is 'Ambiguous'",
    "MERFISH, Moffitt et al. 2018, by way of https://github.com/JEFworks-Lab/SEraster")  # fmt: skip
_register_cells("human_kidney", "human_kidney_top2000.h5ad",
    "5,685 cells of the human kidney, 2,000 genes, 11 types",
    "https://github.com/ttgump/scDCC, the 2,000 most variable genes")  # fmt: skip
_register_cells("starmap_mpfc", "starmap_mpfc.h5ad",
    "3,704 cells of the mouse prefrontal cortex, 158 genes, 16 types of which one is 'NA'",
    "STARmap, Wang et al. 2018, by way of https://github.com/YosefLab/scVI-data")  # fmt: skip
_register_cells("pbmc68k", "10x_pbmc68k_reduced.h5ad",
    "700 blood cells, 765 genes already log-normalized and scaled, 10 types",
    "10x Genomics PBMC 68k, the reduced file bundled with scanpy",
    label="bulk_labels", counts=False)  # fmt: skip


@register_dataset(
    "synthetic",
    "Gaussian classes around points of the unit sphere in R^128, 50,000 / 10,000",
    source="drawn by this library after the synthetic data of the OTAD paper",
)
def synthetic(
    *,
    std: float = 0.1,
    classes: int = 10,
    dim: int = 128,
    train_size: int = 50_000,
    test_size: int = 10_000,
    radius: float = 1.0,
    seed: int = 0,
    **about: Any,
) -> Dataset:
    """x = mu_k + std * e, with mu_k uniform on the sphere of `radius` in R^dim and e ~ N(0, I); one
    seed gives the same mu_k, labels and e for every std.

    Dimension, sizes and the unit sphere are the paper's, which varies std from 0.1 to 0.6. It does
    not say how many classes there are. Its accuracies of the network are about those of the best
    possible classifier for 100 classes at radius 1.6, and fit no number of classes at radius 1.
    """
    check_count(classes, "classes", least=2)
    check_count(dim, "dim")
    check_count(train_size, "train_size", least=classes)
    check_count(test_size, "test_size")
    for name, number in {"std": std, "radius": radius}.items():
        require(0 < number < float("inf"), name, "a positive number", repr(number))
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(classes, dim, generator=generator, dtype=torch.float64)
    centers = (radius * directions / directions.norm(dim=1, keepdim=True)).float()

    def draw(count: int) -> tuple[Tensor, Tensor]:
        y = (torch.arange(count) % classes)[torch.randperm(count, generator=generator)]
        return centers[y] + std * torch.randn(count, dim, generator=generator), y

    parts, names = (*draw(train_size), *draw(test_size)), [f"class {k}" for k in range(classes)]
    return Dataset(about["name"], *parts, "classification", about["source"], tuple(names))


def _register_bundled(name: str, summary: str, source: str) -> None:
    """A data set that comes with scikit-learn; tables are in their own units."""

    @register_dataset(name, summary, source=source)
    def build(*, test_fraction: float = 0.2, seed: int = 0, **about: Any) -> Dataset:
        from sklearn import datasets

        bunch = getattr(datasets, f"load_{name}")(**{"scaled": False} if name == "diabetes" else {})
        x, y = torch.from_numpy(bunch.data).float(), torch.from_numpy(bunch.target)
        classes = tuple(map(str, getattr(bunch, "target_names", ())))
        if name == "digits":
            x, about["bounds"] = x.view(-1, 1, 8, 8) / 16, (0.0, 1.0)
        else:
            about["feature_names"] = tuple(map(str, bunch.feature_names))
        y = y.long() if classes else y.float()
        return split_rows(x, y, test_fraction, seed, classes=classes, **about)


BUNDLED = {
    "digits": ("1,797 digits, 1 x 8 x 8",
        "UCI Optical Recognition of Handwritten Digits (Alpaydin, Kaynak 1998), CC BY 4.0"),
    "breast_cancer": ("569 tumors, 30 measurements, 2 classes",
        "UCI Breast Cancer Wisconsin Diagnostic (Wolberg 1995), CC BY 4.0"),
    "diabetes": ("442 patients, 10 measurements, regression",
        "Efron, Hastie, Johnstone, Tibshirani 2004; as shipped with scikit-learn, BSD-3-Clause"),
    "wine": ("178 wines, 13 measurements, 3 cultivars",
        "UCI Wine (Aeberhard, Forina 1992), CC BY 4.0"),
}  # fmt: skip
for _name, _about in BUNDLED.items():
    _register_bundled(_name, *_about)
