"""The protocol: every attack on whoever still stands, at every eps, resumable at every batch."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from otad.attacks import Attack, LpBall
from otad.checks import check_choice, check_count
from otad.errors import InputError
from otad.evaluate.certificate_check import sandwich
from otad.evaluate.clean import look_at_clean
from otad.evaluate.flag_context import Scene
from otad.evaluate.flags import CHECKS, raise_flags
from otad.evaluate.identity import model_card
from otad.evaluate.parts import Account
from otad.evaluate.proof import Stated, prove
from otad.evaluate.records import AttackRecord, CertificateRecord, Evaluation
from otad.evaluate.suite import backbone_of, defended_of, named_attacks, suite
from otad.evaluate.survivors import Standing
from otad.io.environment import Environment
from otad.model.otad import OTAD

Progress = Callable[[str, int, int, float], None]
"""What runs now, steps done, steps in all, and the worst case so far at the eps of now: the share
of examples still right, in regression the mean of the largest errors."""

EVERYTHING = (
    "everything: the training set, the network and its head, the metric, K, L, l, "
    "the rule for potentials and the rule for ties"
)
ALL_OF_A_NET = "everything: the architecture and all weights"


@torch.inference_mode(False)  # gradients, whatever mode the caller is in
def evaluate(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: LpBall,
    *,
    eps: Sequence[float] | None = None,
    attacks: str | Sequence[str | Attack] = "standard",
    survivors_only: bool = True,
    spare_proved: Sequence[str] = (),
    certificate: bool = True,
    embedding_lipschitz: float | None = None,
    metric_lipschitz: float | None = None,
    train_x: Tensor | None = None,
    flags: bool = True,
    seed: int = 0,
    batch_size: int = 250,
    folder: str | Path | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """How robust a model is on examples x (n,*) with right answers y (n,): labels or values.

    - `threat`: what an attacker may change; its eps is the headline. Without bounds it takes those
      the model declares.
    - `eps`: further radii to attack at, ascending; that of the threat is always among them.
    - `attacks`: a preset ("quick", "standard", "full") or attacks, by name or made, in order.
    - `survivors_only`: spare rows known to be wrong at a distance of at most eps. Otherwise each
      attack meets every example that is right unattacked; dearer, but attacks can be compared.
    - `spare_proved`: names of dear attacks that are spared rows whose certificate reaches as far as
      the radius: nothing can break those. All other attacks test the proofs.
    - `certificate`, `flags`: also prove what can be proved; also look for signs that the attacks
      were too weak. A proof that an attack contradicts is told in any case (`is_sound`).
    - `embedding_lipschitz`, `metric_lipschitz`: see `certify`; needed to prove anything of a model
      whose embedding does more than normalize, or whose metric has no constant of its own.
    - `train_x` (N,*): the training inputs, which attacks walk to, where they cannot be told from
      the bank because the embedding does more than normalize.
    - `folder`: every batch is kept there once it is done, so that a run that was killed goes on
      where it was and ends with the same record; and at the end `evaluation.json` and
      `adversarial.safetensors` ("rows" (m,), "inputs" (m,*): for each broken row its nearest
      adversarial example; in regression, for each row that an attack made worse, its worst input
      at the threat's eps).
    """
    started = time.perf_counter()
    x, y, threat = _prepared(model, x, y, threat)
    radii = _radii(eps, threat)
    check_count(batch_size, "batch_size")
    stated = Stated(embedding_lipschitz, metric_lipschitz)
    stated.check(model)
    chosen, missing = _chosen(model, x, y, threat, attacks, train_x)
    _check_spared(spare_proved, chosen, y, certificate)
    clean = look_at_clean(model, x, y, threat, batch_size)
    place = None if folder is None else Path(folder)
    card = model_card(model)
    run = Standing(model, x, y, threat, card["fingerprint"], clean, seed, place)
    labels = list(itertools.product(radii, chosen))
    steps = max(1, math.ceil(int(clean.right.sum()) / batch_size))
    records: list[AttackRecord] = []
    remarks: dict[str, list[str]] = {}
    attacking = len(labels) * steps
    checks = len(CHECKS) if flags else 1

    def tell(label: str, done: int, radius: float = threat.eps) -> None:
        if progress is not None:
            progress(label, done, attacking + certificate + checks, run.worst(radius))

    proof = None
    if certificate:
        tell("certificates", 0)
        proof, reason = _proof(model, x, y, threat, stated)
        missing = missing | ({"certificate": reason} if reason else {})
    safe = torch.tensor(() if proof is None else proof.radius, dtype=torch.float64)
    for number, (radius, attack) in enumerate(labels):
        parts = []
        label, done = f"{attack.name}, eps {radius:g}", certificate + number * steps
        rows = run.rows(radius, survivors_only)
        if attack.name in spare_proved and proof is not None:
            rows = rows[safe[rows] <= radius]
        tell(label, done, radius)
        for batch, some in enumerate(rows.split(batch_size) if len(rows) else ()):
            parts.append(run.part(attack, radius, batch, some))
            tell(label, done + batch + 1, radius)
        records.append(_record(attack, radius, run.settings(attack), parts))
        if heard := [*remarks.get(attack.name, ()), *itertools.chain(*(p.remarks for p in parts))]:
            remarks[attack.name] = list(dict.fromkeys(heard))
    scene = Scene(
        model, x, y, threat, tuple(chosen), tuple(records), clean, proof, remarks, seed, train_x
    )
    attacked = certificate + attacking

    def tell_check(done: int) -> None:
        tell(f"red flag {done + 1} of {checks}", attacked + done)

    raised = raise_flags(scene, tell_check) if flags else (sandwich(scene),)
    tell("done", attacked + checks)
    found = Evaluation(
        task=scene.task,
        n=len(x),
        seed=seed,
        model=card | {"abstained": clean.abstained},
        threat=threat.to_dict(),
        eps=radii,
        attacker_knows=ALL_OF_A_NET if defended_of(model) is None else EVERYTHING,
        environment=Environment.now(x.device, torch.get_num_threads()),
        clean=clean.scores,
        clean_right=tuple(clean.right.nonzero()[:, 0].tolist()),
        clean_errors=tuple(clean.errors.tolist()),
        attacks=tuple(records),
        certificate=proof,
        flags=raised,
        solver=clean.solver,
        seconds=run.earlier_seconds + time.perf_counter() - started,
        missing=missing,
        spared_proved=() if proof is None else tuple(dict.fromkeys(spare_proved)),
    )
    if place is not None:
        run.write_adversarial(place / "adversarial.safetensors")
        found.write(place / "evaluation.json")
    return found


def _prepared(
    model: nn.Module, x: Tensor, y: Tensor, threat: LpBall
) -> tuple[Tensor, Tensor, LpBall]:
    """Examples on the model's device, and the threat with the model's bounds."""
    for name, value in (("x", x), ("y", y)):
        if not isinstance(value, Tensor) or value.dim() == 0 or len(value) == 0:
            raise InputError(f"{name}: expected a torch.Tensor with at least one row")
    if len(x) != len(y):
        raise InputError(f"y: expected one answer for each of the {len(x)} examples, got {len(y)}")
    if not isinstance(model, nn.Module):
        raise InputError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(threat, LpBall):
        raise InputError(f"threat: expected a ball such as L2(0.5), got {type(threat).__name__}")
    backbone = backbone_of(model)
    declared = None if backbone is None else backbone.bounds
    if declared is not None:
        low, high = threat.bounds or declared
        if low < declared[0] or high > declared[1]:
            raise InputError(
                f"threat: expected bounds within {declared}, which the model declares, "
                f"got {(low, high)}"
            )
        threat = replace(threat, bounds=(low, high))
    tensors: Iterable[Tensor] = itertools.chain(model.parameters(), model.buffers())
    device = next((tensor.device for tensor in tensors), x.device)
    return x.detach().to(device), y.detach().to(device), threat


def _radii(eps: Sequence[float] | None, threat: LpBall) -> tuple[float, ...]:
    if eps is None:
        return (threat.eps,)
    given = [float(value) for value in eps]
    if not given or any(not 0 <= value < math.inf for value in given):
        raise InputError(f"eps: expected finite radii of at least 0, at least one, got {given}")
    if any(first >= second for first, second in itertools.pairwise(given)):
        raise InputError(f"eps: expected radii in ascending order, got {given}")
    return tuple(sorted({*given, threat.eps}))


def _chosen(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: LpBall,
    attacks: str | Sequence[str | Attack],
    train_x: Tensor | None,
) -> tuple[list[Attack], dict[str, str]]:
    task = "regression" if y.is_floating_point() else "classification"
    if isinstance(attacks, str):
        return suite(model, attacks, x.shape[1:], task, threat, train_x)
    chosen = named_attacks(model, attacks, x.shape[1:], task, threat, train_x)
    names = [attack.name for attack in chosen]
    if not names or len(set(names)) < len(names):
        raise InputError(f"attacks: expected at least one, each name once, got {names}")
    return chosen, {}


def _check_spared(
    names: Sequence[str], chosen: Sequence[Attack], y: Tensor, certificate: bool
) -> None:
    known = [attack.name for attack in chosen]
    for name in names:
        check_choice(name, "spare_proved", known)
    if names and (y.is_floating_point() or not certificate):
        why = "a regression, where nothing is broken" if certificate else "certificate=False"
        raise InputError(f"spare_proved: expected none with {why}, got {', '.join(names)}")


def _record(
    attack: Attack, eps: float, settings: dict[str, Any], parts: list[Account]
) -> AttackRecord:
    def joined(name: str) -> tuple[Any, ...]:
        return tuple(itertools.chain(*(getattr(part, name) for part in parts)))

    return AttackRecord(
        attack=attack.name,
        family=attack.family,
        eps=eps,
        settings=settings,
        attacked=joined("attacked"),
        broken=joined("broken"),
        distances=joined("distances"),
        abstained=joined("abstained"),
        errors=joined("errors"),
        forwards=sum(part.forwards for part in parts),
        backwards=sum(part.backwards for part in parts),
        seconds=sum(part.seconds for part in parts),
    )


def _proof(
    model: nn.Module, x: Tensor, y: Tensor, threat: LpBall, stated: Stated
) -> tuple[CertificateRecord | None, str]:
    """The certificate, or why there is none."""
    if not isinstance(model, OTAD):
        return None, "certificates are proved for OTAD models alone"
    try:
        return prove(model, x, y, threat, stated), ""
    except InputError as error:
        return None, str(error)
