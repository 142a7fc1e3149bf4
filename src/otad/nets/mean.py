"""The mean of several networks whose features have a proved Lipschitz constant in l2."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from otad.checks import require
from otad.nets.base import LinearHead, LipschitzBound, build, register
from otad.nets.lipschitz import ROUNDING, LipschitzNet, is_lipschitz_in_l2

SHARED = ("input_shape", "n_outputs", "task", "bounds")  # what all members must have in common


@register("mean")
class MeanNet(LipschitzNet):
    """The mean of the outputs of several networks, with the largest of their Lipschitz constants.

    Networks that were trained from different seeds err in different ways. Their mean has larger
    margins, so more is proved. Its features are those of all m members, one after another and
    divided by sqrt(m), so they stretch no distance more than a member does.

    Parameters
    ----------
    members : sequence of Backbone
        Networks such as `OrthogonalNet` with the same shapes, bounds and normalization. Their
        weights are shared.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> first, second = (
    ...     otad.nets.OrthogonalNet((1, 8, 8), 3, width=16, blocks=1, seed=seed).eval()
    ...     for seed in (0, 1)
    ... )
    >>> net, x = otad.nets.MeanNet([first, second]).eval(), torch.rand(2, 1, 8, 8)
    >>> torch.allclose(net(x), (first(x) + second(x)) / 2, atol=1e-6)
    True
    >>> round(net.lipschitz.constant, 3)
    1.0
    """

    def __init__(self, members: Sequence[LipschitzNet]) -> None:
        require(len(members) > 0, "members", "at least one network", "none")
        for number, member in enumerate(members):
            name, got = f"members[{number}]", type(member).__name__
            require(is_lipschitz_in_l2(member), name, "one with a proved constant in l2", got)
            for part in SHARED:
                expected, got = (getattr(one, part) for one in (members[0], member))
                require(got == expected, name, f"the {part} {expected} of the first", got)
            for part in ("mean", "std"):
                same = torch.equal(getattr(member, part), getattr(members[0], part))
                require(same, name, f"the {part} of the first", "another")
        first = members[0]
        shape: dict[str, Any] = {"dim": sum(member.dim for member in members), "task": first.task}
        super().__init__(first.input_shape, first.n_outputs, bounds=first.bounds, **shape)
        self.mean, self.std = first.mean, first.std
        self.members = cast(Sequence[LipschitzNet], nn.ModuleList(members))
        _share_normalization(self)
        self.register_load_state_dict_post_hook(_share_normalization)  # type: ignore[no-untyped-call]
        heads = [member.head for member in members]
        self.head = LinearHead(self.dim, self.n_outputs, self.task)
        with torch.no_grad():
            weight = torch.cat([head.matrix for head in heads], dim=1) / math.sqrt(len(members))
            bias = torch.stack([head.bias for head in heads]).mean(0)
        self.head.weight, self.head.bias = nn.Parameter(weight), nn.Parameter(bias)
        self.head.uses_autocast = False

    def embed(self, x: Tensor) -> Tensor:
        features = [member.embed(x) for member in self.members]
        return torch.cat(features, dim=1) / math.sqrt(len(features))

    @property
    def lipschitz(self) -> LipschitzBound:
        bounds = [cast(LipschitzBound, member.lipschitz) for member in self.members]
        constant, offset = (max(numbers) for numbers in list(zip(*bounds, strict=True))[1:])
        return LipschitzBound(self.norm, ROUNDING * constant, ROUNDING * offset)

    def config(self) -> dict[str, Any]:
        return {"kind": self.kind, "members": [member.config() for member in self.members]}

    @classmethod
    def from_config(cls, options: Mapping[str, Any]) -> Self:
        return cls([cast(LipschitzNet, build(one)) for one in options["members"]])


def _share_normalization(net: MeanNet, *_: object) -> None:
    """Certificates read `mean` and `std` of the mean, but inputs are normalized by its members."""
    for member in net.members:
        member.mean, member.std = net.mean, net.std
