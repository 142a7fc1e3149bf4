"""`otad attack`: one attack, what it breaks, and the inputs it found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from otad.attacks.base import Attack, AttackResult
from otad.checks import require
from otad.cli import options as opt
from otad.cli.console import describe_score, progress_bar, show
from otad.cli.inputs import Examples, class_names_of, open_examples
from otad.cli.sources import open_model, training_inputs
from otad.evaluate import ATTACKS, make_attack
from otad.io.files import replacing
from otad.model.otad import OTAD
from otad.scores import score_of, share_score
from otad.threat import LpBall

NOT_OPTIONS = ("name", "model", "train_x", "network", "source", "substitute", "metric")
"""Arguments of attacks that no text can give."""


def attack(
    model_dir: opt.ModelDir,
    input: opt.Input,
    eps: Annotated[float, opt.option("How far an input may be changed.")],
    name: Annotated[str, opt.option(f"One of {', '.join(ATTACKS)}.", "--attack")] = "pgd",
    option: Annotated[
        list[str] | None, opt.option("An option of the attack, such as steps=100. Repeatable.")
    ] = None,
    norm: opt.Norm = "l2",
    immutable: opt.Immutable = None,
    unit: opt.Unit = None,
    scale: opt.Scale = None,
    targets: opt.Targets = None,
    rows: opt.Rows = None,
    seed: opt.Seed = 0,
    out: Annotated[
        Path | None, opt.option("NPZ file for the inputs it found.", dir_okay=False)
    ] = None,
    batch_size: opt.BatchSize = 500,
    data_dir: opt.DataDir = None,
    device: opt.Device = "cpu",
    as_json: opt.AsJson = False,
) -> None:
    """Run one attack on a model, and report how many of its predictions remain right.

    One attack can show that a model is weak, never that it is strong: see `otad
    evaluate` and `otad certify`. The file of --out contains x, y, adversarial,
    broken (the prediction there is wrong), distance and row.

    Example: otad attack digits-model test --attack pgd --norm l2 --eps 0.5

    Example: otad attack wine-model wines.csv --norm linf --eps 0.1 --unit std
    """
    if out is not None:
        require(out.suffix.lower() == ".npz", "out", "a name that ends in .npz", out.name)
    options = read_options(option or ())
    model = open_model(model_dir, device, data_dir, out, input, targets, scale)
    ball = opt.threat_to(model, norm, eps, immutable=immutable, unit=unit, scale=scale)
    chosen = make_attack(name, model, train_x=training_inputs(model, data_dir), **options)
    examples = open_examples(model, input, targets=targets, data_dir=data_dir, rows=rows, seed=seed)
    y = examples.targets
    with torch.no_grad():
        outputs = torch.cat([model(part) for part in examples.x.split(batch_size)])
    clean = score_of(outputs, y)
    found = _run(chosen, model, examples, ball, seed=seed, batch_size=batch_size)
    if y.is_floating_point():  # the gain is |f - y|
        attacked = score_of(found.gain, torch.zeros_like(found.gain))
    else:
        attacked = share_score(int((~found.broken).sum()), len(y))
    record = {
        "attack": name,
        "options": options,
        "threat": ball.to_dict(),
        "rows": len(examples),
        "seed": seed,
        "clean": clean,
        "attacked": attacked,
        "forwards": int(found.forwards.sum()),
        "backwards": int(found.backwards.sum()),
        "seconds": found.seconds,
        "adversarial": None if out is None else str(out),
    }
    facts = {
        "threat": ball.describe(),
        f"{clean.metric} unattacked": describe_score(clean),
        f"{clean.metric} under {name}": describe_score(attacked),
        "queries": f"{record['forwards']:,} predictions, {record['backwards']:,} gradients",
        "time": f"{found.seconds:.1f} s",
    }
    if out is not None:
        _write(out, model, examples, found)
        facts["inputs found"] = str(out)
    show(record, as_json, title=f"Attacked {len(examples)} rows by {name}", facts=facts)


def read_options(given: Sequence[str]) -> dict[str, Any]:
    """From name=value: numbers, lists, true, false and null as in JSON, all else as text."""
    options: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        require(name.isidentifier() and equals, "option", "name=value", repr(text))
        require(name not in options, "option", "each name once", f"{name} again")
        require(name not in NOT_OPTIONS, "option", "none that is part of the model", name)
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def _run(
    attack: Attack, model: OTAD, examples: Examples, ball: LpBall, *, seed: int, batch_size: int
) -> AttackResult:
    """One result for all rows, a batch at a time."""
    x, y = examples.x, examples.targets
    generator = torch.Generator().manual_seed(seed)
    parts: list[AttackResult] = []
    with progress_bar(f"attacking by {attack.name}") as advance:
        for some in zip(x.split(batch_size), y.split(batch_size), strict=True):
            parts.append(attack(model, *some, ball, generator=generator))
            advance(sum(len(part.inputs) for part in parts), len(x))
    tensors = {
        name: torch.cat([getattr(part, name) for part in parts])
        for name, value in vars(parts[0]).items()
        if isinstance(value, Tensor)
    }
    return AttackResult(**tensors, seconds=sum(part.seconds for part in parts))


def _write(out: Path, model: OTAD, examples: Examples, found: AttackResult) -> None:
    """Labels are written as class names, so that the file can be an input of commands."""
    y, classes = examples.targets.cpu(), class_names_of(model)
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
