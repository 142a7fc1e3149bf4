"""The network of a defended model alone, without the bank, with which the defense is compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from otad.attacks import Attack, Knowledge
from otad.attacks.needs import Setting
from otad.baselines import Purified
from otad.evaluate.protocol import Attacked
from otad.evaluate.records import FAIL, NOT_RUN, PASS, Evaluation, Flag
from otad.evaluate.suite import ATTACKS, suite
from otad.model.otad import OTAD
from otad.nets import Backbone, LiftedNet
from otad.scores import is_right, squared_errors

STRENGTH = "the undefended network was attacked as hard"
APGD = {"restarts": 3}  # its settings
ALLOWED_SHARE = 0.01  # of the examples may be missed: attacks differ by a few rows by chance
ALLOWED_EXCESS = 1.01  # times the largest error found by its own attacks
NO_NETWORK = "the model has no network: it answers from labeled points"


def network_of(model: nn.Module) -> tuple[Backbone | None, str]:
    """Return the network that a model defends. If there is none, return None with the reason where
    the model is an OTAD model: its backbone is then the map through the bank itself, or none at
    all."""
    if isinstance(model, Purified):
        return model.net, ""
    if not isinstance(model, OTAD):
        return None, ""
    net = model.backbone
    if isinstance(net, LiftedNet) and not len(net.blocks):
        return None, NO_NETWORK
    return net, ""


def attacks_alone(
    network: nn.Module,
    attacks: str | Sequence[str | Attack],
    chosen: Sequence[Attack],
    setting: Setting,
) -> tuple[list[Attack], dict[str, str]]:
    """Return the attacks on the network alone, gradient attacks first, and why others are missing:
    the same preset, or those of the `chosen` attacks that need no bank. APGD, the strongest
    attack on a plain network, is added unless it is there or the chosen attacks follow the
    gradient already."""
    known, missing = Knowledge(), dict[str, str]()
    if isinstance(attacks, str):
        fitting, missing = suite(network, attacks, *setting)
        has_own = any(one.name == "apgd" for one in fitting)
    else:
        misfit = {one.name: one.needs.unmet_by_model(known) for one in chosen}
        fitting = [one for one in chosen if one.family != "adaptive" and not misfit[one.name]]
        has_own = any(one.family == "white-box" for one in fitting)
    apgd = ATTACKS["apgd"]
    if not has_own and not apgd.misfit(known, setting):
        fitting.append(apgd.for_model(known, **APGD))
    return sorted(fitting, key=lambda one: one.family != "white-box"), missing


@torch.no_grad()
def strength(network: nn.Module, alone: Evaluation, run: Attacked, batch_size: int) -> Flag:
    """Check whether the attacks on the network `alone` missed what adversarial examples of the
    defended model, which a `run` of attacks found within eps, do to it."""
    meaning = (
        "Adversarial examples of the defended model are tried on the network. If they break it "
        "where its own attacks failed, these were too weak, and the gain is larger than shown."
    )
    near = run.found if run.is_value else run.found & (run.distances <= run.threat.eps)
    rows = near.nonzero()[:, 0]
    if not len(rows):
        unknown = "This check gives no information. Do not read it as PASS."
        return Flag(STRENGTH, NOT_RUN, "no adversarial example was found", meaning, unknown)
    parts = run.inputs[rows].to(run.x.device).split(batch_size)
    outputs, y = torch.cat([network(part).cpu() for part in parts]), run.y.cpu()[rows]
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
    advice = "Attack the network with more attacks, such as those of the presets standard and full."
    return Flag(STRENGTH, FAIL, found, meaning, advice)
