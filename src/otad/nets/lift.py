"""The lift of a backbone: its own outputs as a Lipschitz map of its embedded inputs.

An embedded input e of p numbers becomes (e, 0) in R^(p + C), and its feature becomes (e, g(e)).
Here g(e) are the outputs of the backbone divided by a number, the `stretch`; the head multiplies by
it. A bank of such pairs is a lifted bank (`otad.cip.whole_bank.lifted_bank`): every answer is a
mixture of the network's outputs for training points, and each training point keeps its own output.

If the stretch is at least the largest ratio of differences between outputs and between embedded
inputs, the pairs belong to a 1-Lipschitz map, which curvature between 0 and 2 allows in local and
in global scope. For a backbone without a transport step the outputs are linear in e, and that ratio
is at most the spectral norm of the head.

Then the outputs do not depend on the directions of e that are orthogonal to all rows of the head,
but distances do. Far from training points, the map through all pairs answers by a mixture of many
outputs, which is too short. If these unread directions are multiplied by a factor below 1, no
output changes, no two points get farther apart, and the ratio is still at most the spectral norm.
So equal margins prove equal radii, and the map comes closer to the outputs of the network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from otad.checks import check_positive, require
from otad.nets.base import Backbone, LinearHead, LipschitzBound, build, register, squared_lengths
from otad.nets.inputs import with_memory
from otad.nets.lipschitz import LipschitzNet, full_precision, norm_bounds

MARGIN = 1e-3  # added to the spectral norm as a share of it, for rounding
MOST_STRETCH = 1e30  # so that float32 has room for the outputs


@register("lift")
class Lift(Backbone):
    """A backbone that writes the outputs of another one into additional coordinates.

    Embedded inputs e of the other backbone become (e, 0), and features become (e, outputs /
    stretch). Weights are shared.

    Parameters
    ----------
    inner : Backbone
        The backbone with p-dimensional embedded inputs and C outputs.
    stretch : float
        The number that outputs are divided by. If it is at least their Lipschitz constant on the
        training data, the lifted map is 1-Lipschitz.
    unread : float
        The factor, above 0 and at most 1, of the directions of embedded inputs that the head does
        not read. Below 1 the inner backbone must have no transport step.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> net = otad.nets.fc_resnet((4,), 3, blocks=1)
    >>> lift = otad.nets.Lift(net, stretch=2.0)
    >>> x = torch.rand(2, 4)
    >>> lift.dim, torch.allclose(lift(x), net(x))
    (7, True)
    """

    settings = ("stretch",)

    read: Tensor | None

    def __init__(self, inner: Backbone, *, stretch: float, unread: float = 1.0) -> None:
        check_positive(stretch, "stretch", most=MOST_STRETCH)
        check_positive(unread, "unread", most=1.0)
        fits = unread == 1 or isinstance(inner, LipschitzNet)
        expected = f"1 for a {type(inner).__name__}, which may transport"
        require(fits, "unread", expected, unread)
        size, count = inner.dim, inner.n_outputs
        shape: dict[str, Any] = {"dim": size + count, "task": inner.task, "bounds": inner.bounds}
        super().__init__(inner.input_shape, count, **shape)
        self.inner, self.lift = inner, count
        _share_normalization(self)
        self.register_load_state_dict_post_hook(_share_normalization)  # type: ignore[no-untyped-call]
        self.stretch, self.unread = float(stretch), float(unread)
        # An orthonormal basis (r,d) of the rows of the head, if it is needed.
        self.register_buffer("read", None if unread == 1 else _row_basis(inner.head))
        self.head = with_memory(LinearHead(self.dim, count, self.task), inner.mean.device)
        self.head.to(inner.mean.dtype).requires_grad_(False)
        self.head.weight.zero_()[:, size:].fill_diagonal_(self.stretch)
        self.head.bias.zero_()

    def embed(self, x: Tensor) -> Tensor:
        embedded = self.inner.embed(x)
        if self.read is not None:
            with full_precision(x.device):
                inside = embedded @ self.read.mT @ self.read
            embedded = torch.lerp(inside, embedded, self.unread)
        return functional.pad(embedded, (0, self.lift))

    @property
    def embedding_lipschitz(self) -> LipschitzBound | None:
        bound = self.inner.embedding_lipschitz
        if bound is None or self.read is None:
            return bound
        factor = self.unread + (1 - self.unread) * float(norm_bounds(self.read)) ** 2
        return LipschitzBound(bound.norm, factor * bound.constant, factor * bound.offset)

    def transport(self, e: Tensor) -> tuple[Tensor, Tensor]:
        inputs = e[:, : -self.lift]
        outputs = self.inner.head(self.inner.transport(inputs)[0])
        answers = outputs.reshape(len(e), self.lift) / self.stretch
        return torch.cat([inputs, answers], dim=1), squared_lengths(answers)

    def config(self) -> dict[str, Any]:
        config = {"kind": self.kind, "stretch": self.stretch, "inner": self.inner.config()}
        return config if self.read is None else config | {"unread": self.unread}

    @classmethod
    def from_config(cls, options: Mapping[str, Any]) -> Self:
        return cls(build(options["inner"]), **{k: v for k, v in options.items() if k != "inner"})


def _share_normalization(lift: Lift, *_: object) -> None:
    """Certificates read `mean` and `std` of the lift, but inputs are normalized by those inside."""
    lift.mean, lift.std = lift.inner.mean, lift.inner.std


@torch.no_grad()
def feature_lift(inner: Backbone, unread: float = 1.0) -> Lift:
    """Make the lift of a backbone without a transport step.

    Its stretch is just above the spectral norm of the head, so the lifted map is 1-Lipschitz.

    Parameters
    ----------
    inner : Backbone
        The backbone, such as an `OrthogonalNet`.
    unread : float
        As in `Lift`.

    Returns
    -------
    Lift
        A backbone with the same outputs. The global map of `otad.defend` mixes these outputs.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> net = otad.nets.OrthogonalNet((1, 8, 8), 3, width=16, blocks=2).eval()
    >>> lift = otad.nets.feature_lift(net, unread=0.1).eval()
    >>> x = torch.rand(6, 1, 8, 8)
    >>> model = otad.defend(lift, x, torch.arange(6) % 3, n_neighbors=1, scope="global")
    >>> torch.allclose(model(x), net(x), atol=1e-4)
    True
    """
    norm = float(torch.linalg.matrix_norm(inner.head.matrix.double(), 2))
    return Lift(inner, stretch=(1 + MARGIN) * norm or 1.0, unread=unread)


@torch.no_grad()
def _row_basis(head: LinearHead) -> Tensor:
    """Return an orthonormal basis (C,d) of a space that contains all rows (C,d) of a head."""
    basis: Tensor = torch.linalg.qr(head.matrix.double().mT)[0].mT
    return basis.to(head.matrix).contiguous()
