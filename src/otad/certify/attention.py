"""Lipschitz bounds of self-attention and of the blocks of a vision transformer.

Pure functions of weights, in the layout of torch (outputs, inputs): `nn.MultiheadAttention` keeps
`in_proj_weight` (3D,D), the rows of queries, keys and values, head after head. Norms are
Frobenius for sequences X (N,D) and spectral for maps between them."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from otad.checks import (
    STORAGE_DTYPES,
    check_choice,
    check_count,
    check_shape,
    check_tensor,
    require,
)

ROUNDING = 1 + 1e-9  # of norms computed in float64
_spectral = partial(torch.linalg.matrix_norm, ord=2)
# The largest slope of each. That of x Phi(x) is at sqrt(2); tanh's version of it is steeper.
ACTIVATIONS = {
    "relu": 1.0,
    "gelu": (1 + math.erf(1)) / 2 + 1 / (math.e * math.sqrt(math.pi)),
    "gelu_tanh": 1.129,
}


def attention_lipschitz(
    in_weight: Tensor,
    out_weight: Tensor,
    *,
    n_heads: int,
    n_tokens: int,
    max_norm: float,
    query_bias: Tensor | None = None,
    form: str = "tight",
) -> float:
    """Lipschitz constant of multi-head dot-product self-attention on {X (N,D) : |X|_F <= max_norm}.

    `in_weight` (3D,D), `out_weight` (D,D), `query_bias` (D,): other biases have no effect. With
    Q_r, K_r, V_r of width w = D / R for head r, M = max_norm, N = n_tokens:

    - "paper", Theorem 1, for attention without a query bias, T the largest Frobenius norm among all
      Q_r, K_r, V_r and the output weight:  sqrt(R) T^2 (T^2 M^2 (sqrt(N) + 1) / sqrt(w) + sqrt(N));
    - "tight", with each matrix's own spectral norm and a sharper proof (see the documentation):
      the lesser of |W| sqrt(sum_r |V_r|^2 c_r^2) and sum_r |V_r W_r| c_r, where
      c_r = |K_r Q_r^T| M^2 / sqrt(w) + sqrt(N) (1 + M |K_r b_r| / (2 sqrt(w)))."""
    check_choice(form, "form", ("tight", "paper"))
    count, tokens = check_count(n_heads, "n_heads"), check_count(n_tokens, "n_tokens")
    bound = _checked_size(max_norm, "max_norm")
    out = _checked(out_weight, "out_weight", "D,D")
    whole = _checked(in_weight, "in_weight", "3D,D")
    dim = len(out)
    check_shape(out, "out_weight", (dim, dim), "(D,D)")
    check_shape(whole, "in_weight", (3 * dim, dim), "(3D,D) to match out_weight")
    require(dim % count == 0, "n_heads", f"a divisor of D = {dim}", count)
    width = dim // count
    query, key, value = whole.view(3, count, width, dim)  # each (R,w,D)
    if form == "paper":
        known = query_bias is None or not bool(query_bias.any())
        require(known, "query_bias", "None, as Theorem 1 has no biases", query_bias)
        largest = max(float(matrix.norm()) for matrix in (*query, *key, *value, out))
        inner = largest**2 * bound**2 * (math.sqrt(tokens) + 1) / math.sqrt(width)
        return ROUNDING * math.sqrt(count) * largest**2 * (inner + math.sqrt(tokens))

    pull = torch.zeros(count, dtype=torch.float64, device=out.device)
    if query_bias is not None:
        bias = _checked(query_bias, "query_bias", "D")
        check_shape(bias, "query_bias", (dim,), "(D,) to match out_weight")
        pull = torch.linalg.vector_norm(key.mT @ bias.view(count, width, 1), dim=(1, 2))
    slope = _spectral(key.mT @ query) * bound**2 / math.sqrt(width)
    slope = slope + math.sqrt(tokens) * (1 + bound * pull / (2 * math.sqrt(width)))
    joint = _spectral(out) * (_spectral(value) * slope).square().sum().sqrt()
    outs = out.view(dim, count, width).movedim(1, 0)  # (R,D,w), applied to the answer of each head
    single = (_spectral(outs @ value) * slope).sum()
    return ROUNDING * float(torch.minimum(joint, single))


def layer_norm_lipschitz(weight: Tensor, *, eps: float, min_std: float = 0.0) -> float:
    """max |weight| / sqrt(min_std^2 + eps), for tokens of standard deviation at least min_std.

    With c the centered token and s = sqrt(|c|^2 / D + eps), the Jacobian before the weight is
    (I - c c^T / (D s^2)) / s on centered vectors, with eigenvalues 1 / s and eps / s^3 <= 1 / s."""
    largest = float(_checked(weight, "weight", "D").abs().max())
    require(0 < eps < math.inf, "eps", "a positive finite number", eps)
    return largest / math.sqrt(_checked_size(min_std, "min_std") ** 2 + eps)


def layer_norm_bound(weight: Tensor, bias: Tensor | None, *, n_tokens: int) -> float:
    """|LayerNorm(X)|_F for any X (N,D): a normalized token is no longer than sqrt(D)."""
    token = float(_checked(weight, "weight", "D").abs().max()) * math.sqrt(len(weight))
    if bias is not None:
        check_shape(bias, "bias", tuple(weight.shape), "like weight")
        token += float(torch.linalg.vector_norm(bias.detach().double()))
    return ROUNDING * math.sqrt(check_count(n_tokens, "n_tokens")) * token


def activation_lipschitz(name: str) -> float:
    """The largest slope of "relu", "gelu" or "gelu_tanh"."""
    return ACTIVATIONS[check_choice(name, "name", tuple(ACTIVATIONS))]


def mlp_lipschitz(first: Tensor, second: Tensor, activation: str = "gelu") -> float:
    """|second| * slope of the activation * |first|, for weights (h,D) and (D,h)."""
    inner, outer = _checked(first, "first", "h,D"), _checked(second, "second", "D,h")
    check_shape(outer, "second", (len(outer), len(inner)), "(D,h) to match first")
    product = float(_spectral(inner)) * float(_spectral(outer))
    return ROUNDING * activation_lipschitz(activation) * product


def vit_block_lipschitz(
    *, attention: float, attention_norm: float, mlp: float, mlp_norm: float
) -> float:
    """Of the block Y = X + Attn(LN1(X)), Y + MLP(LN2(Y)), from the constants of its four parts.

    The input of the attention is what LN1 gives, so `attention` may be taken at `max_norm =
    layer_norm_bound(...)`, and (1 + attention * attention_norm) (1 + mlp * mlp_norm) then holds
    for all X."""
    for name, value in locals().items():
        _checked_size(value, name)
    return ROUNDING * (1 + attention * attention_norm) * (1 + mlp * mlp_norm)


def _checked(weight: Tensor, name: str, axes: str) -> Tensor:
    return check_tensor(weight, name, axes, dtypes=STORAGE_DTYPES).detach().double()


def _checked_size(value: float, name: str) -> float:
    require(0 <= value <= 1e150, name, "a number from 0 to 1e150", value)  # squares are finite
    return float(value)
