"""Measures `otad serve` on the loopback, with clients on the same machine.

The service runs as its own processes, as the command starts them. Clients send binary tensors over
connections that stay open, each one request after the other. Four things are recorded:

- throughput and latency against the rows of a request and the number of clients;
- the model called directly, without a service, for the same rows;
- the memory of the workers during a long run;
- a worker that is killed under load: clients that lose their connection send the same request
  again, and every answer is compared with the model called directly.

    python benchmarks/serve/load.py                                  # about 13 minutes
    python benchmarks/serve/load.py --seconds 2 --minutes 1          # about 2 minutes
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from http.client import HTTPConnection, HTTPException
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import otad
from otad.io.environment import Environment
from otad.training import TrainConfig, fit_backbone

Record = dict[str, Any]
PATH = "/v2/models/digits/infer"
SAMPLES = 40  # of the memory
SETTLED = 0.2  # the share of a long run after which memory is compared
PAUSE = 0.05  # seconds between attempts to send a request again
ATTEMPTS = 2000  # to send one request


class Service:
    """The processes of `otad serve`, and one request after the other to them."""

    def __init__(self, url: str, process: subprocess.Popen[str]) -> None:
        self.address, self.process = url.removeprefix("http://"), process

    def connect(self) -> HTTPConnection:
        return HTTPConnection(self.address, timeout=300)

    def workers(self) -> list[int]:
        """The processes that answer: the youngest generation below the parent."""
        (server,) = [pid for pid in children(self.process.pid) if children(pid)]
        return children(server)

    def resident(self) -> int:
        """The resident memory of all workers, in bytes."""
        return sum(memory_of(pid) for pid in self.workers())


def children(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return sorted(found)


def memory_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0


@contextmanager
def served(folder: Path, workers: int) -> Iterator[Service]:
    options = ["--name", "digits", "--port", "0", "--workers", str(workers), "--json"]
    program = "from otad.cli.main import main; main()"
    command = [sys.executable, "-c", program, "serve", str(folder), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            service = Service(json.loads(process.stdout.readline())["url"], process)
            link = service.connect()
            link.request("GET", "/v2/health/ready")
            if link.getresponse().status != 200:
                raise RuntimeError("the service is not ready")
            link.close()
            yield service
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(300)


def message_of(x: torch.Tensor, name: str) -> tuple[bytes, dict[str, str]]:
    """The body and the headers of a request with binary tensors, which asks for labels' codes."""
    data = x.numpy().astype("<f4").tobytes()
    given = {"name": "input", "shape": list(x.shape), "datatype": "FP32"}
    given["parameters"] = {"binary_data_size": len(data)}
    asked = [{"name": "prediction", "parameters": {"binary_data": True}}]
    head = json.dumps({"id": name, "inputs": [given], "outputs": asked}).encode()
    return head + data, {"Inference-Header-Content-Length": str(len(head))}


def send(link: HTTPConnection, message: tuple[bytes, dict[str, str]]) -> tuple[int, Record, bytes]:
    link.request("POST", PATH, *message)
    answer = link.getresponse()
    body, length = answer.read(), answer.getheader("Inference-Header-Content-Length")
    return answer.status, json.loads(body[: int(length or len(body))]), body[int(length or 0) :]


def load(
    service: Service, x: torch.Tensor, batch: int, clients: int, until: Callable[[], bool]
) -> tuple[list[float], float]:
    """Seconds of every request of closed-loop clients, and of the whole."""

    def client(number: int) -> list[float]:
        link, found = service.connect(), []
        start = number * batch % max(1, len(x) - batch)
        message = message_of(x[start : start + batch], str(number))
        while not until():
            begin = time.perf_counter()
            status, head, _ = send(link, message)
            if status != 200:
                raise RuntimeError(f"expected an answer, got {status}: {head}")
            found.append(time.perf_counter() - begin)
        link.close()
        return found

    begin = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        latencies = [one for found in pool.map(client, range(clients)) for one in found]
    return latencies, time.perf_counter() - begin


def lasting(seconds: float) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() >= end


def measured(latencies: list[float], seconds: float, batch: int) -> Record:
    return {
        "requests": len(latencies),
        "requests_per_second": len(latencies) / seconds,
        "rows_per_second": batch * len(latencies) / seconds,
        "p50_ms": 1000 * float(np.quantile(latencies, 0.5)),
        "p99_ms": 1000 * float(np.quantile(latencies, 0.99)),
    }


def call_directly(model: otad.OTAD, x: torch.Tensor, batch: int, seconds: float) -> Record:
    """The model itself in this process."""
    over, latencies = lasting(seconds), []
    with torch.no_grad():
        model.trace(x[:batch])  # prepares the search
        begin = time.perf_counter()
        while not latencies or not over():
            start = time.perf_counter()
            model.trace(x[:batch])
            latencies.append(time.perf_counter() - start)
    return {"batch": batch, **measured(latencies, time.perf_counter() - begin, batch)}


