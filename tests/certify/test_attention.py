"""Lipschitz bounds of transformer parts against Jacobians of torch's own layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from factories import refuses
from torch import Tensor, nn
from torch.autograd.functional import jacobian

from otad.certify import (
    activation_lipschitz,
    attention_lipschitz,
    layer_norm_bound,
    layer_norm_lipschitz,
    mlp_lipschitz,
    vit_block_lipschitz,
)

TOKENS, DIM = 4, 6
PARTS = ("attention", "attention_norm", "mlp", "mlp_norm")


def drawn(module: nn.Module, seed: int, scale: float) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    module.double().eval()
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_(std=scale, generator=generator)
    return module


def steepest(function: Any, sequences: Tensor) -> float:
    """The largest spectral norm of the Jacobian over sequences (S,N,D)."""
    slopes = torch.stack([jacobian(function, one).reshape(TOKENS * DIM, -1) for one in sequences])
    return float(torch.linalg.matrix_norm(slopes, ord=2).max())


def ball(radius: float, seed: int, count: int = 20) -> Tensor:
    """Sequences on the sphere |X|_F = radius, some with all their length in one or two tokens."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, TOKENS, DIM, dtype=torch.float64, generator=generator)
    x[::4, 1:] *= 0.01
    x[1::4, 2:] *= 0.01
    return x * (radius / x.flatten(1).norm(dim=1))[:, None, None]


def attend(layer: nn.MultiheadAttention) -> Callable[[Tensor], Tensor]:
    return lambda x: layer(x[None], x[None], x[None], need_weights=False)[0][0]


def bound_of(layer: nn.MultiheadAttention, radius: float, **options: Any) -> float:
    settings = {"n_heads": layer.num_heads, "n_tokens": TOKENS, "max_norm": radius} | options
    return attention_lipschitz(layer.in_proj_weight, layer.out_proj.weight, **settings)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("radius", [0.3, 2.0, 8.0])
