"""Every well-known layer is written as JSON and read again, and no other."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from factories import refuses
from torch import Tensor, nn
from torch.nn.utils import spectral_norm

from otad.nets.inputs import restored
from otad.nets.layer_json import describe, restore

LAYERS: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2), (4, 9)),
    (nn.Conv2d(4, 6, (3, 1), padding="same", bias=False, padding_mode="reflect"), (4, 8, 8)),
    (nn.Conv3d(2, 3, 2), (2, 4, 4, 4)),
    (nn.ConvTranspose1d(4, 2, 3, stride=2, output_padding=1), (4, 5)),
    (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2, bias=False), (4, 5, 5)),
    (nn.MaxPool1d(2), (4, 8)),
    (nn.MaxPool2d((2, 3), stride=1, padding=1, ceil_mode=True), (4, 8, 8)),
    (nn.AvgPool1d(3, stride=2, count_include_pad=False, padding=1), (4, 8)),
    (nn.AvgPool2d(3, divisor_override=4), (4, 8, 8)),
    (nn.AdaptiveAvgPool1d(3), (4, 8)),
    (nn.AdaptiveAvgPool2d((1, None)), (4, 8, 8)),
    (nn.AdaptiveMaxPool1d(3), (4, 8)),
    (nn.AdaptiveMaxPool2d(2), (4, 8, 8)),
    (nn.BatchNorm1d(4, eps=0.1), (4,)),
    (nn.BatchNorm2d(4, momentum=None, affine=False), (4, 8, 8)),
    (nn.BatchNorm3d(2), (2, 4, 4, 4)),
    (nn.GroupNorm(2, 4, eps=0.1), (4, 8, 8)),
    (nn.LayerNorm((8, 8), elementwise_affine=False), (4, 8, 8)),
    (nn.RMSNorm(8, eps=0.1), (4, 8)),
    (nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (4, 8, 8)),
    (nn.LocalResponseNorm(2, alpha=0.3), (4, 8, 8)),
    (nn.Dropout2d(0.4), (4, 8, 8)),
    (nn.AlphaDropout(0.4), (4, 8, 8)),
    (nn.Flatten(2), (4, 8, 8)),
    (nn.Unflatten(1, (2, -1)), (4, 8)),
    (nn.PixelShuffle(2), (4, 8, 8)),
    (nn.PixelUnshuffle(2), (4, 8, 8)),
    (nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), (4, 8, 8)),
    (nn.Upsample(size=(5, 4)), (4, 8, 8)),
    (nn.ZeroPad2d((1, 2, 0, 1)), (4, 8, 8)),
    (nn.Softmax(-1), (4, 8)),
    (nn.PReLU(4), (4, 8, 8)),
    (nn.Hardtanh(-0.2, 0.3), (4, 8)),
    (nn.Threshold(0.1, -1.0), (4, 8)),
    (nn.GLU(1), (4, 8)),
    (nn.Softshrink(0.2), (4, 8)),
    *((layer(), (4, 8)) for layer in (nn.ReLU6, nn.SiLU, nn.Mish, nn.Tanh, nn.Hardswish, nn.SELU)),
    (nn.TransformerEncoderLayer(8, 2, 12, activation="gelu", bias=False, batch_first=True), (4, 8)),
    (
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 12, norm_first=True, layer_norm_eps=0.1), 2,
            nn.LayerNorm(8), enable_nested_tensor=False,
        ),
        (4, 8),
    ),
    (nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(32, 5, bias=False))), (4, 8)),
]  # fmt: skip


def shifted(layer: nn.Module) -> nn.Module:
    with torch.no_grad():
        for tensor in layer.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.linspace(0.1, 0.5, tensor.numel()).reshape(tensor.shape))
    return layer.eval()


def again(layer: nn.Module) -> nn.Module:
    """Read as from a file, with its limits."""
    description = json.loads(json.dumps(describe(layer)))
    return restored(restore, description, layer.state_dict())


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=lambda one: type(one).__name__)
def test_a_layer_is_read_again(layer: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    twin = again(shifted(layer))
    assert type(twin) is type(layer)
    assert str(twin) == str(layer)
    assert torch.equal(twin(x), layer(x))


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False, "batch_first": True}, {"kdim": 3, "vdim": 5, "add_bias_kv": True}],
)
def test_attention_and_embeddings(options: dict[str, int]) -> None:
    layer = shifted(nn.MultiheadAttention(8, 2, add_zero_attn=True, **options))
    x = [torch.randn(4, 3, layer_size) for layer_size in (8, layer.kdim, layer.vdim)]
    assert torch.equal(again(layer)(*x)[0], layer(*x)[0])
    table, rows = shifted(nn.Embedding(7, 3, padding_idx=2)), torch.tensor([[0, 2, 6]])
    assert torch.equal(again(table)(rows), table(rows))


class _Own(nn.ReLU):
    pass


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (_Own(), "net: .*got _Own"),
        (nn.Sequential(nn.Bilinear(2, 2, 2), nn.LSTM(3, 3)), "net: .*got LSTM"),
        (nn.Embedding(7, 3, max_norm=1.0), "net: .*max_norm"),
        (nn.TransformerEncoderLayer(8, 2, 12, activation=torch.tanh), "net: .*activation relu"),
        (spectral_norm(nn.Conv2d(1, 2, 3)), "net: .*parametrization"),
    ],
)
def test_others_are_not_written(layer: nn.Module, message: str) -> None:
    refuses(describe, layer, match=message)


def _layer(name: str, **arguments: object) -> Callable[[], nn.Module]:
    return lambda: restored(restore, {"layer": name, **arguments}, {"weight": torch.zeros(4)})


HUGE = 10**9


@pytest.mark.parametrize(
    "make",
    [
        _layer("Conv2d", in_channels=1, out_channels=HUGE, kernel_size=1),
        _layer("ConvTranspose2d", in_channels=1, out_channels=1, kernel_size=[30000, 30000]),
        _layer("Embedding", num_embeddings=HUGE, embedding_dim=1),
        _layer("BatchNorm2d", num_features=HUGE),
        _layer("InstanceNorm2d", num_features=HUGE, track_running_stats=True),
        _layer("MultiheadAttention", embed_dim=20000, num_heads=1),
        _layer("TransformerEncoderLayer", d_model=8, nhead=1, dim_feedforward=HUGE),
        _layer("Sequential", layers=[{"layer": "PReLU"}] * 200),
    ],
)
def test_sizes_are_bounded_by_the_weights(make: Callable[[], Tensor]) -> None:
    refuses(make, match="at most .* to load|expected")


def test_restored_layers_stay_shared_and_integers_have_no_gradient() -> None:
    def make(_: object) -> nn.Module:
        net = nn.Module()
        net.first = net.second = nn.Linear(2, 2)
        net.order = nn.Parameter(torch.tensor([2, 0, 1]), requires_grad=False)
        return net

    saved = {name: weight.clone() for name, weight in make(None).state_dict().items()}
    net = restored(make, {}, saved)
    assert net.first.weight is net.second.weight
    assert net.order.tolist() == [2, 0, 1]
    assert [one.requires_grad for one in (net.order, net.first.weight)] == [False, True]
