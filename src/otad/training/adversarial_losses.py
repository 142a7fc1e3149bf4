"""Losses of adversarial training that compare outputs at clean inputs x and at perturbed inputs x':

    TRADES (arXiv:1901.08573)   loss(f(x), y) + beta D(f(x), f(x'))
    MART (ICLR 2020)            - log p'_y - log(1.0001 - max over j != y of p'_j)
                                + beta (1 - p_y) D(f(x), f(x'))

with the probabilities p at x and p' at x'. D is their Kullback-Leibler divergence KL(p || p'), or
for values the squared difference. PGD and FGSM training take loss(f(x'), y) itself."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_ROOM = 1e-4  # added so that the second logarithm of MART is finite


def divergence(clean: Tensor, perturbed: Tensor) -> Tensor:
    """Return KL(p || p') (B,) of logits (B,C), or the squared difference of values (B,)."""
    if clean.dim() == 1:
        return (clean - perturbed).square()
    logs = functional.log_softmax(clean, 1), functional.log_softmax(perturbed, 1)
    return (logs[0].exp() * (logs[0] - logs[1])).sum(1)


def trades_losses(fitted: Tensor, clean: Tensor, perturbed: Tensor, beta: float) -> Tensor:
    """Return the TRADES losses (B,) from the losses `fitted` (B,) at clean inputs and outputs."""
    return fitted + beta * divergence(clean, perturbed)


def mart_losses(labels: Tensor, clean: Tensor, perturbed: Tensor, beta: float) -> Tensor:
    """Return the MART losses (B,) from labels (B,) and logits (B,C)."""
    logs = functional.log_softmax(perturbed, 1)
    own = labels[:, None]
    others = logs.scatter(1, own, -torch.inf).amax(1).exp()
    boosted = -logs.gather(1, own)[:, 0] - torch.log(1 + _ROOM - others)
    doubt = 1 - functional.softmax(clean, 1).gather(1, own)[:, 0]
    return boosted + beta * doubt * divergence(clean, perturbed)
