"""Small seeded models of every kind on unusual banks, and a bound of attention, for `audit.py`."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import otad
from otad.certify import attention_lipschitz
from otad.cip import ExactCip
from otad.model.bank import FeatureBank
from otad.model.prototypes import prototype_net
from otad.nets import LipschitzMetric, fc_resnet, lifted_net, vision_transformer

BANKS = (
    "plain", "copies", "contradictions", "nearly equal", "line", "plane", "huge", "tiny", "offset",
    "lone point", "box", "lattice",
)  # fmt: skip
PAPER = {"mode": "paper", "climb": (0.5, 0.3)}
SETTINGS: dict[str, dict[str, Any]] = {
    "one neighbor": {"n_neighbors": 1},
    "four neighbors": {"n_neighbors": 4},
    "all neighbors": {"n_neighbors": 12, "points": 12},
    "all, curved down": {"n_neighbors": 12, "points": 12, "strong_convexity": -0.3},
    "curved down": {"n_neighbors": 2, "strong_convexity": -0.5},
    "curved up": {"n_neighbors": 4, "strong_convexity": 0.4},
    "paper": {"n_neighbors": 4, "solver": {"mode": "paper"}},
    "paper, climbing": {"n_neighbors": 4, "strong_convexity": 0.2, "solver": PAPER},
    "climbing": {"n_neighbors": 4, "solver": {"climb": (0.5, 0.0)}},
    "spares": {"n_neighbors": 2, "solver": {"spares": 2, "max_smoothness": 2.5}},
    "dropping": {"n_neighbors": 5, "solver": {"max_smoothness": 2.0}},
    "half precision": {"n_neighbors": 3, "bank_dtype": torch.bfloat16},
    "keys, one neighbor": {"n_neighbors": 1, "keys": True},
    "keys, four neighbors": {"n_neighbors": 4, "keys": True},
    "keys, curved down": {"n_neighbors": 3, "keys": True, "strong_convexity": -0.3},
    "transformer": {"n_neighbors": 3, "net": "transformer"},
    "global": {"scope": "global"},
    "global, capped": {"scope": "global", "smoothness": 1.6},
    "global, curved down": {"scope": "global", "smoothness": 2.0, "strong_convexity": -0.5},
    "lifted": {"scope": "global", "net": "lifted"},
    "lifted, capped": {"scope": "global", "net": "lifted", "smoothness": 1.6},
    "prototypes": {"scope": "global", "net": "prototypes"},
    "values, one neighbor": {"values": True, "n_neighbors": 1},
    "values, four neighbors": {"values": True, "n_neighbors": 4},
    "values, all": {"values": True, "n_neighbors": 12, "points": 12},
    "values, curved down": {"values": True, "n_neighbors": 3, "strong_convexity": -0.4},
    "values, keys": {"values": True, "n_neighbors": 3, "keys": True},
    "values, global": {"values": True, "scope": "global"},
    "attention": {"net": "attention"},
}
CLASSES, POINTS, SHAPE = 3, 40, (1, 8, 8)


class Case(NamedTuple):
    """A model, the points (N,p) of its bank in input units, queries (B,p) and certify options."""

    model: otad.OTAD
    points: Tensor
    x: Tensor
    spread: float
    options: dict[str, Any]


class Folded(nn.Module):
    """A 1.5-Lipschitz metric of vectors: an orthogonal matrix, then absolute values and sines."""

    def __init__(self, mean: Tensor, drawn: torch.Generator) -> None:
        super().__init__()
        size = max(4, mean.numel())
        matrix = torch.linalg.qr(torch.randn(size, size, generator=drawn))[0][:, : mean.numel()]
        self.matrix = nn.Parameter(1.5 * matrix)
        self.register_buffer("mean", mean.clone())
        self.lipschitz = 1.0001 * float(torch.linalg.matrix_norm(self.matrix.detach(), ord=2))

    def forward(self, x: Tensor) -> Tensor:
        first, second = functional.linear(x - self.mean, self.matrix).tensor_split(2, dim=1)
        return torch.cat([first.abs(), second.sin()], 1)


def odd_points(kind: str, count: int, dim: int, drawn: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw points (N,p) in float64 and labels (N,), by region or, in some banks, at random."""
    normal = partial(torch.randn, generator=drawn, dtype=torch.float64)
    x, half = normal(count, dim), count // 2
    y = (x @ normal(dim, CLASSES) + 0.3 * normal(1, CLASSES)).argmax(1)
    if torch.rand((), generator=drawn) < 0.25:
        y = torch.randint(CLASSES, (count,), generator=drawn)
    if kind in ("copies", "contradictions", "nearly equal"):
        x[half:], y[half:] = x[: count - half], y[: count - half] + (kind != "copies")
        x[half:] += 1e-6 * normal(count - half, dim) if kind == "nearly equal" else 0
    elif kind in ("line", "plane"):
        rank = min(dim, 1 if kind == "line" else 2)
        x = x[:, :rank] @ normal(rank, dim) + normal(1, dim)
    elif kind in ("huge", "tiny"):
        x *= 1e6 if kind == "huge" else 1e-6
    elif kind == "offset":
        x += 1e4 * normal(1, dim)
    elif kind == "lone point":
        y = (torch.arange(count) > 0) * (1 + y % (CLASSES - 1))
    elif kind == "box":
        x = (0.5 + 0.5 * x).clamp(0, 1)
    elif kind == "lattice":
        x = (2 * x).round() / 2
    y %= CLASSES
    y[:2] = torch.tensor([0, 1]) if kind == "lone point" else y[:2]
    return x, y


