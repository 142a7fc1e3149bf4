"""
Defend a convolutional network
==============================

A small CNN is trained on handwritten digits and defended by ``otad.defend``. Then the CNN and the
defended model are attacked. The digits are those of MNIST if the folder that ``OTAD_DATA`` names
has them, else the 8 x 8 digits that come with scikit-learn.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import otad
from otad.evaluate import make_attack

plt.style.use("otad.report.gallery")
torch.manual_seed(0)

# %%
# We use 80 training images of each digit, and 30 test images.
try:
    data, eps = otad.data.load("mnist"), 1.0
except otad.data.MissingDataError:
    data, eps = otad.data.load("digits"), 0.5
rows = otad.data.subset_per_class(data.train_y, 80, torch.Generator().manual_seed(0))
train_x, train_y = data.train_x[rows], data.train_y[rows]
x, y = data.test_x[:30], data.test_y[:30]
print(f"{data.name}: {len(train_x)} training images of shape {tuple(train_x.shape[1:])}")

# %%
# Any network will do. This one is an ordinary CNN with ordinary training.
net = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
    nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
)  # fmt: skip
optimizer = torch.optim.Adam(net.parameters(), 4e-3)
for _ in range(8):
    for batch in torch.randperm(len(train_x)).split(64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(train_x[batch]), train_y[batch]).backward()
        optimizer.step()

# %%
# By default the features that enter the last layer are interpolated between training points. An
# attack that changes these features still changes the answer. If neighbors are searched among the
# images themselves, a small change of an image cannot change its neighbors much. So this is the
# choice for robustness.
models = {
    "neighbors\nby features": otad.defend(net, train_x, train_y, bounds=(0, 1)),
    "neighbors\namong images": otad.defend(
        net, train_x, train_y, bounds=(0, 1), metric=nn.Flatten()
    ),
}

# %%
# We measure the worst case over an attack that follows the gradient and two that try to change the
# neighbors. These few attacks are fast; for numbers to publish use ``attacks="standard"``.
clean, worst = {}, {}
for name, model in models.items():
    wrong_neighbors = make_attack("soft_knn", model, temperatures=(0.1,), steps=15)
    attacks = ["straight", wrong_neighbors, otad.attacks.Pgd(steps=20)]
    found = otad.evaluate(model, x, y, otad.L2(eps), attacks=attacks, train_x=train_x, flags=False)
    clean[name], worst[name] = len(found.clean_right) / found.n, found.worst_case_accuracy
    alone = found.undefended
clean = {"undefended": len(alone.clean_right) / alone.n} | clean
worst = {"undefended": alone.worst_case_accuracy} | worst
for name in clean:
    print(f"{' '.join(name.split()):24}{clean[name]:7.1%} clean, {worst[name]:6.1%} under attack")
gain = worst["neighbors\namong images"] - worst["undefended"]
print(f"gain at l2 {eps:g}: {100 * gain:+.1f} points")

# %%
# The left panel shows the accuracies, the other two a digit before and after an attack on the CNN.
broken = otad.attack(net, x, y, otad.L2(eps, bounds=(0, 1)), attack="pgd", steps=20)
row = int((broken.broken & (broken.distance > 0)).nonzero()[0])
figure, panels = plt.subplots(1, 3, width_ratios=(3, 1, 1))
panels[0].bar(clean.keys(), [100 * share for share in clean.values()], color="#e6eaed")
bars = panels[0].bar(worst.keys(), [100 * share for share in worst.values()], width=0.5)
panels[0].bar_label(bars, fmt="%.0f %%", padding=-14, color="white")
panels[0].set_title(f"Right answers in percent: clean (gray) and under attack at l2 {eps:g}")
for panel, image, title in zip(
    panels[1:], (x[row], broken.inputs[row]), ("a test digit", "attacked"), strict=True
):
    with torch.no_grad():
        says = int(net(image[None]).argmax())
    panel.imshow(image[0].numpy(), vmin=0, vmax=1)
    panel.set_title(f"{title}\nCNN: {says}")
    panel.axis("off")
