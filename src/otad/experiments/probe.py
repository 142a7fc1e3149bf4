"""The cost of predictions in time and memory, each measured in a fresh process, which is started by
"python -m otad.experiments.probe ARGUMENTS" with those of `measure` as a list in JSON."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from otad.checks import assuming, check_evaluation, require
from otad.data import Dataset
from otad.errors import OtadError
from otad.experiments.records import CostRecord
from otad.experiments.spec import CostSpec, SpeedSpec
from otad.experiments.study import Study
from otad.io.environment import resident_now, resident_peak
from otad.model.captured import Step, can_capture, captured, has_room, recorded
from otad.model.defend import defend
from otad.model.loading import load
from otad.model.otad import OTAD
from otad.progress import Counter

T = TypeVar("T")
Times = dict[str, float]
VERSION = 3  # raise it when the same model would be measured differently


def measure_costs(study: Study) -> tuple[tuple[CostRecord, ...], dict[str, str]]:
    """[cost]: a record for each device and size of the bank, and why devices are missing."""
    spec = study.experiment.cost
    if spec is None:
        return (), {}
    net, source = study.net(spec.net), study.source(study.experiment.nets[spec.net].data)
    data, size = source.data, len(source.data.train_x)
    require(max(spec.banks) <= size, "cost.banks", f"at most {size} train points", spec.banks)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(study.seed))

    def measure(device: str, bank: int, report: Counter) -> CostRecord:
        rows = order[:bank].sort().values
        model = defend(net.net, data.train_x[rows], data.train_y[rows])
        with tempfile.TemporaryDirectory(prefix="otad-probe-") as folder:
            return probe(Path(folder), model, data, spec, device)

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

    def measure(key: str, place: str | None, folder: Path, report: Counter) -> CostRecord:
        row, model = study.experiment.rows[key], study.model(key)
        flags = ["warm"] + ["disk"] * (place == "disk") + ["steps"] * spec.steps
        if not isinstance(model, OTAD):
            base, flags = study.bank(row.net), ["warm", "net"]  # without use of its bank
            model = base.replace(bank=base.bank.select(torch.arange(16)))
        record = probe(folder, model, study.data(row), spec, study.device, *flags)
        return replace(record, place=place, bank=record.bank if place else 0)

    for key in spec.rows:
        is_net = study.experiment.rows[key].method == "net"
        with tempfile.TemporaryDirectory(prefix="otad-probe-") as folder:
            for place in (None,) if is_net else spec.places:
                label = f"speed of {key}" + ("" if place is None else f", bank in {place}")
                asked = [spec.queries, spec.batch_size, spec.threads, spec.steps, place]
                identity = [VERSION, study.identity(key), asked]
                how = partial(measure, key, place, Path(folder))
                record = study.part(label, CostRecord, identity, how)
                found.append(replace(record, row=key))  # which may have been renamed since
    return tuple(found)


def probe(
    folder: Path, model: OTAD, data: Dataset, spec: CostSpec | SpeedSpec, device: str, *flags: str
) -> CostRecord:
    """Measure a model in a fresh process, on the first test points; `flags` of `measure`.

    The model is saved to the folder, or was by an earlier call."""
    x, y = data.test_x[: spec.queries].clone(), data.test_y[: spec.queries].clone()
    place, queries = folder / "model", folder / "queries.safetensors"
    if not queries.exists():
        model.save(place)
        save_file({"x": x, "y": y}, queries)
    arguments = [str(place), str(queries), device, spec.threads, spec.batch_size, *flags]
    command = [sys.executable, "-m", "otad.experiments.probe", json.dumps(arguments)]
    libraries = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    environment = os.environ | dict.fromkeys(libraries, str(spec.threads))
    source = str(Path(__file__).parents[2])  # the very package that runs here
    paths = source, os.environ.get("PYTHONPATH") or source
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise OtadError(f"the process that measures the cost failed:\n{done.stderr.strip()}")
    bank = len(model.bank_inputs)
    return CostRecord(device=device, bank=bank, queries=len(x), **json.loads(done.stdout))


@torch.no_grad()
def measure(
    folder: str, queries: str, device: str, threads: int, batch_size: int, *flags: str
) -> dict[str, Any]:
    """Fields of `CostRecord`, for the model in a folder and the `x` and `y` of a safetensors file.

    Flags: "disk", the bank stays in its file; "net", the backbone alone answers; "warm", also
    measure queries after every batch was answered once before; "steps", also those of the defense.
    """
    torch.set_num_threads(threads)
    square = torch.ones(64, 64, device=device)
    square @ square  # starts the driver of a GPU and loads the matrix library
    before, started, resident = resident_now(), time.perf_counter(), "disk" not in flags
    model = load(folder, device=device, resident=resident, verify=False)  # it was just written
    loaded, data = time.perf_counter(), load_file(queries)
    batches = data["x"].split(batch_size)
    asked = model.backbone if "net" in flags else model
    answering = captured(asked, batches[0].to(device)) or asked  # as `otad.predict` does

    def predict(batch: Tensor) -> Tensor:
        outputs: Tensor = answering(batch.to(device)).cpu()
        return outputs

    def time_batch(batch: Tensor) -> dict[str, float]:
        clock = Clock(device)
        clock("all", lambda: predict(batch))
        return clock.seconds

    begun = time.perf_counter()
    outputs = torch.cat([predict(batch) for batch in batches])
    found: dict[str, Any] = {"seconds": time.perf_counter() - begun}
    found["load_seconds"] = loaded - started
    if "warm" in flags:
        times = _times(batches, time_batch)["all"]
        found["milliseconds"] = statistics.median(times)
        found["deviation"] = statistics.pstdev(times)
    found["resident"] = resident_peak() - before
    found["device_memory"] = torch.cuda.max_memory_allocated() if "cuda" in device else None
    found["accuracy"] = 100 * float((outputs.argmax(1) == data["y"]).double().mean())
    if "steps" in flags:
        steps = _times(batches, lambda batch: time_steps(model, batch.to(device)))
        found["steps"] = {name: statistics.median(times) for name, times in steps.items()}
    return found


def _times(batches: Iterable[Tensor], work: Callable[[Tensor], Times]) -> dict[str, list[float]]:
    """The milliseconds a query of each batch, by what was timed."""
    times = [(len(batch), work(batch)) for batch in batches]
    return {
        name: [1000 * seconds[name] / count for count, seconds in times] for name in times[0][1]
    }


class Clock:
    """Seconds by name of what was done on a device."""

    def __init__(self, device: str | torch.device) -> None:
        self.device, self.seconds = torch.device(device), dict[str, float]()

    def __call__(self, name: str, work: Callable[[], T]) -> T:
        started = self._now()
        result = work()
        self.seconds[name] = self._now() - started
        return result

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


@torch.no_grad()
def time_steps(model: OTAD, x: Tensor) -> dict[str, float]:
    """Seconds of each step for a batch of inputs, on the device of the model: "search" (checks,
    embedding, key, neighbors), "rows" (the pairs of the neighbors fetched from a bank in a file or
    on another device), "products" (of the neighbors), "potentials and QP" (L and longest paths,
    eq. (2), then eq. (3)), "image" (assembled and read by the head). A network in place of the
    solver is one step after the search, "network"; a global map one step in all, "global map".

    A GPU answers by CUDA graphs, so there the two parts of a search are timed as graphs as well:
    "keys, by a graph" and "neighbors, by a graph"."""
    clock, solver, head = Clock(model.backbone.mean.device), model.solver, model.backbone.head
    if not model.answerer.rests_on_neighbors or solver is None:
        clock("global map", lambda: model(x))
        return clock.seconds

    def search() -> Any:
        check_evaluation(model, "model")
        embedded, keys = model._queries(model.backbone.check_inputs(x))
        return model.problem(embedded, model.neighbors(keys).indices)

    problem = clock("search", search)
    for name, replay in _search_graphs(model, x).items():
        replay()  # the first time takes longer
        clock(name, replay)
    exact = model.answerer.exact_solver
    if exact is None:
        clock("network", lambda: head(solver(problem).image))
        return clock.seconds
    near = clock("rows", problem.fetched)
    if near is problem:
        del clock.seconds["rows"]  # the steps that need them read them in place
    products = clock("products", lambda: exact._products(near))
    found, _ = clock("potentials and QP", lambda: exact._dual(near, products))
    clock("image", lambda: head(exact._solution(near, found).image))
    return clock.seconds


def _search_graphs(model: OTAD, x: Tensor) -> dict[str, Step]:
    """Return graphs that make the keys of x and that find the neighbors of these keys, if graphs
    can hold the model."""
    if not can_capture(model) or not has_room(x.device):
        return {}
    made: list[Tensor] = []

    def make_keys() -> None:
        made[:] = model._queries(x)

    def find_neighbors() -> None:
        with assuming():
            model.neighbors(made[1])

    graphs = recorded([make_keys, find_neighbors], x.device)
    return dict(zip(("keys, by a graph", "neighbors, by a graph"), graphs, strict=True))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(*json.loads(sys.argv[1]))) + "\n")
