"""Purifiers without a generative model: the median filter, and sparse coding of patches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from otad.baselines.purification import Purifier, register_purifier
from otad.checks import check_count, check_positive, require
from otad.nets.inputs import Sizes, standard_normal


@register_purifier("median_filter")
class MedianFilter(Purifier):
    """The median of each window of an image (feature squeezing, Xu et al. 2018).

    Beyond the border the nearest pixel is repeated. In windows of an even number of pixels, the
    larger of the two middle values is taken, as `scipy.ndimage.median_filter` does. Where several
    pixels equal the median, the gradient goes to one of them.

    Parameters
    ----------
    input_shape : sequence of int
        The shape (C, H, W) of an image.
    size : int
        The side of the window.
    bounds : (float, float) or None
        The lowest and the highest legal input value.

    Examples
    --------
    >>> import torch
    >>> from otad.baselines import MedianFilter
    >>> x = torch.zeros(1, 1, 4, 4)
    >>> x[0, 0, 1, 1] = 1.0  # a single bright pixel disappears
    >>> float(MedianFilter((1, 4, 4))(x).max())
    0.0
    """

    settings = ("size",)

    def __init__(self, input_shape: Sizes, *, size: int = 3, **options: Any) -> None:
        super().__init__(input_shape, **options)
        self.size = check_count(size, "size", most=min(self.input_shape[1:]))

    def purify(self, x: Tensor) -> Tensor:
        before, after = self.size // 2, (self.size - 1) // 2
        padded = functional.pad(x, (before, after, before, after), mode="replicate")
        windows = padded.unfold(2, self.size, 1).unfold(3, self.size, 1).flatten(4)
        return windows.kthvalue(self.size**2 // 2 + 1).values


@register_purifier("sparse_coding")
class SparseCoding(Purifier):
    """Sparse coding over a learned dictionary of patches, as in STL (Sun et al. 2019).

    Each patch p, without its mean, is replaced by a combination of few atoms d_k of length 1:
    the code c minimizes `|p - sum_k c_k d_k|^2 / 2 + penalty |c|_1`, found by FISTA. A cleaned
    image is the mean of its overlapping patches. Learn the dictionary by `train_purifier`.

    Parameters
    ----------
    input_shape : sequence of int
        The shape (C, H, W) of an image.
    patch, stride : int
        The side of a patch, and the distance between patches. Patches must cover the image.
    atoms : int
        The number of atoms.
    penalty : float
        The weight of the l1 norm. A larger one removes more.
    steps : int
        The number of steps of FISTA.
    seed : int
        The seed of the first dictionary.
    bounds : (float, float) or None
        The lowest and the highest legal input value.

    Examples
    --------
    >>> import torch
    >>> from otad.baselines import SparseCoding
    >>> purifier = SparseCoding((1, 8, 8), patch=4, stride=2, atoms=32)
    >>> purifier(torch.rand(3, 1, 8, 8)).shape, purifier.differentiable
    (torch.Size([3, 1, 8, 8]), False)
    """

    settings = ("patch", "stride", "atoms", "penalty", "steps")
    differentiable = False

    def __init__(
        self,
        input_shape: Sizes,
        *,
        patch: int = 8,
        stride: int = 2,
        atoms: int = 256,
        penalty: float = 0.1,
        steps: int = 50,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(input_shape, **options)
        channels, *sides = self.input_shape
        self.patch = check_count(patch, "patch", most=min(sides))
        self.stride = check_count(stride, "stride", most=patch)
        left = [side - patch for side in sides]
        covers = not any(length % stride for length in left)
        require(covers, "stride", f"a divisor of {left}, the sides minus the patch", stride)
        check_positive(penalty, "penalty")
        self.atoms, self.steps = check_count(atoms, "atoms"), check_count(steps, "steps")
        self.penalty = float(penalty)
        generator = torch.Generator().manual_seed(seed)
        drawn = standard_normal(atoms, channels * patch**2, generator=generator)
        self.dictionary = nn.Parameter(drawn)

    def unit_atoms(self) -> Tensor:
        """Return the atoms (K, C * patch^2), each of length 1."""
        return functional.normalize(self.dictionary, dim=1)

    def patches(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the patches (B, L, C * patch^2) without their means, and the means (B, L, 1)."""
        rows = functional.unfold(x, self.patch, stride=self.stride).mT
        means = rows.mean(2, keepdim=True)
        return rows - means, means

    @torch.no_grad()
    def encode(self, patches: Tensor) -> Tensor:
        """Return the codes (..., K) of patches (..., C * patch^2)."""
        atoms = self.unit_atoms()
        gram, products = atoms @ atoms.mT, patches @ atoms.mT
        step = 1 / float(torch.linalg.matrix_norm(gram, 2))
        codes = ahead = torch.zeros_like(products)
        pace = 1.0
        for _ in range(self.steps):
            moved = ahead - step * (ahead @ gram - products)
            moved = functional.softshrink(moved, step * self.penalty)
            faster = (1 + (1 + 4 * pace**2) ** 0.5) / 2
            ahead = moved + (pace - 1) / faster * (moved - codes)
            codes, pace = moved, faster
        return codes

    def purify(self, x: Tensor) -> Tensor:
        patches, means = self.patches(x)
        rows = (self.encode(patches) @ self.unit_atoms() + means).mT
        sides, options = self.input_shape[1:], {"stride": self.stride}
        total = functional.fold(rows, sides, self.patch, **options)
        return total / functional.fold(torch.ones_like(rows), sides, self.patch, **options)

    def loss(self, x: Tensor, attacked: Tensor) -> Tensor:
        patches, _ = self.patches(x)
        codes = self.encode(patches)
        errors = (patches - codes @ self.unit_atoms()).square().sum(2) / 2
        return (errors + self.penalty * codes.abs().sum(2)).mean()
