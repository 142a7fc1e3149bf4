"""Small models whose bank is in the unit square, and the distances that brute force finds."""

from __future__ import annotations

import torch
from torch import Tensor

from otad.attacks import Attack
from otad.attacks.adaptive import Bisector, Region, SoftKnn, Straight
from otad.cip.whole_bank.potential import integrate_most
from otad.model.bank import FeatureBank
from otad.model.defend import defend
from otad.model.otad import OTAD
from otad.nets import FCResNet, fc_resnet

BOX = (0.0, 1.0)
BANK_ATTACKS: list[Attack] = [
    Straight(points=6),
    Bisector(pairs=3, polish=5),
    SoftKnn((0.1, 0.01), 15, 1, polish=5),
    Region(singles=4, classes=1, sizes=(3,), rounds=2, polish=5),
]


def blobs(size: int, seed: int, task: str = "classification") -> tuple[Tensor, Tensor]:
    """Two classes left and right of 0.5 in the unit square, or the value of the first feature."""
    drawn = torch.rand(size, 2, generator=torch.Generator().manual_seed(seed))
    first = drawn[:, 0].clone()
    return drawn, first if task == "regression" else (first > 0.5).long()


def first_feature_net(task: str = "classification") -> FCResNet:
    """Features are inputs, and the head reads the first of them, so that votes are labels."""
    outputs = 2 if task == "classification" else 1
    net = fc_resnet((2,), outputs, blocks=1, task=task, bounds=BOX)
    with torch.no_grad():
        for weight in net.parameters():
            weight.zero_()
        net.head.weight.copy_(torch.tensor([[-1.0, 0.0], [1.0, 0.0]])[-outputs:])
        if outputs == 2:
            net.head.bias.copy_(torch.tensor([0.5, -0.5]))
    return net.eval()


def local_model(size: int = 40, *, neighbors: int = 1, task: str = "classification") -> OTAD:
    return defend(first_feature_net(task), *blobs(size, 0, task), n_neighbors=neighbors)


def stairs(
    size: int = 60, *, smoothness: float = 30.0, task: str = "classification", flipped: int = 0
) -> OTAD:
    """A global map: left half of the square to (0, 0), right half to (1, 0), but for the `flipped`
    first points, which no such map passes through. A steep step, flat elsewhere."""
    x, y = blobs(size, 0)
    z = torch.stack([y.float(), torch.zeros(size)], 1)
    z[:flipped, 0] = 1 - z[:flipped, 0]
    bank = FeatureBank(x, z, y if task == "classification" else y.float(), "stairs")
    potential = integrate_most(x, z, smoothness)
    net = first_feature_net(task)
    return OTAD(net, bank, scope="global", potential=potential, n_neighbors=3).eval()


@torch.no_grad()
def true_distances(model: OTAD, x: Tensor, y: Tensor, nodes: int) -> Tensor:
    """Brute force: how far the nearest wrong node of a fine grid is from each input (B,)."""
    axis = torch.linspace(0, 1, nodes)
    grid = torch.cartesian_prod(axis, axis)
    answers = torch.cat([model(part).argmax(1) for part in grid.split(20_000)])
    return torch.cdist(x, grid).masked_fill(answers[None] == y[:, None], torch.inf).amin(1)
