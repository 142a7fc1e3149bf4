"""Small networks as users write them: none knows of this library."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

SIDE, CLASSES = 8, 3


class OwnCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.hidden, self.out = nn.Linear(4 * 16, 12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu_(self.conv(x)), 2)
        return self.out(functional.relu(self.hidden(x.flatten(1))))


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.conv(x)).relu()


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(1, 6, 3, stride=2), nn.Sequential(Block(6), Block(6))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(self.blocks(self.stem(x))).flatten(1))


class ViT(nn.Module):
    """Patches, a class token, attention, and a head on the class token."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.1 * torch.ones(1, 5, width))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).mT
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1) + self.places
        seen = self.norm1(tokens)
        tokens = tokens + self.attention(seen, seen, seen, need_weights=False)[0]
        return self.head((tokens + self.mlp(self.norm2(tokens)))[:, 0])


class WithLogits(nn.Module):
    """Returns an object, as classifiers of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classifier = nn.Linear(SIDE**2, 10), nn.Linear(10, CLASSES)

    def forward(self, pixel_values: Tensor) -> Any:
        hidden = torch.tanh(self.body(pixel_values.flatten(1)))
        return SimpleNamespace(logits=self.classifier(input=hidden), hidden_states=(hidden,))


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.module(*args, **options)


class Residual(nn.Module):
    """Keeps the size of its input up to the head: a transport of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(SIDE**2, SIDE**2) for _ in range(2))
        self.head = nn.Linear(SIDE**2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for step in self.steps:
            x = x + 0.1 * torch.relu(step(x))
        return self.head(x)


class Squeezed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(11, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).squeeze(-1)


def sequential_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3), nn.GroupNorm(2, 6), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(6, CLASSES),
    )  # fmt: skip


def sequential_transformer() -> nn.Module:
    """Rows of pixels are tokens."""
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, norm_first=True)
    return nn.Sequential(
        nn.Flatten(1, 2), nn.LayerNorm(8),
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        nn.Flatten(), nn.Linear(64, 9), nn.GELU(), nn.Linear(9, CLASSES),
    )  # fmt: skip


def softmax_net() -> nn.Module:
    layers = nn.Linear(SIDE**2, 10), nn.ReLU(), nn.Linear(10, CLASSES), nn.LogSoftmax(1)
    return nn.Sequential(nn.Flatten(), *layers)


def table_mlp() -> nn.Module:
    layers = nn.Linear(11, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    return nn.Sequential(*layers)


def data_parallel() -> nn.Module:
    """On the CPU, also where there is a GPU."""
    net = nn.DataParallel(OwnCNN()).cpu()
    net.device_ids = []
    return net


NETS: dict[str, Callable[[], nn.Module]] = {
    "own CNN": OwnCNN,
    "sequential CNN": sequential_cnn,
    "MLP for values": table_mlp,
    "squeezed MLP for values": Squeezed,
    "ResNet": ResNet,
    "ViT": ViT,
    "object with logits": WithLogits,
    "compiled": lambda: torch.compile(OwnCNN(), backend="eager"),  # type: ignore[return-value]
    "data parallel": data_parallel,
    "wrapped": lambda: Wrapper(WithLogits()),
    "log-softmax": softmax_net,
    "sequential transformer": sequential_transformer,
    "residual": Residual,
}
OF_VALUES = ("MLP for values", "squeezed MLP for values")
AS_JSON = ("sequential CNN", "MLP for values", "log-softmax", "sequential transformer")


def make(name: str, seed: int = 0) -> nn.Module:
    """A net whose every weight and statistic differs from what a constructor gives."""
    drawn_by = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = NETS[name]()
    with torch.no_grad():
        for part, tensor in net.state_dict().items():
            if tensor.is_floating_point():
                noise = torch.rand(tensor.shape, generator=drawn_by)
                tensor.add_((0.2 if "var" in part else 0.4) * noise)
    return net.eval()


def data(name: str, rows: int = 40, seed: int = 1) -> tuple[Tensor, Tensor]:
    drawn_by = torch.Generator().manual_seed(seed)
    if name in OF_VALUES:
        x = torch.rand(rows, 11, generator=drawn_by)
        return x, x.sum(1)
    x = torch.rand(rows, 1, SIDE, SIDE, generator=drawn_by)
    return x, torch.arange(rows) % CLASSES


def outputs(net: nn.Module, x: Tensor) -> Tensor:
    """Logits (B,C) or values (B,), as the net itself gives them."""
    with torch.no_grad():
        result = net(x.clone())
    result = getattr(result, "logits", result)
    return result.squeeze(-1)
