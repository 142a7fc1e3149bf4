"""Tries bad calls, commands and files, kills processes, and lets two write at once.

`make campaign` runs it.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch
from campaign.strangers import Commands, run
from campaign.test_campaign import KINDS, campaign
from factories import model

import otad
from otad.io.codec import read_json, write_json
from otad.io.environment import Environment
from otad.io.tensor_files import check_seal

TASKS = {  # commands whose processes are killed, or of which two run at once
    "train": "train rows.npz --out net-2 --epochs 25 --blocks 2",
    "defend": "defend net --out model-2 --scope global",
    "evaluate": "evaluate model test --eps 0.1,0.2 --attack pgd --attack noise --no-flags --rows 8",
    "reproduce": "reproduce wine.toml --out results",
    "predict": "predict model test --out predictions.csv",
    "save": "",
}


def work(task: str, seed: int = 0, *more: str) -> None:
    """Run a whole task in the current folder."""
    if task != "save":
        return run([*TASKS[task].split(), *more])
    for step in range(8):
        model(seed + step % 2).save("saved")


def start(function: Callable[..., object], *given: object) -> int:
    """Start a process by fork, so that it need not import anything again, and return its id."""
    if child := os.fork():
        return child
    code = 1
    try:
        function(*given)
        code = 0
    except otad.InputError:  # one of two trainings in a folder may be refused
        code = 2
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def end(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def finish(task: str) -> None:
    """Run a task again to finish it, or with --force if it was finished already."""
    if end(start(work, task)) == 2:
        assert end(start(work, task, 0, "--force")) == 0


def check_intact() -> None:
    """Check that every file under its final name is whole, and that every model loads."""
    for path in Path().rglob("*.*"):
        if path.suffix == ".safetensors" and path.name[0] != ".":
            check_seal(path)
        elif path.name == "card.json":
            otad.load(path.parent)
        elif path.suffix == ".json":
            read_json(path)


def disturb(kills: int, pairs: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Kill tasks at random moments, then run two of each at once.

    Files must stay whole, and it must be possible to finish the task. This process must not have
    computed gradients, because torch cannot fork then."""
    folder, rng, counts, failures = Path.cwd(), random.Random(seed), Counter[str](), []
    for name in (
        "matplotlib.pyplot",
        "sklearn.datasets",
        *(f"otad.cli.{one}" for one in TASKS if one != "save"),
    ):
        import_module(name)  # once here instead of in every process
    assert end(start(Commands, folder)) == 0
    lasting = dict[str, float]()
    for number in range(-len(TASKS), kills + pairs):  # negative numbers measure the durations
        task, place = list(TASKS)[number % len(TASKS)], folder / str(number)
        place.mkdir()
        os.chdir(place)
        for name in ("rows.npz", "wine.toml", "net", "model"):
            Path(name).symlink_to(folder / name)
        begun, what = time.monotonic(), f"{'kill' if number < kills else 'two writers'}: {task}"
        try:
            if 0 <= number < kills:
                child = start(work, task)
                time.sleep(delay := rng.uniform(0, lasting[task]))
                os.kill(child, signal.SIGKILL)
                if end(child) == 0:  # the task had ended before
                    lasting[task], what = delay, f"{what}, too late"
            elif number >= kills:
                assert {*map(end, [start(work, task, k) for k in range(2)])} in ({0}, {0, 2})
            check_intact()
            finish(task)
            lasting.setdefault(task, min(9.0, time.monotonic() - begun))
            check_intact()
            if number >= 0:
                counts[what] += 1
        except (AssertionError, otad.OtadError, OSError) as error:
            failures.append(f"{what}, number {number}, seed {seed}: {error!r}")
    return counts, failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, count in (("calls", 20000), ("commands", 3000), ("folders", 1000), ("kills", 100)):
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--writers", type=int, default=25, help="Pairs that write at once.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs=2, metavar=("KIND", "NUMBER"), help="Repeat one call.")
    parser.add_argument("--out", type=Path, default=Path("results/campaign.json"))
    asked, begun = parser.parse_args(), time.time()
    out, failures, found = asked.out.resolve(), [], {}
    torch.set_num_threads(1)
    for kind in (asked.only[0],) if asked.only else ("kills", *KINDS):
        with tempfile.TemporaryDirectory() as place:
            os.chdir(place)
            if kind == "kills":
                counts, failed = disturb(asked.kills, asked.writers, asked.seed)
            else:
                numbers = range(getattr(asked, kind))
                numbers = numbers[int(asked.only[1]) :][:1] if asked.only else numbers
                counts, failed, _ = campaign(kind, numbers, asked.seed)
            os.chdir("/")
        found[kind], failures = dict(sorted(counts.items())), failures + failed
    about = {"seed": asked.seed, "failures": failures, "seconds": round(time.time() - begun)}
    if not asked.only:
        environment = vars(Environment.now(torch.device("cpu"), 1))
        write_json(out, about | {"counts": found, "environment": environment})
    sys.stdout.write("\n".join([*failures, f"{found}, {len(failures)} failures", ""]))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