@torch.no_grad()
def make_case(kind: str, setting: str, drawn: torch.Generator, queries: int) -> Case:
    """Make a seeded model, with a random dimension, dtype, normalization and unit."""
    given = {"n_neighbors": 3, "net": "plain", "points": POINTS} | SETTINGS[setting]
    net_kind, values, keys = given.pop("net"), given.pop("values", False), given.pop("keys", False)
    flips = torch.rand(4, generator=drawn).tolist()
    images, scope = net_kind == "transformer", given.get("scope", "local")
    dim = 64 if images else (1, 2, 3, 20, 64)[int(5 * flips[0])]
    exact, y = odd_points(kind, given.pop("points"), dim, drawn)
    points = exact.float()
    center, spread = exact.mean(0), max(float(exact.std(0).mean()), 1e-12)
    bounds = (0.0, 1.0) if kind == "box" else None
    frame: dict[str, Any] = {"bounds": bounds}
    if flips[1] < 0.5 or images or (kind in ("huge", "tiny") and scope == "global"):
        frame |= {"mean": center.float(), "std": exact.std(0).clamp_min(0.3 * spread).float()}
    if images:
        points = points.view(-1, *SHAPE)
        frame |= {"mean": center.float().view(SHAPE), "std": spread}
    solver = {"on_failure": "fallback"} | given.pop("solver", {})
    given |= {"solver": ExactCip(**solver)} if scope == "local" else {}
    options: dict[str, Any] = {}
    if images:
        sizes: dict[str, Any] = {"patch": 4, "width": 8, "blocks": 2, "heads": 2}
        net = vision_transformer(SHAPE, CLASSES, seed=int(1e6 * flips[2]), **sizes, **frame)
        pooled = net.transport(net.embed(points))[0].unflatten(1, (-1, 8)).mean(1)
        means = torch.stack([pooled[y == c].sum(0) / (y == c).sum().clamp_min(1) for c in range(3)])
        net.head.weight.copy_(means)
        net.head.bias.copy_(-means.square().sum(1) / 2)
        metric = LipschitzMetric(SHAPE, widths=(8, 16), depth=1, key_dim=8, **frame)
        model = otad.defend(net, points, y, metric=metric, **given)
        if flips[3] < 0.5:  # then the rule "cell" applies; 1% is for rounding
            patches = net.patch_embed.proj.weight.flatten(1).double()
            options["embedding_lipschitz"] = 1.01 * float(patches.norm(2)) / spread
    elif net_kind in ("lifted", "prototypes"):
        net = lifted_net((dim,), CLASSES, hidden=(8,), seed=int(1e6 * flips[2]), **frame)
        if net_kind == "lifted":
            model = otad.defend(net, points, y, **given)
        else:
            made = prototype_net(net, points, y, neighbors=1)
            model = otad.OTAD(made, made.bank(), **given)
    else:
        task, outputs = ("regression", 1) if values else ("classification", CLASSES)
        net = fc_resnet((dim,), outputs, blocks=1, hidden=1, task=task, **frame).eval()
        inputs = net.embed(points)
        middle, size = inputs.mean(0), max(float(inputs.std(0).mean()), 1e-12)
        place = (inputs - middle) / size
        corners = torch.randn(max(4, CLASSES), dim, generator=drawn)
        smooth = scope == "global" or len(points) < POINTS or flips[2] < 0.3
        share = torch.softmax(place @ corners.T, 1) @ corners if smooth else corners[y]
        features = middle + size * (0.3 * place + (0.5 if smooth else 1.0) * share)
        net.head.weight.copy_(corners[:outputs])
        net.head.bias.copy_(-(features.mean(0) @ corners[:outputs].T))
        dtype = given.pop("bank_dtype", torch.float32)
        labels = y.float() if values else y
        bank = FeatureBank(inputs.to(dtype), features.to(dtype), labels, "audit")
        if keys:
            metric = Folded(net.mean if "mean" in frame else center.float(), drawn).eval()
            given |= {"metric": metric, "keys": metric(points)}
        model = otad.OTAD(net, bank, **given)
    if flips[3] < 0.5 and not images:
        model, points = model.double(), points.double()
    normal = partial(torch.randn, queries, dim, generator=drawn, dtype=torch.float64)
    chosen = torch.randint(len(points), (2, queries), generator=drawn)
    flat = points.flatten(1).double()
    x = flat[chosen[0]] + spread * 0.2 * normal()
    x[::4] = flat[chosen[0, ::4]]
    x[1::4] = (flat[chosen[0, 1::4]] + flat[chosen[1, 1::4]]) / 2
    x[2::8] = center + spread * 3 * normal()[2::8]
    x = x.clamp(*bounds) if bounds else x
    if torch.rand((), generator=drawn) < 0.5:
        options["unit"] = (0.2 + 2.8 * torch.rand(dim, generator=drawn)).view(net.input_shape)
        if "embedding_lipschitz" in options:
            options["embedding_lipschitz"] *= float(options["unit"].max())
    return Case(model, flat, x.to(points.dtype), spread, options)


