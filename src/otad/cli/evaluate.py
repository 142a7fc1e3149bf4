"""`otad evaluate`: the worst case over many attacks, certificates, and checks of the attacks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer

from otad.checks import check_choice
from otad.cli import options as opt
from otad.cli.console import attack_bar, describe_score, show
from otad.cli.inputs import class_names_of, open_examples
from otad.cli.sources import files_of, refuse_overwriting, training_inputs
from otad.errors import InputError
from otad.evaluate import ATTACKS, PRESETS
from otad.evaluate import evaluate as evaluate_model
from otad.evaluate.records import FAIL, NOT_RUN, PASS, Evaluation
from otad.io.codec import to_plain
from otad.model import otad as models


def evaluate(
    model_dir: opt.ModelDir,
    input: opt.Input,
    eps: Annotated[
        str, typer.Option(help="How far an input may be changed: one radius, or several: 0.5,1,2.")
    ],
    headline: Annotated[
        float | None,
        typer.Option(help="The radius of the headline figure; by default the first of --eps."),
    ] = None,
    suite: Annotated[
        str, typer.Option(help=f"Which attacks to run: {', '.join(PRESETS)}.")
    ] = "standard",
    attack: Annotated[
        list[str] | None,
        typer.Option(help=f"Run this attack instead of a suite. Repeatable: {', '.join(ATTACKS)}."),
    ] = None,
    norm: opt.Norm = "l2",
    immutable: opt.Immutable = None,
    unit: opt.Unit = None,
    scale: opt.Scale = None,
    all_rows: Annotated[
        bool,
        typer.Option(
            "--all-rows",
            help="Run every attack on every row, even on those already broken: more expensive, but "
            "the attacks can be compared.",
        ),
    ] = False,
    spare_proved: Annotated[
        list[str] | None,
        typer.Option(
            help="Skip this attack on rows whose certificate covers the radius: no attack can "
            "break those. Repeatable."
        ),
    ] = None,
    no_flags: Annotated[
        bool,
        typer.Option(
            "--no-flags",
            help="Skip the checks for attacks that are too weak. Whether an attack refutes a "
            "certificate is always checked.",
        ),
    ] = False,
    embedding_lipschitz: opt.EmbeddingLipschitz = None,
    metric_lipschitz: opt.MetricLipschitz = None,
    targets: opt.Targets = None,
    rows: opt.Rows = None,
    seed: Annotated[int, opt.seed_option("Seed of the attacks, and of the rows --rows draws.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the results.", file_okay=False)] = Path(
        "evaluation"
    ),
    batch_size: opt.BatchSize = 250,
    data_dir: opt.DataDir = None,
    device: opt.Device = "cpu",
    as_json: opt.AsJson = False,
) -> None:
    """Attack a model by a suite of attacks, certify it, and write a report.

    The headline is the share of rows that are right and that no attack breaks.
    Finished batches are stored in --out: after an interruption, the same command
    resumes. Writes evaluation.json, report.html and report.md.

    Exit code 1 means that an attack refuted a certificate, which is a bug.

    Example: otad evaluate digits-model test --eps 0.5,1,2 --headline 1

    Example: otad evaluate wine-model test --norm linf --eps 0.1 --unit std --immutable alcohol
    """
    from otad.report.evaluation_report import evaluation_report
    from otad.report.examples import Adversarial

    radii = opt.read_radii(eps)
    if headline is not None and headline not in radii:
        raise InputError(f"headline: expected one of --eps {eps}, got {headline:g}")
    check_choice(suite, "suite", tuple(PRESETS))
    model = models.load(model_dir, device=str(opt.check_device(device)))
    refuse_overwriting(out, input, targets, scale, *files_of(model, model_dir, data_dir))
    threat = opt.threat_to(
        model,
        norm,
        radii[0] if headline is None else headline,
        immutable=immutable,
        unit=unit,
        scale=scale,
    )
    examples = open_examples(model, input, targets=targets, data_dir=data_dir, rows=rows, seed=seed)
    x, y, train_x = examples.x, examples.targets, training_inputs(model, data_dir)
    with attack_bar(of_values=y.is_floating_point()) as progress:
        evaluation = evaluate_model(
            model,
            x,
            y,
            threat,
            eps=sorted(radii),
            attacks=list(attack) if attack else suite,
            survivors_only=not all_rows,
            spare_proved=spare_proved or (),
            embedding_lipschitz=embedding_lipschitz,
            metric_lipschitz=metric_lipschitz,
            train_x=train_x,
            flags=not no_flags,
            seed=seed,
            batch_size=batch_size,
            folder=out,
            progress=progress,
        )
    report = evaluation_report(
        evaluation,
        model=model,
        x=x,
        y=y,
        adversarial=Adversarial.read(out / "adversarial.safetensors"),
        classes=class_names_of(model) or None,
        feature_names=model.notes.get("feature_names"),
        train_x=train_x,
        title=f"How robust is {model_dir.resolve().name}?",
    )
    files = {
        "evaluation": out / "evaluation.json",
        "report": report.write(out / "report.html"),
        "markdown": report.write(out / "report.md"),
    }
    show(
        _record(evaluation) | {name: str(path) for name, path in files.items()},
        as_json,
        title=f"Evaluated {len(examples)} rows, {threat.describe()}",
        facts=_facts(evaluation) | {name: str(path) for name, path in files.items()},
    )
    if not evaluation.is_sound:
        raise typer.Exit(1)


def _record(evaluation: Evaluation) -> dict[str, object]:
    """A summary of the record, which is written to its own file."""
    names = ("task", "seed", "threat", "eps", "clean", "missing", "is_sound", "seconds")
    found: dict[str, object] = {name: getattr(evaluation, name) for name in names}
    found["rows"] = evaluation.n
    found["flags"] = {flag.name: flag.verdict for flag in evaluation.flags}

    def at_each(value: Callable[[float], object]) -> dict[str, object]:
        return {opt.radius_text(eps): value(eps) for eps in evaluation.eps}

    if evaluation.task == "classification":
        found["worst_case"] = at_each(evaluation.worst_case)
        found["certified"] = at_each(evaluation.certified_accuracy)
        found["per_attack"] = evaluation.per_attack
    else:
        found["mean_worst_error"] = at_each(lambda eps: fmean(evaluation.worst_errors(eps)))
        if evaluation.certificate is not None:
            found["mean_certified_error"] = fmean(evaluation.certificate.worst_errors)
    plain: dict[str, object] = to_plain(found)
    return plain


def _facts(evaluation: Evaluation) -> dict[str, str]:
    facts = {
        f"clean {score.metric}, {name}": describe_score(score)
        for name, score in evaluation.clean.items()
    }
    for eps in evaluation.eps:
        radius = opt.radius_text(eps)
        mark = " (headline)" if eps == evaluation.headline_eps else ""
        if evaluation.task == "regression":
            worst = fmean(evaluation.worst_errors(eps))
            facts[f"worst |f - y| at {radius}{mark}"] = f"{worst:.4g} on average"
            if mark and evaluation.certificate is not None:
                bound = fmean(evaluation.certificate.worst_errors)
                facts[f"certified |f - y| at {radius}"] = f"at most {bound:.4g} on average"
            continue
        facts[f"worst case at {radius}{mark}"] = describe_score(evaluation.worst_case(eps))
        if (proved := evaluation.certified_accuracy(eps)) is not None:
            facts[f"certified at {radius}"] = describe_score(proved)
    facts["attacks"] = ", ".join(dict.fromkeys(record.attack for record in evaluation.attacks))
    for name, reason in evaluation.missing.items():
        facts[f"not run: {name}"] = reason
    verdicts = [flag.verdict for flag in evaluation.flags]
    facts["flags"] = ", ".join(
        f"{verdicts.count(verdict)} {verdict}" for verdict in (PASS, FAIL, NOT_RUN)
    )
    for flag in evaluation.flags:
        if flag.verdict == FAIL:
            facts[f"FAIL: {flag.name}"] = flag.found
    return facts | {"time": f"{evaluation.seconds:.0f} s"}
