"""Train twice from the same start: once left alone, once killed again and again (SIGKILL).

Run as a script with a folder; prints one JSON line per kill. Imports are paid once, since every
run is a fork of this process, taken before torch has started any thread.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from otad.nets import fc_resnet
from otad.training import TrainConfig, checkpoint, train

EPOCHS = 100
KILLS = 20
FILE = "checkpoint.safetensors"


def long_run(folder: Path) -> None:
    torch.set_num_threads(1)
    x = torch.rand(64, 3, generator=torch.Generator().manual_seed(0))
    config = TrainConfig(epochs=EPOCHS, batch_size=16, energy_weight=0.01, ema=0.9)
    net = fc_resnet((3,), 2, blocks=2)
    train(net, (x, (x.sum(1) > 1.5).long()), config, checkpoint_dir=folder)


def fork_run(folder: Path, *, die_at_rename: int = 0) -> int:
    pid = os.fork()
    if pid:
        return pid
    rename, left = os.replace, die_at_rename

    def rename_or_die(source: Path, target: Path) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)

    os.replace = rename_or_die
    status = 1
    try:
        long_run(folder)
        status = 0
    finally:
        os._exit(status)


def tell(pid: int, folder: Path) -> None:
    _, status = os.waitpid(pid, 0)
    epochs = len(checkpoint.read_tensors(folder / FILE).header["history"])
    report = {
        "killed": os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL,
        "epochs": epochs,
        "files": sorted(os.listdir(folder)),
    }
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()  # or the next fork would hold it too


def main(base: Path) -> None:
    TrainConfig().make_optimizer(torch.nn.Linear(1, 1))  # torch's lazy imports
    whole, cut = base / "whole", base / "cut"
    tell(fork_run(whole), whole)
    tell(fork_run(cut, die_at_rename=3), cut)  # the new file is written, not yet in its place
    dice = random.Random(0)
    for _ in range(KILLS):
        before = (cut / FILE).stat().st_mtime_ns
        pid = fork_run(cut)
        while (cut / FILE).stat().st_mtime_ns == before:
            time.sleep(0.001)
        time.sleep(dice.uniform(0, 0.02))
        os.kill(pid, signal.SIGKILL)
        tell(pid, cut)
    tell(fork_run(cut), cut)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