def watch_memory(service: Service, x: torch.Tensor, seconds: float, clients: int) -> Record:
    """The memory of the workers while clients send requests of 1 and of 40 rows."""
    over, samples = lasting(seconds), list[Record]()
    begin = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        loads = [pool.submit(load, service, x, batch, clients, over) for batch in (1, 40)]
        while not samples or not over():
            passed = time.perf_counter() - begin
            samples.append({"seconds": passed, "megabytes": service.resident() / 1e6})
            time.sleep(seconds / SAMPLES)
        found = [one.result() for one in loads]
    settled = [one["megabytes"] for one in samples[int(SETTLED * len(samples)) :]]
    half = (len(settled) + 1) // 2
    growth = statistics.mean(settled[-half:]) - statistics.mean(settled[:half])
    requests = sum(len(latencies) for latencies, _ in found)
    return {
        "minutes": seconds / 60, "requests": requests, "growth": growth,
        "largest": max(one["megabytes"] for one in samples), "samples": samples,
    }  # fmt: skip


def kill_under_load(
    service: Service, x: torch.Tensor, expected: list[int], requests: int, clients: int
) -> Record:
    """Kill a worker while clients send `requests` requests; what they got, by their ids."""
    numbers, lock = count(), threading.Lock()
    answers: dict[str, bool] = {}
    again = 0
    victim, before = service.workers()[0], len(service.workers())

    def client(_: int) -> None:
        nonlocal again
        link = service.connect()
        while (number := next(numbers)) < requests:
            if number == requests // 3:
                os.kill(victim, signal.SIGKILL)
            row = number % len(x)
            message = message_of(x[row : row + 1], str(number))
            for _ in range(ATTEMPTS):
                try:
                    status, head, tail = send(link, message)
                except (OSError, HTTPException, ValueError):  # the worker is gone
                    link.close()
                    link = service.connect()
                    with lock:
                        again += 1
                    time.sleep(PAUSE)
                    continue
                if status == 200:
                    code = int(np.frombuffer(tail, "<i8")[0])
                    answers[head["id"]] = code == expected[row]
                    break
                time.sleep(PAUSE)
        link.close()

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(client, range(clients)))
    end = time.monotonic() + 300
    while victim in (found := service.workers()) or len(found) < before:
        if time.monotonic() > end:
            raise RuntimeError("the worker was not started again")
        time.sleep(PAUSE)
    return {
        "requests": requests, "answered": len(answers), "sent_again": again,
        "wrong": list(answers.values()).count(False), "workers_after": len(found),
    }  # fmt: skip


def make_model(folder: Path, points: int, epochs: int) -> tuple[otad.OTAD, torch.Tensor]:
    digits = otad.data.load("digits")
    x, y = digits.train_x[:points], digits.train_y[:points]
    options = {"options": {"blocks": 2, "hidden": 64}, "bounds": (0.0, 1.0), "n_outputs": 10}
    config = TrainConfig(epochs=epochs, seed=0)
    net, _ = fit_backbone((x, y), config, task="classification", progress=False, **options)
    model = otad.defend(net, x, y, scope="local", progress=False)
    model.save(folder, classes=list(digits.classes))
    return model, digits.test_x


def run(given: argparse.Namespace) -> Record:
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        model, x = make_model(Path(folder), given.points, given.epochs)
        with torch.no_grad():
            expected = model(x).argmax(1).tolist()
        direct = [call_directly(model, x, batch, given.seconds) for batch in given.batches]
        with served(Path(folder), given.workers) as service:
            rows = []
            for batch in given.batches:
                for clients in given.clients:
                    load(service, x, batch, clients, lasting(given.seconds / 5))  # warms up
                    found = load(service, x, batch, clients, lasting(given.seconds))
                    rows.append({"batch": batch, "clients": clients, **measured(*found, batch)})
            most = max(given.clients)
            memory = watch_memory(service, x, 60 * given.minutes, max(1, most // 2))
            killed = kill_under_load(service, x, expected, given.requests, most)
    return {
        "format": 1, "points": given.points, "workers": given.workers,
        "seconds_each": given.seconds, "rows": rows, "direct": direct,
        "memory": memory, "killed": killed,
        "seconds": time.perf_counter() - begin,
        "environment": asdict(Environment.now(torch.device("cpu"), torch.get_num_threads())),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    numbers = {"type": int, "nargs": "+"}
    parser.add_argument("--batches", **numbers, default=[1, 10, 40, 200], help="Rows of a request.")
    parser.add_argument("--clients", **numbers, default=[1, 8, 32], help="Clients at once.")
    parser.add_argument("--seconds", type=float, default=10.0, help="Of each measurement.")
    parser.add_argument("--minutes", type=float, default=10.0, help="Of the memory run.")
    parser.add_argument("--requests", type=int, default=3000, help="While a worker is killed.")
    parser.add_argument("--workers", type=int, default=2, help="Processes that answer.")
    parser.add_argument("--points", type=int, default=1437, help="Points of the bank.")
    parser.add_argument("--epochs", type=int, default=10, help="Of training the network.")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/serve.json"))
    given = parser.parse_args(arguments)
    record = run(given)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    shown = Table("rows", "clients", "requests/s", "rows/s", "p50, ms", "p99, ms")
    for row in [{"clients": "direct"} | row for row in record["direct"]] + record["rows"]:
        rates = f"{row['requests_per_second']:.0f}", f"{row['rows_per_second']:.0f}"
        times = f"{row['p50_ms']:.1f}", f"{row['p99_ms']:.1f}"
        shown.add_row(str(row["batch"]), str(row["clients"]), *rates, *times)
    Console().print(shown)
    memory = {name: value for name, value in record["memory"].items() if name != "samples"}
    Console().print({"memory": memory, "killed": record["killed"], "seconds": record["seconds"]})


if __name__ == "__main__":
    main()
