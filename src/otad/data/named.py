"""Published data sets: where their files lie below the data folder, and where they come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from otad.data.dataset import Dataset, Task
from otad.data.files import find_first
from otad.data.h5ad import load_h5ad
from otad.data.idx import load_idx
from otad.data.image_folder import load_image_folder
from otad.data.table import load_csv

MNIST_SOURCE = "MNIST, LeCun, Cortes, Burges 1998; CC BY-SA 3.0 as usually stated"
MNIST_HINT = (
    "the four files train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, "
    "t10k-images-idx3-ubyte.gz, t10k-labels-idx1-ubyte.gz of "
    "https://yann.lecun.com/exdb/mnist, into the folder mnist/"
)
FASHION_SOURCE = "Fashion-MNIST, Xiao, Rasul, Vollgraf 2017; MIT"
FASHION_HINT = (
    "the Debian package dataset-fashion-mnist (then data_dir is /usr/share/datasets), or the "
    "four .gz files of https://github.com/zalandoresearch/fashion-mnist, into fashion-mnist/"
)
IMAGENETTE_SOURCE = "Imagenette, fast.ai, Apache-2.0; images under the ImageNet terms"
IMAGENETTE_HINT = (
    "https://github.com/fastai/imagenette, unpacked as imagenette/train and imagenette/val"
)
RED_WINE_SOURCE = "Red wine quality, Cortez et al. 2009, UCI; CC BY 4.0"
RED_WINE_HINT = (
    "https://archive.ics.uci.edu/dataset/186/wine+quality, winequality-red.csv into wine/"
)

_FASHION = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
_IMAGENETTE = {
    "n01440764": "tench",
    "n02102040": "English springer",
    "n02979186": "cassette player",
    "n03000684": "chain saw",
    "n03028079": "church",
    "n03394916": "French horn",
    "n03417042": "garbage truck",
    "n03425413": "gas pump",
    "n03445777": "golf ball",
    "n03888257": "parachute",
}


def mnist(root: Path) -> Dataset:
    folders = [root / "mnist", root / "MNIST" / "raw"]
    return load_idx(
        [*folders, *_own_folder(root, fashion=False)],
        name="mnist",
        classes=tuple(str(k) for k in range(10)),
        source=MNIST_SOURCE,
        hint=MNIST_HINT,
    )


def fashion_mnist(root: Path) -> Dataset:
    folders = [root / "fashion-mnist", root / "FashionMNIST" / "raw"]
    return load_idx(
        [*folders, *_own_folder(root, fashion=True)],
        name="fashion_mnist",
        classes=_FASHION,
        source=FASHION_SOURCE,
        hint=FASHION_HINT,
    )


def imagenette(root: Path, *, size: int = 224, resize: int | None = None) -> Dataset:
    find_first([root / "imagenette" / "train"], "imagenette", IMAGENETTE_HINT)
    return load_image_folder(
        root / "imagenette",
        size=size,
        resize=resize,
        name="imagenette",
        class_labels=_IMAGENETTE,
        source=IMAGENETTE_SOURCE,
    )


def red_wine(
    root: Path, *, task: Task = "regression", test_fraction: float = 0.2, seed: int = 0
) -> Dataset:
    file = "winequality-red.csv"
    path = find_first([root / "wine" / file, root / file], "red_wine", RED_WINE_HINT)
    return load_csv(
        path,
        "quality",
        task=task,
        test_fraction=test_fraction,
        seed=seed,
        name="red_wine",
        source=RED_WINE_SOURCE,
    )


def cell_set(
    name: str, file: str, label: str, source: str, *, counts: bool = True
) -> Callable[..., Dataset]:
    """A loader for single_cell/FILE; `counts` says whether its values still need log1p."""

    def build(
        root: Path,
        *,
        drop: Sequence[str] = (),
        genes: int | None = None,
        normalize: bool = counts,
        scale: bool = True,
        clip: float | None = 10.0,
        test_fraction: float = 0.2,
        seed: int = 0,
    ) -> Dataset:
        path = find_first(
            [root / "single_cell" / file, root / file], name, cell_hint(file, label, source)
        )
        return load_h5ad(
            path,
            label,
            drop=drop,
            genes=genes,
            normalize=normalize,
            scale=scale,
            clip=clip,
            test_fraction=test_fraction,
            seed=seed,
            name=name,
            source=source,
        )

    return build


def cell_hint(file: str, label: str, source: str) -> str:
    return (
        f"{source}; as an AnnData file single_cell/{file} "
        f"with cells by genes in X and the cell type in obs[{label!r}]"
    )


def _own_folder(root: Path, *, fashion: bool) -> list[Path]:
    """The data folder itself, for files that lie directly in it.

    MNIST and Fashion-MNIST use the same file names, so the folder's name has to tell them apart.
    """
    return [root] if ("fashion" in root.absolute().name.lower()) == fashion else []
