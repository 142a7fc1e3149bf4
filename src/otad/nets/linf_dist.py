"""A network whose features have the Lipschitz constant 1 in l-infinity (Zhang et al. 2021,
arXiv:2102.05363)."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from otad.checks import check_choice
from otad.nets.base import LinearHead, LipschitzBound, register
from otad.nets.inputs import Sizes, draw, with_memory
from otad.nets.lipschitz import LipschitzNet
from otad.nets.resnet import check_widths

FIRST_ORDER, LAST_ORDER = 8.0, 1000.0
GROWS_FROM, GROWS_TO = 0.125, 0.875  # shares of the training in which the order grows
MOMENTUM = 0.1  # of running means
BLOCK = 2**24  # differences that are held at a time

Function = Callable[..., Tensor]


@register("linf_dist")
class LinfDistNet(LipschitzNet):
    """An l-infinity distance net, a classifier with a certified radius in l-infinity.

    A neuron is the distance `max_i |x_i - w_i|` of its input from a vector of weights. Such a
    neuron is 1-Lipschitz in l-infinity, and so are layers of them. After each hidden layer a mean
    is subtracted, as in batch normalization without scaling. A logit is a bias minus the distance
    of the last layer, so a label cannot change within half the margin between two logits, times
    std.

    The gradient of a largest difference is sparse. In training, neurons are therefore distances in
    l_p. The order p is 8 in the first eighth of the training, then grows to 1000, and is infinite
    in the last eighth.

    Parameters
    ----------
    input_shape : sequence of int
        The shape of one input.
    n_outputs : int
        The number of classes.
    widths : sequence of int
        The number of neurons of each hidden layer.
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
    >>> net = otad.nets.LinfDistNet((1, 8, 8), 10, widths=(32, 32)).eval()
    >>> x = torch.rand(3, 1, 8, 8)
    >>> net(x).shape
    torch.Size([3, 10])
    >>> otad.certify(net, x).norm
    'linf'
    """

    norm = "linf"
    settings = ("widths",)
    is_capturable = False  # the order is not a tensor where it is infinite

    def __init__(
        self,
        input_shape: Sizes,
        n_outputs: int,
        *,
        widths: Sizes = (5120,) * 5,
        seed: int = 0,
        task: str = "classification",
        **options: Any,
    ) -> None:
        check_choice(task, "task", ("classification",))
        super().__init__(input_shape, n_outputs, task=task, dim=n_outputs, **options)
        self.widths = check_widths(widths)
        generator = torch.Generator().manual_seed(seed)
        sizes = (math.prod(self.input_shape), *self.widths, self.n_outputs)
        layers = [DistanceLayer(*pair, generator) for pair in itertools.pairwise(sizes)]
        layers[-1].is_shifted = False
        self.layers: Any = nn.Sequential(*layers)
        self.head = with_memory(LinearHead(self.dim, self.n_outputs, task))
        self.head.order = 1.0  # dual to l-infinity
        self.head.weight.requires_grad_(False).zero_().fill_diagonal_(-1.0)
        with torch.no_grad():
            self.head.bias.zero_()

    def embed(self, x: Tensor) -> Tensor:
        return self.layers(self.normalize(x).flatten(1))  # type: ignore[no-any-return]

    def begin_step(self, share: float) -> None:
        grown = (share - GROWS_FROM) / (GROWS_TO - GROWS_FROM)
        order = FIRST_ORDER * (LAST_ORDER / FIRST_ORDER) ** max(grown, 0.0)
        for layer in self.layers:
            layer.order = order if grown < 1 else math.inf

    @property
    def lipschitz(self) -> LipschitzBound:
        added = (part for layer in self.layers for part in (layer.weight, layer.mean))
        return LipschitzBound(
            self.norm, 1.0, sum(float(part.detach().abs().max()) for part in added)
        )


class DistanceLayer(nn.Module):
    """Maps x (B,n) to the distances |x - w_j|_p (B,m) from the rows of its weight (m,n), less their
    means. In evaluation mode p is infinite, and running means are subtracted."""

    mean: Tensor
    uses_batch_statistics = True

    def __init__(self, before: int, after: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(after, before))
        with torch.no_grad():
            draw(self.weight, "normal_", 0.0, 1.0, generator=generator)
        self.register_buffer("mean", torch.zeros(after))
        self.order, self.is_shifted = FIRST_ORDER, True

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.order == math.inf:
            distances = torch.cdist(x, self.weight, p=math.inf)
        else:
            distances = LpDistance.apply(x, self.weight, self.order)  # type: ignore[no-untyped-call]
        if not self.is_shifted:
            return distances
        if self.training:
            mean = distances.mean(0)
            with torch.no_grad():
                self.mean.lerp_(mean.detach(), MOMENTUM)
            return distances - mean
        return distances - self.mean


class LpDistance(torch.autograd.Function):
    """The distances |x - w_j|_p (B,m) of x (B,n) from w (m,n), for any finite order p.

    Differences are divided by the largest one, as their p-th powers would be 0 or infinite. All
    differences do not fit into memory. On a GPU with Triton each is therefore computed where it is
    summed, by compiled code; elsewhere some rows of w are taken at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, order: float) -> Tensor:
        parts, run = _parts(weight, x)
        ctx.order = x.new_tensor(order)
        distances = torch.cat([run(_distances)(x, part, ctx.order) for part in parts], dim=1)
        ctx.save_for_backward(x, weight, distances)
        return distances

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, distances = ctx.saved_tensors
        parts, run = _parts(weight, x)
        to_x, to_weight, columns = torch.zeros_like(x), [], [len(part) for part in parts]
        pieces = zip(parts, distances.split(columns, 1), gradient.split(columns, 1), strict=True)
        for piece in pieces:
            to_x += run(_gradient_of_x)(x, *piece, ctx.order)
            to_weight.append(run(_gradient_of_weight)(x, *piece, ctx.order))
        return to_x, torch.cat(to_weight), None


