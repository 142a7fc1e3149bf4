"""Measures how many points a bank needs, and how fast banks are read, to estimate large ones.

The first part makes banks of a few labeled points of the digits: drawn at random, means of similar
points, and learned prototypes. Each answers by the global map, and the record has the accuracy and
the certified accuracy. The size of the means and the margin of the training are chosen on a fifth
of the training data, by what is proved there.

The second part writes a bank of random points as shards and times how fast its bytes are read from
disk, verified and searched. What a bank of 1e8 or 1e9 points would need is computed from this. It
is an estimate: nothing of that size was run, cores are taken to add up, and no network is part of
it.

    python benchmarks/bank_size.py
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from matplotlib.figure import Figure
from output import Record, environment, finish, table
from torch import Tensor

import otad
from otad.model.bank import FeatureBank
from otad.model.bank_shards import damaged_shards
from otad.search.neighbors import TorchSearch
from otad.training import TrainConfig, train

EPS = 0.5
SIZES = (1, 2, 5, 10, 20, 50, 100)  # points of each class
MEANS = (3, 10, 30)  # neighbors that a mean is taken over
MARGINS = (0.5, 0.8, 1.2)
CHOSEN_AT = 10  # the size at which the margin is chosen
FOLDS = 5  # one of which is held out
KINDS = ("random", "means", "learned")

QUERIES = 100  # of a batch
NODE_BYTES, NODE_CORES = 256 * 10**9, 32  # the memory and the cores of a node in the estimate
LARGE = (10**8, 10**9)
LAYOUTS = {  # the numbers of a point: its dimension, their bytes, and the dimension of its key
    "784 numbers, float32": (784, 4, None),
    "512 numbers, float16": (512, 2, None),
    "512 numbers, float16, by 8-dimensional keys": (512, 2, 8),
}


def certified(net: otad.prototypes.PrototypeNet, x: Tensor, y: Tensor) -> Record:
    model = otad.OTAD(net.eval(), net.bank(), scope="global", n_neighbors=1)
    found = otad.certify(model, x, progress=False)
    accuracy = float((found.prediction == y).double().mean())
    return {"points": len(net.points), "accuracy": accuracy, "certified": found.accuracy(y, EPS)}


def labeled_points(
    x: Tensor, y: Tensor, size: int | None, neighbors: int, margin: float | None, epochs: int
) -> otad.prototypes.PrototypeNet:
    """Return so many points of each class: means of neighbors, and learned if there is a margin."""
    frame = otad.nets.lifted_net(tuple(x.shape[1:]), 10, blocks=0, bounds=(0.0, 1.0))
    options = {"per_class": size, "neighbors": neighbors, "progress": False}
    net = otad.prototypes.prototype_net(frame, x, y, **options)
    if margin is not None:
        config = TrainConfig(
            epochs=epochs, batch_size=256, optimizer="adamw", learning_rate=0.01, weight_decay=0.0,
            loss="margin", target_margin=margin, ema=0.99,
        )  # fmt: skip
        train(net, (x, y), config, progress=False)
    return net


def condensation(
    sizes: tuple[int, ...], epochs: int, seed: int
) -> tuple[list[Record], list[Record]]:
    """Return what each kind and size of bank proves on test data, and what chose the settings."""
    data = otad.data.load("digits")
    order = torch.randperm(len(data.train_x), generator=torch.Generator().manual_seed(seed))
    held, rest = order[::FOLDS], order[torch.arange(len(order)) % FOLDS > 0]
    x, y = data.train_x, data.train_y
    trials, rows = [], []

    def choose(size: int, options: list[Record]) -> Record:
        """Return the options that prove most on held-out training data."""
        for given in options:
            net = labeled_points(x[rest], y[rest], size, **given, epochs=epochs)
            trials.append({"per_class": size} | given | certified(net, x[held], y[held]))
        best = max(trials[-len(options) :], key=lambda trial: trial["certified"])
        return {name: best[name] for name in ("neighbors", "margin")}

    means = {
        size: choose(size, [{"neighbors": count, "margin": None} for count in MEANS])
        for size in sizes
    }
    middle = min(sizes, key=lambda size: abs(size - CHOSEN_AT))
    margin = choose(middle, [means[middle] | {"margin": margin} for margin in MARGINS])["margin"]
    drawn = {"neighbors": 1, "margin": None}
    for size in (*sizes, None):
        kinds = {"random": drawn}
        if size is not None:
            kinds |= {"means": means[size], "learned": means[size] | {"margin": margin}}
        for kind, given in kinds.items():
            net = labeled_points(x, y, size, **given, epochs=epochs)
            about = {"kind": kind, "per_class": size} | given
            rows.append(about | certified(net, data.test_x, data.test_y))
    return rows, trials


def seconds_of(work: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    """Return the median time of three calls, by default in seconds of one core."""
    times = []
    for _ in range(3):
        start = clock()
        work()
        times.append(clock() - start)
    return sorted(times)[1]


def bandwidths(points: int, seed: int) -> Record:
    """Return bytes per second of reading a bank of shards, and per core of what is computed."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(points, 512, generator=generator).half()
    bank = FeatureBank(inputs, inputs, torch.zeros(points, dtype=torch.int64), "random points")
    queries = torch.randn(QUERIES, 512, generator=generator)
    keys = torch.randn(16 * points, 8, generator=generator)
    with TemporaryDirectory() as folder:
        bank.save(folder, shards=4)
        files = sorted(Path(folder).glob("*.safetensors"))
        size = sum(path.stat().st_size for path in files)

        def read_cold() -> None:
            for path in files:
                with path.open("rb", buffering=0) as file:
                    if hasattr(os, "posix_fadvise"):  # so that it comes from the disk
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    while file.read(2**24):
                        pass

        mapped = TorchSearch(FeatureBank.load(folder, verify=False).inputs)
        in_memory, by_key = TorchSearch(inputs.float()), TorchSearch(keys)
        key_queries = queries[:, :8].contiguous()
        return {
            "disk": size / seconds_of(read_cold, time.perf_counter),
            "verify": size / seconds_of(lambda: damaged_shards(folder)),
            "search_mapped_float16": inputs.nbytes / seconds_of(lambda: mapped(queries, 10)),
            "search_float32": 2 * inputs.nbytes / seconds_of(lambda: in_memory(queries, 10)),
            "search_keys": keys.nbytes / seconds_of(lambda: by_key(key_queries, 10)),
        }


