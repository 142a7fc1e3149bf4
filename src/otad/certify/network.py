"""Certified radii of a network alone, whose features have a proved Lipschitz constant Q in a norm.

If the normalized input moves by at most t in that norm, an output <w, z> + b moves by at most
Q |w|_* t, where |w|_* is the dual norm: l2 for l2, and l1 for l-infinity. So the prediction c is
kept against j while t < (o_c - o_j) / (Q |w_c - w_j|_*). Rounding takes a little off."""

from __future__ import annotations

import torch
from torch import Tensor

from otad.certify.half_spaces import ROUNDING
from otad.certify.input_reach import (
    KEY_ROUNDOFFS,
    check_unchanged,
    coarsest_eps,
    measured_unit,
)
from otad.certify.rules import PRECISION
from otad.certify.votes import Head
from otad.checks import check_choice, check_evaluation, require
from otad.errors import InputError
from otad.nets import Backbone

NAME = "network"
CERTIFIABLE = "an OTAD model, or a classifier with a proved Lipschitz bound"
BATCH = 1000
ORDERS = {"l2": (2.0, 2.0), "linf": (torch.inf, 1.0)}  # of each norm and its dual


class NetworkBound:
    """What is proved about a classifier, for changes measured as |delta / unit|."""

    @torch.no_grad()
    def __init__(self, net: Backbone, unit: Tensor | None) -> None:
        name, proved = type(net).__name__, net.lipschitz
        if proved is None:
            raise InputError(f"model: expected {CERTIFIABLE}, got {name} without one")
        require(net.task == "classification", "model", CERTIFIABLE, net.task)
        check_evaluation(net, "model")
        check_unchanged(net)
        expected = "the forward method of Backbone, by its features and its head"
        require(type(net).forward is Backbone.forward, "model", expected, f"{name} with its own")
        self.net, self.norm = net, check_choice(proved.norm, "lipschitz.norm", tuple(ORDERS))
        self.order, self.dual = ORDERS[self.norm]
        self.head = Head(net.head, self.dual)
        self.constant, self.offset = proved.constant, proved.offset
        self.stretch = float((measured_unit(net, unit) / net.std.double()).max())
        eps = coarsest_eps(net)
        self.slip = KEY_ROUNDOFFS * eps
        self.roundoff = (self.head.weight.shape[1] + 32) * eps / 2  # of the sums of the head
        self.assumptions = (
            f"rule 'network': in {self.norm}, the features of {name} move by at most "
            f"{proved.constant:g} times the change of its normalized input",
            f"rounding changes computed features by at most {self.slip:.1g} of their terms",
            PRECISION,
        )

    @torch.no_grad()
    def radius(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the radii and the predictions (B,) of inputs x (B,*input_shape)."""
        outputs = self.net(x)
        bad = ~outputs.isfinite().all(1)
        require(not bool(bad.any()), "model", "finite outputs", outputs[bad][:1].tolist())
        prediction = outputs.argmax(1)
        wide = x.double()  # it may have been rounded
        inputs = [part.flatten(1) for part in (self.net.normalize(wide), wide / self.net.std)]
        length = sum(torch.linalg.vector_norm(part, self.order, dim=1) for part in inputs)
        size = self.constant * length + self.offset

        def bound(rows: Tensor, lengths: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
            """Errors are made here and at the changed input, where sizes grow with the change."""
            steepness = torch.linalg.vector_norm(rows, self.dual, dim=1)
            each = self.slip * steepness + self.roundoff * (1 + self.slip) * lengths
            lost = 2 * (each * size + self.roundoff * offsets)
            slope = self.constant * self.stretch * (steepness + 2 * each)
            return (1 + ROUNDING) * lost, (1 + ROUNDING) * slope

        return self.head.radius(outputs, prediction, bound), prediction
