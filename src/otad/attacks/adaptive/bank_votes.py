"""What each bank point would answer on its own, read once for a model."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from otad.model.otad import OTAD

FEATURES_AT_ONCE = 2**25  # numbers of a block of features

# A bank of images has gigabytes of features, and every batch of every attack asks for this.
_KNOWN: WeakKeyDictionary[OTAD, tuple[tuple[object, ...], Tensor]] = WeakKeyDictionary()


@torch.no_grad()
def head_outputs(owner: OTAD, like: Tensor) -> Tensor:
    """What the head reads from the feature of each bank point: (N,C), in regression (N,)."""
    features, head = owner.bank_features, owner.backbone.head
    parts = [features, *head.parameters()]
    state = (like.device, like.dtype, *((part.data_ptr(), part._version) for part in parts))
    known = _KNOWN.get(owner)
    if known is None or known[0] != state:
        rows = max(1, FEATURES_AT_ONCE // features.shape[1])
        known = state, torch.cat([head(part.to(like)) for part in features.split(rows)])
        _KNOWN[owner] = known
    return known[1]


def label_outputs(owner: OTAD, like: Tensor) -> Tensor:
    """For k-NN rules: 1 for the label of each bank point (N,C), in regression its value (N,)."""
    labels = owner.bank_labels.to(like.device)
    if not labels.is_floating_point():
        labels = one_hot(labels, owner.backbone.n_outputs)
    return labels.to(like)
