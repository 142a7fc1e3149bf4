"""Saved models of every kind, the questions they are asked, and the comparison of answers.

The models in `models/` and the answers beside it were recorded by an earlier version. `record.py`
records the answers of the same models again, where a change of behavior is intended.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

# names that moved are changed here alone
import otad
from otad import L2, OTAD, InputError, Linf, OTADClassifier, OTADRegressor
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
from otad.cip.surrogate import CipNet, CipNetConfig
from otad.cli.main import main as commands
from otad.cli.sources import TrainedNet
from otad.evaluate import Evaluation
from otad.explain import explain
from otad.model.bank import FeatureBank
from otad.model.imitation import imitate
from otad.model.prototypes import prototype_net
from otad.nets import (
    CNNMetric,
    LipschitzMetric,
    fc_resnet,
    lifted_net,
    vision_transformer,
)
from otad.training import MetricConfig, TrainConfig, train, train_metric
from otad.training.adversary import Adversary


def metric_part(model: OTAD) -> Callable[[Tensor], Tensor]:
    """Inputs to where a model searches neighbors."""
    return model.backbone.embed if model.metric is None else model.metric


def net_of_command(folder: Path) -> nn.Module:
    """The net in a folder of `otad train`."""
    return TrainedNet.read(folder).net


def smoothness_of(record: Evaluation) -> tuple[float, ...]:
    """Quantiles of the L that was used."""
    used = record.solver.smoothness
    if used is None:
        return ()
    return (used.least, used.median, used.quantile_90, used.quantile_99, used.most)


def evaluation_of_file(path: Path) -> Evaluation:
    return Evaluation.read(path)


# end of the names that moved

HERE = Path(__file__).parent
MODELS = HERE / "models"
Arrays = dict[str, np.ndarray]

CLASSES, DIM, IMAGE, POINTS, ASKED = 3, 6, (1, 8, 8), 45, 12


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


def as_array(value: Any) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)


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


PACKAGES = {"ngopt": "nevergrad", "square": "pyautoattack", "autoattack": "pyautoattack"}
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
        found[f"flag/{flag.name}"] = flag.verdict
    if record.solver is not None:
        found["solver/statuses"] = list(record.solver.statuses)
        found["solver/shares"] = list(record.solver.statuses.values())
        found["solver/smoothness"] = smoothness_of(record)
    return {f"evaluation/{name}": as_array(value) for name, value in found.items()}


def flag_answers(model: OTAD, case: Case, x: Tensor, y: Tensor) -> Arrays:
    record = evaluation_of(model, case, x, y, flags=True)
    return {f"flag/{flag.name}": as_array(flag.verdict) for flag in record.flags}


# Short trainings: each takes data, and a function that may change the first weights of its net.

Change = Callable[[nn.Module], None]


def weights_of(net: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in net.state_dict().items() if value.is_floating_point()}


def history_of(result: Any) -> dict[str, Any]:
    return {"loss": [epoch.loss for epoch in result.history]}


def backbone_start() -> Any:
    return fc_resnet((DIM,), CLASSES, blocks=2, hidden=7, seed=31)


def cip_net_config(epochs: int) -> CipNetConfig:
    return CipNetConfig(
        epochs=epochs,
        batch_size=16,
        learning_rate=0.05,
        optimizer="sgd",
        weight_decay=5e-4,
        warmup=0.0,
        gradient_clip=0.0,
    )


BACKBONE_CONFIG = TrainConfig(
    epochs=5, batch_size=16, learning_rate=0.02, energy_weight=0.05, warmup=1.0, ema=0.5
)


def train_backbone(data: Mapping[str, Tensor], change: Change, **options: Any) -> dict[str, Any]:
    net = backbone_start()
    change(net)
    result = train(net, (data["x"], data["y"]), BACKBONE_CONFIG, **options)
    return weights_of(net) | history_of(result) | {"resumed": result.resumed_after}


def train_for_margins(data: Mapping[str, Tensor], change: Change) -> dict[str, Any]:
    net = lifted_net((DIM,), CLASSES, blocks=1, hidden=(7,), seed=32)
    change(net)
    config = TrainConfig(
        epochs=5,
        batch_size=15,
        learning_rate=3e-3,
        optimizer="adamw",
        loss="margin",
        pair_weight=0.1,
        decay_on="matrices",
        gradient_clip=1.0,
        schedule="step",
    )
    result = train(net, (data["x"], data["y"]), config)
    return weights_of(net) | history_of(result)


def train_vit(data: Mapping[str, Tensor], change: Change) -> dict[str, Any]:
    sizes = {"patch": 4, "width": 4, "blocks": 1, "heads": 2, "hidden": 4}
    net = vision_transformer(IMAGE, CLASSES, seed=33, bounds=(0.0, 1.0), **sizes)
    change(net)
    config = TrainConfig(
        epochs=5, batch_size=15, learning_rate=0.02, energy_weight=0.1, label_smoothing=0.1
    )
    result = train(net, (data["images"], data["kinds"]), config)
    return weights_of(net) | history_of(result)


def train_values(data: Mapping[str, Tensor], change: Change) -> dict[str, Any]:
    net = fc_resnet((DIM,), 1, blocks=2, hidden=7, seed=34, task="regression")
    change(net)
    config = TrainConfig(epochs=5, batch_size=16, learning_rate=0.01, energy_weight=0.05)
    parts = (data["numbers"], data["t"], data["numbers"][:9], data["t"][:9])
    result = train(net, parts, config)
    scores = {"scores": [epoch.val_score for epoch in result.history]}
    return weights_of(net) | history_of(result) | scores


def metric_start() -> Any:
    return CNNMetric(IMAGE, widths=(4, 4), key_dim=4, bounds=(0.0, 1.0), mean=0.5)


METRIC_CONFIG = MetricConfig(
    epochs=5, batch_size=15, learning_rate=1e-2, optimizer="sgd", n_neighbors=3
)


def train_key_net(data: Mapping[str, Tensor], change: Change, **options: Any) -> dict[str, Any]:
    net = metric_start()
    change(net)
    result = train_metric(net, (data["images"], data["kinds"]), METRIC_CONFIG, **options)
    return weights_of(net) | history_of(result) | {"resumed": result.resumed_after}


def train_robust_key_net(data: Mapping[str, Tensor], change: Change) -> dict[str, Any]:
    net = LipschitzMetric(IMAGE, widths=(8, 8), depth=1, key_dim=4, bounds=(0.0, 1.0))
    change(net)
    config = MetricConfig(
        epochs=5,
        batch_size=15,
        learning_rate=1e-2,
        optimizer="sgd",
        adversary=Adversary(0.2, steps=2, weight_share=0.01),
        references="bank",
        n_neighbors=3,
    )
    result = train_metric(net, (data["images"], data["kinds"]), config)
    return weights_of(net) | history_of(result)


def train_imitation(data: Mapping[str, Tensor], change: Change, **options: Any) -> dict[str, Any]:
    model = otad.load(MODELS / "local")
    net = CipNet(DIM, 5, width=8, blocks=1, heads=2, generator=torch.Generator().manual_seed(35))
    change(net)
    result = imitate(model, cip_net_config(5), net=net, held_out=6, **options).result
    missed = {"missed": [epoch.held_out_error for epoch in result.history]}
    return weights_of(net) | history_of(result) | missed | {"resumed": result.resumed_after}


def train_prototypes(data: Mapping[str, Tensor], change: Change) -> dict[str, Any]:
    bare = lifted_net((DIM,), CLASSES, blocks=0)
    net = prototype_net(bare, data["x"], data["y"], per_class=6, neighbors=3)
    change(net)
    config = TrainConfig(epochs=5, batch_size=15, learning_rate=0.05, loss="margin")
    result = train(net, (data["x"], data["y"]), config)
    return weights_of(net) | history_of(result)


SETTINGS = {"n_neighbors": 4, "n_blocks": 1, "hidden": 8, "epochs": 5, "random_state": 0}


def fit_classifier(data: Mapping[str, Tensor], change: Change) -> dict[str, Any]:
    x, names = data["x"].numpy(), np.array(["a", "b", "c"])[data["y"].numpy()]
    found = {}
    for scope in ("local", "global"):
        model = OTADClassifier(scope=scope, optimizer="sgd", **SETTINGS).fit(x, names)
        asked = x[:8] + 0.3
        found[f"{scope}/shares"] = model.predict_proba(asked)
        found[f"{scope}/labels"] = model.predict(asked)
        found[f"{scope}/radius"] = model.certify(asked).radius
        found[f"{scope}/loss"] = [epoch.loss for epoch in model.history_]
    return found


def fit_regressor(data: Mapping[str, Tensor], change: Change) -> dict[str, Any]:
    x, y = data["numbers"].numpy(), data["t"].numpy()
    found = {}
    for scope in ("local", "global"):
        model = OTADRegressor(scope=scope, optimizer="sgd", **SETTINGS).fit(x, y)
        asked = x[:8] + 0.3
        found[f"{scope}/values"] = model.predict(asked)
        interval = model.certify(asked, 0.1)
        found[f"{scope}/low"], found[f"{scope}/high"] = interval.low, interval.high
    return found


TRAININGS: dict[str, Callable[..., dict[str, Any]]] = {
    "backbone": train_backbone,
    "margins": train_for_margins,
    "vit": train_vit,
    "regression": train_values,
    "metric": train_key_net,
    "robust_metric": train_robust_key_net,
    "cip_net": train_imitation,
    "prototypes": train_prototypes,
    "classifier": fit_classifier,
    "regressor": fit_regressor,
}
# Those whose run, stopped after its first epoch, is kept on disk to go on from there.
RESUMED = ("backbone", "metric", "cip_net")


def training_answers(
    name: str, data: Mapping[str, Tensor], change: Change, **options: Any
) -> Arrays:
    found = TRAININGS[name](data, change, **options)
    return {f"{name}/{part}": as_array(value) for part, value in found.items()}


def run_command(*arguments: object) -> str:
    """What an `otad` command prints."""
    result = CliRunner().invoke(commands, [str(argument) for argument in arguments])
    if result.exit_code != 0:
        raise RuntimeError(f"{result.output}\n{result.exception!r}")
    return result.stdout


def command_answers(folder: Path, out: Path, x: Tensor) -> Arrays:
    """The net that `otad train` wrote, and the model that `otad defend` makes of it."""
    net = net_of_command(folder)
    run_command("defend", folder, "--out", out, "--neighbors", 4, "--data-dir", folder)
    model = otad.load(out)
    return {
        "net": as_array(net(x)),
        "model": as_array(model(x)),
        "classes": as_array(model.notes["classes"]),
    }


def bank_answers(path: Path) -> Arrays:
    """A bank from its file, mapped and in memory."""
    found: Arrays = {}
    for name, mmap in (("mapped", True), ("read", False)):
        bank = FeatureBank.load(path, mmap=mmap)
        inputs, features = bank.gather(torch.tensor([[0, 3], [44, 7]]))
        some = bank.subset(4, torch.Generator().manual_seed(1))
        found |= {f"{name}/inputs": inputs.numpy(), f"{name}/features": features.numpy()}
        found |= {f"{name}/labels": bank.labels.numpy(), f"{name}/subset": some.inputs.numpy()}
        found[f"{name}/fingerprint"] = as_array(bank.fingerprint)
    return found


# Keeping and comparing. A file holds all numbers of one kind in a row, and an index.

FLOAT32, FLOAT64, FOUND = (1e-4, 1e-5), (1e-9, 1e-11), (1e-3, 1e-5)
SOUGHT = ("distance", "gain", "error")


def tolerance_of(name: str, precise: bool) -> tuple[float, float]:
    """Relative and absolute: of what is computed in float64 from stored numbers, of what another
    processor may sum in another order in float32, or of what an attack finds by steps."""
    is_sought = name.startswith(("attack/", "evaluation/")) and name.endswith(SOUGHT)
    if is_sought:
        return FOUND
    return FLOAT64 if precise else FLOAT32


def agreement(found: np.ndarray, golden: np.ndarray, tolerance: tuple[float, float]) -> np.ndarray:
    """Where two arrays of one shape agree: numbers within the tolerance, all else exactly."""
    if golden.dtype.kind != "f":
        return np.asarray(found == golden)
    relative, absolute = tolerance
    return np.isclose(found, golden, rtol=relative, atol=absolute, equal_nan=True)


def undecided(name: str) -> str:
    return f"undecided/{name}"


def numbers_in(texts: np.ndarray) -> np.ndarray:
    """One text of numbers for each text."""
    return np.array([" ".join(re.findall(r"\d[\d.e+-]*", text)) for text in texts.tolist()])


def differences(found: Arrays, golden: Arrays, *, precise: bool = False) -> list[str]:
    """In words, everything in which answers differ from those kept, but for undecided places."""
    told = []
    kept = {name for name in golden if not name.startswith("undecided/")}
    for name in sorted(kept | found.keys()):
        if name not in found or name not in kept:
            told.append(f"{name}: {'no answer any more' if name in kept else 'a new answer'}")
            continue
        new, old = found[name], golden[name]
        if name.endswith("/assumptions"):  # the numbers in them, whatever the words are
            new, old = numbers_in(new), numbers_in(old)
        if new.shape != old.shape or new.dtype.kind != old.dtype.kind:
            told.append(f"{name}: {new.dtype} {new.shape} instead of {old.dtype} {old.shape}")
            continue
        excused = golden.get(undecided(name), np.zeros(old.shape, dtype=bool))
        wrong = ~agreement(new, old, tolerance_of(name, precise)) & ~excused
        if wrong.any():
            where = np.argwhere(wrong)[0].tolist()
            told.append(f"{name}: {new[wrong][:3]} instead of {old[wrong][:3]}, first at {where}")
    return told


def read_arrays(path: Path) -> Arrays:
    found: Arrays = {}
    with np.load(path, allow_pickle=False) as file:
        index = json.loads(str(file["index"]))
        packed = {kind: file[f"numbers{place}"] for place, kind in enumerate(index["order"])}
    used = dict.fromkeys(packed, 0)
    for name, kind, shape, texts in index["entries"]:
        if kind not in packed:
            found[name] = np.array(texts, dtype=kind).reshape(shape)
            continue
        count = math.prod(shape)
        found[name] = packed[kind][used[kind] : used[kind] + count].reshape(shape)
        used[kind] += count
    return found


def given_in(golden: Arrays) -> tuple[Tensor, Tensor]:
    """The queries and right answers of a file."""
    return torch.from_numpy(golden["given/x"]), torch.from_numpy(golden["given/y"])


def training_data_in(golden: Arrays) -> dict[str, Tensor]:
    given = only(golden, within="given/")
    return {name.removeprefix("given/"): torch.from_numpy(value) for name, value in given.items()}


def start_in(golden: Arrays, training: str) -> dict[str, Tensor]:
    """The weights a training started from."""
    prefix = f"start/{training}/"
    start = only(golden, within=prefix)
    return {name.removeprefix(prefix): torch.from_numpy(value) for name, value in start.items()}


def only(golden: Arrays, *, within: str = "", without: tuple[str, ...] = ()) -> Arrays:
    """Entries whose names begin so, and not so, undecided places with them."""
    return {
        name: value
        for name, value in golden.items()
        if name.removeprefix(undecided("")).startswith(within)
        and not name.removeprefix(undecided("")).startswith(without)
    }


def loaded(kind: str | Path) -> OTAD:
    """The model of a kind as its case says, or of another folder."""
    options = CASES[kind].loading if isinstance(kind, str) else {}
    return otad.load(MODELS / kind, **options)