@pytest.mark.parametrize("bias", [False, True])
def test_attention_bound_holds(heads: int, radius: float, bias: bool) -> None:
    layer = drawn(nn.MultiheadAttention(DIM, heads, bias=bias, batch_first=True), heads, 0.5)
    found = steepest(attend(layer), ball(radius, 7))
    tight = bound_of(layer, radius, query_bias=layer.in_proj_bias[:DIM] if bias else None)
    assert found <= tight
    assert found > 0.02 * tight, "a bound this loose says nothing"
    if not bias:
        printed = bound_of(layer, radius, form="paper")
        assert tight <= printed
        parts = layer.in_proj_weight.view(3 * heads, DIM // heads, DIM)
        largest = max(float(part.detach().norm()) for part in [*parts, layer.out_proj.weight])
        root = math.sqrt(TOKENS)
        expected = math.sqrt(heads) * largest**2 * (
            largest**2 / math.sqrt(DIM / heads) * radius**2 * (root + 1) + root
        )  # fmt: skip
        assert printed == pytest.approx(expected, rel=1e-6)


def test_of_the_biases_that_of_queries_matters() -> None:
    """Without it in the bound, a large query bias would break it."""
    layer = drawn(nn.MultiheadAttention(DIM, 2, batch_first=True), 1, 0.5)
    before = jacobian(attend(layer), ball(2.0, 1)[0])
    with torch.no_grad():
        layer.in_proj_bias[DIM:] += 1.0
    assert torch.allclose(jacobian(attend(layer), ball(2.0, 1)[0]), before)
    layer = drawn(nn.MultiheadAttention(DIM, 1, batch_first=True), 2, 0.4)
    with torch.no_grad():
        layer.in_proj_bias[:DIM] *= 60
        layer.in_proj_weight[:DIM] *= 0.01
    bias = layer.in_proj_bias[:DIM]
    assert steepest(attend(layer), ball(1.0, 2)) <= bound_of(layer, 1.0, query_bias=bias)
    refuses(bound_of, layer, 1.0, query_bias=bias, form="paper", match=r"query_bias.*Theorem 1")


def test_attention_at_rest() -> None:
    """At X = 0 all attend to all alike: the Jacobian is that of an average, |W V|; the bound keeps
    the factor sqrt(N) of the worst case, where all attend to one token."""
    layer = drawn(nn.MultiheadAttention(DIM, 1, bias=False, batch_first=True), 3, 0.5)
    bound = bound_of(layer, 0.0)
    product = (layer.out_proj.weight @ layer.in_proj_weight[2 * DIM :]).detach()
    norm = float(torch.linalg.matrix_norm(product, ord=2))
    assert bound == pytest.approx(math.sqrt(TOKENS) * norm, rel=1e-6)
    assert steepest(attend(layer), torch.zeros(1, TOKENS, DIM).double()) == pytest.approx(norm)


@pytest.mark.parametrize("size", [1e-4, 0.1, 10.0])
def test_layer_norm(size: float) -> None:
    layer = drawn(nn.LayerNorm(DIM, eps=1e-3), 4, 1.0)
    x = ball(size, 3)
    spread = float(x.std(dim=2, correction=0).min())
    found = steepest(layer, x)
    bound = layer_norm_lipschitz(layer.weight, eps=1e-3, min_std=spread)
    assert found <= bound * (1 + 1e-12) <= layer_norm_lipschitz(layer.weight, eps=1e-3) * (1 + 1e-9)
    lengths = layer(x).flatten(1).norm(dim=1)
    assert lengths.max() <= layer_norm_bound(layer.weight, layer.bias, n_tokens=TOKENS)
    plain = nn.LayerNorm(DIM, eps=1e-2).double()
    attained = steepest(plain, torch.ones(1, TOKENS, DIM, dtype=torch.float64))
    assert attained == pytest.approx(layer_norm_lipschitz(plain.weight, eps=1e-2))


@pytest.mark.parametrize(
    ("name", "function"),
    [("relu", nn.ReLU()), ("gelu", nn.GELU()), ("gelu_tanh", nn.GELU(approximate="tanh"))],
)
def test_activations(name: str, function: nn.Module) -> None:
    x = torch.linspace(-9, 9, 400_001, dtype=torch.float64, requires_grad=True)
    function(x).sum().backward()
    slope = float(x.grad.abs().max())
    assert slope <= activation_lipschitz(name) <= slope + 1e-4


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_block_of_a_vision_transformer(activation: str) -> None:
    options = {"batch_first": True, "norm_first": True, "layer_norm_eps": 1e-2}
    encoder = nn.TransformerEncoderLayer(DIM, 2, 9, 0.0, activation, **options)
    layer = drawn(encoder, 5, 0.4)
    longest = layer_norm_bound(layer.norm1.weight, layer.norm1.bias, n_tokens=TOKENS)
    bias = layer.self_attn.in_proj_bias[:DIM]
    bound = vit_block_lipschitz(
        attention=bound_of(layer.self_attn, longest, query_bias=bias),
        attention_norm=layer_norm_lipschitz(layer.norm1.weight, eps=1e-2),
        mlp=mlp_lipschitz(layer.linear1.weight, layer.linear2.weight, activation),
        mlp_norm=layer_norm_lipschitz(layer.norm2.weight, eps=1e-2),
    )
    sequences = torch.cat([ball(size, 6, 8) for size in (0.01, 1.0, 30.0)])
    found = steepest(lambda x: layer(x[None])[0], sequences)
    assert 1 < found <= bound


def attention(inner: int = 18, outer: int = 6, **changes: Any) -> float:
    options = {"n_heads": 1, "n_tokens": 2, "max_norm": 1.0} | changes
    return attention_lipschitz(torch.ones(inner, 6), torch.ones(6, outer), **options)


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: attention(n_heads=4), r"n_heads.*6.*4"),
        (lambda: attention(max_norm=-1.0), r"max_norm.*-1\.0"),
        (lambda: attention(form="loose"), r"form.*tight, paper.*loose"),
        (lambda: attention(n_tokens=0), r"n_tokens.*0"),
        (lambda: attention(query_bias=torch.zeros(5)), r"query_bias.*6.*5"),
        (lambda: attention(inner=12), "in_weight.*12"),
        (lambda: attention(outer=5), "out_weight.*5"),
        (lambda: mlp_lipschitz(torch.ones(9, 6), torch.ones(6, 8)), r"second.*9.*8"),
        (lambda: mlp_lipschitz(torch.ones(9, 6), torch.ones(6, 9), "swish"), r"name.*relu.*swish"),
        (lambda: layer_norm_lipschitz(torch.ones(6), eps=0.0), r"eps.*0\.0"),
        (lambda: vit_block_lipschitz(**dict.fromkeys(PARTS, 1) | {"mlp": math.nan}), "mlp.*nan"),
    ],
)
def test_refusals(refused: Callable[[], float], message: str) -> None:
    refuses(refused, match=message)
