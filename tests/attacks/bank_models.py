"""Small models whose bank is in the unit square, with the distances that brute force finds, and
of tiny images whose neighbors are searched by a metric, behind an embedding that hides them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, pad

from otad.attacks import Attack
from otad.attacks.adaptive import Bisector, Pull, Region, SoftKnn, Straight
from otad.cip.whole_bank.lifted_bank import lifted_potential
from otad.cip.whole_bank.potential import integrate_most
from otad.model.bank import FeatureBank
from otad.model.defend import defend
from otad.model.otad import OTAD
from otad.nets import FCResNet, VisionTransformer, fc_resnet, lifted_net, vision_transformer

BOX, LIFT = (0.0, 1.0), 2
SHAPE = (1, 4, 4)  # of tiny images
BANK_ATTACKS: list[Attack] = [
    Straight(points=3),
    Bisector(pairs=2, polish=3),
    SoftKnn((0.1, 0.01), 8, 1, polish=3),
    Region(singles=3, classes=1, sizes=(3,), rounds=2, polish=3),
    Pull(classes=1, sizes=(1, 3), steps=6, polish=3),
]


def blobs(size: int, seed: int, task: str = "classification") -> tuple[Tensor, Tensor]:
    """Two classes left and right of 0.5 in the unit square, or the value of the first feature."""
    drawn = torch.rand(size, 2, generator=torch.Generator().manual_seed(seed))
    first = drawn[:, 0].clone()
    return drawn, first if task == "regression" else (first > 0.5).long()


def first_feature_net(
    task: str = "classification", bounds: tuple[float, float] | None = BOX
) -> FCResNet:
    """Features are inputs, and the head reads the first of them: class 1 right of the middle."""
    outputs, middle = 2 if task == "classification" else 1, sum(bounds or (0.0,)) / 2
    net = fc_resnet((2,), outputs, blocks=1, task=task, bounds=bounds)
    with torch.no_grad():
        for weight in net.parameters():
            weight.zero_()
        net.head.weight.copy_(torch.tensor([[-1.0, 0.0], [1.0, 0.0]])[-outputs:])
        if outputs == 2:
            net.head.bias.copy_(torch.tensor([middle, -middle]))
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


def lifted_stairs(corner: float = 0.0, bounds: tuple[float, float] | None = BOX) -> OTAD:
    x, y = blobs(60, 0)
    inputs = pad(x + corner, (0, LIFT))
    features = torch.cat([x + corner, 0.05 * one_hot(y, 2).float()], 1)
    net = lifted_net((2,), 2, hidden=(4,), bounds=bounds)
    potential = lifted_potential(inputs, features, LIFT, 3.0)
    bank = FeatureBank(inputs, features, y, "lifted stairs")
    return OTAD(net.eval(), bank, scope="global", potential=potential, n_neighbors=3).eval()


@torch.no_grad()
def true_distances(model: OTAD, x: Tensor, y: Tensor, nodes: int) -> Tensor:
    """Brute force: how far the nearest wrong node of a fine grid is from each input (B,)."""
    axis = torch.linspace(0, 1, nodes)
    grid = torch.cartesian_prod(axis, axis)
    answers = torch.cat([model(part).argmax(1) for part in grid.split(20_000)])
    return torch.cdist(x, grid).masked_fill(answers[None] == y[:, None], torch.inf).amin(1)


class Bent(nn.Module):
    """Keys of 6 numbers: a random layer and a tanh, with gradients that turn on the way."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        drawn_by = torch.Generator().manual_seed(seed)
        self.register_buffer("weight", torch.randn(16, 6, generator=drawn_by) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return ((x - 0.5).flatten(1) @ self.weight).tanh()


def tiles(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Three classes of images, by their brightness."""
    y = torch.arange(count) % 3
    drawn = torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(seed))
    return 0.4 * drawn + 0.3 * y.view(-1, 1, 1, 1), y


def token_net(x: Tensor, y: Tensor) -> VisionTransformer:
    """A small ViT whose head is fitted to classes or values by least squares."""
    outputs, task = (1, "regression") if y.is_floating_point() else (3, "classification")
    net = vision_transformer(
        SHAPE, outputs, patch=2, width=8, blocks=1, heads=2, bounds=(0.0, 1.0), task=task
    ).eval()
    with torch.no_grad():
        pooled = net.transport(net.embed(x))[0].unflatten(1, (4, 8)).mean(1)
        design = torch.cat([pooled, torch.ones(len(x), 1)], 1)
        wanted = y[:, None] if outputs == 1 else 4 * torch.eye(3)[y]
        fitted = torch.linalg.lstsq(design.double(), wanted.double()).solution.float()
        net.head.weight.copy_(fitted[:-1].T)
        net.head.bias.copy_(fitted[-1])
    return net


def keyed_model(
    *, neighbors: int = 5, metric: nn.Module | None = None, values: bool = False
) -> tuple[OTAD, Tensor]:
    """A model with a bank of 90 images, and these images, which its bank does not hold."""
    x, y = tiles(90, seed=0)
    if values:
        y = x.mean((1, 2, 3))
    return defend(token_net(x, y), x, y, n_neighbors=neighbors, metric=metric or Bent()), x
