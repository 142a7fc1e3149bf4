"""Small experiments, as TOML files: a vision transformer with metrics and a CIP-net; a wine net."""

from __future__ import annotations

from pathlib import Path

from otad.experiments.cache import WorkFolder
from otad.experiments.experiment import read_experiment
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
[attacks]
push = { name = "pgd", eps = 0.1, points = 9, options = { steps = 2 } }
[rows]
net = { net = "vit", method = "net", attacks = ["push"] }
exact = { net = "vit", method = "otad", metric = "learned", attacks = ["push"] }
estimated = { net = "vit", method = "otad", metric = "learned", surrogate = "imitation" }
few = { net = "vit", method = "otad", metric = "learned", per_class = 2 }
pixels = { net = "vit", method = "majority_knn", metric = "pixels" }
whole = { net = "vit", method = "otad", scope = "global", smoothness = 9 }
"""

KEYS = """
title = "keys of a classifier"
[data.digits]
name = "digits"
options = { test_fraction = 0.7 }
[otad]
n_neighbors = 3
net = "robust"
[nets.robust]
data = "digits"
kind = "lifted"
blocks = 1
options = { hidden = [64] }
train = { epochs = 12, batch_size = 64, learning_rate = 0.1, adversary = { eps = 0.3, steps = 2 } }
[metrics.softmax]
data = "digits"
kind = "classifier"
net = "robust"
[metrics.tuned]
data = "digits"
kind = "tuned"
row = "softmax"
train = { epochs = 1, batch_size = 64, references = "bank", adversary = { eps = 0.3, steps = 1 } }
[rows]
classifier = { method = "net" }
softmax = { method = "otad", metric = "softmax", per_class = 5, central = true, robust = true }
tuned = { like = "softmax", metric = "tuned" }
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


def written(folder: Path, text: str, *changes: tuple[str, str], name: str = "small") -> Path:
    """The TOML file of an experiment, with some text replaced."""
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    path = folder / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    return path


def study_of(path: Path, work: Path, deadline: float | None = None) -> Study:
    return Study(read_experiment(path), lambda *_: None, WorkFolder(work, deadline))
