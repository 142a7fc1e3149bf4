"""Small experiments: with a vision transformer, metrics and a surrogate; with a net alone."""

from __future__ import annotations

from pathlib import Path

from otad.experiments.config import Experiment, read_experiment
from otad.experiments.study import Study

VISION = """
title = "vision"
[data.digits]
name = "digits"
options = { test_fraction = 0.9 }
[otad]
n_neighbors = 3
[nets.vit]
data = "digits"
kind = "vit"
blocks = 1
options = { patch = 4, width = 8, heads = 2 }
train = { epochs = 1, optimizer = "adamw", learning_rate = 0.01 }
bank = "float16"
[metrics.learned]
data = "digits"
kind = "cnn"
options = { widths = [2, 2], key_dim = 4 }
train = { epochs = 2, batch_size = 64, adversary = { eps = 0.1, steps = 1 } }
[metrics.pixels]
data = "digits"
kind = "pixels"
[surrogates.imitation]
row = "exact"
held_out = 9
options = { width = 8, heads = 2, blocks = 1 }
train = { epochs = 2, warmup = 0 }
[rows]
net = { net = "vit", method = "net" }
exact = { net = "vit", method = "otad", metric = "learned" }
estimated = { net = "vit", method = "otad", metric = "learned", surrogate = "imitation" }
few = { net = "vit", method = "otad", metric = "learned", per_class = 2 }
pixels = { net = "vit", method = "majority_knn", metric = "pixels" }
"""


WINE = """
title = "small"
[data.wine]
name = "wine"
[nets.right]
data = "wine"
blocks = 1
train = { epochs = 1 }
[rows]
right = { net = "right", method = "net" }
"""


def vision(folder: Path, old: str = "", new: str = "") -> Experiment:
    assert old in VISION
    path = folder / "vision.toml"
    path.write_text(VISION.replace(old, new, 1) if old else VISION, encoding="utf-8")
    return read_experiment(path)


def study_of(experiment: Experiment, work: Path, max_seconds: float | None = None) -> Study:
    return Study(
        experiment,
        data_dir=None,
        device="cpu",
        work=work,
        seed=0,
        report=lambda part, done, total: None,
        max_seconds=max_seconds,
    )
