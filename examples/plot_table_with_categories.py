"""
A table with words and missing values
=====================================

Tables have columns of text and empty cells. The estimators take them as they are: inside the model,
text becomes one-hot columns, and a missing number becomes the median and is marked. An attacker may
replace one category by another, but not by a mixture of both.
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
# The table describes wines of three growers. To get text, we replace two columns of numbers by
# words that a taster would write. We also remove some cells.
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
# The settings are the defaults, except for fewer neighbors, so that more can be proved.
clf = otad.OTADClassifier(n_neighbors=3, random_state=0).fit(X_train, y_train)
names = clf.module_.notes["feature_names"]
print(f"{table.shape[1]} columns became {len(names)}: {', '.join(names[-9:])}")
print(f"right on {len(X_test)} test wines: {clf.score(X_test, y_test):.1%}")

# %%
# Changes of numbers are measured in standard deviations. A switch of a category has the length
# 1.41. So at eps = 1.5 one category can switch, and numbers can then change only a little. An
# attacker cannot change whether magnesium was measured.
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
# There are few wines and many columns, so wines of another grower are near. Where a category can
# switch, the undefended network may be the better one. So look at both sizes, and at the proved
# share.
for eps in radii:
    network, defended = (one.worst_case(eps).value for one in (alone, found))
    print(f"l2 {eps:g}: undefended {network:.1f}%, defended {defended:.1f}%", end=", ")
    proved = found.certified_accuracy(eps).value
    print(f"gain {defended - network:+.1f} points, proved {proved:.1f}%")

# %%
# The left panel shows the accuracy under attack, the right one which features the attack changed
# most.
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
