"""Lipschitz bounds of self-attention and of the blocks of a vision transformer.

All are pure functions of weights in torch's layout (outputs, inputs). `nn.MultiheadAttention`
stores `in_proj_weight` (3D, D): the rows of queries, keys and values, head after head. Norms are
Frobenius for sequences X (N, D) and spectral for maps between them.
"""

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
from otad.nets.lipschitz import ROUNDING

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
    """Bound the Lipschitz constant of multi-head self-attention on all X (N, D) up to a norm.

    Parameters
    ----------
    in_weight : Tensor (3D, D)
        The weights of queries, keys and values, as `nn.MultiheadAttention` stores them.
    out_weight : Tensor (D, D)
        The weight of the output projection.
    n_heads, n_tokens : int
        The number of heads R and of tokens N.
    max_norm : float
        The largest Frobenius norm M of a sequence X.
    query_bias : Tensor (D,), optional
        The bias of the queries. Other biases have no effect.
    form : "tight" or "paper"
        "paper" is Theorem 1 of the OTAD paper, for attention without a query bias. "tight" uses the
        spectral norm of each matrix and a sharper proof.

    Notes
    -----
    With `Q_r`, `K_r`, `V_r` of width `w = D / R` for head r:

    - "paper": `sqrt(R) T^2 (T^2 M^2 (sqrt(N) + 1) / sqrt(w) + sqrt(N))`, where T is the largest
      Frobenius norm among all `Q_r`, `K_r`, `V_r` and the output weight.
    - "tight": the smaller of `|W| sqrt(sum_r |V_r|^2 c_r^2)` and `sum_r |V_r W_r| c_r`, where
      `c_r = |K_r Q_r^T| M^2 / sqrt(w) + sqrt(N) (1 + M |K_r b_r| / (2 sqrt(w)))`.

    Examples
    --------
    >>> import torch
    >>> from otad.certify import attention_lipschitz
    >>> weights = torch.eye(4).repeat(3, 1), torch.eye(4)
    >>> sizes = {"n_heads": 2, "n_tokens": 4, "max_norm": 1.0}
    >>> round(attention_lipschitz(*weights, **sizes), 3)
    3.828
    >>> round(attention_lipschitz(*weights, **sizes, form="paper"), 3)
    59.314
    """
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
    """Bound the Lipschitz constant of layer normalization.

    Parameters
    ----------
    weight : Tensor (D,)
        The weight of the layer.
    eps : float
        The `eps` of the layer, positive.
    min_std : float
        The smallest standard deviation of a token. 0 holds for all tokens.

    Returns
    -------
    float
        `max |weight| / sqrt(min_std^2 + eps)`.

    Examples
    --------
    >>> import torch
    >>> from otad.certify import layer_norm_lipschitz
    >>> round(layer_norm_lipschitz(torch.ones(4), eps=0.25), 6)
    2.0
    """
    largest = float(_checked(weight, "weight", "D").abs().max())
    require(0 < eps < math.inf, "eps", "a positive finite number", eps)
    return largest / math.sqrt(_checked_size(min_std, "min_std") ** 2 + eps)


def layer_norm_bound(weight: Tensor, bias: Tensor | None, *, n_tokens: int) -> float:
    """Bound the Frobenius norm of `LayerNorm(X)` for any X (N, D).

    A normalized token is no longer than `sqrt(D)`.

    Parameters
    ----------
    weight : Tensor (D,)
        The weight of the layer.
    bias : Tensor (D,) or None
        The bias of the layer.
    n_tokens : int
        The number of tokens N.

    Examples
    --------
    >>> import torch
    >>> from otad.certify import layer_norm_bound
    >>> round(layer_norm_bound(torch.ones(4), None, n_tokens=9), 6)
    6.0
    """
    token = float(_checked(weight, "weight", "D").abs().max()) * math.sqrt(len(weight))
    if bias is not None:
        check_shape(bias, "bias", tuple(weight.shape), "like weight")
        token += float(torch.linalg.vector_norm(bias.detach().double()))
    return ROUNDING * math.sqrt(check_count(n_tokens, "n_tokens")) * token


def activation_lipschitz(name: str) -> float:
    """Return the largest slope of an activation: "relu", "gelu" or "gelu_tanh".

    Examples
    --------
    >>> from otad.certify import activation_lipschitz
    >>> activation_lipschitz("relu")
    1.0
    >>> round(activation_lipschitz("gelu"), 4)
    1.1289
    """
    return ACTIVATIONS[check_choice(name, "name", tuple(ACTIVATIONS))]


def mlp_lipschitz(first: Tensor, second: Tensor, activation: str = "gelu") -> float:
    """Bound the Lipschitz constant of two linear layers with an activation between them.

    Parameters
    ----------
    first, second : Tensor (h, D) and (D, h)
        The weights of the layers.
    activation : str
        A name that `activation_lipschitz` knows.

    Returns
    -------
    float
        The product of the spectral norms and the slope of the activation.

    Examples
    --------
    >>> import torch
    >>> from otad.certify import mlp_lipschitz
    >>> round(mlp_lipschitz(2 * torch.eye(3), torch.eye(3), "relu"), 6)
    2.0
    """
    inner, outer = _checked(first, "first", "h,D"), _checked(second, "second", "D,h")
    check_shape(outer, "second", (len(outer), len(inner)), "(D,h) to match first")
    product = float(_spectral(inner)) * float(_spectral(outer))
    return ROUNDING * activation_lipschitz(activation) * product


def vit_block_lipschitz(
    *, attention: float, attention_norm: float, mlp: float, mlp_norm: float
) -> float:
    """Bound the Lipschitz constant of a transformer block from the constants of its parts.

    The block is `Y = X + Attn(LN1(X))`, then `Y + MLP(LN2(Y))`, and the bound is `(1 + attention *
    attention_norm) (1 + mlp * mlp_norm)`. It holds for all X if `attention` is computed with
    `max_norm=layer_norm_bound(...)`, because LN1 bounds the input of the attention.

    Parameters
    ----------
    attention, attention_norm : float
        The constants of the attention and of the layer normalization in front of it.
    mlp, mlp_norm : float
        The constants of the MLP and of the layer normalization in front of it.

    Examples
    --------
    >>> from otad.certify import vit_block_lipschitz
    >>> round(vit_block_lipschitz(attention=2.0, attention_norm=1.0, mlp=3.0, mlp_norm=0.5), 6)
    7.5
    """
    for name, value in locals().items():
        _checked_size(value, name)
    return ROUNDING * (1 + attention * attention_norm) * (1 + mlp * mlp_norm)


def _checked(weight: Tensor, name: str, axes: str) -> Tensor:
    return check_tensor(weight, name, axes, dtypes=STORAGE_DTYPES).detach().double()


def _checked_size(value: float, name: str) -> float:
    require(0 <= value <= 1e150, name, "a number from 0 to 1e150", value)  # squares are finite
    return float(value)
