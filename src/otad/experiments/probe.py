"""A process of its own that predicts once and says what that cost.

    python -m otad.experiments.probe MODEL QUERIES --device cpu --threads 2 --batch-size 1000

MODEL is a model folder, QUERIES a safetensors file with `x` and `y`. The answer is one line of
JSON: seconds to load and to predict, peak resident memory beyond the imports, accuracy.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from otad.model.otad import load

_STATUS = Path("/proc/self/status")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("queries", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    found = measure(options.model, options.queries, options.device, options.batch_size)
    sys.stdout.write(json.dumps(found) + "\n")


def measure(model_dir: Path, queries: Path, device: str, batch_size: int) -> dict[str, Any]:
    on_cuda = torch.device(device).type == "cuda"
    square = torch.ones(64, 64, device=device)
    square @ square  # starts the driver of a GPU and loads the matrix library
    before = resident_now()
    started = time.perf_counter()
    model = load(model_dir, device=device)
    loaded = time.perf_counter()
    data = load_file(queries)
    outputs = []
    with torch.no_grad():
        begun = time.perf_counter()
        for batch in data["x"].split(batch_size):
            outputs.append(model(batch.to(device)).cpu())
        ended = time.perf_counter()
    correct = (torch.cat(outputs).argmax(1) == data["y"]).double().mean()
    return {
        "load_seconds": loaded - started,
        "seconds": ended - begun,
        "resident": resident_peak() - before,
        "device_memory": torch.cuda.max_memory_allocated() if on_cuda else None,
        "accuracy": 100 * float(correct),
    }


def resident_now() -> int:
    """Bytes of resident memory; where the system does not tell, the peak so far."""
    return _status("VmRSS") or _peak_of_usage()


def resident_peak() -> int:
    """Peak of resident memory in bytes.

    Linux's own mark is preferred: what getrusage gives starts from the peak of the parent process.
    """
    return _status("VmHWM") or _peak_of_usage()


def _status(name: str) -> int | None:
    if not _STATUS.exists():
        return None
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _peak_of_usage() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main()
