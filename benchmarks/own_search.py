"""Searches for inputs that change an answer, without sharing code with `otad.attacks`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from odd_models import Case
from torch import Tensor
from torch.nn import functional

import otad

INSIDE = 1 - 1e-6
SHARES = torch.tensor([0.6, 0.95, INSIDE], dtype=torch.float64)
OUTWARD = torch.tensor([1.0001, 1.02, 1.1, 1.3, 1.7, 2.5, 4.0, 8.0], dtype=torch.float64)


class Search:
    """A search for answers around queries x (B,p) that contradict a certificate.

    `limit` (B,) is what is certified up to `radius` (B,): the predicted class, or if `sign` (B,) is
    given the largest certified sign * value. Steps are measured in units."""

    def __init__(self, case: Case, radius: Tensor, limit: Tensor, sign: Tensor | None) -> None:
        self.model, self.x, self.radius, self.limit, self.sign = (
            case[0],
            case.x,
            radius,
            limit,
            sign,
        )
        self.shape, bounds = self.model.backbone.input_shape, self.model.backbone.bounds
        self.bounds = bounds or (-math.inf, math.inf)
        self.unit = case.options.get("unit", torch.ones(self.shape)).flatten().double()
        self.nearest = torch.full_like(radius, math.inf)
        self.inside = torch.zeros_like(radius, dtype=torch.int64)
        self.uncovered = 0

    def gain(self, outputs: Tensor) -> Tensor:
        """Return (n,B) from outputs (n,B,...), above 0 where they contradict the certificate."""
        if self.sign is not None:
            return self.sign * outputs.double() - self.limit
        own = functional.one_hot(self.limit, outputs.shape[-1]).bool().expand(outputs.shape)
        rivals = outputs.masked_fill(own, -math.inf).amax(-1)
        return (rivals - outputs[own].view(rivals.shape)).double()

    def look(self, steps: Tensor, grad: bool = False) -> tuple[Tensor, Tensor]:
        """Return gains (n,B) after steps (n,B,p), with gradients or whether the answer changed.

        Gradients are (n,B,p), changes (n,B). Distances are measured from the inputs as the model
        gets them."""
        at = (self.x.double() + self.unit * steps).to(self.x.dtype).clamp(*self.bounds)
        away = torch.linalg.vector_norm((at.double() - self.x.double()) / self.unit, dim=2)
        with torch.set_grad_enabled(grad):
            flat = at.flatten(0, 1).requires_grad_(grad)
            trace = self.model.trace(flat.view(-1, *self.shape))
            outputs = trace.outputs.view(*away.shape, *trace.outputs.shape[1:])
            gain = self.gain(outputs)
            slope = torch.autograd.grad(gain.sum(), flat)[0].view(at.shape) if grad else None
        changed = gain > 0 if self.sign is not None else outputs.argmax(-1) != self.limit
        changed = (changed | ~gain.isfinite()).detach()
        if self.model.scope == "global":  # the certificate covers solved rows only
            solved = (trace.solution.status == 0).view(away.shape)
            self.uncovered += int((changed & ~solved & (away < self.radius)).sum())
            changed &= solved
        self.inside += ((away > 0) & (away < self.radius)).sum(0)
        self.nearest = torch.minimum(self.nearest, away.masked_fill(~changed, math.inf).amin(0))
        return gain.detach(), changed if slope is None else slope.double() * self.unit

    def run(self, case: Case, drawn: torch.Generator, steps: int = 8) -> None:
        reach = self.radius.clamp_max(100 * case.spread)[:, None]
        ways = functional.normalize(self._ways(case, drawn), dim=2, eps=1e-300)
        gains = self.look((SHARES[:, None, None, None] * reach * ways).flatten(0, 1))[0]
        best = gains[-len(ways) :].topk(min(3, len(ways)), dim=0).indices
        best = ways.gather(0, best[..., None].expand(-1, -1, ways.shape[2]))
        moved = INSIDE * reach * torch.cat([best[:1], torch.zeros_like(best[:1])])
        for number in range(steps):
            slope = functional.normalize(self.look(moved, grad=True)[1], dim=2, eps=1e-300)
            moved = moved + reach * (0.7 if number < steps // 2 else 0.1) * slope
            length = torch.linalg.vector_norm(moved, dim=2, keepdim=True)
            moved = moved * (INSIDE * reach / length.clamp_min(1e-300)).clamp_max(1)
        self.look(moved)
        ways = torch.cat([best, functional.normalize(moved, dim=2, eps=1e-300)])
        far = (OUTWARD[:, None, None, None] * reach * ways).flatten(0, 1)
        changed = self.look(far)[1].unflatten(0, (len(OUTWARD), len(ways)))
        first = changed.int().argmax(0)
        high = OUTWARD[first]
        low = torch.where(first > 0, OUTWARD[(first - 1).clamp_min(0)], INSIDE)
        for _ in range(12 if bool(changed.any()) else 0):
            middle = (low + high) / 2
            beyond = self.look((middle[..., None] * reach) * ways)[1] | ~changed.any(0)
            low, high = torch.where(beyond, low, middle), torch.where(beyond, middle, high)

    @torch.no_grad()
    def _ways(self, case: Case, drawn: torch.Generator) -> Tensor:
        """Return directions (n,B,p) of any length."""
        rows, dim = self.x.shape
        ways = [torch.randn(12, rows, dim, generator=drawn, dtype=torch.float64)]
        axes = torch.eye(dim, dtype=torch.float64)[torch.randperm(dim, generator=drawn)[:6]]
        ways.append(torch.cat([axes, -axes])[:, None].expand(-1, rows, -1))
        head, x = self.model.backbone.head, self.x.double()
        votes = head(self.model.bank_features.to(head.weight.dtype))
        wrong = self.gain(votes[:, None].expand(-1, rows, *votes.shape[1:])).mT
        wrong = wrong > (0 if self.sign is None else wrong.median(1, keepdim=True).values)
        away = torch.cdist(x / self.unit, case.points / self.unit)
        rivals = case.points[away.masked_fill(~wrong, math.inf).topk(3, largest=False).indices]
        own = case.points[away.masked_fill(wrong, math.inf).argmin(1)]
        std = self.model.backbone.std.flatten().double()
        ways.append(((rivals - x[:, None]) / self.unit).movedim(1, 0))
        ways.append(((rivals - own[:, None]) * self.unit / std**2).movedim(1, 0))
        return torch.cat(ways)


@dataclass(frozen=True)
class SuiteSize:
    data: str = "mnist"
    per_class: int = 500
    points: int = 100
    eps: float = 2.0
    epochs: int = 30
    attacks: str | tuple[str, ...] = "standard"
    restarts: int = 10
    steps: int = 100
    neighbors: tuple[int, ...] = (1, 3, 10)


class OwnAttack:
    """An independent attack on inputs x (B,*) within `eps` that knows the training data.

    It climbs the margin from random starts, pulls inputs towards points of each other class and
    away from points of their own class, follows lines to such points, and walks along the decision
    boundary. Every input on the way counts."""

    def __init__(self, model: otad.OTAD, x: Tensor, y: Tensor, size: SuiteSize, seed: int) -> None:
        self.model, self.x, self.y, self.size = model, x, y, size
        self.drawn = torch.Generator(x.device).manual_seed(seed)
        self.bounds = model.backbone.bounds
        self.distance = torch.full((len(x),), math.inf, dtype=torch.float64, device=x.device)

    def gain(self, at: Tensor) -> Tensor:
        """Return the margin (B,) of the best other class, and note which inputs are broken."""
        outputs = self.model(at)
        own = functional.one_hot(self.y, outputs.shape[1]).bool()
        gain = outputs.masked_fill(own, -math.inf).amax(1) - outputs[own]
        away = (at.detach() - self.x).double().flatten(1).norm(dim=1)
        broken = (outputs.argmax(1) != self.y) & (away <= self.size.eps)
        self.distance = torch.where(broken, torch.minimum(self.distance, away), self.distance)
        return gain

    def slope(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return gains (B,) and their gradients (B,*), scaled to length 1."""
        at = at.detach().requires_grad_()
        gain = self.gain(at)
        (slope,) = torch.autograd.grad(gain.sum(), at)
        return gain.detach(), scaled(slope, 1.0)

    def within(self, at: Tensor, eps: float = math.inf) -> Tensor:
        step = at - self.x
        length = step.flatten(1).norm(dim=1).view(-1, *[1] * (step.dim() - 1))
        step = step * (min(eps, 1e9) * (1 - 1e-6) / length.clamp_min(1e-12)).clamp_max(1.0)
        return (self.x + step).clamp(*self.bounds)

    def climb(self, at: Tensor) -> None:
        eps, steps, speed = self.size.eps, self.size.steps, torch.zeros_like(at)
        for number in range(steps):
            speed = 0.75 * speed + self.slope(at)[1]
            rate = eps * (0.01 + 0.25 * (1 + math.cos(math.pi * number / steps)))
            at = self.within(at + scaled(speed, rate), eps)
        self.gain(at)

    @torch.no_grad()
    def pull(self, points: Tensor, labels: Tensor, target: int, count: int) -> Tensor:
        """Move towards the nearest points of a class and away from those of the own class.

        Both are searched again in each step."""
        at, flat, eps = self.x, points.flatten(1), self.size.eps
        for _ in range(min(20, self.size.steps)):
            away = torch.cdist(at.flatten(1), flat)
            others, own = labels == target, labels == self.y[:, None]
            ends = [
                flat[away.masked_fill(~kind, math.inf).topk(count, largest=False).indices].mean(1)
                for kind in (others[None].expand_as(own), own)
            ]
            at = self.within(at + scaled((ends[0] - ends[1]).view_as(at), eps / 5), eps)
            self.gain(at)
        return at

    def walk(self, ends: Tensor) -> None:
        """Follow lines to inputs of other classes, then the boundary to its point nearest to x."""
        for share in torch.linspace(0.05, 1, 20).tolist():
            step = scaled(ends - self.x, 1.0) * self.size.eps * share * (1 - 1e-6)
            self.gain((self.x + step).clamp(*self.bounds).detach())
        far = ends
        for _ in range(self.size.steps // 4):
            low = torch.zeros(len(ends), *[1] * (ends.dim() - 1), device=ends.device)
            high = torch.ones_like(low)
            for _ in range(8):
                middle = (low + high) / 2
                with torch.no_grad():
                    wrong = (self.gain(self.x + middle * (far - self.x)) > 0).view_as(low)
                low, high = torch.where(wrong, low, middle), torch.where(wrong, middle, high)
            edge = self.x + high * (far - self.x)
            normal = self.slope(edge)[1]
            along = ((edge - self.x) * normal).flatten(1).sum(1).view_as(low)
            onto = self.x + along * normal  # the nearest point of a flat boundary
            far = self.within(self.x + 1.3 * ((edge + onto) / 2 - self.x))

    def run(self, points: Tensor, labels: Tensor) -> dict[str, int]:
        """Run all parts, and return how many rows each part is the first to break."""
        counts, classes = {}, int(labels.max()) + 1

        def part(name: str, before: int) -> int:
            now = int(self.distance.isfinite().sum())
            counts[name] = now - before
            return now

        with torch.no_grad():
            self.gain(self.x)
        known = part("without attack", 0)
        for target in range(classes):
            for count in self.size.neighbors:
                self.climb(self.pull(points, labels, target, count))
        known = part("pull, then climb", known)
        self.climb(self.x)
        for _ in range(self.size.restarts):
            noise = torch.randn(self.x.shape, generator=self.drawn, device=self.x.device)
            self.climb(self.within(self.x + scaled(noise, self.size.eps), self.size.eps))
        known = part("climb", known)
        away = torch.cdist(self.x.flatten(1), points.flatten(1))
        nearest = away.masked_fill(labels == self.y[:, None], math.inf)
        for column in nearest.topk(self.size.restarts, largest=False).indices.unbind(1):
            self.walk(points[column])
        part("walk", known)
        return counts


def scaled(step: Tensor, length: float) -> Tensor:
    return length * functional.normalize(step.flatten(1), dim=1).view(step.shape)
