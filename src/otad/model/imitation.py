"""A network in place of the solver, as in the paper's OTAD-T-NN.

A CIP-net learns the exact answers for training points, each from its neighbors other than itself.
Then it replaces the solver."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from otad.checks import check_count, check_tensor, require
from otad.cip import BankProblem
from otad.cip.surrogate import CIP_NET_RECIPE, CipNet, CipNetConfig, CipNetResult, train_cip_net
from otad.errors import InputError
from otad.io.mapped_rows import gathered
from otad.model.otad import OTAD

PAPER_WIDTH = 2048  # the width of tokens for features of dimension 24,576
_SEARCHED_ROWS = 1024


@dataclass(frozen=True, eq=False)
class Imitation:
    """A model whose solver is replaced by a trained `CipNet`, and the record of the training.

    If `result.finished` is False, the same call resumes the training."""

    model: OTAD
    result: CipNetResult


@torch.inference_mode(False)  # weights made in inference mode cannot be trained
def imitate(
    model: OTAD,
    config: CipNetConfig | None = None,
    *,
    net: CipNet | None = None,
    alpha: float = 1.0,
    held_out: int = 0,
    **options: Any,
) -> Imitation:
    """Train a CIP-net on the answers of a model of local scope, and return a copy that uses it.

    The network learns from all bank points but `held_out` random ones, on which its error is
    measured after each epoch. With `alpha` below 1 it also learns the backbone's own features of
    the bank points, as in the paper, which costs robustness. Other options are those of
    `otad.cip.surrogate.train_cip_net`.
    """
    solver = model.answerer.exact_solver
    if solver is None:
        other = "" if model.solver is None else f" and {type(model.solver).__name__}"
        expected = "local scope and ExactCip, whose answers are learned"
        raise InputError(f"model: expected {expected}, got {model.scope} scope{other}")
    expected = "0, as a network does not substitute neighbors"
    require(solver.spares == 0, "spares", expected, solver.spares)
    config, points = config or recipe_for(model), len(model.bank_inputs)
    fits = check_count(held_out, "held_out", least=0) < points
    require(fits, "held_out", f"fewer than all {points} points", held_out)
    rows, unseen = None, None
    if held_out:
        order = torch.randperm(points, generator=torch.Generator().manual_seed(config.seed))
        rows, unseen = (part.sort().values for part in (order[held_out:], order[:held_out]))
    net = fresh_net(model, seed=config.seed) if net is None else net
    net.check_sizes(model.n_neighbors, model.backbone.dim, name="net")
    features, own = model.bank_features, None
    if alpha != 1:
        own = features if rows is None else gathered(features, rows)
    result = train_cip_net(
        net.to(model.backbone.mean),
        lessons(model, rows),
        config,
        teacher=replace(solver, on_failure="fallback"),
        alpha=alpha,
        own_features=own,
        held_out=None if unseen is None else lessons(model, unseen),
        source=f"{model.bank_fingerprint} in {features.dtype}, without {held_out} points",
        **options,
    )
    return Imitation(model.replace(solver=net), result)


def recipe_for(model: OTAD) -> CipNetConfig:
    """Return the recipe for the device of a model; on a GPU it uses mixed precision."""
    device = model.backbone.mean.device
    return replace(CIP_NET_RECIPE, device=str(device), mixed_precision=device.type == "cuda")


def fresh_net(model: OTAD, *, width: int | None = None, seed: int = 0, **options: Any) -> CipNet:
    """Return a new CIP-net for a model, with the options of `CipNet`.

    The default `width` is twice the dimension of the features, rounded up to a multiple of 64, and
    at most the paper's 2048."""
    dim = model.backbone.dim
    width = min(PAPER_WIDTH, 64 * math.ceil(dim / 32)) if width is None else width
    generator = torch.Generator().manual_seed(seed)
    return CipNet(dim, model.n_neighbors, width=width, generator=generator, **options)


@torch.no_grad()
def lessons(model: OTAD, rows: Tensor | None = None) -> BankProblem:
    """Return bank points as queries, each with its K nearest other points as neighbors.

    All points are used, or those of `rows` (M,) int64. Neighbors are searched as the model does."""
    inputs, like = model.bank_inputs, model.backbone.mean
    chosen = torch.arange(len(inputs)) if rows is None else rows
    check_tensor(chosen, "rows", "M", dtypes=(torch.int64,))
    found = []
    for some in chosen.split(_SEARCHED_ROWS):
        keys = gathered(model.bank_points, some, like.device).to(like)
        found.append(model.neighbors(keys, model.n_neighbors, exclude=some).indices)
    if rows is not None or (inputs.dtype, inputs.device) != (like.dtype, like.device):
        inputs = gathered(inputs, chosen, like.device).to(like)  # if not, they may stay in a file
    return model.problem(inputs, torch.cat(found))
