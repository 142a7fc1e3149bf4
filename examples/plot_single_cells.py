"""
Classify single cells
=====================

One call reads an AnnData file of cells and genes. It normalizes the counts, takes their logarithm,
and selects and scales genes, with statistics of the training cells alone. The cells are those of
the MERFISH atlas of the mouse brain if the folder that ``OTAD_DATA`` names has them, else
simulated.
"""

from pathlib import Path

import anndata
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch

import otad
from otad.evaluate import make_attack

plt.style.use("otad.report.gallery")

# %%
# The simulation has 800 cells of four types with three states each. In each state ten marker genes
# are expressed four times as much, and cells differ in their total counts. With a single state for
# each type the task is simpler, and the network alone is about as robust.
try:
    data = otad.data.load("merfish_mousePOA", drop="Ambiguous")
except otad.data.MissingDataError:
    draw = np.random.default_rng(0)
    types = np.array(["astrocyte", "excitatory", "inhibitory", "microglia"])
    state = draw.integers(0, 12, 800)
    rates = draw.gamma(1.0, 5.0, (1, 120)) * np.ones((12, 1))
    for kind in range(12):
        rates[kind, 10 * kind : 10 * kind + 10] *= 4
    counts = draw.poisson(rates[state] * draw.gamma(5.0, 0.2, (800, 1)))
    cells = anndata.AnnData(
        counts.astype(np.float32),
        obs=pd.DataFrame({"cell_type": types[state % 4]}, index=[f"cell {k}" for k in range(800)]),
        var=pd.DataFrame(index=[f"gene {k}" for k in range(120)]),
    )
    cells.write_h5ad(Path("cells.h5ad"))
    data = otad.data.load_h5ad(Path("cells.h5ad"), "cell_type", genes=100)
print(data)

# %%
# The classifier has its default settings, but fewer neighbors and epochs.
train_x, train_y = data.train_x[:500], np.array(data.classes)[data.train_y[:500]]
clf = otad.OTADClassifier(n_neighbors=3, epochs=10, random_state=0).fit(train_x, train_y)
x, y = data.test_x[:60], np.array(data.classes)[data.test_y[:60]]
print(f"right on {len(x)} test cells: {clf.score(x, y):.1%}")

# %%
# One unit of eps is one standard deviation of a gene. Two of the attacks try to change the
# neighbors, and one follows the gradient. For numbers to publish use ``attacks="standard"``.
eps = 2.0
wrong_neighbors = make_attack("soft_knn", clf.module_, temperatures=(0.1,), steps=15)
attacks = ["straight", wrong_neighbors, otad.attacks.Pgd(steps=20)]
found = otad.evaluate(clf, x, y, otad.L2(eps), attacks=attacks, flags=False)
alone = found.undefended
print(f"undefended {alone.worst_case_accuracy:.1%}, defended {found.worst_case_accuracy:.1%}")
gain = found.worst_case_accuracy - alone.worst_case_accuracy
print(f"proved to stay right: {found.certified_accuracy(eps).value:.1f}% of the cells")
print(f"gain at l2 {eps:g}: {100 * gain:+.1f} points")

# %%
# An explanation lists training cells, and the genes in which the nearest one differs most.
one = otad.explain(clf, x[:1], feature_names=data.feature_names)[0]
print(one)

# %%
# The left panel shows right answers without and under attack. The right panel shows the test cells
# along their two principal components; circles mark those for which an attack changed the type.
figure, panels = plt.subplots(1, 2, width_ratios=(2, 3))
for number, one in enumerate((alone, found)):
    panels[0].bar(number, 100 * len(one.clean_right) / one.n, color="#e6eaed")
    color = ("#8796a1", "#0f766e")[number]
    bar = panels[0].bar(number, 100 * one.worst_case_accuracy, 0.5, color=color)
    panels[0].bar_label(bar, fmt="%.0f %%", padding=-14, color="white")
panels[0].set_xticks((0, 1), ("undefended", "defended"))
panels[0].set_title(f"Right types, percent: clean (gray), at l2 {eps:g}")
center = data.train_x.mean(0)
plane = torch.linalg.svd(data.train_x - center, full_matrices=False)[2][:2].T
places, broken = (x - center) @ plane, np.isfinite(found.distances())
for name in np.unique(y):
    panels[1].scatter(*places[y == name].T.numpy(), s=18, label=name)
panels[1].scatter(*places[broken].T.numpy(), s=70, fc="none", ec="#1f2a30", label="broken")
panels[1].set(title="Test cells", xticks=[], yticks=[])
panels[1].legend()
