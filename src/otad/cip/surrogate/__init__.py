"""CIP-net: a transformer that estimates the answers of the solver, and its training."""

from otad.arguments import guard
from otad.cip.surrogate.net import CipNet
from otad.cip.surrogate.training import (
    CIP_NET_RECIPE,
    CipNetConfig,
    CipNetEpoch,
    CipNetResult,
    leave_one_out,
    train_cip_net,
)

__all__ = [
    "CIP_NET_RECIPE", "CipNet", "CipNetConfig", "CipNetEpoch", "CipNetResult", "leave_one_out",
    "train_cip_net",
]  # fmt: skip

guard(globals(), __all__)
