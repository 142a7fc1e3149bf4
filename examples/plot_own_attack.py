"""
Write an attack of your own
===========================

An attack is a class with one method. This one moves an image toward itself shifted by one pixel, as
far as the threat model allows. Once it is registered, evaluations find it by its name. The base
class projects the result, asks the model again and measures the distance, so an attack cannot
report a success that it did not have.
"""

import math

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import otad
from otad.attacks import Attack, Needs, register_attack
from otad.evaluate import make_attack

plt.style.use("otad.report.gallery")
STEPS = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if (i, j) != (0, 0)]


# %%
# ``run`` gets the model as ``target``, the examples, the ball and a generator. ``needs`` says which
# models the attack fits; evaluations read it.
@register_attack
class Shift(Attack):
    """Moves every image toward itself shifted by one pixel, in the worst of eight directions."""

    name, family, needs = "shift", "black-box", Needs(tasks=("classification",))

    def run(self, target, x, ball, generator):
        best, most = x, torch.full((len(x),), -torch.inf)
        for step in STEPS:
            moved = ball.project(x.roll(step, (2, 3)), x)
            logits = target(moved)
            right = torch.nn.functional.one_hot(target.y, logits.shape[1]).bool()
            lead = (logits - 1e9 * right).amax(1) - logits[right]  # above 0: another class wins
            best = torch.where((lead > most)[:, None, None, None], moved, best)
            most = torch.maximum(lead, most)
        return best


# %%
# We train a defended classifier of 8 x 8 digits with the default settings of the estimator.
X, y = load_digits(return_X_y=True)
X_train, X_test, y_train, y_test = train_test_split(
    X.reshape(-1, 1, 8, 8) / 16, y, train_size=800, test_size=40, random_state=0
)
clf = otad.OTADClassifier(epochs=10, bounds=(0, 1), random_state=0).fit(X_train, y_train)

# %%
# We compare it with attacks of the library. Two of them, ``straight`` and ``soft_knn``, try to
# change the neighbors, so they do not apply to the network alone. With ``survivors_only=False``
# each attack tries all digits. In the worst case a digit counts as right only if no attack breaks
# it.
eps = 0.5
wrong_neighbors = make_attack("soft_knn", clf.module_, temperatures=(0.1,), steps=15)
attacks = ["shift", "noise", "straight", wrong_neighbors, otad.attacks.Pgd(steps=20)]
found = otad.evaluate(
    clf, X_test, y_test, otad.L2(eps), attacks=attacks, survivors_only=False, flags=False
)
alone = found.undefended
print(f"at l2 {eps:<6g}  undefended   defended")
shares = {name: (alone.per_attack.get(name, math.nan), s) for name, s in found.per_attack.items()}
shares["worst case"] = alone.worst_case_accuracy, found.worst_case_accuracy
for name, (network, defended) in shares.items():
    print(f"{name:12}{network:12.1%}{defended:11.1%}".replace("nan%", "   -"))
print(f"gain in the worst case: {100 * (defended - network):+.1f} points")

# %%
# A weak attack makes every model look robust, so look at the worst case over many attacks. An
# attack of your own can lower the worst case, but never raise it.
figure, panels = plt.subplots(1, 4, width_ratios=(4, 1, 1, 1))
for number, label in enumerate(("undefended", "defended")):
    heights = [100 * pair[number] for pair in shares.values()]
    places = [place + 0.4 * number - 0.2 for place in range(len(heights))]
    panels[0].bar(places, heights, 0.38, label=label, color=("#8796a1", "#0f766e")[number])
panels[0].set_xticks(range(len(shares)), shares)
panels[0].set(title=f"Right answers at l2 {eps:g}, percent", ylim=(0, 118))
panels[0].legend(ncols=2, loc="upper right")
x = clf.as_inputs(X_test[:1])
shifted = otad.attack(clf, X_test[:1], y_test[:1], otad.L2(eps), attack="shift").inputs
images = {f"a {y_test[0]}": x, "shifted": x.roll((0, 1), (2, 3)), f"within l2 {eps:g}": shifted}
for panel, (title, image) in zip(panels[1:], images.items(), strict=True):
    panel.imshow(image[0, 0].numpy(), vmin=0, vmax=1)
    panel.set_title(title)
    panel.axis("off")
