"""Measures how well the distance from the bank separates foreign inputs from held-out inputs.

Foreign inputs are Fashion-MNIST for MNIST, and noise and Imagenette (at 32 x 32) for CIFAR-10. The
record has the area under the ROC curve of `OTAD.distance`, by pixels and by the keys of a small
trained metric. It also has the share of inputs beyond a threshold chosen on held-out data.

The distance to the nearest bank point was chosen over the distance to the K-th nearest one without
foreign data, by how well each separates held-out inputs from the same inputs with their pixels in
another order. The areas of both are recorded.

    python benchmarks/foreign_inputs.py --data-dir DIR --out results/benchmarks/foreign_inputs.json
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from output import table
from rich.console import Console
from sklearn.metrics import roc_auc_score
from torch import Tensor

import otad
from otad.data import load
from otad.io.environment import Environment
from otad.nets import CNNMetric
from otad.training import MetricConfig, train_metric

STUDIES: dict[str, tuple[str, ...]] = {
    "mnist": ("fashion_mnist",),
    "cifar10": ("noise", "imagenette"),
}
SPACES = ("pixels", "metric")
NEIGHBORS = 10
QUANTILE = 0.95
CONFIG = MetricConfig(epochs=6, batch_size=128, learning_rate=2e-3)
WIDTHS = (24, 48)
Record = dict[str, Any]


def some(x: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return x[torch.randperm(len(x), generator=generator)[:count]]


def scores(model: otad.OTAD, x: Tensor) -> dict[str, Tensor]:
    """Return the distances (n,) to the nearest and to the K-th nearest bank point."""
    with torch.no_grad():
        found = [model.neighbors(model.query_keys(batch), NEIGHBORS) for batch in x.split(250)]
    distances = torch.cat([one.distances for one in found])
    return {"nearest": distances[:, 0], "kth": distances[:, -1]}


def areas(inside: dict[str, Tensor], outside: dict[str, Tensor]) -> dict[str, float]:
    """Return areas under the ROC curve: 1/2 by chance, 1 if all foreign inputs are farther away."""
    found = {}
    for name, near in inside.items():
        far = outside[name]
        is_foreign = torch.cat([torch.zeros(len(near)), torch.ones(len(far))])
        found[name] = float(roc_auc_score(is_foreign, torch.cat([near, far])))
    return found


def study(
    name: str, parts: dict[str, Tensor], foreign: dict[str, Tensor], space: str, seed: int
) -> list[Record]:
    """Return one row of the record for each kind of foreign inputs.

    `parts` are the bank, its labels, held_out and test inputs of the data set."""
    bank, labels = parts["bank"], parts["labels"]
    metric = None
    if space == "metric":
        metric = CNNMetric(bank.shape[1:], key_dim=64, widths=WIDTHS, bounds=(0.0, 1.0), seed=seed)
        train_metric(metric, (bank, labels), CONFIG, progress=False)
    model = otad.defend(
        None, bank, labels, inputs="pixels", scope="local", bounds=(0.0, 1.0), metric=metric,
        n_neighbors=NEIGHBORS, progress=False,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    held_out = parts["held_out"]
    pixels = held_out.flatten(1)
    order = torch.randperm(pixels.shape[1], generator=generator)
    inside, test = scores(model, held_out), scores(model, parts["test"])
    scrambled = areas(inside, scores(model, pixels[:, order].view_as(held_out)))
    limit = otad.distance_threshold(model, held_out, quantile=QUANTILE)
    rows = []
    for other, x in foreign.items():
        outside = scores(model, x)
        found = areas(test, outside)
        rows.append(
            {
                "data": name, "foreign": other, "space": space, "auroc": found["nearest"],
                "auroc_kth": found["kth"], "scrambled": scrambled["nearest"],
                "scrambled_kth": scrambled["kth"], "threshold": limit,
                "refused_test": float((test["nearest"] > limit).double().mean()),
                "refused_foreign": float((outside["nearest"] > limit).double().mean()),
            }
        )  # fmt: skip
    return rows


def run(data_dir: Path | None, points: int, inputs: int, seed: int) -> Record:
    started, rows = time.perf_counter(), []
    for name, others in STUDIES.items():
        generator = torch.Generator().manual_seed(seed)
        data = load(name, data_dir=data_dir)
        order = torch.randperm(len(data.train_x), generator=generator)
        bank, held = order[:points], order[points : points + inputs]
        parts = {
            "bank": data.train_x[bank], "labels": data.train_y[bank],
            "held_out": data.train_x[held], "test": some(data.test_x, inputs, generator),
        }  # fmt: skip
        foreign = {}
        for other in others:
            if other == "noise":
                foreign[other] = torch.rand(parts["test"].shape, generator=generator)
                continue
            sized = {"size": data.input_shape[1]} if other == "imagenette" else {}
            foreign[other] = some(load(other, data_dir=data_dir, **sized).test_x, inputs, generator)
        for space in SPACES:
            rows += study(name, parts, foreign, space, seed)
    return {
        "format": 1,
        "bank": points, "inputs": inputs, "seed": seed, "n_neighbors": NEIGHBORS,
        "quantile": QUANTILE, "metric": {"widths": WIDTHS, "training": asdict(CONFIG)},
        "rows": rows, "seconds": time.perf_counter() - started,
        "environment": asdict(Environment.now(torch.device("cpu"), torch.get_num_threads())),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--data-dir", type=Path, help="Folder of the data sets [OTAD_DATA].")
    parser.add_argument("--points", type=int, default=4000, help="Points of the bank.")
    count = "How many inputs are held out, tested, and foreign."
    parser.add_argument("--inputs", type=int, default=500, help=count)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/foreign_inputs.json"))
    given = parser.parse_args(arguments)
    record = run(given.data_dir, given.points, given.inputs, given.seed)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    shown = [
        {key: f"{value:.3f}" if isinstance(value, float) else value for key, value in row.items()}
        for row in record["rows"]
    ]
    Console(width=160).print(table(f"foreign inputs, {record['seconds']:.0f} s", shown))


if __name__ == "__main__":
    main()
