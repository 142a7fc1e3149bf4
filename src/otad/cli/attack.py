"""`otad attack`: one attack, what it breaks, and the inputs that do."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from otad.attacks.base import Attack, AttackResult, Target, gain_of
from otad.cli.console import progress_bar, show
from otad.cli.examples import Examples, Rows, Targets, class_names_of, open_examples
from otad.cli.inputs import training_inputs
from otad.cli.options import (
    AsJson,
    DataDir,
    Device,
    Input,
    ModelDir,
    check_device,
    seed_option,
)
from otad.cli.outputs import files_of, refuse_overwriting
from otad.cli.threat import Immutable, Norm, Scale, Unit, threat_to
from otad.errors import InputError
from otad.evaluate import ATTACKS, make_attack
from otad.io.codec import to_plain
from otad.io.files import replacing
from otad.model import otad as defense
from otad.model.otad import OTAD
from otad.scores import Score, score_of, share_score
from otad.threat import LpBall

PARTS = ("name", "model", "train_x", "network", "source", "substitute", "metric")
"""What attacks are made of beside their options, which no text can give."""


def attack(
    model_dir: ModelDir,
    input: Input,
    eps: Annotated[float, typer.Option(help="How far an input may be moved.")],
    name: Annotated[str, typer.Option("--attack", help=f"One of {', '.join(ATTACKS)}.")] = "pgd",
    option: Annotated[
        list[str] | None,
        typer.Option(help="An option of the attack, such as steps=100. Repeatable."),
    ] = None,
    norm: Norm = "l2",
    immutable: Immutable = None,
    unit: Unit = None,
    scale: Scale = None,
    targets: Targets = None,
    rows: Rows = None,
    seed: Annotated[int, seed_option("Of the attack, and of the rows --rows draws.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Also write the inputs it found, as an NPZ file.", dir_okay=False),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Rows at a time.", min=1)] = 500,
    data_dir: DataDir = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Attack a model once, and tell how many of its answers stand.

    One attack can show that a model is weak, never that it is strong: see `otad
    evaluate` and `otad certify`. The file of --out holds x, y, adversarial,
    broken (the answer there is wrong), distance and row.

    Example: otad attack digits-model test --attack pgd --norm l2 --eps 0.5

    Example: otad attack wine-model wines.csv --norm linf --eps 0.1 --unit std
    """
    if out is not None and out.suffix.lower() != ".npz":
        raise InputError(f"out: expected a name that ends in .npz, got {out.name}")
    options = read_options(option or ())
    model = defense.load(model_dir, device=str(check_device(device)))
    refuse_overwriting(out, input, targets, scale, *files_of(model, model_dir, data_dir))
    ball = threat_to(model, norm, eps, immutable=immutable, unit=unit, scale=scale)
    chosen = make_attack(name, model, train_x=training_inputs(model, data_dir), **options)
    examples = open_examples(model, input, targets=targets, data_dir=data_dir, rows=rows, seed=seed)
    y = examples.answers
    found = _run(chosen, model, examples, ball, seed=seed, batch_size=batch_size)
    if out is not None:
        _write(out, model, examples, found)
    record = {
        "attack": name,
        "options": options,
        "threat": ball.to_dict(),
        "rows": len(examples),
        "seed": seed,
        "clean": _clean_score(model, examples, batch_size),
        "attacked": _score(found.broken, found.gain, y),
        "forwards": int(found.forwards.sum()),
        "backwards": int(found.backwards.sum()),
        "seconds": found.seconds,
        "adversarial": None if out is None else str(out),
    }
    show(
        to_plain(record),
        as_json,
        title=f"Attacked {len(examples)} rows by {name}",
        facts=_facts(record, ball.describe()),
    )


def read_options(given: Sequence[str]) -> dict[str, Any]:
    """From name=value: numbers, lists, true, false and null as in JSON, all else as text."""
    options: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name.isidentifier() and equals):
            raise InputError(f"option: expected name=value such as steps=100, got {text!r}")
        if name in options:
            raise InputError(f"option: expected each name once, got {name} more than once")
        if name in PARTS:
            raise InputError(f"option: expected none that is part of the model, got {name}")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def describe_score(score: Score) -> str:
    """The value with the 95% interval that its number of rows allows."""
    if score.metric == "accuracy":
        return f"{score.value:.1f}% [{score.low:.1f}, {score.high:.1f}], n = {score.n:,}"
    if math.isinf(score.high):  # one error alone does not tell how much errors differ
        return f"{score.value:.4g}, n = {score.n:,}"
    return f"{score.value:.4g} [{score.low:.4g}, {score.high:.4g}], n = {score.n:,}"


def _run(
    attack: Attack, model: OTAD, examples: Examples, ball: LpBall, *, seed: int, batch_size: int
) -> AttackResult:
    """One result for all rows, a batch at a time."""
    x, y = examples.x, examples.answers
    generator = torch.Generator().manual_seed(seed)
    parts = []
    with progress_bar(f"attacking by {attack.name}") as advance:
        for some in _batches(len(x), batch_size):
            parts.append(attack(model, x[some], y[some], ball, generator=generator))
            advance(some.stop, len(x))
    tensors = {
        name: torch.cat([getattr(part, name) for part in parts])
        for name, value in vars(parts[0]).items()
        if isinstance(value, Tensor)
    }
    return AttackResult(**tensors, seconds=sum(part.seconds for part in parts))


def _batches(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _clean_score(model: OTAD, examples: Examples, batch_size: int) -> Score:
    x, y = examples.x, examples.answers
    broken, gain = [], []
    for some in _batches(len(x), batch_size):
        target = Target(model, y[some])
        outputs = target(x[some])
        broken.append(target.is_broken(outputs))
        gain.append(gain_of(outputs, y[some]))
    return _score(torch.cat(broken), torch.cat(gain), y)


def _score(broken: Tensor, gain: Tensor, y: Tensor) -> Score:
    """The share of right answers; in regression, where the gain is |f - y|, its mean square."""
    if y.is_floating_point():
        return score_of(gain, torch.zeros_like(gain))
    return share_score(int((~broken).sum()), len(y))


def _facts(record: dict[str, Any], threat: str) -> dict[str, str]:
    metric = record["clean"].metric
    facts = {
        "threat": threat,
        f"{metric} unattacked": describe_score(record["clean"]),
        f"{metric} under {record['attack']}": describe_score(record["attacked"]),
        "queries": f"{record['forwards']:,} answers, {record['backwards']:,} gradients",
        "time": f"{record['seconds']:.1f} s",
    }
    if record["adversarial"] is not None:
        facts["inputs found"] = record["adversarial"]
    return facts


def _write(out: Path, model: OTAD, examples: Examples, found: AttackResult) -> None:
    """Labels are in the user's own words, so that the file can be an input of commands."""
    y, classes = examples.answers.cpu(), class_names_of(model)
    arrays: dict[str, Any] = {
        "x": examples.x.cpu().numpy(),
        "y": np.array([classes[label] for label in y.tolist()]) if classes else y.numpy(),
        "adversarial": found.inputs.cpu().numpy(),
        "broken": found.broken.cpu().numpy(),
        "distance": found.distance.cpu().numpy(),
        "row": np.array(examples.names),
    }
    with replacing(out) as partial, partial.open("wb") as stream:
        np.savez(stream, **arrays)
