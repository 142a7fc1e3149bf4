"""`otad attack`: one attack, what it breaks, and the inputs it found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import nn

from otad.attacks.base import Attack, AttackResult
from otad.checks import require
from otad.cli import options as opt
from otad.cli.console import describe_score, remark, show, usual_progress
from otad.cli.inputs import Examples, open_examples
from otad.cli.outputs import STDOUT, check_out
from otad.cli.sources import module_of, open_model_or_net, training_inputs
from otad.evaluate import ATTACKS, make_attack
from otad.evaluate.runner import advice_on_size
from otad.io.codec import to_plain
from otad.io.files import replacing
from otad.model.names import Described, class_names_of
from otad.progress import progress_bar
from otad.scores import score_of, share_score
from otad.threat import LpBall

# Arguments of attacks that cannot be given as text.
NOT_OPTIONS = ("name", "model", "train_x", "network", "source", "substitute", "metric", "stand_in")


def attack(
    model_dir: opt.ModelOrNet,
    input: opt.Input,
    eps: Annotated[float, opt.option("The largest change of an input.")],
    name: Annotated[
        str, opt.option(f"The attack: {', '.join(ATTACKS)}.", "--attack", **opt.among(ATTACKS))
    ] = "pgd",
    option: Annotated[
        opt.Names, opt.option("Option of the attack, such as steps=100. Repeatable.")
    ] = None,
    norm: opt.Norm = "l2",
    immutable: opt.Immutable = None,
    unit: opt.Unit = None,
    scale: opt.Scale = None,
    targets: opt.Targets = None,
    rows: opt.Rows = None,
    seed: opt.Seed = 0,
    out: Annotated[
        Path | None,
        opt.option("NPZ file for the inputs found; - prints JSON to stdout.", dir_okay=False),
    ] = None,
    force: opt.Force = False,
    batch_size: opt.BatchSize = 500,
    data_dir: opt.DataDir = None,
    device: opt.Device = "cpu",
    as_json: opt.AsJson = False,
) -> None:
    """Run one attack on a model, and report how many predictions stay right.

    The model is a defended model, or a network that `otad train` wrote. A single attack
    can show that a model is weak, but not that it is strong. For that, use `otad
    evaluate` and `otad certify`. The file of --out has the arrays x, y, adversarial,
    broken (whether the adversarial input is answered wrongly), distance and row.

    Example: otad attack digits-model test --attack pgd --norm l2 --eps 0.5

    Example: otad attack wine-model wines.csv --norm linf --eps 0.1
    """
    named = out in (None, STDOUT) or Path(out or "").suffix.lower() == ".npz"
    require(named, "out", "a name that ends in .npz, or -", out)
    options = read_options(option or ())
    model = open_model_or_net(model_dir, device, data_dir, out, input, targets, scale)
    module = module_of(model)
    check_out(out, force, as_json)
    ball = opt.threat_to(model, norm, eps, immutable=immutable, unit=unit, scale=scale)
    chosen = make_attack(name, module, train_x=training_inputs(model, data_dir, input), **options)
    examples = open_examples(model, input, targets=targets, data_dir=data_dir, rows=rows, seed=seed)
    y = examples.targets
    if advice := advice_on_size(ball, examples.x):
        remark(f"note: {advice}")
    with torch.no_grad():
        outputs = torch.cat([module(part) for part in examples.x.split(batch_size)])
    clean = score_of(outputs, y)
    found = _run(chosen, module, examples, ball, seed, batch_size)
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
        **{name: int(getattr(found, name).sum()) for name in ("forwards", "backwards")},
        "seconds": found.seconds,
        "adversarial": None if out is None else str(out),
    }
    facts = {
        "threat": ball.describe(),
        f"{clean.metric} without attack": describe_score(clean),
        f"{clean.metric} under {name}": describe_score(attacked),
        "cost": f"{record['forwards']:,} predictions, {record['backwards']:,} gradients",
        "time": f"{found.seconds:.1f} s",
    }
    if out is not None:
        arrays = _arrays(model, examples, found)
        facts["inputs found"] = str(out)
        if out == STDOUT:
            listed = {name: array.tolist() for name, array in arrays.items()}
            typer.echo(json.dumps(to_plain(record | listed), allow_nan=False))
        else:
            with replacing(out) as partial, partial.open("wb") as stream:
                np.savez(stream, **arrays)
    show(record, as_json, title=f"Attacked {len(examples)} rows with {name}", facts=facts, out=out)


def read_options(given: Sequence[str]) -> dict[str, Any]:
    """Read name=value: numbers, lists, true, false and null as in JSON, everything else as text."""
    options: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        require(name.isidentifier() and equals, "option", "name=value", repr(text))
        require(name not in options, "option", "each name once", f"{name} again")
        require(
            name not in NOT_OPTIONS,
            "option",
            "an option of the attack, not a part of the model",
            name,
        )
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def _run(
    attack: Attack, model: nn.Module, examples: Examples, ball: LpBall, seed: int, batch_size: int
) -> AttackResult:
    """Attack all rows, one batch at a time, and return one result."""
    x, y = examples.x.split(batch_size), examples.targets.split(batch_size)
    generator = torch.Generator().manual_seed(seed)
    parts: list[dict[str, Any]] = []
    with progress_bar(f"attacking with {attack.name}", usual_progress()) as advance:
        for some in zip(x, y, strict=True):
            parts.append(vars(attack(model, *some, ball, generator=generator)))
            advance(sum(len(part["inputs"]) for part in parts), len(examples))
    values = {name: [part[name] for part in parts] for name in parts[0]}
    seconds = sum(values.pop("seconds"))
    tensors = {name: torch.cat(value) for name, value in values.items()}
    return AttackResult(**tensors, seconds=seconds)


def _arrays(model: Described, examples: Examples, found: AttackResult) -> dict[str, Any]:
    """Return the arrays to write; labels are class names, so that commands can read the file."""
    tensors = {"adversarial": found.inputs, "broken": found.broken, "distance": found.distance}
    arrays: dict[str, Any] = {name: tensor.cpu().numpy() for name, tensor in tensors.items()}
    y, classes = examples.targets.cpu(), class_names_of(model)
    labels = np.array([classes[label] for label in y.tolist()]) if classes else y.numpy()
    return arrays | {"x": examples.x.cpu().numpy(), "y": labels, "row": np.array(examples.names)}
