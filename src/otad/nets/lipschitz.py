"""What networks with a proved Lipschitz constant share, and a metric of that kind: its keys are no
farther apart than inputs / std."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import orthogonal

from otad.checks import MOST_BLOCKS, check_count, require
from otad.nets.base import Backbone, LipschitzBound, Metric, register_metric
from otad.nets.inputs import Sizes, check_image_shape, draw, with_memory
from otad.precision import FULL_PRODUCTS

ROUNDING = 1 + 1e-9  # a factor above the rounding of norms computed in float64
SHIFTED = 5  # one of so many channels is shifted in each direction


class LipschitzNet(Backbone):
    """The base class of backbones whose features have a proved Lipschitz constant.

    All layers but the head are the embedding: nothing is transported, and the energy is 0."""

    norm: ClassVar[str] = "l2"
    """The norm of inputs and of features in which the constant is proved."""

    def transport(self, e: Tensor) -> tuple[Tensor, Tensor]:
        return e, e.new_zeros(len(e))

    @property
    def embedding_lipschitz(self) -> LipschitzBound | None:
        return self.lipschitz


def is_lipschitz_in_l2(net: nn.Module) -> bool:
    """Return whether the features of a network have a proved Lipschitz constant in l2."""
    return isinstance(net, LipschitzNet) and net.norm == "l2"


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute products and convolutions in float32, which a GPU may otherwise round to ten bits."""
    with FULL_PRODUCTS, torch.autocast(device.type, enabled=False):
        yield