def attention_ratios(kind: str, drawn: torch.Generator, draws: int) -> tuple[float, Tensor]:
    """Return the Lipschitz bound of self-attention, and measured ratios (n,) to compare with it.

    The ratios |F(X') - F(X)| / |X' - X| are along random directions and along those of power
    iteration, which stretch the most."""
    normal = partial(torch.randn, generator=drawn, dtype=torch.float64)
    tokens, width, heads = 12, 8, 2
    x = odd_points(kind, tokens, width, drawn)[0]
    layer = nn.MultiheadAttention(width, heads, dtype=torch.float64)
    with torch.no_grad():
        layer.in_proj_weight.copy_(normal(3 * width, width) / 3)
        layer.in_proj_bias.copy_(normal(3 * width))
        layer.out_proj.weight.copy_(normal(width, width) / 3)
    weights = layer.in_proj_weight.detach(), layer.out_proj.weight.detach()
    sizes = {"n_heads": heads, "n_tokens": tokens, "max_norm": 2 * float(x.norm())}
    bias = layer.in_proj_bias.detach()[:width]
    bound = attention_lipschitz(*weights, query_bias=bias, **sizes)

    def attend(tokens: Tensor) -> Tensor:
        return layer(tokens, tokens, tokens, need_weights=True)[0]

    slope = torch.autograd.functional.jacobian(attend, x).view(2 * (x.numel(),))
    ways, ratios = normal(draws, tokens, width), []
    for _ in range(5):
        ways /= ways.norm(dim=(1, 2), keepdim=True)
        for share in (1e-3, 0.1, 1.0):
            step = share * float(x.norm()) * ways
            moved = torch.stack([attend(one) for one in x + step]) - attend(x)
            ratios.append((moved.norm(dim=(1, 2)) / step.norm(dim=(1, 2))).detach())
        ways = (ways.flatten(1) @ slope.mT @ slope).view(ways.shape) + 1e-12 * ways
    return bound, torch.cat(ratios)