def estimates(rates: Record) -> list[Record]:
    """Return what large banks need: bytes, nodes to hold what is searched, and seconds."""
    rows = []
    for layout, (dim, number, key_dim) in LAYOUTS.items():
        rate = rates["search_float32" if number == 4 else "search_mapped_float16"]
        rate = rates["search_keys"] if key_dim else rate
        for points in LARGE:
            stored = points * (2 * dim * number + 8)
            searched = points * (4 * key_dim if key_dim else dim * number)
            nodes = math.ceil(searched / NODE_BYTES)
            rows.append(
                {
                    "layout": layout, "points": points, "stored_bytes": stored,
                    "searched_bytes": searched, "nodes": nodes,
                    "batch_seconds": searched / rate / nodes / NODE_CORES,
                    "verify_seconds": stored / rates["verify"] / nodes / NODE_CORES,
                    "disk_seconds": searched / rates["disk"] / nodes,
                }
            )  # fmt: skip
    return rows


def draw(record: Record) -> Figure:
    figure = Figure(figsize=(7.6, 3.2), layout="constrained")
    for panel, name in zip(figure.subplots(1, 2), ("accuracy", "certified"), strict=True):
        for kind in KINDS:
            rows = [row for row in record["rows"] if row["kind"] == kind]
            panel.plot(*([row[it] for row in rows] for it in ("points", name)), "o-", label=kind)
        title = "accuracy" if name == "accuracy" else f"certified accuracy, l2 {EPS}"
        panel.set(xscale="log", xlabel="points of the bank", title=title)
        panel.grid(True, color="#e4e4e4")
    panel.legend()
    return figure


def main(arguments: list[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    text = ",".join(map(str, SIZES))
    parser.add_argument("--sizes", default=text, help="Points of each class, with commas.")
    parser.add_argument("--epochs", type=int, default=12, help="Epochs of learned points.")
    parser.add_argument("--points", type=int, default=2**17, help="Points whose reading is timed.")
    parser.add_argument("--seed", type=int, default=0)
    where = "Folder of the record and the plot."
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks"), help=where)
    given = parser.parse_args(arguments)
    sizes = tuple(int(size) for size in given.sizes.split(","))
    rows, trials = condensation(sizes, given.epochs, given.seed)
    rates = bandwidths(given.points, given.seed)
    record = {
        "data": "digits", "eps": EPS, "epochs": given.epochs, "seed": given.seed, "rows": rows,
        "trials": trials, "timed_points": given.points, "queries": QUERIES,
        "bytes_per_second": rates, "node_bytes": NODE_BYTES, "node_cores": NODE_CORES,
        "estimates": estimates(rates),
        "environment": environment(torch.device("cpu"), torch.get_num_threads()),
    }  # fmt: skip
    shown = [
        [
            {it: f"{v:.3g}" if isinstance(v, float) else str(v) for it, v in row.items()}
            for row in some
        ]
        for some in (rows, [rates], record["estimates"])
    ]
    titles = "points of a bank", "bytes per second", "estimates"
    tables = [table(title, some) for title, some in zip(titles, shown, strict=True)]
    finish(record, tables, draw(record), given.out / "bank_size")


if __name__ == "__main__":
    main()
