"""`otad evaluate`: the worst case over many attacks, certificates, and checks of the attacks."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from torch import Tensor

from otad.checks import check_choice, require
from otad.cli import options as opt
from otad.cli.console import describe_counts, describe_score, show, usual_progress
from otad.cli.inputs import open_examples
from otad.cli.outputs import STDOUT, check_out
from otad.cli.sources import TrainedNet, module_of, open_model_or_net, training_inputs
from otad.evaluate import ATTACKS, PRESETS
from otad.evaluate import evaluate as evaluate_model
from otad.evaluate.identity import DEFENDED, MAJORITY, MEAN_FEATURE, NET
from otad.evaluate.records import FAIL, NOT_RUN, PASS, Evaluation
from otad.evaluate.runner import REPORTS
from otad.io.codec import to_plain
from otad.model.folder import note_evaluation
from otad.model.names import class_names_of
from otad.model.otad import OTAD
from otad.report.evaluation_report import evaluation_report
from otad.report.examples import Adversarial
from otad.report.page import Report

HOW = (
    "skip_proved", "embedding_lipschitz", "metric_lipschitz", "within_bounds", "seed", "batch_size",
)  # fmt: skip
_NAMES = {
    DEFENDED: "defended model",
    NET: "network alone",
    MAJORITY: "k-NN by majority",
    MEAN_FEATURE: "k-NN by mean feature",
}


def evaluate(
    model_dir: opt.ModelOrNet,
    input: opt.Input,
    eps: Annotated[str, opt.option("The largest changes of an input, such as 0.5,1,2.")],
    headline: Annotated[
        float | None,
        opt.option("The eps of the headline figure.", show_default="the first of --eps"),
    ] = None,
    suite: Annotated[
        str, opt.option(f"Suite of attacks: {', '.join(PRESETS)}.", **opt.among(PRESETS))
    ] = "standard",
    attack: Annotated[
        opt.Names,
        opt.option(
            f"Run this attack instead of a suite. Repeatable: {', '.join(ATTACKS)}.",
            **opt.among(ATTACKS),
        ),
    ] = None,
    norm: opt.Norm = "l2",
    immutable: opt.Immutable = None,
    unit: opt.Unit = None,
    scale: opt.Scale = None,
    all_rows: Annotated[
        bool, opt.option("Run every attack on all rows, also on broken ones.", "--all-rows")
    ] = False,
    skip_proved: Annotated[
        opt.Names,
        opt.option("Do not run this attack on certified rows. Repeatable.", **opt.among(ATTACKS)),
    ] = None,
    no_flags: Annotated[
        bool, opt.option("Do not check the strength of the attacks.", "--no-flags")
    ] = False,
    embedding_lipschitz: opt.EmbeddingLipschitz = None,
    metric_lipschitz: opt.MetricLipschitz = None,
    within_bounds: opt.WithinBounds = False,
    targets: opt.Targets = None,
    rows: opt.Rows = None,
    seed: opt.Seed = 0,
    out: opt.OutFolder = Path("evaluation"),
    force: opt.Force = False,
    batch_size: opt.BatchSize = 250,
    card: Annotated[bool, opt.option("Add the figures to the model's card.", "--card")] = False,
    data_dir: opt.DataDir = None,
    device: opt.Device = "cpu",
    jobs: opt.Jobs = 1,
    cluster: opt.Cluster = None,
    as_json: opt.AsJson = False,
) -> None:
    """Attack a model with a suite of attacks, certify it, and write a report.

    The model is a defended model, or a network that `otad train` wrote. The network
    inside a defended model is attacked alone as well, to show the gain. The headline is
    the share of rows that are right and that no attack breaks. Finished batches are
    saved in --out. After an interruption the same command resumes, also with another
    number of processes. The command writes evaluation.json, report.html and report.md;
    --out - only prints the record. Use --force to replace a finished evaluation.

    Exit code 1 means that an attack refuted a certificate, which is a bug.

    Example: otad evaluate digits-model test --eps 0.5,1,2 --headline 1

    Example: otad evaluate wine-model test --norm linf --eps 0.1 --immutable alcohol
    """
    how = opt.given(locals(), HOW)
    radii = opt.read_radii(eps)
    radius = radii[0] if headline is None else headline
    require(radius in radii, "headline", f"one of --eps {eps}", f"{radius:g}")
    check_choice(suite, "suite", tuple(PRESETS))
    model = open_model_or_net(model_dir, device, data_dir, out, input, targets, scale)
    defended = model if isinstance(model, OTAD) else None
    require(
        not card or defended, "--card", "a defended model", "a network alone, which has no card"
    )
    results = [] if out == STDOUT else ["evaluation.json", *REPORTS]
    check_out(out, force, as_json, results=results, started="parts")
    threat = opt.threat_to(model, norm, radius, immutable=immutable, unit=unit, scale=scale)
    examples = open_examples(model, input, targets=targets, data_dir=data_dir, rows=rows, seed=seed)
    x, y, train_x = examples.x, examples.targets, training_inputs(model, data_dir, input)
    how |= {"eps": sorted(radii), "attacks": list(attack) if attack else suite, "train_x": train_x}
    how |= {"survivors_only": not all_rows, "flags": not no_flags, "progress": usual_progress()}
    how["folder"] = None if out == STDOUT else out
    with opt.executor_of(jobs, cluster, device) as executor, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* equal training points")  # `open_examples` said so
        warnings.filterwarnings("ignore", ".* earlier evaluation")  # its report is written below
        evaluation = evaluate_model(module_of(model), x, y, threat, executor=executor, **how)
    evaluation = replace(evaluation, names=examples.names)
    if card and defended is not None:
        about = {"interface": defended.interface()}
        note_evaluation(model_dir, evaluation, defended.describe(), **about)
    if out == STDOUT:
        typer.echo(json.dumps(to_plain(evaluation), allow_nan=False))
        raise typer.Exit(0 if evaluation.is_sound else 1)
    evaluation.write(out / "evaluation.json")  # again, with the names
    title = f"How robust is {model_dir.resolve().name}?"
    named: dict[str, Any] = {"train_x": train_x, "title": title, "source": input}
    report = report_on(evaluation, model, x, y, out, **named)
    files = {
        "evaluation": str(out / "evaluation.json"),
        "report": str(report.write(out / "report.html")),
        "markdown": str(report.write(out / "report.md")),
    }
    title = f"Evaluated {len(examples)} rows, {threat.describe()}"
    record = {"verdict": list(report.verdict), **_record(evaluation), **files}
    facts = _facts(evaluation) | files
    show(record, as_json, title=title, facts=facts, verdict=report.verdict)
    if not evaluation.is_sound:
        raise typer.Exit(1)


def report_on(
    evaluation: Evaluation,
    model: OTAD | TrainedNet,
    x: Tensor,
    y: Tensor,
    folder: Path,
    *,
    source: str,
    **options: Any,
) -> Report:
    """Return the report of an evaluation in a folder; `options` of `evaluation_report`."""
    options |= {"model": module_of(model), "x": x, "y": y, "classes": class_names_of(model) or None}
    options["feature_names"] = model.notes.get("feature_names")
    options["adversarial"] = Adversarial.read(folder / "adversarial.safetensors")
    options.setdefault("examples", "test examples" if source == "test" else "examples")
    return evaluation_report(evaluation, **options)


def _record(evaluation: Evaluation) -> dict[str, object]:
    """Return a summary of the record, which is written to its own file."""
    names = ("task", "seed", "threat", "eps", "clean", "missing", "is_sound", "seconds")
    found: dict[str, object] = {name: getattr(evaluation, name) for name in names}
    found["rows"] = evaluation.n
    found["flags"] = {flag.name: flag.verdict for flag in evaluation.checks}
    alone = evaluation.undefended
    found["undefended"] = evaluation.undefended_reason or None if alone is None else _record(alone)
    radii = {opt.radius_text(eps): eps for eps in evaluation.eps}
    if evaluation.task == "classification":
        found["worst_case"] = {text: evaluation.worst_case(eps) for text, eps in radii.items()}
        proved = {text: evaluation.certified_accuracy(eps) for text, eps in radii.items()}
        if evaluation.certificate_within_bounds is not None:
            found["certified_within_bounds"] = {
                text: evaluation.certified_accuracy(eps, within_bounds=True)
                for text, eps in radii.items()
            }
        return found | {"certified": proved, "per_attack": evaluation.per_attack}
    errors = {text: fmean(evaluation.worst_errors(eps)) for text, eps in radii.items()}
    found["mean_worst_error"] = errors
    if evaluation.certificate is not None:
        found["mean_certified_error"] = fmean(evaluation.certificate.worst_errors)
    return found


def _facts(evaluation: Evaluation) -> dict[str, str]:
    alone, names = evaluation.undefended, dict(_NAMES)
    if evaluation.task == "regression":
        names[MAJORITY] = "k-NN by mean value"
    facts = {
        f"clean {score.metric}, {names.get(name, name)}": describe_score(score)
        for name, score in evaluation.clean.items()
    }
    for eps in evaluation.eps:
        radius = opt.radius_text(eps)
        mark = " (headline)" if eps == evaluation.headline_eps else ""
        if evaluation.task == "regression":
            worst = fmean(evaluation.worst_errors(eps))
            facts[f"worst |f - y| at {radius}{mark}"] = f"{worst:.4g} on average"
            if alone is not None:
                worst = fmean(alone.worst_errors(eps))
                facts[f"undefended network at {radius}"] = f"{worst:.4g} on average"
            if mark and evaluation.certificate is not None:
                bound = fmean(evaluation.certificate.worst_errors)
                facts[f"certified |f - y| at {radius}"] = f"at most {bound:.4g} on average"
            continue
        facts[f"worst case at {radius}{mark}"] = describe_score(evaluation.worst_case(eps))
        if alone is not None:
            facts[f"undefended network at {radius}"] = describe_score(alone.worst_case(eps))
        if (proved := evaluation.certified_accuracy(eps)) is not None:
            facts[f"certified at {radius}"] = describe_score(proved)
        if (proved := evaluation.certified_accuracy(eps, within_bounds=True)) is not None:
            facts[f"certified at {radius} within bounds"] = describe_score(proved)
    facts["attacks"] = ", ".join(dict.fromkeys(record.attack for record in evaluation.attacks))
    facts |= {f"not run: {name}": reason for name, reason in evaluation.missing.items()}
    count, checks = evaluation.verdicts, evaluation.checks
    facts["flags"] = describe_counts({name: count[name] for name in (PASS, FAIL, NOT_RUN)})
    failed = {f"FAIL: {flag.name}": flag.found for flag in checks if flag.verdict == FAIL}
    return facts | failed | {"time": f"{evaluation.seconds:.0f} s"}
