"""
A table with words and missing values
=====================================

Tables have columns of text and empty cells. The estimators take them as they are: text becomes
one-hot columns inside the model, a missing number becomes the median and is marked. The attacker
may switch a category as a whole, and cannot move half of the way between two.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_wine
from sklearn.model_selection import train_test_split

import otad
from otad.evaluate import make_attack

plt.style.use("otad.report.gallery")

# %%
# Wines of three growers. To have words, the columns of color become what a taster would write, and
# some cells are lost.
draw = np.random.default_rng(0)
table, grower = load_wine(return_X_y=True, as_frame=True)
table["hue"] = np.array(["purple", "ruby", "brick"])[np.digitize(table["hue"], (0.8, 1.05))]
depth = np.digitize(table["color_intensity"], (3.5, 6.0))
table["color_intensity"] = np.array(["pale", "medium", "deep"])[depth]
table.loc[draw.random(len(table)) < 0.1, "hue"] = None
table.loc[draw.random(len(table)) < 0.1, "magnesium"] = np.nan
grower = np.array(["Barolo", "Grignolino", "Barbera"])[grower]
X_train, X_test, y_train, y_test = train_test_split(
    table, grower, test_size=30, random_state=0, stratify=grower
)
print(X_test[["alcohol", "magnesium", "hue", "color_intensity"]].head(4))

# %%
# The settings are the defaults, but for fewer neighbors, by which more can be proved.
clf = otad.OTADClassifier(n_neighbors=3, random_state=0).fit(X_train, y_train)
names = clf.module_.notes["feature_names"]
print(f"{table.shape[1]} columns became {len(names)}: {', '.join(names[-9:])}")
print(f"right on {len(X_test)} test wines: {clf.score(X_test, y_test):.1%}")

# %%
# The threat: numbers are measured in their standard deviations. A switch of category has length
# 1.41, so it is possible at eps = 1.5, and leaves little for the numbers. Whether the magnesium was
# measured cannot be changed.
unit = clf.module_.backbone.std
mutable = torch.tensor([name != "magnesium is missing" for name in names])
threat = otad.L2(1.5, scale=unit, mutable=mutable, groups=clf.groups_)
print(threat.describe())
wrong_neighbors = make_attack("soft_knn", clf.module_, temperatures=(0.1,), steps=15)
attacks = ["categories", "straight", wrong_neighbors, otad.attacks.Pgd(steps=20)]
radii = (0.5, 1.5)
found = otad.evaluate(clf, X_test, y_test, threat, eps=radii, attacks=attacks, flags=False)
alone = found.undefended

# %%
# With few wines in many columns, wines of another grower are near, and where a category can switch
# the network may well keep more of them. So look at both sizes, and at what is proved.
for eps in radii:
    network, defended = (one.worst_case(eps).value for one in (alone, found))
    print(f"l2 {eps:g}: undefended {network:.1f}%, defended {defended:.1f}%", end=", ")
    proved = found.certified_accuracy(eps).value
    print(f"gain {defended - network:+.1f} points, proved {proved:.1f}%")

# %%
# Left: what is left by the attacks. Right: what was changed most in the wines that an attack broke.
changes = otad.attack(clf, X_test, y_test, threat, attack="categories", beam=2)
moved = (changes.inputs - clf.as_inputs(X_test)) / unit
largest = moved[changes.broken].abs().mean(0)
figure, panels = plt.subplots(1, 2, width_ratios=(2, 3))
for name, one in (("defended", found), ("undefended", alone)):
    shares = [one.worst_case(eps).value for eps in (0, *radii)]
    panels[0].plot((0, *radii), shares, "o-", label=name)
panels[0].set(title="Right answers, percent", xlabel="l2 size of the attack", ylim=(0, 102))
panels[0].legend(loc="lower left")
most = largest.argsort()[-8:].tolist()
panels[1].barh([names[place] for place in most], largest[most].numpy())
panels[1].set(title="What was changed in broken wines (mean, in units)")
