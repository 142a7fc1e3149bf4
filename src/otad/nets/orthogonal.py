"""A network of orthogonal matrices and shifts, whose features have the Lipschitz constant 1 in l2.

Its blocks are those of LipNeXt. Its matrices are trained by steps that keep them orthogonal, see
`otad.training.orthogonal_muon`, so no matrix is solved for and no norm is estimated in training."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from otad.checks import MOST_BLOCKS, check_choice, check_count, require
from otad.nets.base import LinearHead, LipschitzBound, register
from otad.nets.inputs import Sizes, check_image_shape, standard_normal, with_memory
from otad.nets.lipschitz import (
    ROUNDING,
    LipschitzNet,
    fold,
    full_precision,
    max_min,
    norm_bounds,
    shift,
)  # fmt: skip

SHIFTED = 16  # one of so many channels is shifted in each direction
MOST_STAGES = 8
POLAR_STEPS = 6  # which are enough for singular values from 0.6 to 1.3


@register("orthogonal")
class OrthogonalNet(LipschitzNet):
    """A network of orthogonal matrices and shifts, a classifier with a certified radius in l2.

    Each square of 2 x 2 pixels becomes one pixel with `width` channels, of which all but the first
    ones are 0. A block maps all pixels x to `MaxMin(M R^T shift(R (x + p)) + b)`. Here M and R are
    orthogonal matrices that act on channels, p depends on the place, a sixteenth of the channels is
    shifted by one pixel in each of four directions, and MaxMin sorts pairs of channels. A further
    stage makes one pixel of 2 x 2 pixels again, and a matrix with orthonormal rows leaves half of
    their channels, so it has twice the channels of the stage before. A feature is the l2 norm of a
    channel over all pixels. No step stretches, and blocks preserve lengths. The head has
    orthonormal rows.

    All layers but the head are the embedding: nothing is transported, and the energy is 0. Train
    with the optimizer "orthogonal_muon", which keeps the rows of all matrices orthonormal, and a
    learning rate from 1e-4 to 1e-3.

    Parameters
    ----------
    input_shape : sequence of int
        The shape (C, H, W) of an image, whose sides each stage can halve.
    n_outputs : int
        The number of classes, at most the number of features.
    width : int
        The even number of channels of the first stage, at least 16 and 4 C.
    blocks : int
        The number of blocks in each stage.
    stages : int
        The number of stages, from 1 to 8. There are `width * 2 ** (stages - 1)` features.
    seed : int
        The seed of the weights.
    task : str
        "classification".
    bounds, mean, std
        As in `Backbone`. One std for all channels gives the largest radii.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> net = otad.nets.OrthogonalNet((1, 8, 8), 10, width=16, blocks=2, stages=2).eval()
    >>> x = torch.rand(3, 1, 8, 8)
    >>> net(x).shape, round(net.lipschitz.constant, 3)
    (torch.Size([3, 10]), 1.0)
    >>> bool((otad.certify(net, x).radius >= 0).all())
    True
    """

    settings = ("width", "blocks", "stages")
    orthonormal_rows: ClassVar[Sequence[str]] = ("head.weight",)
    """The names of the weights whose rows a training has to keep orthonormal."""

    def __init__(
        self,
        input_shape: Sizes,
        n_outputs: int,
        *,
        width: int = 512,
        blocks: int = 12,
        stages: int = 1,
        seed: int = 0,
        task: str = "classification",
        **options: Any,
    ) -> None:
        check_choice(task, "task", ("classification",))
        halvings = 2 ** check_count(stages, "stages", most=MOST_STAGES)
        channels, height, across = check_image_shape(input_shape, halvings)
        least = max(SHIFTED, 4 * channels, -(-2 * n_outputs // halvings))
        fits = check_count(width, "width") % 2 == 0 and width >= least
        require(fits, "width", f"an even number of at least {least} channels", width)
        dim = width * halvings // 2
        super().__init__(input_shape, n_outputs, task=task, dim=dim, **options)
        self.width, self.blocks = width, check_count(blocks, "blocks", most=MOST_BLOCKS)
        self.parts = nn.ModuleList()
        for number in range(stages):
            sides = height // 2 ** (number + 1), across // 2 ** (number + 1)
            self.parts.append(Stage(width * 2**number, blocks, sides, is_first=number == 0))
        self.head = with_memory(LinearHead(dim, n_outputs, task))
        self.head.uses_autocast = False
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self.parameters():
                weight.zero_()
            for weight in orthogonal_weights(self):
                *others, rows, size = weight.shape
                drawn = standard_normal(*others, size, size, generator=generator)
                weight.copy_(torch.linalg.qr(drawn.double())[0][..., :rows, :])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in ("matrices", "positions", "biases"):  # so a net without stages was saved
            if f"{prefix}{name}" in state_dict:
                state_dict[f"{prefix}parts.0.{name}"] = state_dict.pop(f"{prefix}{name}")
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.parts)

    def embed(self, x: Tensor) -> Tensor:
        folded = fold(self.normalize(x).movedim(1, 3))
        tokens = functional.pad(folded, (0, self.width - folded.shape[3]))
        if self.training:
            return self._hidden(tokens)[-1]
        with full_precision(x.device):
            return self._hidden(tokens)[-1]

    def _hidden(self, x: Tensor) -> list[Tensor]:
        """Return what is computed from tokens (B,H,W,c): in each block, and at last pooled."""
        found = [x]
        for stage in self.parts:
            found += stage(found[-1])
        single = torch.promote_types(x.dtype, torch.float32)  # bfloat16 has too few digits
        # In evaluation mode float64, because rounding errors of sums over many tokens add up.
        wide = single if self.training else torch.float64
        pooled = torch.linalg.vector_norm(found[-1].to(wide), dim=(1, 2))
        return [*found, pooled.to(single)]

    @property
    def lipschitz(self) -> LipschitzBound:
        stages = cast("Iterable[Stage]", self.parts)
        constant = ROUNDING * math.prod(stage.norm_bound() for stage in stages)
        # Hidden values move by no more than the input does from 0, where they are computed here.
        exact = copy.deepcopy(self).double()
        with torch.no_grad():
            still = exact._hidden(exact.mean.new_zeros(1, 1, 1, 1))
        largest = max(float(torch.linalg.vector_norm(each)) for each in still)
        return LipschitzBound(self.norm, constant, ROUNDING * constant * largest)


class Stage(nn.Module):
    """Maps tokens (B,H,W,c) by blocks. All but the first stage fold and mix them before."""

    def __init__(self, width: int, blocks: int, sides: Sizes, *, is_first: bool) -> None:
        super().__init__()
        # Of all blocks together, so that an optimizer has few tensors to change.
        self.matrices = nn.Parameter(torch.empty(blocks, 2, width, width))  # M and R
        self.positions = nn.Parameter(torch.empty(blocks, *sides, width))
        self.biases = nn.Parameter(torch.empty(blocks, width))
        self.mixer = None if is_first else nn.Parameter(torch.empty(width, 2 * width))
        self.orthonormal_rows = ("matrices",) if is_first else ("mixer", "matrices")

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return all that is computed from tokens (B,H,W,c), the result last."""
        found = [] if self.mixer is None else [functional.linear(fold(x), self.mixer)]
        x = found[-1] if found else x
        each = (part.unbind() for part in (self.matrices, self.positions, self.biases))
        for (turn, basis), position, bias in zip(*each, strict=True):
            found.append(x + position.to(x.dtype))
            moved = shift(functional.linear(found[-1], basis), SHIFTED)
            # Rounding errors of this product are the same for all tokens, so they would add up.
            wide = turn.dtype if self.training else torch.float64
            back = (turn.to(wide) @ basis.to(wide).mT).to(turn.dtype)
            found.append(max_min(functional.linear(moved, back, bias)))
            x = found[-1]
        return found

    def norm_bound(self) -> float:
        """Return a bound on the Lipschitz constant of the stage."""
        norms = norm_bounds(self.matrices)
        mixed = 1.0 if self.mixer is None else float(norm_bounds(self.mixer))
        return mixed * float((norms[:, 0] * norms[:, 1].square()).prod())


def orthogonal_weights(net: nn.Module) -> list[nn.Parameter]:
    """Return the weights (...,r,n) of a network whose rows have to stay orthonormal."""
    named = [(part, getattr(part, "orthonormal_rows", ())) for part in net.modules()]
    return [part.get_parameter(name) for part, names in named for name in names]


@torch.no_grad()
def retract(net: nn.Module) -> None:
    """Replace each weight whose rows have to stay orthonormal by the nearest one that has them.

    It is the polar factor, by the iteration of Newton and Schulz in float64, which only multiplies.
    """
    for weight in orthogonal_weights(net):
        factor = weight.double()
        for _ in range(POLAR_STEPS):
            factor = 1.5 * factor - 0.5 * (factor @ factor.mT) @ factor
        weight.copy_(factor)
