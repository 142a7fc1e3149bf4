"""Which parameters weight decay draws towards zero."""

from __future__ import annotations

from typing import Any

from torch import nn

from otad.training.recipe import TrainConfig

_PLACES = ("pos_embed", "cls_token")


def decay_groups(net: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
    """Parameters as an optimizer takes them: in one group, or for "matrices" in two, where biases,
    scales of normalization, positions and class tokens are spared: to be small is no virtue there.
    """
    if config.decay_on == "all":
        return [{"params": list(net.parameters())}]
    decayed: list[nn.Parameter] = []
    spared: list[nn.Parameter] = []
    for name, parameter in net.named_parameters():
        is_place = name.rpartition(".")[2] in _PLACES
        (spared if parameter.dim() < 2 or is_place else decayed).append(parameter)
    return [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
