"""A weakness put there on purpose: whoever looks for weaknesses must find it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from otad.attacks.adaptive import Straight
from otad.baselines.knn import Knn
from otad.evaluate.flag_context import Scene, not_run
from otad.evaluate.planted_map import Planted, plant_in_map, planted_bank, ready
from otad.evaluate.records import FAIL, PASS, Flag
from otad.evaluate.suite import defended_of
from otad.model.otad import OTAD

PLANTS = 8  # examples that get one
BANK = 2000  # points of the original bank that stay around them
DISTANCE = 0.5  # of eps: where an adversarial example is put

NAME = "planted adversarial example is found"
MEANING = (
    "In a copy of the model, pairs are added to the bank so that an input at half the eps is "
    "answered wrongly by construction. Attacks that miss it would miss a real one too."
)


def planted_example(scene: Scene) -> Flag:
    """The attacks of the evaluation on models with plants."""
    defended = defended_of(scene.model)
    if defended is None:
        return not_run(NAME, "the model has no bank to plant one in", MEANING)
    if scene.task != "classification" or not scene.attacks or scene.threat.eps == 0:
        return not_run(NAME, "it takes a classifier, an attack and an eps above 0", MEANING)
    x, y = scene.sample(PLANTS)
    if not len(x):
        return not_run(NAME, "no example is right unattacked", MEANING)
    total = missed = 0
    for planted in plant(scene, defended, x, y):
        places, answers = (planted.examples, planted.aims), planted.answers
        with torch.no_grad():
            right, wrong = (planted.model(inputs).argmax(1) == answers for inputs in places)
        hidden = right & ~wrong
        total += int(hidden.sum())
        missed += _missed(scene, planted, hidden)
    if not total:
        return not_run(NAME, "no weakness could be planted at this eps", MEANING)
    if not missed:
        return Flag(NAME, PASS, f"all {total} were found", MEANING, "Nothing to do.")
    advice = (
        "Add attacks that move towards bank points of other classes (straight, soft_knn, region, "
        "keys). "
        "The worst case of this evaluation is too optimistic."
    )
    return Flag(NAME, FAIL, f"{missed} of {total} were missed", MEANING, advice)


def _missed(scene: Scene, planted: Planted, hidden: Tensor) -> int:
    """How many of the `hidden` examples (n,) withstand all attacks, those that know the bank
    first."""
    x, y = planted.examples[hidden], planted.answers[hidden]
    for attack in sorted(scene.attacks, key=lambda one: one.family != "adaptive"):
        if not len(x):
            break
        if isinstance(attack, Straight) and attack.train_x is not None:
            attack = replace(attack, train_x=planted.train_x)
        result = attack(planted.model, x, y, scene.threat, generator=scene.generator(NAME))
        x, y = x[~result.broken], y[~result.broken]
    return len(x)


def plant(scene: Scene, defended: OTAD, x: Tensor, y: Tensor) -> Iterator[Planted]:
    """Models with a part of the bank and new pairs for some examples of x (B,*) with answers y."""
    generator = scene.generator("plants")  # not that of the attacks, which would meet its draws
    half = scene.threat.with_eps(DISTANCE * scene.threat.eps)
    aims = half.surface(x, generator)
    chosen = torch.randperm(len(defended.bank_inputs), generator=generator)[:BANK].sort().values
    chosen = chosen.to(defended.bank_inputs.device)
    if scene.model is defended and not defended.answerer.rests_on_neighbors:
        # which has to choose its own aims
        yield from plant_in_map(defended, chosen, x, y, half, scene.train_x)
    else:
        yield plant_neighbors(scene.model, defended, chosen, x, y, aims, scene.train_x)


@torch.no_grad()
def plant_neighbors(
    model: nn.Module,
    defended: OTAD,
    chosen: Tensor,
    x: Tensor,
    y: Tensor,
    aims: Tensor,
    train_x: Tensor | None = None,
) -> Planted:
    """For each example as many new points as there are neighbors at the example itself, with the
    feature of a bank point that is answered y, and as many at its aim, with a feature that is
    answered otherwise."""
    backbone, labels = defended.backbone, defended.bank_labels[chosen]
    inputs, features = defended.bank_inputs[chosen], defended.bank_features[chosen]
    keys = None if defended.bank_keys is None else defended.bank_keys[chosen]
    answers = backbone.head(features.to(backbone.head.weight)).argmax(1).to(labels.device)
    copies = max(defended.n_searched, getattr(model, "n_neighbors", 0))
    agreed = answers == labels  # points whose feature and label say the same
    raw = None if train_x is None else [train_x[chosen.to(train_x.device)].to(x)]
    for example, aim, label in zip(x, aims, y.tolist(), strict=True):
        for place, wanted in ((example, answers == label), (aim, answers != label)):
            source = (wanted & agreed).nonzero()[:, 0][:1]
            if not len(source):
                continue
            if raw is not None:
                raw.append(place.expand(copies, *place.shape))
            point = backbone.embed(place[None]).to(inputs).expand(copies, -1)
            inputs = torch.cat([inputs, point])
            if keys is not None:
                key = defended.query_keys(place[None]).to(keys)
                keys = torch.cat([keys, key.expand(copies, -1)])
            features = torch.cat([features, features[source].expand(copies, -1)])
            labels = torch.cat([labels, labels[source].expand(copies)])
    bank = planted_bank(inputs, features, labels)
    planted = defended.replace(bank=bank, keys=keys, scope="local", resident=True)
    seen = type(model)(planted, model.n_neighbors) if isinstance(model, Knn) else planted
    return Planted(ready(seen, x), x, y, aims, None if raw is None else torch.cat(raw))
