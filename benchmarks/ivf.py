"""Measures what a proof of exact neighbors costs: the share of the bank that `IvfSearch` reads.

The bank is MNIST if its files are there (`--data-dir` or OTAD_DATA), else the embedded digits. It
is searched by pixels and by low-dimensional keys, the first principal components. For each number
of cells that may be read, the record has the share of queries that are proved, of those whose
neighbors are right, and the time of a query on one core beside that of a scan of the whole bank.

    python benchmarks/ivf.py --data-dir DIR
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from matplotlib.figure import Figure
from output import Record, environment, finish, table
from torch import Tensor

from otad.data import load
from otad.errors import OtadError
from otad.search.ivf import IvfSearch, build_lists
from otad.search.neighbors import Neighbors, TorchSearch

NEIGHBORS = 10
KEY_DIMS = (8, 32)
PROBES = (1, 4, 16, 64, None)  # None: until all are proved


def principal_components(points: Tensor, queries: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return both (n,dim) in the directions of the largest variance of the points."""
    mean = points.mean(0)
    covariance = (points - mean).T @ (points - mean)
    directions = torch.linalg.eigh(covariance.double()).eigenvectors[:, -dim:].float()
    return (points - mean) @ directions, (queries - mean) @ directions


def measure(path: Path, n_probe: int | None, queries: Tensor, exact: Neighbors) -> Record:
    search = IvfSearch(path, n_probe=n_probe, verify=False)
    start = time.process_time()
    found, read = search.counted(queries, NEIGHBORS)
    seconds = time.process_time() - start
    right = (found.indices == exact.indices).all(1)
    return {
        "n_probe": "all" if n_probe is None else n_probe,
        "cells": search.cells,
        "read": float(read.double().mean()) / len(search),
        "proved": float(found.proved.double().mean()),
        "right": float(right.double().mean()),
        "wrong_but_proved": int((found.proved & ~right).sum()),
        "milliseconds": 1000 * seconds / len(queries),
    }


def run(data_dir: Path | None, points: int, queries: int, seed: int) -> Record:
    try:
        data = load("mnist", data_dir=data_dir)
    except (OtadError, FileNotFoundError):
        data = load("digits")
    bank, asked = (it.flatten(1).float() for it in (data.train_x[:points], data.test_x[:queries]))
    spaces = {"pixels": (bank, asked)}
    for dim in KEY_DIMS:
        spaces[f"{dim}-dimensional keys"] = principal_components(bank, asked, dim)
    rows = []
    with TemporaryDirectory() as folder:
        for space, (held, wanted) in spaces.items():
            start = time.process_time()
            path = build_lists(held, Path(folder) / "lists", seed=seed)
            build = time.process_time() - start
            scan = TorchSearch(held)
            start = time.process_time()
            exact = scan(wanted, NEIGHBORS)
            scanned = 1000 * (time.process_time() - start) / len(wanted)
            for n_probe in PROBES:
                about = {"space": space, "dim": held.shape[1], "build_seconds": build}
                about |= {"scan_milliseconds": scanned}
                rows.append(about | measure(path, n_probe, wanted, exact))
    return {
        "data": data.name, "points": len(bank), "queries": len(asked), "n_neighbors": NEIGHBORS,
        "seed": seed, "rows": rows,
        "environment": environment(torch.device("cpu"), torch.get_num_threads()),
    }  # fmt: skip


def draw(record: Record) -> Figure:
    figure = Figure(figsize=(5.2, 3.2), layout="constrained")
    panel = figure.add_subplot()
    for space in dict.fromkeys(row["space"] for row in record["rows"]):
        own = [row for row in record["rows"] if row["space"] == space]
        shares = [[100 * row[name] for row in own] for name in ("read", "proved")]
        panel.plot(*shares, marker="o", label=space)
    panel.set(xlabel="share of the bank that is read, %", ylabel="proved queries, %")
    panel.legend()
    panel.grid(True, color="#e4e4e4")
    return figure


def main(arguments: list[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--data-dir", type=Path, help="Folder of the data sets [OTAD_DATA].")
    parser.add_argument("--points", type=int, default=60_000, help="Points of the bank, at most.")
    parser.add_argument("--queries", type=int, default=100, help="Test points that are searched.")
    parser.add_argument("--seed", type=int, default=0)
    where = "Folder of the record and the plot."
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks"), help=where)
    given = parser.parse_args(arguments)
    record = run(given.data_dir, given.points, given.queries, given.seed)
    names = ("space", "n_probe", "read", "proved", "right", "milliseconds", "scan_milliseconds")
    shown = [
        {it: f"{row[it]:.3f}" if isinstance(row[it], float) else str(row[it]) for it in names}
        for row in record["rows"]
    ]
    finish(record, [table("cells of a bank", shown)], draw(record), given.out / "ivf")


if __name__ == "__main__":
    main()
