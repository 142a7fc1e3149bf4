"""The user's own trained modules as a `Backbone`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from otad.errors import InputError
from otad.nets.base import Backbone, LinearHead, register, squared_lengths
from otad.nets.inputs import evaluating
from otad.nets.lifted import LiftedNet
from otad.nets.user_modules import describe, restore, run

EQUAL_DIMENSIONS = (
    "embedded inputs and features must be in one space R^d; widen the last layer before the head "
    "to that size, or move the layers that change the size into `embed`"
)


@register("sequential")
class SequentialBackbone(Backbone):
    """embed -> blocks one after another -> head, from modules that share the user's weights.

    `embed` maps normalized inputs (B,*input_shape) to (B,d), None flattens them. A block maps
    x^(k-1) (B,d) to x^k (B,d), shortcut included; the energy is sum_k |x^k - x^(k-1)|^2.
    """

    def __init__(
        self,
        embed: nn.Module | None,
        blocks: Sequence[nn.Module],
        head: nn.Linear,
        *,
        input_shape: Sequence[int],
        **options: Any,
    ) -> None:
        """`options` (task, bounds, mean, std) are those of `Backbone`."""
        if not isinstance(head, nn.Linear):
            raise InputError(f"head: expected an nn.Linear, got {type(head).__name__}")
        if not isinstance(head.weight, nn.Parameter):
            raise InputError(
                "head: expected an nn.Linear whose weight is a parameter, got a parametrized one; "
                "remove its parametrization (weight_norm, spectral_norm, pruning)"
            )
        super().__init__(input_shape, head.out_features, dim=head.in_features, **options)
        self.embedding = nn.Flatten() if embed is None else embed
        self.blocks = nn.ModuleList(blocks)
        self.head = LinearHead(self.dim, self.n_outputs, self.task, bias=head.bias is not None)
        self.head.weight, self.head.bias = head.weight, head.bias
        self.mean = self.mean.to(head.weight)
        self.std = self.std.to(head.weight)
        self._check_dimensions()

    def embed(self, x: Tensor) -> Tensor:
        return self.embedding(self.normalize(x))  # type: ignore[no-any-return]

    def transport(self, e: Tensor) -> tuple[Tensor, Tensor]:
        x, energy = e, e.new_zeros(e.shape[0])
        for block in self.blocks:
            moved = block(x.clone())  # the layers may work in place
            energy = energy + squared_lengths(moved - x)
            x = moved
        return x, energy

    def _check_dimensions(self) -> None:
        """Compare the sizes for one input with that of the embedded input."""
        with evaluating(self), torch.no_grad():
            x = run(self.embedding, self.mean.clone().unsqueeze(0), "embed")
            dim = x.shape[1]
            for number, block in enumerate(self.blocks):
                x = run(block, x, f"blocks[{number}]")
                if x.shape[1] != dim:
                    raise InputError(
                        f"blocks[{number}]: expected features of dimension {dim} like the "
                        f"embedded input, got dimension {x.shape[1]}: {EQUAL_DIMENSIONS}"
                    )
            if self.head.in_features != dim:
                raise InputError(
                    f"head: expected in_features {dim} like the embedded input, "
                    f"got {self.head.in_features}: {EQUAL_DIMENSIONS}"
                )

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "embed": describe(self.embedding),
            "blocks": [describe(block) for block in self.blocks],
            "dim": self.dim,
            "bias": self.head.bias is not None,
        }

    @classmethod
    def from_config(cls, options: Mapping[str, Any]) -> SequentialBackbone:
        rest = dict(options)
        head_shape = (rest.pop("dim"), rest.pop("n_outputs"), rest.pop("bias"))
        with torch.random.fork_rng(devices=[]):  # layers draw weights when made
            embed, head = restore(rest.pop("embed")), nn.Linear(*head_shape)
            blocks = [restore(block) for block in rest.pop("blocks")]
        return cls(embed, blocks, head, **rest)


def adapt(
    net: nn.Module,
    *,
    input_shape: Sequence[int] | None = None,
    task: str = "classification",
    bounds: Sequence[float] | None = None,
) -> Backbone:
    """A trained nn.Sequential as a `Backbone`: its last Linear is the head, all before it is one
    transport step over the flattened input, whose size it must keep. Weights are shared.

    A net that first changes the size is given in parts: `SequentialBackbone(embed, blocks, head)`.
    """
    if isinstance(net, Backbone):
        return net
    if not isinstance(net, nn.Sequential) or len(net) == 0:
        raise InputError(
            f"net: expected a Backbone or a non-empty nn.Sequential, got {type(net).__name__}; "
            "give its parts to SequentialBackbone(embed, blocks, head)"
        )
    *body, head = net
    if not isinstance(head, nn.Linear):
        raise InputError(f"net: expected an nn.Linear as last layer, got {type(head).__name__}")
    if input_shape is None:
        input_shape = (_first_width(net),)
    blocks = [nn.Sequential(*body)] if body else []
    return SequentialBackbone(None, blocks, head, input_shape=input_shape, task=task, bounds=bounds)


def only_normalizes(backbone: Backbone) -> bool:
    """Whether the embedding is normalization and flattening, with zeros for the coordinates of a
    lift, and nothing else."""
    kind = type(backbone)
    if kind.normalize is not Backbone.normalize:
        return False
    if isinstance(backbone, SequentialBackbone) and kind.embed is SequentialBackbone.embed:
        layer = backbone.embedding
        return type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1)
    return kind.embed is (LiftedNet.embed if backbone.lift else Backbone.embed)


def _first_width(net: nn.Sequential) -> int:
    first = next(layer for layer in net if not isinstance(layer, nn.Flatten))
    if not isinstance(first, nn.Linear):
        raise InputError(
            f"input_shape: expected a shape, since the first layer is {type(first).__name__}, "
            "got None"
        )
    return first.in_features
