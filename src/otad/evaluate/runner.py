"""`evaluate`: clean scores, certificates, attacks and flags of a model in one record."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from otad.attacks import Attack, LpBall
from otad.attacks.needs import Setting
from otad.attacks.row_graphs import sharing_graphs
from otad.attacks.target import answers, seeded
from otad.baselines import MajorityKnn, MeanFeatureKnn
from otad.checks import check_broadcast, check_choice, check_count, check_shape, require
from otad.errors import InputError
from otad.evaluate import attack_flags  # noqa: F401  (registers its checks)
from otad.evaluate.certificate_check import (
    certificate_holds,
    check_constants,
    check_within_bounds,
    prove,
)
from otad.evaluate.flags import CHECKS, Check, FlagContext, remark_flag
from otad.evaluate.identity import DEFENDED, MAJORITY, MEAN_FEATURE, NET, generator_for, kind_of
from otad.evaluate.protocol import run_attacks
from otad.evaluate.records import Evaluation, Flag
from otad.evaluate.suite import backbone_of, defended_of, suite
from otad.evaluate.undefended import attacks_alone, network_of, strength
from otad.io.environment import Environment
from otad.io.tensor_files import write_tensors
from otad.model.account import AccountBuilder, SolverAccount
from otad.model.captured import capturing
from otad.model.conversion import ArrayLike, Estimator, converted, like_inputs
from otad.model.otad import OTAD
from otad.model.training_inputs import copies_of_bank
from otad.progress import AttackReport, with_attack_bar
from otad.scores import Score, score_of
from otad.workers import Workers, working

UNDEFENDED = "undefended"  # the folder of the network alone
REPORTS = ("report.html", "report.md")  # of an evaluation, in its folder
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
    within_bounds: bool = False,
    embedding_lipschitz: float | None = None,
    metric_lipschitz: float | None = None,
    train_x: ArrayLike | None = None,
    flags: bool = True,
    undefended: bool = True,
    seed: int = 0,
    batch_size: int = 250,
    folder: str | Path | None = None,
    executor: Executor | Workers | int | None = None,
    progress: AttackReport | bool | None = None,
) -> Evaluation:
    """Measure how robust a model is: the worst case over many attacks, and what is proved.

    Parameters
    ----------
    model : Module or estimator
        A torch module, such as a defended model, or a fitted estimator. A module whose answers are
        random declares it by an attribute `randomized = True`. Then its answer is the mean of its
        outputs over ten draws, attacks follow the mean of the gradients (EOT), and a wrong answer
        counts if it is wrong over ten new draws. A module whose gradient is not its derivative,
        such as `otad.baselines.Purified`, declares it by `straight_through = True`.
    x : Tensor, array, DataFrame or DataLoader (n, *input_shape)
        Examples. A DataLoader yields x and y. A warning counts those that are training points.
    y : Tensor or array (n,)
        The right answers: class numbers (for an estimator, its labels), or values.
    threat : LpBall
        What an attacker may change, such as `otad.L2(0.5)`. If it has no bounds, it gets those that
        the model declares.
    eps : sequence of float, optional
        Further radii to attack at, ascending.
    attacks : str or sequence
        A preset ("quick", "standard" or "full"), or names of attacks, or attacks, in order.
    survivors_only : bool
        Whether attacks skip examples that are known to be wrong within eps. If False, every attack
        runs on all examples that are right without attack. This is slower, but attacks can be
        compared.
    skip_proved : sequence of str
        Names of expensive attacks that skip examples with a certified radius above eps.
    certificate, flags : bool
        Whether to certify the answers, and to check whether the attacks were too weak. An attack
        that contradicts a certificate is reported in any case.
    within_bounds : bool
        Whether to prove also what holds for inputs within the bounds of the model, which attacks
        never leave. Such radii are recorded beside the others: see `certify`.
    embedding_lipschitz, metric_lipschitz : float, optional
        Lipschitz constants that the model does not know; see `certify`.
    train_x : Tensor or array (N, *input_shape), optional
        The training inputs, for attacks on a defended model whose bank does not hold them. For a
        model without a bank they only show which examples are training points, so that the same
        call works for a network and for its defense.
    undefended : bool
        Whether to attack the network inside a defended model alone as well, to show the gain.
    seed : int
        The seed of all attacks.
    batch_size : int
        Rows at once.
    folder : str or Path, optional
        Where to save finished batches, from which a stopped run resumes. At the end it holds
        `evaluation.json` and `adversarial.safetensors`: "rows" (m,) and "inputs" (m, *input_shape),
        the nearest adversarial examples, or in regression the worst inputs within eps. The results
        of the undefended network are in its folder `undefended`. An earlier evaluation is replaced,
        and a warning names the reports that still show it.
    executor : Executor, int or None
        Who attacks and certifies the batches: a number of processes of this machine, which are
        replaced if they are killed; an executor of `concurrent.futures` with processes; or an
        `otad.cluster.RayExecutor`. The record does not depend on it. If None, this process.
    progress : callable, bool or None
        A function of (attack, steps done, all steps, worst case so far). True draws a progress bar,
        False draws none, and None draws one on a terminal when the work takes longer than two
        seconds.

    Returns
    -------
    Evaluation
        Everything that was measured.

    Raises
    ------
    InputError
        If shapes, bounds or attacks do not fit the model.

    Examples
    --------
    >>> import otad
    >>> digits = otad.data.load("digits")
    >>> net = otad.nets.fc_resnet((1, 8, 8), 10, blocks=1, hidden=16, bounds=(0.0, 1.0))
    >>> model = otad.defend(net, digits.train_x[:200], digits.train_y[:200])
    >>> x, y = digits.test_x[:4], digits.test_y[:4]
    >>> report = otad.evaluate(model, x, y, otad.L2(0.5), attacks=["pgd", "square"])
    >>> report
    Evaluation(4 examples, l2 eps 0.5, inputs in [0, 1]: clean ..., worst case ...; 2 attacks...)
    >>> report.undefended.worst_case_accuracy <= 1.0
    True
    """
    started = time.perf_counter()
    model, x, y, threat = prepared(model, x, y, threat)
    environment = Environment.now(x.device, torch.get_num_threads())
    given = [threat.eps] if eps is None else [float(value) for value in eps]
    are_radii = given and all(0 <= value < math.inf for value in given)
    expected = "at least one finite radius of at least 0, in ascending order"
    require(are_radii and given == sorted({*given}), "eps", expected, given)
    radii = tuple(sorted({*given, threat.eps}))
    check_count(batch_size, "batch_size")
    constants = {"embedding_lipschitz": embedding_lipschitz, "metric_lipschitz": metric_lipschitz}
    check_constants(model, constants)
    task = "regression" if y.is_floating_point() else "classification"
    if not isinstance(executor, Workers):  # otherwise the evaluation around this one has warned
        warn_of_size(threat, x, stacklevel=6)
    inputs = None if train_x is None else like_inputs(model, train_x, "train_x")
    if copies := _copies(model, x, inputs):
        known = f"x: {copies} of {len(x)} examples equal training points of the model"
        warnings.warn(f"{known}. Scores on them do not apply to new data", stacklevel=5)
    chosen, missing = suite(model, attacks, x.shape[1:], task, threat, inputs)
    for name in skip_proved:
        check_choice(name, "skip_proved", [attack.name for attack in chosen])
        require(certificate, "skip_proved", "none with certificate=False", name)
        require(task != "regression", "skip_proved", "none with a regression", name)
    check_within_bounds(model, task, within_bounds, certificate)
    place = None if folder is None else Path(folder)
    fitting = [one for one, applies in CHECKS.items() if applies(model)]
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

    with working(executor) as workers, capturing(model), sharing_graphs():
        alone: Evaluation | None = None
        if network is not None:
            alone = evaluate(
                network, x, y, threat, eps=radii, attacks=bare, survivors_only=survivors_only,
                certificate=False, flags=False, seed=seed, batch_size=batch_size,
                folder=None if place is None else place / UNDEFENDED, executor=workers,
                progress=lambda label, done, _, worst: report(
                    f"undefended network, {label}", min(done, first), worst
                ),
            )  # fmt: skip
            alone = replace(alone, missing=misfits)
            started = time.perf_counter() - alone.seconds
        proof, inside = None, None
        if certificate:
            report("certificates", first, 0.0 if task == "regression" else 1.0)
            try:
                how: dict[str, Any] = {"executor": workers, **constants}
                proof = prove(model, x, y, threat, **how)
                if within_bounds:
                    inside = prove(model, x, y, threat, within_bounds=True, **how)
            except InputError as error:
                missing["certificate"] = str(error)
        skipped = {} if proof is None else dict.fromkeys(skip_proved, torch.tensor(proof.radius))
        run = run_attacks(
            model, x, y, threat, chosen, eps=radii, survivors_only=survivors_only,
            certified=skipped, seed=seed, batch_size=batch_size, folder=place, executor=workers,
            progress=lambda label, done, _, worst: report(label, first + certificate + done, worst),
        )  # fmt: skip
        scores, solver = _clean(model, x, y, batch_size, seed)
        worst, records = run.worst(threat.eps), tuple(run.records)
        ran = run.right, tuple(chosen), records, proof, seed, inputs, inside
        context = FlagContext(model, x, y, threat, *ran)

        def watch(done: int) -> None:
            if done < len(checks):
                label = f"flag {done + 1} of {len(checks)}"
                report(label, total - len(checks) + done, worst)

        watch(0)
        raised = workers.all(_answer, (context,), ((check,) for check in checks), watch)
    report("done", total, worst)
    if alone is not None and network is not None:
        alone = replace(alone, flags=(strength(network, alone, run, batch_size),) if flags else ())
    if flags:
        raised += [remark_flag(*one) for one in run.remarks.items()]
    found = Evaluation(
        task=task, n=len(x), seed=seed, threat=threat.to_dict(), eps=radii,
        model=run.card | {"abstained": run.abstained},
        attacker_knows=ATTACKER_KNOWS[defended_of(model) is not None],
        environment=environment,
        clean=scores, solver=solver, clean_errors=run.clean_errors,
        clean_right=tuple(run.right.nonzero()[:, 0].tolist()),
        attacks=records, certificate=proof, flags=tuple(raised), missing=missing,
        seconds=run.saved_seconds + time.perf_counter() - started, skipped_proved=tuple(skipped),
        undefended=alone, undefended_reason=reason, certificate_within_bounds=inside,
    )  # fmt: skip
    if place is not None:
        rows = run.found.nonzero()[:, 0]
        tensors = {"rows": rows, "inputs": run.inputs[rows]}
        write_tensors(place / "adversarial.safetensors", tensors, {"data": run.data})
        found.write(place / "evaluation.json")
        for old in (place / name for name in REPORTS if (place / name).exists()):
            remedy = "remove it, or write it again by `otad report --out`"
            warnings.warn(f"{old} may show an earlier evaluation: {remedy}", stacklevel=5)
        if alone is not None:
            alone.write(place / UNDEFENDED / "evaluation.json")
    return found


def _answer(context: FlagContext, check: Check) -> Flag:
    return check(context)


@torch.no_grad()
def _clean(
    model: nn.Module, x: Tensor, y: Tensor, batch_size: int, seed: int
) -> tuple[dict[str, Score], SolverAccount | None]:
    """Scores of the model, its network and k-NN with its bank, and the account of its solver."""
    models: dict[str, Callable[[Tensor], Tensor]] = {kind_of(model): partial(answers, model)}
    if (backbone := backbone_of(model)) is not None:
        models[NET] = backbone
    account = None
    if isinstance(model, OTAD):
        account = AccountBuilder(model, potentials=True)
        models |= {MAJORITY: MajorityKnn(model), MEAN_FEATURE: MeanFeatureKnn(model)}
        models[DEFENDED] = lambda batch: account.add(batch).outputs
    scores = {}
    for name, answer in models.items():
        generator, outputs = generator_for(seed, "clean"), []  # the draws that attacks start from
        for batch in x.split(batch_size):
            with seeded(model, generator):
                outputs.append(answer(batch).cpu())
        scores[name] = score_of(torch.cat(outputs), y.cpu())
    return scores, None if account is None else account.account()


def _copies(model: nn.Module, x: Tensor, train_x: Tensor | None) -> int:
    """Return how many examples are training points, as far as these are known."""
    if (defended := defended_of(model)) is not None:
        return copies_of_bank(defended, x)
    if train_x is None:
        return 0
    check_shape(train_x, "train_x", (len(train_x), *x.shape[1:]), "like the examples x")
    known = set(_contents(train_x.to(x.dtype)))
    return sum(content in known for content in _contents(x))


def _contents(x: Tensor) -> Iterator[int]:
    """Yield a number for each input, which is the same for equal inputs."""
    return (hash((row.double() + 0.0).numpy().tobytes()) for row in x.cpu())  # without -0.0


def warn_of_size(threat: LpBall, x: Tensor, stacklevel: int) -> None:
    """Warn of a threat that limits nothing."""
    if advice := advice_on_size(threat, x):
        warnings.warn(advice, stacklevel=stacklevel)


def advice_on_size(threat: LpBall, x: Tensor) -> str:
    """Say if the threat allows every input within the bounds, as if 8 were meant as 8/255."""
    if not threat.allows_everything(x):
        return ""
    known = f"threat: eps = {threat.eps:g} allows every input within {threat.bounds}, so it "
    return known + "limits nothing. Give eps in the units of x, such as 8/255 for pixels in (0, 1)"


def prepared(
    model: nn.Module | Estimator, x: ArrayLike, y: ArrayLike | None, threat: LpBall | None
) -> tuple[nn.Module, Tensor, Tensor, LpBall]:
    """Return the module, the examples on its device, and the threat with the model's bounds."""
    module, inputs, targets = converted(model, x, y)
    for name, value in (("x", inputs), ("y", targets)):
        is_filled = isinstance(value, Tensor) and value.dim() > 0 and len(value) > 0
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        require(is_filled, name, "a torch.Tensor with at least one row", got)
    assert targets is not None
    count = len(inputs)
    require(
        len(targets) == count, "y", f"one answer for each of the {count} examples", len(targets)
    )
    if not isinstance(threat, LpBall):
        raise InputError(f"threat: expected a ball such as L2(0.5), got {type(threat).__name__}")
    backbone = backbone_of(module)
    if backbone is not None:
        backbone.check_inputs(inputs)
    if backbone is not None and (declared := backbone.bounds) is not None:
        low, high = threat.bounds or declared
        within = declared[0] <= low and high <= declared[1]
        require(within, "threat", f"bounds within {declared}, those of the model", (low, high))
        threat = replace(threat, bounds=(low, high))
    if threat.scale is not None:
        scale = check_broadcast(threat.scale, "scale", inputs.shape[1:])
        threat = replace(threat, scale=scale)  # records hold the unit of every feature
    tensors = *module.parameters(), *module.buffers(), inputs
    device = tensors[0].device
    return module, inputs.detach().to(device), targets.detach().to(device), threat
