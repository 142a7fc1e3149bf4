"""A network of skew orthogonal convolutions, whose features have the Lipschitz constant 1 in l2
(Singla and Feizi 2021, arXiv:2105.11417, and arXiv:2108.04062)."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrize import register_parametrization

from otad.checks import MOST_BLOCKS, check_choice, check_count, require
from otad.nets.base import LinearHead, LipschitzBound, register
from otad.nets.inputs import Sizes, draw, draw_linear
from otad.nets.lipschitz import ROUNDING, LipschitzNet, full_precision, max_min

LARGEST_NORM = 3.0  # of the skew-symmetric maps, by their bound
SQUARINGS = 5


@register("soc")
class SOCNet(LipschitzNet):
    """A network of skew orthogonal convolutions, a classifier with a certified radius in l2.

    A layer is the exponential `exp(A)` of a convolution A with `A^T = -A`, which preserves lengths.
    The activations sort or reflect pairs of channels and preserve lengths too. So the features are
    1-Lipschitz in l2, up to an error of the exponential that the certificate includes. The rows w
    of the head have length 1. A label y cannot change within the smallest `(o_y - o_j) / |w_y -
    w_j|`, times std.

    Each stage has `depth - 1` layers at its resolution. Then it makes one pixel of 2 x 2 pixels and
    applies one more layer, of which the first channels are kept. All layers but the head are the
    embedding: nothing is transported, and the energy is 0.

    Parameters
    ----------
    input_shape : sequence of int
        The shape (C, H, W) of an image, which is padded by zeros so that all stages can halve it.
    n_outputs : int
        The number of classes.
    widths : sequence of int
        The even number of channels of each stage. The last stage gives twice its width.
    depth : int
        The number of layers in a stage.
    activation : str
        "householder", whose reflections are learned, or "maxmin", which sorts.
    terms : int
        The number of terms of the exponential. Training uses half of them.
    seed : int
        The seed of the weights.
    task : str
        "classification".
    bounds, mean, std
        As in `Backbone`.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> net = otad.nets.SOCNet((1, 8, 8), 10, widths=(4, 8)).eval()
    >>> x = torch.rand(3, 1, 8, 8)
    >>> net(x).shape, round(net.lipschitz.constant, 3)
    (torch.Size([3, 10]), 1.0)
    >>> bool((otad.certify(net, x).radius >= 0).all())
    True
    """

    settings = ("widths", "depth", "activation", "terms")

    def __init__(
        self,
        input_shape: Sizes,
        n_outputs: int,
        *,
        widths: Sizes = (32, 64, 128, 256, 512),
        depth: int = 1,
        activation: str = "householder",
        terms: int = 14,
        seed: int = 0,
        task: str = "classification",
        **options: Any,
    ) -> None:
        check_choice(task, "task", ("classification",))
        require(len(input_shape) == 3, "input_shape", "images (C,H,W)", tuple(input_shape))
        even = len(widths) > 0 and not any(check_count(width, "widths") % 2 for width in widths)
        fits = even and widths[0] >= input_shape[0]
        expected = f"even numbers, the first of at least {input_shape[0]} channels"
        require(fits, "widths", expected, tuple(widths))
        halvings = 2 ** len(widths)
        sides = [-(-side // halvings) for side in input_shape[1:]]  # of the last images
        dim = 2 * widths[-1] * math.prod(sides)
        super().__init__(input_shape, n_outputs, task=task, dim=dim, **options)
        self.widths, self.activation = tuple(widths), activation
        self.depth = check_count(depth, "depth", most=MOST_BLOCKS)
        self.terms = check_count(terms, "terms", least=2, most=100)
        check_choice(activation, "activation", ("householder", "maxmin"))
        self._padding = [0, sides[1] * halvings - input_shape[2]]
        self._padding += [0, sides[0] * halvings - input_shape[1], 0, widths[0] - input_shape[0]]
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.Sequential()
        pixels = math.prod(sides) * halvings**2
        for width, after in itertools.pairwise((*self.widths, 2 * self.widths[-1])):
            for _ in range(self.depth - 1):
                self.layers.append(SkewConv(width, pixels, self.terms, generator))
                self.layers.append(Activation(width, activation))
            pixels //= 4
            self.layers.append(nn.PixelUnshuffle(2))
            self.layers.append(SkewConv(4 * width, pixels, self.terms, generator))
            self.layers.append(Activation(after, activation))
        head = draw_linear(LinearHead(self.dim, self.n_outputs, task), generator)
        register_parametrization(head, "weight", UnitRows())
        self.head = head

    def embed(self, x: Tensor) -> Tensor:
        padded = functional.pad(self.normalize(x), self._padding)
        if self.training:
            return self.layers(padded).flatten(1)  # type: ignore[no-any-return]
        with full_precision(x.device):
            return self.layers(padded).flatten(1)  # type: ignore[no-any-return]

    @property
    def lipschitz(self) -> LipschitzBound:
        layers = [layer for layer in self.layers if isinstance(layer, SkewConv)]
        constant = ROUNDING * math.prod(1 + layer.error_bound() for layer in layers)
        added = sum(float(layer.bias.detach().norm()) * layer.pixels**0.5 for layer in layers)
        return LipschitzBound(self.norm, constant, ROUNDING * constant * added)


class SkewConv(nn.Module):
    """Maps images (B,c,H,W) to sum over k < terms of A^k x / k!, plus a bias, where A is a
    convolution of kernel size 3 (1 for a single pixel) with zero padding and A^T = -A."""

    def __init__(self, width: int, pixels: int, terms: int, generator: torch.Generator) -> None:
        super().__init__()
        self.pixels, self.terms = pixels, terms
        self.size = 1 if pixels == 1 else 3
        self.free = nn.Parameter(torch.empty(width, width, self.size, self.size))
        self.bias = nn.Parameter(torch.zeros(width))
        with torch.no_grad():
            spread = width**-0.5 / self.size
            draw(self.free, "normal_", 0.0, spread, generator=generator)

    @property
    def kernel(self) -> Tensor:
        """The kernel of A, scaled down where the bound on |A| exceeds `LARGEST_NORM`."""
        skew = self.free - self.free.flip(2, 3).transpose(0, 1)
        return skew / (norm_bound(skew) / LARGEST_NORM).clamp_min(1.0)

    def forward(self, x: Tensor) -> Tensor:
        # In mixed precision |A| is bounded roughly; evaluation is always in full precision.
        kernel = self.kernel
        term, total = x, x + self.bias[:, None, None]
        for k in range(1, self.terms // 2 if self.training else self.terms):
            term = functional.conv2d(term, kernel / k, padding=self.size // 2)
            total = total + term
        return total

    @torch.no_grad()
    def error_bound(self) -> float:
        """Return a bound on |exp(A) - sum over k < terms of A^k / k!|, |A|^terms / terms!.

        It holds because A is normal with imaginary eigenvalues, and for real t the remainder of the
        series of e^(it) is at most |t|^terms / terms!."""
        with full_precision(self.free.device):
            norm = ROUNDING * float(norm_bound(self.kernel.double()))
        return ROUNDING * norm**self.terms / math.factorial(self.terms)


def norm_bound(kernel: Tensor) -> Tensor:
    """Return an upper bound on the l2 norm of the convolution with a kernel (c,c,s,s).

    At each frequency a convolution without borders is a matrix T E, where T (c,c*s*s) is the kernel
    as a matrix and E has unit entries in each of its s*s blocks, so |E| = s. Zero padding leaves
    out rows and columns of it. Then |T|^2 = |G| <= |G^n|_F^(1/n) for G = T T^T, which is close for
    n = 2^SQUARINGS."""
    matrix = kernel.flatten(1)
    gram, log = matrix @ matrix.mT, kernel.new_zeros(())
    for _ in range(SQUARINGS):
        length = torch.linalg.matrix_norm(gram).clamp_min(torch.finfo(kernel.dtype).tiny)
        gram = gram / length
        gram, log = gram @ gram, 2 * (log + length.log())
    power = 2 ** (SQUARINGS + 1)
    bound: Tensor = ((log + torch.linalg.matrix_norm(gram).log()) / power).exp()
    return kernel.shape[-1] * bound


class Activation(nn.Module):
    """Keeps the first channels of images (B,c,H,W), and sorts or reflects pairs (a, b) of them.

    A pair is kept if a sin(t/2) > b cos(t/2), and reflected at this line otherwise. At the angle
    t = pi/2, from which training starts, this sorts."""

    def __init__(self, width: int, name: str) -> None:
        super().__init__()
        self.width = width
        self.angles = None
        if name == "householder":
            self.angles = nn.Parameter(torch.full((width // 2, 1, 1), math.pi / 2))

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, : self.width]
        if self.angles is None:
            return max_min(x, dim=1)
        (a, b), (cos, sin) = x.chunk(2, dim=1), (self.angles.cos(), self.angles.sin())
        kept = a * (self.angles / 2).sin() > b * (self.angles / 2).cos()
        first = torch.where(kept, a, cos * a + sin * b)
        return torch.cat([first, torch.where(kept, b, sin * a - cos * b)], dim=1)


class UnitRows(nn.Module):
    """Scales the rows of a matrix to length 1."""

    def forward(self, weight: Tensor) -> Tensor:
        return functional.normalize(weight, dim=1)
