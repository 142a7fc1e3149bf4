"""`evaluate`: clean scores, certificates, attacks and red flags of a model in one record."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from otad.attacks import Attack, LpBall
from otad.attacks.needs import Setting
from otad.baselines import MajorityKnn, MeanFeatureKnn
from otad.checks import check_choice, check_count, require
from otad.errors import InputError
from otad.evaluate import attack_flags  # noqa: F401  (registers its checks)
from otad.evaluate.certificate_check import certificate_holds, check_constants, prove
from otad.evaluate.flags import CHECKS, ONLY_FOR, FlagContext, remark_flag
from otad.evaluate.identity import DEFENDED, MAJORITY, MEAN_FEATURE, NET, kind_of
from otad.evaluate.protocol import Attacked, Progress, run_attacks
from otad.evaluate.records import Evaluation, Flag
from otad.evaluate.suite import backbone_of, defended_of, suite
from otad.evaluate.undefended import attacks_alone, network_of, strength
from otad.io.environment import Environment
from otad.io.tensor_files import write_tensors
from otad.model.account import AccountBuilder, SolverAccount
from otad.model.conversion import ArrayLike, Estimator, converted
from otad.model.otad import OTAD
from otad.progress import with_attack_bar
from otad.scores import Score, score_of

UNDEFENDED = "undefended"  # the folder of the network alone
ATTACKER_KNOWS = {
    True: "everything: the training set, the network and its head, the metric, K, L, l, "
    "the rule for potentials and the rule for ties",
    False: "everything: the architecture and all weights",
}  # whether the model has a bank


@torch.inference_mode(False)  # gradients, whatever mode the caller is in
@with_attack_bar
def evaluate(
    model: nn.Module | Estimator,
    x: ArrayLike,
    y: ArrayLike | None = None,
    threat: LpBall | None = None,
    *,
    eps: Sequence[float] | None = None,
    attacks: str | Sequence[str | Attack] = "standard",
    survivors_only: bool = True,
    skip_proved: Sequence[str] = (),
    certificate: bool = True,
    embedding_lipschitz: float | None = None,
    metric_lipschitz: float | None = None,
    train_x: Tensor | None = None,
    flags: bool = True,
    undefended: bool = True,
    seed: int = 0,
    batch_size: int = 250,
    folder: str | Path | None = None,
    progress: Progress | bool | None = None,
) -> Evaluation:
    """How robust a model is on examples x (n,*) with right answers y (n,): labels or values.

    - `model`, `x`, `y`: a module or a fitted estimator; tensors, arrays, a DataFrame, or a
      DataLoader in place of x and y. Labels are class numbers, of an estimator those of its `fit`.
    - `threat`: what an attacker may change, by default within the bounds the model declares.
    - `eps`: further radii to attack at, ascending; the headline is that of the threat.
    - `attacks`: a preset ("quick", "standard", "full") or attacks, by name or made, in order.
    - `survivors_only`: leave out rows known to be wrong at a distance of at most eps. Otherwise
      every attack runs on all examples that are right without attack: slower, but comparable.
    - `skip_proved`: names of expensive attacks that skip rows with a certified radius above eps.
    - `certificate`: also certify. `flags`: also check whether the attacks were too weak. An attack
      that contradicts a certificate is reported in any case (`is_sound`).
    - `undefended`: also attack the network inside an OTAD model alone, to show what is gained: by
      the same preset, or by those of the attacks that need no bank (`Evaluation.undefended`).
    - `embedding_lipschitz`, `metric_lipschitz`: constants that are not known, see `certify`.
    - `train_x` (N,*): the training inputs, where they cannot be computed from the bank.
    - `folder`: where finished batches are saved, from which a killed run resumes, and at the end
      `evaluation.json` and `adversarial.safetensors`: "rows" (m,) and "inputs" (m,*), the nearest
      adversarial examples; in regression, the worst inputs within the threat's eps. Those of the
      undefended network are in its folder `undefended`."""
    started = time.perf_counter()
    model, x, y, threat = prepared(model, x, y, threat)
    given = [threat.eps] if eps is None else [float(value) for value in eps]
    are_radii = given and all(0 <= value < math.inf for value in given)
    expected = "at least one finite radius of at least 0, in ascending order"
    require(are_radii and given == sorted({*given}), "eps", expected, given)
    radii = tuple(sorted({*given, threat.eps}))
    check_count(batch_size, "batch_size")
    constants = {"embedding_lipschitz": embedding_lipschitz, "metric_lipschitz": metric_lipschitz}
    check_constants(model, constants)
    task = "regression" if y.is_floating_point() else "classification"
    chosen, missing = suite(model, attacks, x.shape[1:], task, threat, train_x)
    for name in skip_proved:
        check_choice(name, "skip_proved", [attack.name for attack in chosen])
        require(certificate, "skip_proved", "none with certificate=False", name)
        require(task != "regression", "skip_proved", "none with a regression", name)
    place = None if folder is None else Path(folder)
    fitting = [one for one in CHECKS if one not in ONLY_FOR or ONLY_FOR[one](model)]
    checks = fitting if flags else [certificate_holds]
    network, reason = network_of(model) if undefended else (None, "")
    steps, first = len(radii) * math.ceil(len(x) / batch_size), 0
    if network is not None:
        setting = Setting(x.shape[1:], task, threat)
        bare, misfits = attacks_alone(network, attacks, chosen, setting)
        first = steps * len(bare)
    total = first + certificate + steps * len(chosen) + len(checks)

    def report(label: str, done: int, worst: float) -> None:
        if callable(progress):
            progress(label, done, total, worst)

    alone: Evaluation | None = None
    if network is not None:
        alone = evaluate(
            network, x, y, threat, eps=radii, attacks=bare, survivors_only=survivors_only,
            certificate=False, flags=False, seed=seed, batch_size=batch_size,
            folder=None if place is None else place / UNDEFENDED,
            progress=lambda label, done, _, worst: report(
                f"undefended network, {label}", min(done, first), worst
            ),
        )  # fmt: skip
        alone = replace(alone, missing=misfits)
        started = time.perf_counter() - alone.seconds
    proof = None
    if certificate:
        report("certificates", first, 0.0 if task == "regression" else 1.0)
        try:
            proof = prove(model, x, y, threat, **constants)
        except InputError as error:
            missing["certificate"] = str(error)
    skipped = {} if proof is None else dict.fromkeys(skip_proved, torch.tensor(proof.radius))
    run = run_attacks(
        model, x, y, threat, chosen, eps=radii, survivors_only=survivors_only, certified=skipped,
        seed=seed, batch_size=batch_size, folder=place,
        progress=lambda label, done, _, worst: report(label, first + certificate + done, worst),
    )  # fmt: skip
    scores, solver = _clean(model, x, y, batch_size)
    worst, records, raised = run.worst(threat.eps), tuple(run.records), []
    ran = run.right, tuple(chosen), records, proof, seed, train_x
    context = FlagContext(model, x, y, threat, *ran)
    for number, check in enumerate(checks, 1):
        done = total - len(checks) + number - 1
        report(f"red flag {number} of {len(checks)}", done, worst)
        raised.append(check(context))
    report("done", total, worst)
    if alone is not None and network is not None:
        alone = replace(alone, flags=(_strength(network, alone, run, batch_size),) if flags else ())
    if flags:
        raised += [remark_flag(*one) for one in run.remarks.items()]
    found = Evaluation(
        task=task, n=len(x), seed=seed, threat=threat.to_dict(), eps=radii,
        model=run.card | {"abstained": run.abstained},
        attacker_knows=ATTACKER_KNOWS[defended_of(model) is not None],
        environment=Environment.now(x.device, torch.get_num_threads()),
        clean=scores, solver=solver, clean_errors=run.clean_errors,
        clean_right=tuple(run.right.nonzero()[:, 0].tolist()),
        attacks=records, certificate=proof, flags=tuple(raised), missing=missing,
        seconds=run.saved_seconds + time.perf_counter() - started, skipped_proved=tuple(skipped),
        undefended=alone, undefended_reason=reason,
    )  # fmt: skip
    if place is not None:
        rows = run.found.nonzero()[:, 0]
        tensors = {"rows": rows, "inputs": run.inputs[rows]}
        write_tensors(place / "adversarial.safetensors", tensors, {"data": run.data})
        found.write(place / "evaluation.json")
        if alone is not None:
            alone.write(place / UNDEFENDED / "evaluation.json")
    return found


@torch.no_grad()
def _strength(network: nn.Module, alone: Evaluation, run: Attacked, batch_size: int) -> Flag:
    near = run.found if run.is_value else run.found & (run.distances <= run.threat.eps)
    rows = near.nonzero()[:, 0]
    parts = run.inputs[rows].to(run.x.device).split(batch_size) if len(rows) else ()
    outputs = [network(part).cpu() for part in parts] or [torch.empty(0)]
    return strength(alone, torch.cat(outputs), run.y.cpu()[rows], rows)


@torch.no_grad()
def _clean(
    model: nn.Module, x: Tensor, y: Tensor, batch_size: int
) -> tuple[dict[str, Score], SolverAccount | None]:
    """Scores of the model, its network and k-NN with its bank, and the account of its solver."""
    models: dict[str, Callable[[Tensor], Tensor]] = {kind_of(model): model}
    if (backbone := backbone_of(model)) is not None:
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


def prepared(
    model: nn.Module | Estimator, x: ArrayLike, y: ArrayLike | None, threat: LpBall | None
) -> tuple[nn.Module, Tensor, Tensor, LpBall]:
    """The module, examples on its device, and the threat with the bounds of the model."""
    module, inputs, targets = converted(model, x, y)
    for name, value in (("x", inputs), ("y", targets)):
        is_filled = isinstance(value, Tensor) and value.dim() > 0 and len(value) > 0
        require(is_filled, name, "a torch.Tensor with at least one row", type(value).__name__)
    assert targets is not None
    count = len(inputs)
    require(
        len(targets) == count, "y", f"one answer for each of the {count} examples", len(targets)
    )
    if not isinstance(threat, LpBall):
        raise InputError(f"threat: expected a ball such as L2(0.5), got {type(threat).__name__}")
    backbone = backbone_of(module)
    if backbone is not None and (declared := backbone.bounds) is not None:
        low, high = threat.bounds or declared
        within = declared[0] <= low and high <= declared[1]
        require(within, "threat", f"bounds within {declared}, those of the model", (low, high))
        threat = replace(threat, bounds=(low, high))
    tensors = *module.parameters(), *module.buffers(), inputs
    device = tensors[0].device
    return module, inputs.detach().to(device), targets.detach().to(device), threat
