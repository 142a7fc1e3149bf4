"""A process of its own that says what a query costs.

    python -m otad.experiments.speed_probe MODEL QUERIES --device cpu --threads 2 --batch-size 100
        [--disk] [--net] [--steps]

MODEL is a model folder, QUERIES a safetensors file with `x` and `y`. The bank is on the device, or
with --disk in its file; with --net the backbone alone answers. One line of JSON comes out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from otad.experiments import features  # noqa: F401  (metrics of a model may be among them)
from otad.experiments.probe import resident_now, resident_peak
from otad.experiments.steps import time_steps, wait
from otad.model.otad import load


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("queries", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    for flag in ("--disk", "--net", "--steps"):
        parser.add_argument(flag, action="store_true")
    sys.stdout.write(json.dumps(measure(parser.parse_args(arguments))) + "\n")


@torch.no_grad()
def measure(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    square = torch.ones(64, 64, device=device)
    square @ square  # starts the driver of a GPU and loads the matrix library
    before = resident_now()
    started = time.perf_counter()
    # Its seal was checked when it was written, a moment ago.
    model = load(options.model, device=options.device, resident=not options.disk, verify=False)
    answer = model.backbone if options.net else model
    loaded = time.perf_counter() - started
    data = load_file(options.queries)
    batches = data["x"].split(options.batch_size)
    outputs = torch.cat([answer(batch.to(device)).cpu() for batch in batches])
    seconds = []
    for batch in batches:
        wait(device)
        begun = time.perf_counter()
        answer(batch.to(device)).cpu()
        seconds.append((time.perf_counter() - begun) / len(batch))
    found: dict[str, Any] = {
        "milliseconds": 1000 * statistics.median(seconds),
        "load_seconds": loaded,
        "resident": resident_peak() - before,
        "device_memory": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "accuracy": 100 * float((outputs.argmax(1) == data["y"]).double().mean()),
    }
    if options.steps and not options.net:
        times = [(len(batch), time_steps(model, batch.to(device))) for batch in batches]
        found["steps"] = {
            name: 1000 * statistics.median(steps.get(name, 0.0) / count for count, steps in times)
            for name in dict.fromkeys(name for _, steps in times for name in steps)
        }
    return found


if __name__ == "__main__":
    main()
