"""The cost of predictions in time and memory, each measured in a fresh process.

    python -m otad.experiments.probe MODEL QUERIES --device cpu --threads 2 --batch-size 100
        [--disk] [--net] [--warm] [--steps]

MODEL is a model folder, QUERIES a safetensors file with `x` and `y`. The bank is on the device, or
with --disk in its file; with --net the backbone alone answers. --warm also measures queries after
every batch was answered once before, --steps the steps of the defense. The output is one line of
JSON: fields of `CostRecord`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from otad.cip import ExactCip
from otad.data import Dataset
from otad.errors import InputError, OtadError
from otad.experiments.cache import Report
from otad.experiments.records import CostRecord
from otad.experiments.spec import CostSpec, SpeedSpec
from otad.experiments.study import Study
from otad.io.environment import resident_now, resident_peak
from otad.model.defend import defend
from otad.model.otad import OTAD, load

T = TypeVar("T")
VERSION = 1  # raise it when the same model would be measured differently
_FEW = 16


def measure_costs(study: Study) -> tuple[tuple[CostRecord, ...], dict[str, str]]:
    """[cost]: a record for each device and size of the bank, and why devices are missing."""
    spec = study.experiment.cost
    if spec is None:
        return (), {}
    net, source = study.net(spec.net), study.source(study.experiment.nets[spec.net].data)
    data, size = source.data, len(source.data.train_x)
    if max(spec.banks) > size:
        raise InputError(f"cost.banks: expected at most {size} train points, got {spec.banks}")
    order = torch.randperm(size, generator=torch.Generator().manual_seed(study.seed))

    def measure(device: str, bank: int, report: Report) -> CostRecord:
        rows = order[:bank].sort().values
        model = defend(net.net, data.train_x[rows], data.train_y[rows])
        return probe(model, data, spec, device)

    records, missing = [], {}
    for device in spec.devices:
        if device == "cuda" and not torch.cuda.is_available():
            missing[device] = "no CUDA device on this machine"
            continue
        for bank in spec.banks:
            label = f"{spec.queries} predictions, bank of {bank}, {device}"
            asked = [device, bank, spec.queries, spec.batch_size, spec.threads, study.seed]
            identity = [VERSION, net.identity, source.fingerprint, asked]
            records.append(study.part(label, CostRecord, identity, partial(measure, device, bank)))
    return tuple(records), missing


def measure_speeds(study: Study) -> tuple[CostRecord, ...]:
    """[speed]: row by row; a net alone has no bank, and so no place of it."""
    spec, found = study.experiment.speed, []
    if spec is None:
        return ()

    def measure(key: str, place: str | None, report: Report) -> CostRecord:
        row, model = study.experiment.rows[key], study.model(key)
        flags = {"--warm": True, "--disk": place == "disk", "--steps": spec.steps}
        if not isinstance(model, OTAD):
            base, flags["--net"] = study.bank(row.net), True  # whose bank is not used
            model = base.replace(bank=base.bank.select(torch.arange(_FEW)))
        names = [flag for flag, is_on in flags.items() if is_on]
        record = probe(model, study.data(row), spec, study.device, names)
        return replace(record, place=place, bank=record.bank if place else 0)

    for key in spec.rows:
        is_net = study.experiment.rows[key].method == "net"
        for place in (None,) if is_net else spec.places:
            label = f"speed of {key}" + ("" if place is None else f", bank in {place}")
            asked = [spec.queries, spec.batch_size, spec.threads, spec.steps, place]
            identity = [VERSION, study.identity(key), asked]
            record = study.part(label, CostRecord, identity, partial(measure, key, place))
            found.append(replace(record, row=key))  # which may have been renamed since
    return tuple(found)


def probe(
    model: OTAD,
    data: Dataset,
    spec: CostSpec | SpeedSpec,
    device: str,
    flags: list[str] | None = None,
) -> CostRecord:
    """Measure a model in a fresh process, on the first test points."""
    x, y = data.test_x[: spec.queries].clone(), data.test_y[: spec.queries].clone()
    numbers = {"--device": device, "--threads": spec.threads, "--batch-size": spec.batch_size}
    with tempfile.TemporaryDirectory(prefix="otad-probe-") as folder:
        place, queries = Path(folder) / "model", Path(folder) / "queries.safetensors"
        model.save(place)
        save_file({"x": x, "y": y}, queries)
        command = [sys.executable, "-m", "otad.experiments.probe", str(place), str(queries)]
        command += [str(part) for pair in numbers.items() for part in pair] + (flags or [])
        libraries = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        source = str(Path(__file__).parents[2])  # the very package that runs here
        paths = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
        environment = os.environ | dict.fromkeys(libraries, str(spec.threads))
        environment |= {"PYTHONPATH": paths}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise OtadError(f"the process that measures the cost failed:\n{done.stderr.strip()}")
    bank = len(model.bank_inputs)
    return CostRecord(device=device, bank=bank, queries=len(x), **json.loads(done.stdout))


@torch.no_grad()
def measure(options: argparse.Namespace) -> dict[str, Any]:
    """In the fresh process."""
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    square = torch.ones(64, 64, device=device)
    square @ square  # starts the driver of a GPU and loads the matrix library
    before, started = resident_now(), time.perf_counter()
    # Its checksum was just written.
    model = load(options.model, device=options.device, resident=not options.disk, verify=False)
    predictor = model.backbone if options.net else model
    loaded = time.perf_counter()
    data = load_file(options.queries)
    batches = data["x"].split(options.batch_size)
    begun = time.perf_counter()
    outputs = torch.cat([_predict(predictor, batch, device) for batch in batches])
    ended = time.perf_counter()
    found: dict[str, Any] = {}
    if options.warm:
        seconds = []
        for batch in batches:
            clock = Clock(device)
            clock("all", partial(_predict, predictor, batch, device))
            seconds.append(clock.seconds["all"] / len(batch))
        found["milliseconds"] = 1000 * statistics.median(seconds)
    found |= {
        "load_seconds": loaded - started,
        "seconds": ended - begun,
        "resident": resident_peak() - before,
        "device_memory": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "accuracy": 100 * float((outputs.argmax(1) == data["y"]).double().mean()),
    }
    if options.steps and not options.net:
        times = [(len(batch), time_steps(model, batch.to(device))) for batch in batches]
        found["steps"] = {
            name: 1000 * statistics.median(steps[name] / count for count, steps in times)
            for name in times[0][1]
        }
    return found


def _predict(model: nn.Module, x: Tensor, device: torch.device) -> Tensor:
    outputs: Tensor = model(x.to(device)).cpu()
    return outputs


class Clock:
    """Seconds by name of what was done on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, dict[str, float]()

    def __call__(self, name: str, work: Callable[[], T]) -> T:
        self._wait()
        started = time.perf_counter()
        result = work()
        self._wait()
        self.seconds[name] = time.perf_counter() - started
        return result

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@torch.no_grad()
def time_steps(model: OTAD, x: Tensor) -> dict[str, float]:
    """Seconds of each step for a batch of inputs, on the device of the model.

    - "search": checks, embedding, key, neighbors;
    - "rows": the pairs of the neighbors fetched from a bank in a file or on another device;
    - "products": the inner products of the neighbors;
    - "potentials and QP": L and longest paths, eq. (2), which the paper solves as a linear program,
      and eq. (3);
    - "image": the feature assembled and read by the head.

    A network in place of the solver is one step, "network", after the search, and a global map is
    one step, "global map".
    """
    clock, solver, head = Clock(model.backbone.mean.device), model.solver, model.backbone.head
    if not model.answerer.rests_on_neighbors or solver is None:
        clock("global map", lambda: model(x))
        return clock.seconds

    def search() -> Any:
        inputs = model.backbone.check_inputs(x)
        embedded = model.backbone.embed(inputs)
        keys = embedded if model.metric is None else model.query_keys(inputs)
        return model.problem(embedded, model.neighbors(keys).indices)

    problem = clock("search", search)
    if not isinstance(solver, ExactCip):
        clock("network", lambda: head(solver(problem).image))
        return clock.seconds
    near = clock("rows", problem.fetched)
    if near is problem:
        del clock.seconds["rows"]  # the steps that need them read them in place
    products = clock("products", lambda: solver.products(near))
    found = clock("potentials and QP", lambda: solver.solve(near, products))
    clock("image", lambda: head(solver.solution(near, found).image))
    return clock.seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("queries", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    for flag in ("--disk", "--net", "--warm", "--steps"):
        parser.add_argument(flag, action="store_true")
    sys.stdout.write(json.dumps(measure(parser.parse_args())) + "\n")
