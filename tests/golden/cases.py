"""Saved models of every kind, and the questions they are asked.

The models in `models/` and the answers beside it were recorded by an earlier version. `record.py`
records the answers of the same models again, where a change of behavior is intended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from golden.arrays import MODELS, Arrays, as_array
from torch import Tensor

# names that moved are changed here alone
import otad
from otad import L2, OTAD, InputError, Linf
from otad.attacks import (
    Apgd,
    AutoAttackSuite,
    Bpda,
    MetricAttack,
    NgOpt,
    Pgd,
    Pixle,
    RandomNoise,
    RandomSearch,
    Square,
    Transfer,
)
from otad.attacks.adaptive import Bisector, Keys, Region, SoftKnn, Straight
from otad.evaluate import Evaluation, Flag
from otad.evaluate.records import CERTIFICATE_CHECK
from otad.explain import explain


def metric_part(model: OTAD) -> Callable[[Tensor], Tensor]:
    """Inputs to where a model searches neighbors."""
    return model.backbone.embed if model.metric is None else model.metric


def smoothness_of(record: Evaluation) -> tuple[float, ...]:
    """Quantiles of the L that was used."""
    used = record.solver.smoothness
    if used is None:
        return ()
    return (used.least, used.median, used.quantile_90, used.quantile_99, used.most)


def recorded_name(flag: Flag) -> str:
    return "certificate sandwich" if flag.name == CERTIFICATE_CHECK else flag.name


def evaluation_of_file(path: Path) -> Evaluation:
    return Evaluation.read(path)


ASKED = 12  # queries of a model


@dataclass(frozen=True)
class Case:
    """A kind of model: how it is loaded, and the questions it answers.

    `eps`: two radii for attacks. `proof`: options of the certificate, None where it is refused.
    `attacked`: the attacks that are run on it one by one, in l2 and some in l-infinity too if
    `both_norms`; `evaluated`: those of an evaluation, and `flagged` those of one with all flags.
    `rows`: so many examples are attacked. `precise`: the net works in float64.
    """

    eps: tuple[float, float] = (0.4, 1.2)
    proof: dict[str, Any] | None = field(default_factory=dict)
    loading: dict[str, Any] = field(default_factory=dict)
    attacked: tuple[str, ...] = ()
    both_norms: bool = False
    evaluated: tuple[str, ...] = ()
    flagged: tuple[str, ...] = ()
    rows: int = ASKED
    precise: bool = False


WITHOUT_IMAGES = (
    "pgd",
    "pgd_restarts",
    "pgd_substitute",
    "apgd",
    "bpda",
    "metric",
    "transfer",
    "noise",
    "random_search",
    "straight",
    "soft_knn",
    "bisector",
    "region",
    "keys",
)
FLAGGED = ("pgd", "noise")
FEW = ("pgd", "apgd", "metric", "straight", "soft_knn", "region", "keys")
PLAIN = ("straight", "soft_knn", "pgd", "bpda", "noise")
KEYED = ("straight", "keys", "metric", "pgd", "noise")


FREE = {"proof": None}
IMAGES = {"eps": (0.3, 0.9)}

CASES: dict[str, Case] = {
    "local": Case(
        attacked=(*WITHOUT_IMAGES, "ngopt", "square", "pixle", "autoattack"),
        both_norms=True,
        evaluated=PLAIN,
        flagged=FLAGGED,
    ),
    "local_double": Case(precise=True),
    "local_paper": Case(),
    "local_capped": Case(**FREE),
    "local_curved": Case(),
    "local_half": Case(),
    "local_bfloat16": Case(),
    "local_mapped": Case(loading={"resident": False}),
    "local_sequential": Case(proof={"embedding_lipschitz": 3.0}),
    "local_plain": Case(),
    "local_adapted": Case(),
    "local_vit": Case(**IMAGES, proof={"embedding_lipschitz": 5.0}, attacked=FEW),
    "metric_cnn": Case(
        **IMAGES,
        proof={"metric_lipschitz": 2.0},
        attacked=(*WITHOUT_IMAGES, "square", "pixle", "autoattack"),
        both_norms=True,
        evaluated=KEYED,
    ),
    "metric_lipschitz": Case(**IMAGES, attacked=FEW),
    "metric_resnet": Case(**FREE),
    "metric_vit": Case(**FREE),
    "metric_attention": Case(**FREE),
    "metric_pretrained": Case(**FREE),
    "global": Case(attacked=WITHOUT_IMAGES, evaluated=("straight", "pgd", "bpda", "noise"), rows=4),
    "global_double": Case(precise=True),
    "global_left_out": Case(),
    "global_curved": Case(),
    "global_bfloat16": Case(),
    "global_mapped": Case(loading={"resident": False}),
    "lifted": Case(attacked=("pgd", "noise"), rows=4),
    "lifted_left_out": Case(),
    "prototypes": Case(attacked=("pgd", "apgd", "noise"), rows=4),
    "labeled": Case(),
    "cip_net": Case(**FREE, attacked=FEW, evaluated=PLAIN),
    "cip_net_hull": Case(**FREE),
    "regression_local": Case(attacked=WITHOUT_IMAGES, evaluated=PLAIN),
    "regression_global": Case(
        attacked=("pgd", "straight", "noise"), evaluated=("pgd", "noise"), rows=4
    ),
    "regression_lifted": Case(),
    "local_from_file": Case(loading={"resident": False, "verify": False}),
}


def answers_of(model: OTAD, case: Case, x: Tensor, y: Tensor) -> Arrays:
    """Outputs, trace, gradient, certificates and explanations."""
    moved = x.clone().requires_grad_()
    trace = model.trace(moved)
    solution = trace.solution
    weights = torch.linspace(0.5, 1.5, trace.outputs.numel(), dtype=x.dtype)
    kept = torch.where(trace.outputs.isnan(), 0.0, trace.outputs)
    (gradient,) = torch.autograd.grad((kept * weights.view_as(kept)).sum(), moved)
    found: dict[str, Any] = {
        "forward": model(x),
        "trace/outputs": trace.outputs,
        "trace/indices": trace.neighbors.indices,
        "trace/distances": trace.neighbors.distances,
        "trace/labels": trace.labels,
        "trace/image": solution.image,
        "trace/value": solution.value,
        "trace/multipliers": solution.multipliers,
        "trace/potentials": solution.potentials,
        "trace/smoothness": solution.smoothness,
        "trace/strong_convexity": solution.strong_convexity,
        "trace/residual": solution.residual,
        "trace/status": solution.status,
        "trace/active": solution.active,
        "trace/mode": solution.mode,
        "gradient": gradient,
    }
    if trace.gap is not None:
        found["trace/gap"] = trace.gap
        found["potential/left_out"] = model.potential.left_out
        found["potential/levels"] = model.potential.levels
    else:
        exclude = torch.arange(len(x))
        found["excluded/indices"] = model.trace(x, exclude=exclude).neighbors.indices
    return {name: as_array(value) for name, value in found.items()} | told_of(model, case, x)


def told_of(model: OTAD, case: Case, x: Tensor) -> Arrays:
    """Certificates and explanations."""
    found: dict[str, Any] = {}
    is_value = model.backbone.task == "regression"
    if case.proof is None:
        try:
            otad.certify_values(model, x, 0.2) if is_value else otad.certify(model, x)
            found["certificate/refused"] = ""
        except InputError as error:
            found["certificate/refused"] = culprit(error)
    elif is_value:
        for eps in case.eps:
            interval = otad.certify_values(model, x, eps, **case.proof)
            found[f"interval/{eps}/low"], found[f"interval/{eps}/high"] = (
                interval.low,
                interval.high,
            )
            found[f"interval/{eps}/assumptions"] = interval.assumptions
    else:
        proof = otad.certify(model, x, **case.proof)
        found["certificate/radius"] = proof.radius
        found["certificate/prediction"] = proof.prediction
        found["certificate/rules"] = proof.rules
        found["certificate/assumptions"] = proof.assumptions
        unit = torch.linspace(0.5, 2.0, x[0].numel(), dtype=x.dtype).view_as(x[0])
        if model.metric is None and "embedding_lipschitz" not in case.proof:
            found["certificate/radius_in_units"] = otad.certify(model, x, unit=unit).radius
    told = explain(model, x)
    neighbors = [one for some in told for one in some.neighbors]
    found["explained/count"] = [len(some.neighbors) for some in told]
    found["explained/index"] = [one.index for one in neighbors]
    found["explained/weight"] = [np.nan if one.weight is None else one.weight for one in neighbors]
    found["explained/label"] = [one.label for one in neighbors]
    found["explained/distance"] = [one.distance for one in neighbors]
    found["explained/prediction"] = [
        np.nan if some.prediction is None else float(some.prediction) for some in told
    ]
    found["explained/status"] = [some.status.name for some in told]
    return {name: as_array(value) for name, value in found.items()}


def culprit(error: InputError) -> str:
    """The name that an error begins with; its wording may change."""
    return str(error).partition(":")[0]


def attacks_on(model: OTAD) -> dict[str, Callable[[], Any]]:
    """Every attack, with a small budget, each made when it is asked for."""
    network, part = model.backbone, metric_part(model)
    found: dict[str, Callable[[], Any]] = {
        "pgd": lambda: Pgd(steps=4),
        "pgd_restarts": lambda: Pgd(steps=3, restarts=2, step_size=0.2, last_only=True),
        "pgd_substitute": lambda: Pgd(steps=4, substitute=network, random_start=False),
        "apgd": lambda: Apgd(steps=6),
        "bpda": lambda: Bpda(network, steps=4),
        "metric": lambda: MetricAttack(part, steps=4),
        "transfer": lambda: Transfer(network, inner=Pgd(steps=5)),
        "noise": lambda: RandomNoise(draws=4),
        "random_search": lambda: RandomSearch(queries=10),
        "ngopt": lambda: NgOpt(budget=8),
        "straight": lambda: Straight(points=2, shares=(1.0, 0.5)),
        "soft_knn": lambda: SoftKnn(temperatures=(0.1,), steps=5, targets=1, polish=1),
        "bisector": lambda: Bisector(pairs=1, polish=1),
        "region": lambda: Region(singles=1, classes=1, sizes=(3,), opponents=4, rounds=1, polish=1),
        "keys": lambda: Keys(steps=4, targets=1, temperatures=(0.1,), restarts=1, polish=1),
        "square": lambda: Square(queries=10),
        "pixle": lambda: Pixle(restarts=2, max_iterations=3),
        "autoattack": lambda: AutoAttackSuite("custom", ("fab-t",)),
    }
    missing = [name for name, package in PACKAGES.items() if find_spec(package) is None]
    return {name: make for name, make in found.items() if name not in missing}


PACKAGES = {"ngopt": "nevergrad", "autoattack": "pyautoattack"}
ALSO_LINF = ("pgd", "apgd", "noise", "random_search", "straight", "square", "region")


def attack_answers(model: OTAD, case: Case, x: Tensor, y: Tensor) -> Arrays:
    """What each attack leaves of each example, or why it does not fit."""
    bounds = model.backbone.bounds
    x, y = x[: case.rows], y[: case.rows]
    tolerance = 0.3 if y.is_floating_point() else float("inf")
    balls = {"l2": L2(case.eps[1], bounds), "linf": Linf(0.3 * case.eps[1], bounds)}
    found: Arrays = {}
    makers = attacks_on(model)
    for name in filter(makers.__contains__, case.attacked):
        for norm, ball in balls.items():
            if norm == "linf" and not (case.both_norms and name in ALSO_LINF):
                continue
            place = f"attack/{name}/{norm}"
            generator = torch.Generator().manual_seed(11)
            attack = makers[name]()
            try:
                result = attack(model, x, y, ball, generator=generator, tolerance=tolerance)
            except InputError as error:
                found[f"{place}/refused"] = as_array(culprit(error))
                continue
            found[f"{place}/broken"] = as_array(result.broken)
            found[f"{place}/distance"] = as_array(result.distance)
            found[f"{place}/gain"] = as_array(result.gain.double())
            if name != "autoattack":
                found[f"{place}/forwards"] = as_array(result.forwards)
                found[f"{place}/backwards"] = as_array(result.backwards)
    return found


def evaluation_of(
    model: OTAD,
    case: Case,
    x: Tensor,
    y: Tensor,
    folder: Path | None = None,
    *,
    flags: bool = False,
) -> Evaluation:
    """By all attacks of the case, or with all `flags` by two of them on fewer examples."""
    makers = attacks_on(model)
    names = case.flagged if flags else case.evaluated
    rows = min(5, case.rows) if flags else case.rows
    x, y = x[:rows], y[:rows]
    return otad.evaluate(
        model,
        x,
        y,
        L2(case.eps[1]),
        eps=case.eps,
        attacks=[makers[name]() for name in names],
        survivors_only=False,
        flags=flags,
        seed=4,
        folder=folder,
        **{} if case.proof is None else case.proof,
    )


def evaluation_answers(record: Evaluation) -> Arrays:
    """Results of all attacks on all rows, and what the evaluation says of them together."""
    found: dict[str, Any] = {
        "clean_right": record.clean_right,
        "clean_errors": np.asarray(record.clean_errors, dtype=float),
        "clean_names": list(record.clean),
        "clean_scores": [score.value for score in record.clean.values()],
        "missing": [f"{name}: {why}" for name, why in record.missing.items()],
        "threat": str({name: record.threat[name] for name in sorted(record.threat)}),
        "sound": record.is_sound,
    }
    for one in record.attacks:
        place = f"{one.attack}/{one.eps}"
        broken, distance = np.zeros(record.n, dtype=bool), np.full(record.n, np.nan)
        broken[list(one.broken)] = True
        distance[list(one.broken)] = one.distances
        found |= {f"{place}/broken": broken, f"{place}/distance": distance}
        found |= {f"{place}/attacked": one.attacked, f"{place}/family": one.family}
        if record.task == "regression":
            errors = np.full(record.n, np.nan)
            errors[list(one.attacked)] = one.errors
            found[f"{place}/error"] = errors
    if record.task == "classification":
        found["worst/distance"] = record.distances()
        for eps in record.eps:
            found[f"worst/{eps}"] = record.worst_case(eps).value
            share = record.certified_accuracy(eps)
            found[f"certified/{eps}"] = np.nan if share is None else share.value
    else:
        found["worst/error"] = record.worst_errors()
    if record.certificate is not None:
        found["certificate/radius"] = record.certificate.radius
        found["certificate/rules"] = record.certificate.rules
        found["certificate/worst_errors"] = record.certificate.worst_errors
    for flag in record.flags:
        found[f"flag/{recorded_name(flag)}"] = flag.verdict
    if record.solver is not None:
        found["solver/statuses"] = list(record.solver.statuses)
        found["solver/shares"] = list(record.solver.statuses.values())
        found["solver/smoothness"] = smoothness_of(record)
    return {f"evaluation/{name}": as_array(value) for name, value in found.items()}


def flag_answers(model: OTAD, case: Case, x: Tensor, y: Tensor) -> Arrays:
    record = evaluation_of(model, case, x, y, flags=True)
    return {f"flag/{recorded_name(flag)}": as_array(flag.verdict) for flag in record.flags}


def loaded(kind: str | Path) -> OTAD:
    """The model of a kind as its case says, or of another folder."""
    options = CASES[kind].loading if isinstance(kind, str) else {}
    return otad.load(MODELS / kind, **options)
