"""
Refuse inputs unlike the training data
======================================

A classifier of digits also names a digit for a photograph of a flower. A defended model knows the
distance to the nearest training point, so it can refuse inputs that are too far away. The limit is
chosen on held-out training data. We compare the distance with the confidence of the network.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits, load_sample_image
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split

import otad

plt.style.use("otad.report.gallery")
draw = np.random.default_rng(0)

# %%
# The classifier learns digits. A fifth of its training data is held out, and the limit is the 95 %
# quantile of the distances of these digits. So about 5 % of new digits will be refused.
X, y = load_digits(return_X_y=True)
X_train, X_test, y_train, y_test = train_test_split(X.reshape(-1, 1, 8, 8) / 16, y, random_state=0)
clf = otad.OTADClassifier(
    epochs=10, validation_fraction=0.2, abstain_beyond=0.95, bounds=(0, 1), random_state=0
).fit(X_train, y_train)
limit = clf.module_.abstain_beyond
print(f"limit {limit:.2f}; {clf.score(X_test, y_test):.1%} of test digits are right")

# %%
# The foreign inputs are patches of a photograph, digits turned by 90 degrees, and noise.
photo = load_sample_image("flower.jpg").mean(2) / 255
corners = draw.integers(0, np.array(photo.shape) - 8, (300, 2))
foreign = {
    "photograph": np.array([photo[None, i : i + 8, j : j + 8] for i, j in corners]),
    "turned": np.rot90(X_test[:300], axes=(2, 3)),
    "noise": draw.random((300, 1, 8, 8)),
}

# %%
# AUROC is the probability that a foreign input has a larger score than a test digit. One score is
# the distance, the other one minus the largest probability of the network.
network = clf.module_.backbone


def unsure(inputs):
    """One minus the largest probability that the network alone gives."""
    return 1 - network(clf.as_inputs(inputs)).softmax(1).amax(1).detach().numpy()


own = clf.distance(X_test)
print(f"{'test digits':12}{clf.is_foreign(X_test).mean():7.1%} refused")
for name, inputs in foreign.items():
    is_foreign = np.r_[np.zeros(len(X_test)), np.ones(len(inputs))]
    by_distance = roc_auc_score(is_foreign, np.r_[own, clf.distance(inputs)])
    by_network = roc_auc_score(is_foreign, np.r_[unsure(X_test), unsure(inputs)])
    print(
        f"{name:12}{clf.is_foreign(inputs).mean():7.1%} refused; AUROC {by_distance:.3f} by the "
        f"distance, {by_network:.3f} by the network (gain {by_distance - by_network:+.3f})"
    )

# %%
# The picture shows the distances of digits and of foreign inputs, and one input of each kind.
figure, panels = plt.subplot_mosaic(
    [["hist", "a", "b"], ["hist", "c", "d"]], width_ratios=(4, 1, 1), figsize=(9.6, 3.6)
)
edges = np.linspace(0, max(clf.distance(some).max() for some in foreign.values()), 60)
for name, inputs in {"test digits": X_test, **foreign}.items():
    panels["hist"].hist(clf.distance(inputs), edges, density=True, alpha=0.7, label=name)
panels["hist"].axvline(limit, color="#1f2a30", ls="--", lw=1.2)
panels["hist"].set(title="Distance to the nearest training digit; refused right of the line")
panels["hist"].set(yticks=[], xlabel="distance, in standard deviations of the pixels")
panels["hist"].legend()
for panel, (name, inputs) in zip("abcd", {"digit": X_test, **foreign}.items(), strict=True):
    panels[panel].imshow(inputs[inputs.std((1, 2, 3)).argmax(), 0], vmin=0, vmax=1)
    panels[panel].set_title(name)
    panels[panel].axis("off")
