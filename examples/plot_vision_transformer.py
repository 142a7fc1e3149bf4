"""
Defend a vision transformer of your own class
=============================================

The network may be any ``nn.Module``: here a small transformer in the style of timm, with patches, a
class token and a linear head. It is defended, each answer is explained by training images, and the
model is saved and loaded without unpickling anything.
"""

from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
import torch
from torch import nn

import otad
from otad.evaluate import make_attack

plt.style.use("otad.report.gallery")
torch.manual_seed(0)


# %%
# The transformer divides an 8 x 8 image into 16 patches.
class Transformer(nn.Module):
    def __init__(self, width=32, depth=2):
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 17, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(x), -1, -1), tokens], 1)
        return self.head(self.encoder(tokens + self.positions)[:, 0])


data = otad.data.load("digits")
rows = otad.data.subset_per_class(data.train_y, 80, torch.Generator().manual_seed(0))
train_x, train_y = data.train_x[rows], data.train_y[rows]
net = Transformer()
optimizer = torch.optim.Adam(net.parameters(), 2e-3)
for _ in range(12):
    for batch in torch.randperm(len(train_x)).split(32):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(train_x[batch]), train_y[batch]).backward()
        optimizer.step()

# %%
# Neighbors are searched among the images themselves, where a small change does not go far. A
# warning says what was chosen for this network, and the model stores the same text:
model = otad.defend(net, train_x, train_y, bounds=(0, 1), metric=nn.Flatten())
print(model.notes["defense"]["says"])

# %%
# The folder contains no code, so you give a module of your class again when you load it.
with TemporaryDirectory() as folder:
    model.save(folder, classes=data.classes)
    model = otad.load(folder, net=Transformer())

# %%
# The gain is measured on 30 test digits. Two attacks try to change the neighbors, and one follows
# the gradient. For numbers to publish leave out ``attacks``, so that the whole standard suite runs.
x, y = data.test_x[:30], data.test_y[:30]
wrong_neighbors = make_attack("soft_knn", model, temperatures=(0.1,), steps=10)
attacks = ["straight", wrong_neighbors, otad.attacks.Pgd(steps=20)]
found = otad.evaluate(model, x, y, otad.L2(0.5), attacks=attacks, train_x=train_x, flags=False)
alone = found.undefended
for name, one in (("undefended", alone), ("defended", found)):
    clean = len(one.clean_right) / one.n
    print(f"{name}: {clean:.1%} clean, {one.worst_case_accuracy:.1%} under attack")
print(f"proved {found.certified_accuracy(0.5).value:.1f}%, of the network alone nothing")
print(f"gain: {100 * (found.worst_case_accuracy - alone.worst_case_accuracy):+.1f} points")

# %%
# We show the least certain answer and the training digits from which it is interpolated.
one = min(otad.explain(model, x, train_x=train_x), key=lambda one: one.margin)
print(one)
figure, panels = plt.subplots(1, 6, figsize=(9.6, 2.0))
panels[0].set_title(f"answered {one.prediction}")
nearest = sorted(one.neighbors, key=lambda near: -near.weight)[:5]
for panel, near in zip(panels[1:], nearest, strict=True):
    panel.set_title(f"a {near.label}, weight {near.weight:.2f}")
for panel, image in zip(panels, [one.inputs, *(near.inputs for near in nearest)], strict=True):
    panel.imshow(image[0].numpy(), vmin=0, vmax=1)
    panel.axis("off")