@register_metric("lipschitz")
class LipschitzMetric(Metric):
    """A metric with a proved Lipschitz constant Q = 1 / std, up to rounding.

    It is proved that `|key(x) - key(x')| <= Q |x - x'|`, because every step is 1-Lipschitz: numbers
    are permuted, orthogonal matrices act on the channels of each pixel, and pairs of channels are
    sorted. Shifts between the matrices make them act like convolutions. Keys are not scaled to unit
    length, which would stretch distances. There are no convolutions, because a GPU may round them
    to ten bits.

    Parameters
    ----------
    input_shape : sequence of int
        The shape (C, H, W) of an image. Its sides must be multiples of 2 ** len(widths).
    widths : sequence of int
        The even number of channels of each stage. A stage halves the resolution.
    depth : int
        The number of further matrices in each stage.
    key_norm : str
        "free" or "ball": see `Metric`.
    seed : int
        The seed of the weights.
    key_dim, bounds, mean, std
        As in `Metric`.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> metric = otad.nets.LipschitzMetric((1, 8, 8), widths=(4, 8), depth=1, key_dim=5)
    >>> metric(torch.rand(2, 1, 8, 8)).shape, round(metric.lipschitz, 3)
    (torch.Size([2, 5]), 1.0)
    """

    settings = ("widths", "depth")
    is_capturable = False  # solving for orthogonal matrices synchronizes with the GPU

    def __init__(
        self,
        input_shape: Sizes,
        *,
        widths: Sizes = (64, 128, 256, 256, 512),
        depth: int = 2,
        key_norm: str = "free",
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(input_shape, key_norm=key_norm, **options)
        require(key_norm != "unit", "key_norm", "'free' or 'ball'", "'unit', which can stretch")
        even = len(widths) > 0 and not any(check_count(width, "widths") % 2 for width in widths)
        require(even, "widths", "even numbers, at least one", tuple(widths))
        self.widths = tuple(widths)
        self.depth = check_count(depth, "depth", least=0, most=MOST_BLOCKS)
        side = 2 ** len(self.widths)
        channels, height, across = check_image_shape(input_shape, side)
        generator = torch.Generator().manual_seed(seed)
        self.stages = nn.Sequential()
        for before, width in itertools.pairwise((channels, *self.widths)):
            self.stages.append(Stage(4 * before, width, self.depth, generator))
        size = self.widths[-1] * (height // side) * (across // side)
        self.projection = OrthogonalLinear(size, self.key_dim, generator)

    def features(self, u: Tensor) -> Tensor:
        return self.stages(u.movedim(1, 3)).flatten(1)  # type: ignore[no-any-return]

    @property
    def lipschitz(self) -> float:
        """The proved Lipschitz constant of the metric.

        It is the product of bounds on the norms of all matrices as they are stored, divided by the
        smallest std. It holds for exact arithmetic: keys in float32 have a relative rounding error
        near 1e-6."""
        matrices = [part for part in self.modules() if isinstance(part, OrthogonalLinear)]
        stretch = math.prod(matrix.norm_bound() for matrix in matrices)
        return stretch / float(self.std.double().min())

    @property
    def offset(self) -> float:
        """The length of the largest hidden value for the mean input, which biases can make long.

        Those for other inputs differ from it by no more than the normalized inputs do. Rounding
        errors are relative to them."""
        exact, lengths = copy.deepcopy(self).double().eval(), []
        for part in exact.modules():
            if isinstance(part, OrthogonalLinear):
                part.register_forward_hook(lambda *given: lengths.append(float(given[2].norm())))
        with torch.no_grad():
            exact.projection(exact.features(exact.mean.new_zeros(1, *self.input_shape)))
        return max(lengths)


class OrthogonalLinear(nn.Linear):
    """A Linear layer x W^T + b whose rows or columns of W, whichever are fewer, are orthonormal.

    W is the Cayley transform of a free skew matrix, cut to size, so it stays orthogonal in
    training. In evaluation mode W is computed once and cached until the mode is set or weights are
    loaded; then gradients reach only the input."""

    def __init__(self, before: int, after: int, generator: torch.Generator) -> None:
        super().__init__(before, after, device="meta")
        with_memory(self)
        with torch.no_grad():
            # At this scale the rotations are far from the identity and mix all channels.
            spread = 2 * max(before, after) ** -0.5
            draw(self.weight, "normal_", 0.0, spread, generator=generator)
            self.bias.zero_()
        orthogonal(self, orthogonal_map="cayley", use_trivialization=False)
        self._cached: tuple[tuple[object, ...], Tensor] | None = None

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast(input.device.type, enabled=False):  # W itself in full precision
            weight = self.weight if self.training else self._cached_weight()
        return functional.linear(input, weight, self.bias)

    def train(self, mode: bool = True) -> Self:
        self._cached = None  # because fused optimizers change weights unnoticed
        return super().train(mode)

    def _cached_weight(self) -> Tensor:
        free = self.get_parameter("parametrizations.weight.original")
        if free.is_inference():  # torch does not count changes of such a tensor
            return self.weight
        state = (free.data_ptr(), free._version, free.device, free.dtype)
        if self._cached is None or self._cached[0] != state:
            with torch.inference_mode(False), torch.no_grad():
                self._cached = state, self.weight
        return self._cached[1]

    @torch.no_grad()
    def norm_bound(self) -> float:
        """Return an upper bound on |W|."""
        weight = self.weight
        return float(norm_bounds(weight if weight.shape[0] <= weight.shape[1] else weight.mT))


@torch.no_grad()
def norm_bounds(weight: Tensor) -> Tensor:
    """Return upper bounds (...) on the norms of matrices (...,r,n) with nearly orthonormal rows.

    They are near 1: |W|^2 = |W W^T| <= 1 + |W W^T - I|_F, in float64."""
    wide = weight.double()
    off = wide @ wide.mT - torch.eye(wide.shape[-2], dtype=wide.dtype, device=wide.device)
    bounds: Tensor = (1 + torch.linalg.matrix_norm(off) + 1e-12).sqrt()
    return bounds


class Stage(nn.Module):
    """Maps (B,H,W,c) to (B,H/2,W/2,width): fold, mix channels, and `depth` times shift and mix."""

    def __init__(self, before: int, width: int, depth: int, generator: torch.Generator) -> None:
        super().__init__()
        self.first = OrthogonalLinear(before, width, generator)
        self.rest = nn.ModuleList(OrthogonalLinear(width, width, generator) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = max_min(self.first(fold(x)))
        for mixer in self.rest:
            x = max_min(mixer(shift(x, SHIFTED)))
        return x


def fold(x: Tensor) -> Tensor:
    """Return (B,H,W,c) as (B,H/2,W/2,4c): each square of 2 x 2 pixels becomes one pixel."""
    tiled: Tensor = x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))  # (B, H/2, 2, W/2, 2, c)
    return tiled.movedim(3, 2).flatten(3)


def shift(x: Tensor, share: int) -> Tensor:
    """Move one of `share` channels of (B,H,W,c) by one pixel in each of four directions.

    It is cyclic, so that it preserves lengths."""
    part = x.shape[3] // share
    *groups, rest = x.split([part] * 4 + [x.shape[3] - 4 * part], dim=3)
    steps = ((1, 1), (-1, 1), (1, 2), (-1, 2))
    moved = [group.roll(*step) for group, step in zip(groups, steps, strict=True)]
    return torch.cat([*moved, rest], dim=3)


def max_min(x: Tensor, dim: int = -1) -> Tensor:
    """Sort the pairs (i, i + c/2) of channels, larger first."""
    left, right = x.chunk(2, dim=dim)
    return torch.cat([torch.maximum(left, right), torch.minimum(left, right)], dim=dim)
