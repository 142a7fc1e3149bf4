"""A net in training beside the running average of its weights."""

from __future__ import annotations

import copy
import itertools
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from otad.nets.base import Backbone
from otad.nets.metric import Metric

AnyNet = TypeVar("AnyNet", bound=Backbone | Metric)


class Averaged(nn.Module, Generic[AnyNet]):
    """All weights that a checkpoint must hold: those of the net and, for a decay above 0, their
    average. After step t it is

        a_1 = w_1,    a_t = decay a_(t-1) + (1 - decay) w_t,

    for the statistics of batch normalization too; whole numbers are copied. torch's own
    `AveragedModel` reads its counter from the GPU once for every weight and step.
    """

    def __init__(self, net: AnyNet, decay: float) -> None:
        super().__init__()
        self.net = net
        self.average: AnyNet | None = None
        if decay > 0:
            self.average = copy.deepcopy(net)
            self.average.requires_grad_(False)
        self._draw = get_ema_multi_avg_fn(decay)

    @property
    def best(self) -> AnyNet:
        """What remains after training: the average if there is one."""
        return self.net if self.average is None else self.average

    @torch.no_grad()
    def update(self, *, first: bool) -> None:
        """After a step, which is the first of all or not."""
        if self.average is None:
            return
        pairs = list(zip(_state(self.average), _state(self.net), strict=True))
        drawn = [] if first else [pair for pair in pairs if pair[0].is_floating_point()]
        for averaged, current in pairs:
            if first or not averaged.is_floating_point():
                averaged.copy_(current)
        if drawn:
            averages, weights = zip(*drawn, strict=True)
            self._draw(averages, weights, 0)


def _state(net: nn.Module) -> list[Tensor]:
    return [tensor.detach() for tensor in itertools.chain(net.parameters(), net.buffers())]
