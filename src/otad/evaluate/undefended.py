"""The network of a defended model alone, without the bank: what the defense is measured against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from otad.attacks import Attack, Knowledge
from otad.attacks.needs import Setting
from otad.evaluate.records import FAIL, NOT_RUN, PASS, Evaluation, Flag
from otad.evaluate.suite import ATTACKS
from otad.model.otad import OTAD
from otad.nets import Backbone, LiftedNet
from otad.scores import is_right, squared_errors

STRENGTH = "the undefended network was attacked as hard"
ALLOWED_SHARE = 0.01  # of the examples may be missed: attacks differ by a few rows by chance
ALLOWED_EXCESS = 1.01  # times the largest error found by its own attacks
NO_NETWORK = "the model has no network of its own: it answers from labeled points"


def network_of(model: nn.Module) -> tuple[Backbone | None, str]:
    """The network that a model defends. None for one that defends none, with the reason where that
    is an OTAD model: its backbone is then the very map through the bank, or none at all."""
    if not isinstance(model, OTAD):
        return None, ""
    net = model.backbone
    if isinstance(net, LiftedNet) and not len(net.blocks):
        return None, NO_NETWORK
    return net, ""


def attacks_alone(
    attacks: str | Sequence[str | Attack], chosen: Sequence[Attack], setting: Setting
) -> str | list[Attack]:
    """What attacks the network alone: the same preset; of `chosen` attacks those that need no bank,
    and APGD if none of them follows the gradient."""
    if isinstance(attacks, str):
        return attacks
    unknown = Knowledge()  # a plain network
    fitting = [
        one for one in chosen if one.family != "adaptive" and not one.needs.unmet_by_model(unknown)
    ]
    if not any(one.family == "white-box" for one in fitting):
        apgd = ATTACKS["apgd"]
        fitting += [] if apgd.misfit(unknown, setting) else [apgd.for_model(unknown, restarts=3)]
    return fitting or "quick"


@torch.no_grad()
def strength(alone: Evaluation, outputs: Tensor, y: Tensor, rows: Tensor) -> Flag:
    """Whether the attacks on the network missed what adversarial examples of the defended model,
    within eps of the examples `rows` (m,) with answers y (m,), do to it: its `outputs` there."""
    meaning = (
        "Adversarial examples of the defended model are tried on the network. Where they do more "
        "than its own attacks, its figure is too good, and more is gained than the record shows."
    )
    if not len(rows):
        unknown = "Nothing is known here; do not read it as PASS."
        return Flag(STRENGTH, NOT_RUN, "no adversarial example was found", meaning, unknown)
    if alone.task == "regression":
        known = torch.tensor(alone.worst_errors(), dtype=torch.float64)[rows]
        worse = squared_errors(outputs, y).sqrt() > ALLOWED_EXCESS * known
    else:
        known = torch.tensor(alone.distances(), dtype=torch.float64)[rows]
        worse = ~is_right(outputs, y) & (known > alone.headline_eps)
    missed = int(worse.sum())
    found = f"{missed} of {len(rows)} adversarial examples do more than its own attacks"
    if missed <= ALLOWED_SHARE * alone.n:
        return Flag(STRENGTH, PASS, found, meaning, "Nothing to do.")
    advice = "Attack it by more attacks, such as those of the presets standard and full."
    return Flag(STRENGTH, FAIL, found, meaning, advice)