def _parts(weight: Tensor, x: Tensor) -> tuple[tuple[Tensor, ...], Callable[[Function], Function]]:
    """The parts of the rows of `weight` to take at a time, and how to run a function of them."""
    if x.is_cuda and find_spec("triton"):
        return (weight,), _compiled
    return weight.split(max(1, BLOCK // x.numel())), lambda function: function


@functools.cache
def _compiled(function: Function) -> Function:
    return torch.compile(function, dynamic=False)


def _distances(x: Tensor, weight: Tensor, order: Tensor) -> Tensor:
    apart = (x[:, None] - weight).abs()
    largest = apart.amax(2).clamp_min(torch.finfo(x.dtype).tiny)
    return _power(apart / largest[..., None], order).sum(2).pow(1 / order) * largest


def _gradient_of_x(
    x: Tensor, weight: Tensor, distances: Tensor, received: Tensor, order: Tensor
) -> Tensor:
    return _shares(x, weight, distances, received, order).sum(1)


def _gradient_of_weight(
    x: Tensor, weight: Tensor, distances: Tensor, received: Tensor, order: Tensor
) -> Tensor:
    return -_shares(x, weight, distances, received, order).sum(0)


def _shares(
    x: Tensor, weight: Tensor, distances: Tensor, received: Tensor, order: Tensor
) -> Tensor:
    apart = x[:, None] - weight
    ratios = apart.abs() / distances.clamp_min(torch.finfo(x.dtype).tiny)[..., None]
    return _power(ratios, order - 1) * apart.sign() * received[..., None]


def _power(ratios: Tensor, order: Tensor) -> Tensor:
    """The powers of numbers from 0 to 1; a GPU has instructions for log2 and exp2 alone."""
    return torch.exp2(order * torch.log2(ratios))
