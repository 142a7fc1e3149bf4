"""`evaluate`: clean scores, certificates, attacks and red flags of a model in one record."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from otad.attacks import Attack, LpBall
from otad.baselines import MajorityKnn, MeanFeatureKnn
from otad.checks import check_choice, check_count
from otad.errors import InputError
from otad.evaluate import model_flags, planted, strength_flags  # noqa: F401  (register checks)
from otad.evaluate.certificate_check import certificate_holds, check_constants, prove
from otad.evaluate.flags import CHECKS, FlagContext, remark_flag
from otad.evaluate.identity import DEFENDED, MAJORITY, MEAN_FEATURE, NET, kind_of
from otad.evaluate.protocol import Progress, run_attacks
from otad.evaluate.records import Evaluation
from otad.evaluate.suite import backbone_of, defended_of, named_attacks, suite
from otad.io.environment import Environment
from otad.model.account import AccountBuilder, SolverAccount
from otad.model.otad import OTAD
from otad.scores import Score, score_of

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
    - `survivors_only`: leave out rows known to be wrong at a distance of at most eps. Otherwise
      every attack runs on all examples that are right unattacked: slower, but comparable.
    - `spare_proved`: names of expensive attacks that skip rows with a certified radius above eps,
      which nothing can break. All other attacks test the certificates.
    - `certificate`: also certify. `flags`: also check whether the attacks were too weak. An attack
      that contradicts a certificate is reported in any case (`is_sound`).
    - `embedding_lipschitz`, `metric_lipschitz`: see `certify`; needed for certificates of a model
      whose embedding does more than normalize, or whose metric has no constant of its own.
    - `train_x` (N,*): the training inputs, for attacks that move towards them, where they cannot
      be computed from the bank.
    - `folder`: finished batches are saved there, so that a run that was killed resumes and ends
      with the same record (see `identity` for what names them); at the end also `evaluation.json`
      and `adversarial.safetensors`: "rows" (m,) and "inputs" (m,*), for each broken row its nearest
      adversarial example; in regression, for each row that an attack made worse, its worst input
      at the threat's eps.
    """
    started = time.perf_counter()
    x, y, threat = _prepared(model, x, y, threat)
    radii = _radii(eps, threat)
    check_count(batch_size, "batch_size")
    constants = {"embedding_lipschitz": embedding_lipschitz, "metric_lipschitz": metric_lipschitz}
    check_constants(model, constants)
    chosen, missing = _chosen(model, x, y, threat, attacks, train_x)
    _check_skipped(spare_proved, chosen, y, certificate)
    place = None if folder is None else Path(folder)
    checks = CHECKS if flags else [certificate_holds]
    total = certificate + len(radii) * len(chosen) * math.ceil(len(x) / batch_size) + len(checks)

    def report(label: str, done: int, worst: float) -> None:
        if progress is not None:
            progress(label, done, total, worst)

    proof = None
    if certificate:
        report("certificates", 0, 0.0 if y.is_floating_point() else 1.0)
        try:
            proof = prove(model, x, y, threat, **constants)
        except InputError as error:
            missing["certificate"] = str(error)
    skipped = {} if proof is None else dict.fromkeys(spare_proved, torch.tensor(proof.radius))
    run = run_attacks(
        model,
        x,
        y,
        threat,
        chosen,
        eps=radii,
        survivors_only=survivors_only,
        certified=skipped,
        seed=seed,
        batch_size=batch_size,
        folder=place,
        progress=lambda label, done, _, worst: report(label, certificate + done, worst),
    )
    scores, solver = _clean(model, x, y, batch_size)
    worst = run.worst(threat.eps)
    attacked = tuple(run.records)
    context = FlagContext(
        model, x, y, threat, run.right, tuple(chosen), attacked, proof, seed, train_x
    )
    raised = []
    for number, check in enumerate(checks):
        done = total - len(checks) + number
        report(f"red flag {number + 1} of {len(checks)}", done, worst)
        raised.append(check(context))
    report("done", total, worst)
    remarks = [remark_flag(*one) for one in run.remarks.items()] if flags else []
    found = Evaluation(
        task="regression" if context.is_regression else "classification",
        n=len(x),
        seed=seed,
        model=run.card | {"abstained": run.abstained},
        threat=threat.to_dict(),
        eps=radii,
        attacker_knows=ALL_OF_A_NET if defended_of(model) is None else EVERYTHING,
        environment=Environment.now(x.device, torch.get_num_threads()),
        clean=scores,
        clean_right=tuple(run.right.nonzero()[:, 0].tolist()),
        clean_errors=run.clean_errors,
        attacks=attacked,
        certificate=proof,
        flags=(*raised, *remarks),
        solver=solver,
        seconds=run.saved_seconds + time.perf_counter() - started,
        missing=missing,
        spared_proved=tuple(skipped),
    )
    if place is not None:
        run.write_inputs(place / "adversarial.safetensors")
        found.write(place / "evaluation.json")
    return found


@torch.no_grad()
def _clean(
    model: nn.Module, x: Tensor, y: Tensor, batch_size: int
) -> tuple[dict[str, Score], SolverAccount | None]:
    """Scores without attack of the model, of the network inside it and of k-NN with its bank; and
    how an OTAD model found its answers."""
    models: dict[str, Callable[[Tensor], Tensor]] = {kind_of(model): model}
    backbone = backbone_of(model)
    if backbone is not None and backbone is not model:
        models[NET] = backbone
    account = None
    if isinstance(model, OTAD):
        account = AccountBuilder(model, potentials=True)
        models |= {MAJORITY: MajorityKnn(model), MEAN_FEATURE: MeanFeatureKnn(model)}
        models[DEFENDED] = lambda batch: account.add(batch).outputs
    scores = {}
    for name, answer in models.items():
        outputs = torch.cat([answer(batch).cpu() for batch in x.split(batch_size)])
        scores[name] = score_of(outputs, y.cpu())
    return scores, None if account is None else account.account()


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


def _check_skipped(
    names: Sequence[str], chosen: Sequence[Attack], y: Tensor, certificate: bool
) -> None:
    known = [attack.name for attack in chosen]
    for name in names:
        check_choice(name, "spare_proved", known)
    if names and (y.is_floating_point() or not certificate):
        why = "a regression, where nothing is broken" if certificate else "certificate=False"
        raise InputError(f"spare_proved: expected none with {why}, got {', '.join(names)}")
