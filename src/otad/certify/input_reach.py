"""How far a change of the input moves the query: as a key among neighbors, and embedded.

Without a metric both are the same space. With one, keys move by at most Q |delta|, Q a Lipschitz
constant of the metric, which decides which bank points can be neighbors; and the embedded input
moves as the embedding allows, which decides the answer for given neighbors. With l = 0 the hull
rule depends on the keys alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional

from otad.certify.votes import Votes
from otad.checks import check_broadcast, check_evaluation, check_finite, require
from otad.errors import InputError
from otad.model.otad import OTAD
from otad.nets import Backbone, LipschitzBound, Metric, only_normalizes

# Relative error allowed for computed keys and embedded inputs, in units of the dtype's eps: that of
# 16 orthogonal layers of up to 2,048 terms, and of an `OrthogonalNet` of default size, is about 1.
KEY_ROUNDOFFS = 64.0
PROOFS = {"lipschitz", "embedding_lipschitz"}  # properties of networks, and what they are about:
COMPUTED = ("embed", "features", "forward", "normalize", "transport")


@dataclass(frozen=True, eq=False)
class Reach:
    """An input x + delta with |delta / unit| <= r is mapped to e(x) + stretch * u with |u| <= r.

    `stretch` (d,) float64. For normalized and flattened inputs it is unit / std, and the points
    reached are exactly that ellipsoid; it is 0 at coordinates that no input reaches, which are then
    0 themselves. Otherwise it is a Lipschitz constant, the same for all d coordinates. All rules
    work with u: their radii are radii of the input.

    `slip` is the relative rounding error of e as the model computes it, also from inputs that were
    rounded to its dtype. So in truth |u| <= r + slip (2 size + 3 r), where size is
    |e(x) / stretch| + |x / unit| / 4."""

    stretch: Tensor
    slip: float

    def size_of(self, points: Tensor, x: Tensor) -> Tensor:
        """|e(x) / stretch| (B,) for inputs x (B,*), of which `points` (B,d) are computed."""
        reached = self.stretch > 0
        size: Tensor = (points.double()[:, reached] / self.stretch[reached]).norm(dim=1)
        return size


@dataclass(frozen=True, eq=False)
class NetworkReach(Reach):
    """The reach of an embedding that a network computes, with what is proved about it.

    Embedded inputs may be short while the terms they are made of are not, so these bound their
    rounding errors."""

    net: Backbone
    bound: LipschitzBound

    def size_of(self, points: Tensor, x: Tensor) -> Tensor:
        length: Tensor = self.net.normalize(x.double()).flatten(1).norm(dim=1)
        return (self.bound.constant * length + self.bound.offset) / self.stretch.max()


@dataclass(frozen=True, eq=False)
class InputReach:
    """The reach of the keys and of the embedding (None if it is not known), and what is assumed
    about both. `within_bounds`: only inputs within the bounds of the model count."""

    model: OTAD
    keys: Reach
    embedded: Reach | None
    assumptions: tuple[str, ...]
    unit: Tensor
    within_bounds: bool = False

    @cached_property
    def corners(self) -> tuple[Tensor, Tensor] | None:
        """The embedded inputs (d,), as the model computes them, of both bounds in all features.

        None where the bounds do not count, or do not bound the keys. Rounding is monotone, so
        every legal input has an embedded input between these two, also as the model computes it."""
        backbone = self.model.backbone
        if not self.within_bounds or self.model.metric is not None or not only_normalizes(backbone):
            return None
        assert backbone.bounds is not None
        each = (backbone.mean.new_full((1, *backbone.input_shape), b) for b in backbone.bounds)
        low, high = (backbone.embed(bound)[0] for bound in each)
        return low, high

    @cached_property
    def votes(self) -> Votes:
        return Votes(self.model, None if self.embedded is None else self.embedded.stretch)


def input_reach(
    model: OTAD,
    unit: Tensor | None,
    embedding_lipschitz: float | None,
    metric_lipschitz: float | None,
    within_bounds: bool = False,
) -> InputReach:
    """Return the reach for changes measured as |delta / unit|. Constants that the model does not
    know must be given."""
    backbone, metric = model.backbone, model.metric
    limits = check_bounds(backbone, within_bounds)
    measured = measured_unit(backbone, unit)
    given: tuple[str, ...] = ()
    if embedding_lipschitz is not None:
        given = (f"the embedding stretches by {embedding_lipschitz:g} at most, as stated",)
    if metric is None:
        why = "None, as neighbors are searched among embedded inputs"
        require(metric_lipschitz is None, "metric_lipschitz", why, metric_lipschitz)
        reach, proved = _embedding_reach(backbone, measured, embedding_lipschitz)
        whole = (*limits, *given, *proved)
        return InputReach(model, reach, reach, whole, measured, within_bounds)
    embedded, is_known = None, only_normalizes(backbone) or given or _embedding_bound(backbone)
    if is_known or model.strong_convexity != 0:
        embedded, proved = _embedding_reach(backbone, measured, embedding_lipschitz)
        given = (*given, *proved)
    else:
        unknown = f"the Lipschitz constant of the embedding of {type(backbone).__name__}"
        given = (f"rule 'cell' is left out, as {unknown} is not known",)
    constant, slip, searched = _metric_constant(metric, metric_lipschitz, float(measured.max()))
    keys = Reach(measured.new_full((model.bank_points.shape[1],), constant), slip)
    assumed = (*limits, *searched, *given)
    return InputReach(model, keys, embedded, assumed, measured, within_bounds)


def check_bounds(net: Backbone, within_bounds: bool) -> tuple[str, ...]:
    """Return what a certificate within the bounds of a network assumes; refuse one without."""
    if not within_bounds:
        return ()
    require(net.bounds is not None, "within_bounds", "a model with declared bounds", net.bounds)
    return (f"a changed input stays within the bounds {net.bounds}, feature by feature",)


def measured_unit(backbone: Backbone, unit: Tensor | None) -> Tensor:
    """The unit (*input_shape) of changes of inputs in float64; refuse an illegal one, and networks
    whose std was changed to one."""
    least = float(backbone.std.min())
    require(least > 0, "model", "a positive std of its inputs", least)
    if unit is None:
        return torch.ones(backbone.input_shape, dtype=torch.float64, device=backbone.std.device)
    require(isinstance(unit, Tensor), "unit", "a torch.Tensor or None", type(unit).__name__)
    unit = check_broadcast(unit, "unit", backbone.input_shape)
    measured = unit.detach().to(backbone.std.device, torch.float64)
    check_finite(measured, "unit")
    require(bool((measured > 0).all()), "unit", "positive values", measured.min().item())
    return measured


def check_unchanged(net: nn.Module) -> None:
    """Refuse a network that computes something else than that of which it proves a constant: one
    with hooks, or of a subclass with other methods that does not state the constant again."""
    for part in net.modules():
        name, kinds = type(part).__name__, type(part).__mro__
        states = (place for place, kind in enumerate(kinds) if PROOFS & vars(kind).keys())
        stated = next(states, 0)
        proves = kinds[stated] not in (Backbone, Metric)
        own = [one for kind in kinds[:stated] for one in COMPUTED if proves and one in vars(kind)]
        expected = f"its own Lipschitz constant, as it has its own {', '.join(own)}"
        require(not own, f"model, {name}", expected, f"that of {kinds[stated].__name__}")
        is_plain = not (part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part))
        expected = "a layer without hooks, as a Lipschitz constant is proved for the layers alone"
        require(is_plain, f"model, {name}", expected, "one with a hook")


def coarsest_eps(net: nn.Module) -> float:
    """The largest eps of the dtypes that a network computes in."""
    kinds = {part.dtype for part in (*net.parameters(), *net.buffers())}
    found = [torch.finfo(kind).eps for kind in kinds if kind.is_floating_point]
    return max(found, default=torch.finfo(torch.float32).eps)


def _embedding_bound(backbone: Backbone) -> LipschitzBound | None:
    """What is proved about the embedding of a network in l2."""
    bound = backbone.embedding_lipschitz
    if bound is None or bound.norm != "l2":
        return None
    check_unchanged(backbone)
    return bound


def _embedding_reach(
    backbone: Backbone, measured: Tensor, constant: float | None
) -> tuple[Reach, tuple[str, ...]]:
    """The reach, and what it assumes. `constant`: Q of an embedding that does more than normalize
    and flatten (see `certify`)."""
    name, kind = "embedding_lipschitz", type(backbone).__name__
    if only_normalizes(backbone):
        why = "None, as this embedding only normalizes and is known exactly"
        require(constant is None, name, why, constant)
        stretch = functional.pad((measured / backbone.std.double()).flatten(), (0, backbone.lift))
        return Reach(stretch, 2 * torch.finfo(backbone.std.dtype).eps), ()
    bound = _embedding_bound(backbone)
    if constant is None and bound is None:
        raise InputError(
            f"{name}: expected a proved constant, as {kind} has its own embedding, got None; "
            "without one, search neighbors by a metric of known constant (metric=nn.Flatten() for "
            "pixels, or otad.nets.LipschitzMetric), certify a network that transports its inputs "
            "(OTADClassifier, `otad train`) or whose constant is proved (otad.nets.OrthogonalNet), "
            "or do without the network (inputs='pixels')"
        )
    check_evaluation(backbone, "model.backbone")
    reached = measured.new_ones(backbone.dim)
    if constant is not None:
        _check_constant(constant, name)
        return Reach(constant * reached, 0.0), ()
    assert bound is not None
    reached[backbone.dim - backbone.lift :] = 0.0
    stretch = bound.constant * float((measured / backbone.std.double()).max()) * reached
    slip = KEY_ROUNDOFFS * coarsest_eps(backbone)
    proved = (
        f"the embedding of {kind} moves by at most {bound.constant:g} times the change of its "
        "normalized input",
        f"rounding moves embedded inputs by {slip:.1g} of their terms at most",
    )
    return NetworkReach(stretch, slip, backbone, bound), proved


def _metric_constant(
    metric: nn.Module, stated: float | None, longest_unit: float
) -> tuple[float, float, tuple[str, ...]]:
    """Q for changes in units, the relative rounding error of keys, and what both assume."""
    name, known = type(metric).__name__, getattr(metric, "lipschitz", None)
    check_evaluation(metric, "model.metric")
    searched = f"neighbors are searched by keys of {name}, which moves"
    if known is not None:
        why = f"None, as {name} has its own constant {known:g}"
        require(stated is None, "metric_lipschitz", why, stated)
        _check_constant(known, f"{name}.lipschitz")
        check_unchanged(metric)
        slip = KEY_ROUNDOFFS * coarsest_eps(metric)
        assumed = (
            f"{searched} no two of them further apart than {known:g} times their inputs",
            f"rounding moves computed keys by {slip:.1g} of their terms at most (no TF32, no "
            "autocast)",
        )
        return known * longest_unit, slip, assumed
    if stated is None:
        raise InputError(
            "model: expected neighbors by l2 distance of embedded inputs, or by a metric of known "
            f"Lipschitz constant (metric_lipschitz states one), got a metric ({name}) without"
        )
    _check_constant(stated, "metric_lipschitz")
    moves = f"them by {stated:g} times the change of an input at most, as stated"
    return stated, 0.0, (f"{searched} {moves}",)


def _check_constant(constant: float, name: str) -> None:
    require(0 < constant < math.inf, name, "a positive finite number", constant)
