"""The last part of the way: where the neighbors have changed, the gradient shows the rest of it."""

from __future__ import annotations

from torch import Tensor

from otad.attacks.apgd import Apgd
from otad.attacks.base import Target
from otad.model.otad import OTAD
from otad.threat import LpBall


def polish(target: Target, x: Tensor, found: Tensor, ball: LpBall, steps: int) -> Tensor:
    """APGD with the model's own gradient from what a neighbor attack found (B,*).

    Among the neighbors of x that gradient cannot see others; among wrong ones it weighs them as the
    model does, which no attack on neighbors alone can. k-NN has no gradient: left as it is.
    """
    if steps == 0 or not isinstance(target.model, OTAD):
        return found
    return Apgd(steps=steps).climb_on(target, x, found, ball)
