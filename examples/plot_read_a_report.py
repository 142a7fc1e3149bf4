"""
Read a report
=============

``otad.evaluate`` attacks a model and its undefended network, certifies answers, and checks whether
the attacks were strong enough. Its result can be written as a report in HTML or Markdown. This page
shows how to read it from top to bottom.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import otad
from otad.evaluate import make_attack
from otad.report.evaluation_report import evaluation_report
from otad.report.verdict import verdict

plt.style.use("otad.report.gallery")

# %%
# A small model, evaluated within l2 0.5. The folder gets the record and the adversarial examples,
# and an interrupted run resumes from it.
X, y = load_digits(return_X_y=True)
X_train, X_test, y_train, y_test = train_test_split(
    X.reshape(-1, 1, 8, 8) / 16, y, train_size=150, test_size=20, random_state=0
)
clf = otad.OTADClassifier(n_neighbors=3, epochs=10, bounds=(0, 1), random_state=0)
clf.fit(X_train, y_train)
wrong_neighbors = make_attack("soft_knn", clf.module_, temperatures=(0.1,), steps=20)
attacks = ["straight", wrong_neighbors, otad.attacks.Pgd(steps=20), "noise"]
found = otad.evaluate(clf, X_test, y_test, otad.L2(0.5), attacks=attacks, folder="evaluation")

# %%
# The verdict says how many answers stay right under attack, for the model and for the network
# alone, how many are proved, and whether any check failed. The difference between the first two
# numbers is the gain.
for sentence in verdict(found, "test digits"):
    print(sentence)
gain = found.worst_case_accuracy - found.undefended.worst_case_accuracy
print(f"gain: {100 * gain:+.1f} points")

# %%
# Attacks run one after the other. Each one tries only digits that the earlier ones did not break.
for one in found.attacks:
    print(f"{one.attack:9} broke {len(one.broken)} of {len(one.attacked)} digits")

# %%
# Read the flags before the numbers. A failed flag says what it means and what to do.
for flag in found.flags:
    print(f"{flag.verdict:8}{flag.name}: {flag.found}")
    if flag.verdict == "FAIL":
        print(f"{'':8}{flag.meaning} {flag.advice}")

# %%
# These lines write the whole report, with pictures of attacked digits. Open ``report.html`` in a
# browser. On the command line, ``otad evaluate`` writes it for you.
x, labels = clf.as_inputs(X_test), clf.as_targets(y_test)
report = evaluation_report(found, model=clf.module_, x=x, y=labels)
for name in ("report.html", "report.md"):
    written = report.write(Path("evaluation") / name)
    print(f"{written}: {written.stat().st_size / 1000:.0f} kB")

# %%
# The robust accuracy of the defended model is between the proved share and the share under attack.
# Dots mark the size that was attacked. Attacks of a smaller size might break more than is shown.
eps = np.linspace(0, 0.5, 200)
radii = [r * (row in found.clean_right) for row, r in enumerate(found.certificate.radius)]
lines = {
    "attacks on the defended model": (found.distances(), "-"),
    "attacks on the network": (found.undefended.distances(), ":"),
    "proved": (radii, "--"),
}
figure, panel = plt.subplots()
for name, (distances, style) in lines.items():
    shares = [100 * np.mean(np.array(distances) > size) for size in eps]
    (line,) = panel.plot(eps, shares, style, label=name)
    panel.plot(eps[-1], shares[-1], "o", color=line.get_color())
panel.set(title="Right answers, percent", xlabel="l2 size of the attack", ylim=(0, 102))
panel.legend(loc="lower left")
