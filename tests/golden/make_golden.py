"""Make the models in `models/` and the answers beside it, by the code as it is.

Run it in the folder `tests` as `python -m golden.make_golden`, all of it or the kinds named, and
only where answers are meant to change. Every answer is asked for again with inputs that are
disturbed by a few roundings: places where that shows are marked as undecided for what attacks find,
and refused everywhere else.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from golden.cases import (
    CASES,
    HERE,
    MODELS,
    RESUMED,
    TRAININGS,
    Arrays,
    Case,
    agreement,
    answers_of,
    asked_of,
    attack_answers,
    bank_answers,
    command_answers,
    evaluation_answers,
    evaluation_of,
    flag_answers,
    local,
    run_command,
    table,
    tolerance_of,
    training_answers,
    training_data,
    undecided,
    write_arrays,
)
from torch import Tensor, nn

import otad

SEEDS = (1, 2)
SHARE = 0.3  # of the tolerance that a few roundings may use up


class UndecidedError(Exception):
    """An answer that roundings decide."""


def disturbed(x: Tensor, seed: int, bounds: tuple[float, float] | None = None) -> Tensor:
    """Inputs that are off by a few units of the last place."""
    size = 3e-7 if x.dtype == torch.float32 else 3e-16
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)
    moved = x * (1 + size * noise)
    return moved if bounds is None else moved.clamp(*bounds)


def decided(ask: Callable[[int | None], Arrays], *, precise: bool, strict: bool) -> Arrays:
    """Answers, with marks at places that roundings decide; refused if `strict`."""
    kept = ask(None)
    marks: Arrays = {}
    for seed in SEEDS:
        again = ask(seed)
        for name, value in kept.items():
            relative, absolute = tolerance_of(name, precise)
            other = again.get(name)
            if other is None or other.shape != value.shape:
                wrong = np.ones(value.shape, dtype=bool)
            else:
                wrong = ~agreement(other, value, (SHARE * relative, SHARE * absolute))
            if wrong.any():
                marks[name] = marks.get(name, np.zeros(value.shape, dtype=bool)) | wrong
    if strict and marks:
        told = {name: f"{mark.sum()} of {mark.size}" for name, mark in marks.items()}
        raise UndecidedError(f"roundings decide {told}")
    for name, mark in marks.items():
        if name.endswith("broken") and mark.any():
            print_line(f"  undecided: {name} {mark.sum()} of {mark.size}")
    return kept | {undecided(name): mark for name, mark in marks.items()}


def print_line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def keep(path: Path, arrays: Arrays) -> None:
    write_arrays(path, arrays)
    print_line(f"{path.name}: {len(arrays)} entries, {path.stat().st_size} bytes")


def make_case(name: str, case: Case) -> None:
    folder = MODELS / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    made = case.make()
    made.save(folder, kind=name)
    (folder / "made.safetensors").unlink(missing_ok=True)
    model = otad.load(folder, **case.loading)
    x, y = asked_of(case)
    bounds = model.backbone.bounds

    def moved(seed: int | None) -> Tensor:
        return x if seed is None else disturbed(x, seed, bounds)

    arrays = {"given/x": x.numpy(), "given/y": y.numpy()}
    arrays |= decided(
        lambda seed: answers_of(model, case, moved(seed), y), precise=case.precise, strict=True
    )
    if case.attacked:
        arrays |= decided(
            lambda seed: attack_answers(model, case, moved(seed), y), precise=False, strict=False
        )
    if case.evaluated:
        arrays |= decided(
            lambda seed: evaluation_answers(evaluation_of(model, case, moved(seed), y)),
            precise=False,
            strict=False,
        )
    if case.flagged:
        arrays |= decided(
            lambda seed: flag_answers(model, case, moved(seed), y), precise=False, strict=False
        )
    keep(HERE / f"{name}.npz", arrays)


def make_evaluation_file() -> None:
    """An evaluation as it lies on disk."""
    case = CASES["local"]
    folder = MODELS / "evaluation"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = otad.load(MODELS / "local")
    with tempfile.TemporaryDirectory() as work:
        record = evaluation_of(model, case, *asked_of(case), folder=Path(work))
        shutil.copy(Path(work) / "evaluation.json", folder)
    keep(HERE / "evaluation.npz", evaluation_answers(record))


def make_trainings() -> None:
    data = training_data()

    def disturbing(seed: int | None) -> Callable[[nn.Module], None]:
        def disturb(net: nn.Module) -> None:
            if seed is not None:
                with torch.no_grad():
                    for weight in net.parameters():
                        weight.copy_(disturbed(weight, seed))

        return disturb

    def disturbed_data(seed: int | None) -> dict[str, Tensor]:
        if seed is None:
            return data
        inputs = ("x", "numbers")
        return data | {name: disturbed(data[name], seed) for name in inputs}

    arrays = {f"given/{part}": value.numpy() for part, value in data.items()}
    for name in TRAININGS:
        starts: dict[str, Tensor] = {}

        def ask(seed: int | None, name: str = name) -> Arrays:
            return training_answers(name, disturbed_data(seed), disturbing(seed))

        arrays |= decided(ask, precise=False, strict=True)
        if name in RESUMED:
            folder = MODELS / "checkpoints" / name
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)

            def note(net: nn.Module, starts: dict[str, Tensor] = starts) -> None:
                starts.update({part: value.clone() for part, value in net.state_dict().items()})

            training_answers(name, data, note, checkpoint_dir=folder, max_seconds=1e-9)
            arrays |= {f"start/{name}/{part}": value.numpy() for part, value in starts.items()}
        print_line(f"training {name}")
    keep(HERE / "trainings.npz", arrays)


def make_command() -> None:
    folder = MODELS / "train_command"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    x, y = table(POINTS_IN_FILE, 41)
    names = np.array(["low", "mid", "top"])[y.numpy()]
    np.savez(folder / "data.npz", x=x.numpy(), y=names)
    before = Path.cwd()
    os.chdir(folder)
    try:
        run_command("train", "data.npz", "--out", ".", "--epochs", 3, "--blocks", 1, "--hidden", 5)
    finally:
        os.chdir(before)
    asked, _ = table(6, 42)
    with tempfile.TemporaryDirectory() as work:
        arrays = command_answers(folder, Path(work) / "model", asked)
    keep(HERE / "train_command.npz", arrays | {"given/x": asked.numpy()})


POINTS_IN_FILE = 40


def make_bank() -> None:
    folder = MODELS / "bank"
    folder.mkdir(parents=True, exist_ok=True)
    local().bank.save(folder / "bank.safetensors")
    keep(HERE / "bank.npz", bank_answers(folder / "bank.safetensors"))


OTHERS = {
    "evaluation": make_evaluation_file,
    "trainings": make_trainings,
    "train_command": make_command,
    "bank": make_bank,
}


def main() -> None:
    torch.set_num_threads(1)
    chosen = sys.argv[1:] or [*CASES, *OTHERS]
    refused = []
    for name in chosen:
        try:
            if name in CASES:
                make_case(name, CASES[name])
            else:
                OTHERS[name]()
        except UndecidedError as error:
            refused.append(f"{name}: {error}")
    if refused:
        raise SystemExit("\n".join(refused))


if __name__ == "__main__":
    main()
