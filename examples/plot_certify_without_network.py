"""
Certify without a network
=========================

With ``inputs="pixels"`` no network is needed. One Lipschitz map passes through all training images
and their labels, and every answer comes with a proof. The share of answers that are proved is
compared with the share that stays right under an attack.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import otad

plt.style.use("otad.report.gallery")
torch.manual_seed(0)

# %%
# All settings are the defaults. There is nothing to train.
data = otad.data.load("digits")
model = otad.defend(None, data.train_x, data.train_y, inputs="pixels", bounds=(0, 1))
print(model)

# %%
# The certificates of all test digits: no change shorter than the radius changes the answer.
x, y = data.test_x, data.test_y
certificate = otad.certify(model, x)
print(certificate)
print(f"right without attack: {float((certificate.prediction == y).double().mean()):.1%}")

# %%
# An ordinary network is trained for comparison. Nothing is proved for it.
net = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.Adam(net.parameters(), 3e-3)
for _ in range(15):
    for batch in torch.randperm(len(data.train_x)).split(64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(data.train_x[batch]), data.train_y[batch]).backward()
        optimizer.step()

# %%
# Both models are attacked on the first 100 digits, with attacks of several sizes.
radii, few = (0.25, 0.5, 0.75, 1.0), slice(100)
proved = [certificate.accuracy(y, eps) for eps in radii]
attacked = {"map through all digits": model, "undefended network": net.eval()}
left = {
    name: [
        otad.attack(one, x[few], y[few], otad.L2(eps, bounds=(0, 1)), attack="pgd", steps=10)
        for eps in radii
    ]
    for name, one in attacked.items()
}
left = {name: [result.accuracy for result in results] for name, results in left.items()}
for place, eps in enumerate(radii):
    shares = ", ".join(f"{name} {values[place]:.0%}" for name, values in left.items())
    print(f"l2 {eps:.2f}: proved {proved[place]:.0%}; left by PGD: {shares}")
gain = proved[1] - left["undefended network"][1]
print(f"gain at l2 {radii[1]:g}, proof against attacked network: {100 * gain:+.1f} points")

# %%
# The robust accuracy of the map is between the proved share and the share under attack. On the
# right are the digit with the largest radius and one with a small radius.
figure, panels = plt.subplots(1, 3, width_ratios=(3, 1, 1))
panels[0].plot(
    (0, *radii), [100 * certificate.accuracy(y, eps) for eps in (0, *radii)], label="proved"
)
for (name, values), mark in zip(left.items(), "os", strict=True):
    panels[0].plot(
        radii, [100 * share for share in values], f"{mark}--", label=f"{name}, under PGD"
    )
panels[0].set(xlabel="l2 size of the attack", ylim=(0, 102), title="Right answers, percent")
panels[0].legend(loc="lower left")
for panel, row in zip(panels[1:], certificate.radius.argsort()[[-1, 5]].tolist(), strict=True):
    panel.imshow(x[row, 0].numpy(), vmin=0, vmax=1)
    panel.set_title(f"answer {certificate.prediction[row]}, radius {certificate.radius[row]:.2f}")
    panel.axis("off")
