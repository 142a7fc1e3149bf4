"""The quadratic program of eq. (3), as its dual: concave maximization over the simplex.

    maximize  c . w - w^T G w / 2     over  w >= 0, sum w = 1

On its support S the optimum solves a linear system. So we guess S, solve, drop the neighbors with
negative weight, add those with positive gain, and repeat until nothing changes. Then all optimality
conditions hold. Almost every row ends within a few rounds. Exchanging many neighbors at a time
could cycle, or meet affinely dependent images; such rows are solved by pivoting.

H = G + 1 1^T has the same optimum, because it adds a constant on the simplex, and is regular on
affinely independent images. With p = H_SS^-1 c and r = H_SS^-1 1 on the support,

    w = p - nu r,   nu = (sum p - 1) / sum r

are the weights there, and c_i - nu - (H w)_i are the gains of the neighbors outside.

Pivoting is an active-set method. The weights in the basis S solve the problem on the affine hull of
S. A neighbor outside S with a positive gain enters, and a neighbor whose weight turns negative
leaves. Each round is one symmetric pivot per unfinished row on the tableau

    T = [ -N       N G_SR      ]        N: inverse of the bordered matrix [G_SS 1; 1^T 0], S block
        [ G_RS N   Schur block ]        R: the neighbors outside S

The objective rises with every step, so no basis occurs twice and the method always ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from otad.cip.execution import row_blocks, run_parts
from otad.threads import torch_threads

REFINEMENTS = 3  # after the first
GUESSES = 8  # rounds of exchange before a row is left to pivoting
_MOST_ROUNDS = 200  # a few pivots per neighbor suffice; a row that needs more counts as unsolved


class SimplexOptimum(NamedTuple):
    """The optimal `weights` (K,B), `sensitivity` (K,K,B) = d weights / d linear, `solved` (B,).

    The sensitivity has shape (0,0,B) unless it is needed."""

    weights: Tensor
    sensitivity: Tensor
    solved: Tensor


def maximize_on_simplex(
    gram: Tensor,
    linear: Tensor,
    active: Tensor,
    tolerance: float,
    guess: Tensor | None = None,
    *,
    sensitive: bool = True,
) -> SimplexOptimum:
    """Maximize linear . w - w^T gram w / 2 over the simplex of active neighbors, for each column.

    `gram` (K,K,B) is positive semidefinite up to the relative error `tolerance`, `linear` is (K,B),
    and `active` (K,B) has at least one True in each column. `guess` (K,B) says which active
    neighbors are expected to get weight, at least one of them; by default all."""
    first = active if guess is None else guess
    parts = row_blocks(linear[0])
    if len(parts) == 1:
        with torch_threads(1):  # synchronizing threads would take most of the time
            return _maximize(gram, linear, active, first, tolerance, sensitive)

    def work(rows: slice) -> SimplexOptimum:
        some = (gram[..., rows], linear[:, rows], active[:, rows], first[:, rows])
        return _maximize(*some, tolerance, sensitive)

    found = run_parts(parts, work, linear.device)
    return SimplexOptimum(*(torch.cat(parts, dim=-1) for parts in zip(*found, strict=True)))


def _maximize(
    gram: Tensor, linear: Tensor, active: Tensor, guess: Tensor, tolerance: float, sensitive: bool
) -> SimplexOptimum:
    scale = gram.diagonal(dim1=0, dim2=1).amax(1)
    scale = torch.where(scale > 0, scale, 1.0)
    quadratic, linear = gram / scale, linear / scale
    # Only differences of the linear term matter; centered, they keep their digits.
    linear = linear - (linear * active).sum(0) / active.sum(0)
    solved = torch.ones_like(scale, dtype=torch.bool)
    weights, inverse, todo = _by_exchange(quadratic, linear, active, guess, tolerance, sensitive)
    if len(todo):
        matrix, slope, allowed = (part[..., todo] for part in (quadratic, linear, active))
        weight, reduced, solved[todo] = pivot_to_optimum(matrix, slope, allowed, tolerance)
        first = reduced.permute(2, 0, 1)

        def apply_inverse(gap: Tensor, rows: Tensor | slice) -> Tensor:
            return (first[rows] @ gap[..., None])[..., 0]

        parts = matrix.permute(2, 0, 1), slope.mT, weight.mT
        weights[:, todo] = _refined(*parts, apply_inverse).mT
        if sensitive:
            inverse[..., todo] = reduced
    return SimplexOptimum(weights, inverse / scale, solved & (weights.amax(0) <= 1))  # false if NaN


def _by_exchange(
    quadratic: Tensor,
    linear: Tensor,
    active: Tensor,
    guess: Tensor,
    tolerance: float,
    sensitive: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights and inverse of the rows that exchange solves, and the rows left over (n,).

    The results of rows left over are zero."""
    sizes = quadratic.shape if sensitive else (0, 0, linear.shape[1])
    weights, inverse = torch.zeros_like(linear), quadratic.new_zeros(sizes)
    place = torch.arange(linear.shape[1], device=linear.device)
    # Here the batch comes first.
    matrix = torch.empty_like(quadratic.permute(2, 0, 1), memory_format=torch.contiguous_format)
    torch.add(quadratic.permute(2, 0, 1), 1, out=matrix)
    target, allowed = linear.mT.contiguous(), active.mT.to(linear.dtype)
    floor = tolerance * (1 + torch.linalg.vector_norm(target * allowed, math.inf, dim=1))
    support, given_up = guess.mT.to(linear.dtype), []
    for number in range(1, GUESSES + 1):
        factors, regular = factor(matrix, support, tolerance)
        solved = solve(factors, torch.stack((target * support, support), dim=2))
        (p, r), (mass, rate) = solved.unbind(2), solved.sum(1).unbind(1)
        level = ((mass - 1) / rate)[:, None]
        weight = torch.addcmul(p, level, r, value=-1)
        gain = torch.baddbmm((target - level)[..., None], matrix, weight[..., None], alpha=-1)
        # Optimal: no weight below zero, no gain above, up to rounding.
        value = torch.addcmul(weight, allowed - support, gain[..., 0])
        done = regular & (torch.sub(value, weight, alpha=2).amax(1) <= floor)
        left = (regular & ~done).nonzero()[:, 0]
        if 2 * len(left) <= len(place) or number == GUESSES:  # store finished rows
            best = done.nonzero()[:, 0]
            rows = place[best]
            parts = factors[best], support[best], r[best], rate[best]
            start = matrix[best], target[best], weight[best]
            weights[:, rows] = _refined(*start, partial(_apply_inverse, *parts)).mT
            if sensitive:
                inverse[..., rows] = reduced_inverse(*parts).permute(1, 2, 0)
            if len(best) + len(left) < len(place):
                given_up.append(place[~regular])
            place = place[left]
            if len(left) == 0:
                break
            kept = (support, matrix, target, allowed, floor, value, done)
            support, matrix, target, allowed, floor, value, done = (x[left] for x in kept)
        support = torch.where(done[:, None], support, (value > 0).to(support.dtype))
    return weights, inverse, torch.cat([place, *given_up])


def _refined(
    matrix: Tensor,
    target: Tensor,
    weights: Tensor,
    apply_inverse: Callable[[Tensor, Tensor | slice], Tensor],
) -> Tensor:
    """Remove the rounding errors of weights (B,K) by iterative refinement.

    The `matrix` is (B,K,K) and the `target` (B,K). `apply_inverse` returns N g (n,K) for gaps g of
    some rows (n,). Rows of nearly dependent images need a second step."""
    rows: Tensor | slice = slice(None)
    weights = weights.clone()
    for _ in range(1 + REFINEMENTS):
        old = weights[rows]
        gap = target[rows] - (matrix[rows] @ old[..., None])[..., 0]
        gap = gap - (old * gap).sum(1, keepdim=True)  # N ignores constants, but they cause rounding
        new = (old + apply_inverse(gap, rows)).clamp_min(0.0)
        new = new / new.sum(1, keepdim=True)
        weights[rows] = new
        moved = ((new - old).abs().amax(1) > 1e-12).nonzero()[:, 0]
        if len(moved) == 0:
            break
        rows = moved if isinstance(rows, slice) else rows[moved]
    return weights


def _apply_inverse(
    factors: Tensor, support: Tensor, edge: Tensor, rate: Tensor, gap: Tensor, rows: Tensor | slice
) -> Tensor:
    """Return N (n,K) applied to the gaps (n,K) of some rows; see `reduced_inverse`."""
    step = solve(factors[rows], (gap * support[rows])[..., None])[..., 0]
    return step - edge[rows] * (step.sum(1) / rate[rows])[:, None]


def factor(matrix: Tensor, support: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """Return the Cholesky factor (B,K,K) of the `matrix` G + 1 1^T on the `support` (B,K).

    The support holds ones and zeros, and the factor is the identity elsewhere. The second result
    says whether the images on the support are affinely independent (B,)."""
    part = matrix
    if not bool(support.all()):
        part = matrix * (support[:, :, None] * support[:, None])
        part.diagonal(dim1=1, dim2=2).add_(1 - support)
    found, failed = torch.linalg.cholesky_ex(part)
    return found, (failed == 0) & (found.diagonal(dim1=1, dim2=2).amin(1) > tolerance**0.5)


def solve(factors: Tensor, sides: Tensor) -> Tensor:
    """Return H^-1 (B,K,K) applied to columns (B,K,n)."""
    half = torch.linalg.solve_triangular(factors, sides, upper=False)
    whole: Tensor = torch.linalg.solve_triangular(factors.mT, half, upper=True)
    return whole


def reduced_inverse(factors: Tensor, support: Tensor, edge: Tensor, rate: Tensor) -> Tensor:
    """Return N = H_SS^-1 - r r^T / sum r (B,K,K), zero outside the support.

    Here r = H_SS^-1 1 is the `edge` (B,K), and its sum is the `rate` (B,)."""
    block = solve(factors, torch.diag_embed(support))
    return block.addcmul_(edge[:, :, None], (edge / rate[:, None])[:, None], value=-1)


def pivot_to_optimum(
    quadratic: Tensor, linear: Tensor, active: Tensor, tolerance: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights (K,B), the inverse N (K,K,B), and whether each row was solved (B,).

    `quadratic` (K,K,B) has no diagonal entry above 1; `linear` and `active` are (K,B)."""
    found = _pivot_all(_start(quadratic, linear, active, tolerance), tolerance)
    # Pivots add up rounding errors, so they are repeated from a fresh tableau of the final basis.
    state, regular = _fresh_start(quadratic, linear, active, found[0], tolerance)
    rows = (regular & found[2]).nonzero()[:, 0]
    for held, better in zip(found, _pivot_all(state.columns(rows), tolerance), strict=True):
        held[..., rows] = better
    return found


def _pivot_all(state: _State, tolerance: float) -> tuple[Tensor, Tensor, Tensor]:
    """Pivot from any state until all rows are finished; the results of `pivot_to_optimum`."""
    weights, inverse = torch.zeros_like(state.weights), torch.zeros_like(state.tableau)
    solved = torch.zeros_like(weights[0], dtype=torch.bool)
    place = torch.arange(len(solved), device=solved.device)
    for _ in range(_MOST_ROUNDS + 10 * len(weights)):
        done = _advance(state, tolerance)
        left = (~done).nonzero()[:, 0]
        if 2 * len(left) <= len(place):  # store finished rows, continue with the rest
            finished = done.nonzero()[:, 0]
            rows, ended = place[finished], state.columns(finished)
            weights[:, rows] = ended.weights
            inverse[..., rows] = ended.tableau * -ended.basis[:, None] * ended.basis[None]
            solved[rows] = True
            place, state = place[left], state.columns(left)
        if len(left) == 0:
            break
    return weights, inverse, solved


@dataclass
class _State:
    tableau: Tensor  # (K,K,B)
    target: Tensor  # (K,B): the affine optimum in the basis, the gain of entering outside it
    weights: Tensor  # (K,B): feasible, and zero outside the basis and the entering neighbor
    basis: Tensor  # (K,B): 1 in the basis, 0 outside
    barrier: Tensor  # (K,B): 0 for neighbors that may enter, -inf for all others
    entering: Tensor  # (B,): the neighbor that enters in the next round, or -1
    gain_floor: Tensor  # (B,): gains up to this count as zero

    def columns(self, keep: Tensor) -> _State:
        return _State(*(part.index_select(-1, keep) for part in vars(self).values()))


def _start(quadratic: Tensor, linear: Tensor, active: Tensor, tolerance: float) -> _State:
    """Return the state whose basis is the single best neighbor."""
    square = quadratic.diagonal(dim1=0, dim2=1).mT
    best = (linear - square / 2).masked_fill(~active, -torch.inf).max(0).indices[None]  # (1,B)
    row = _pick(quadratic, best)
    corner = row.gather(0, best)
    gain = linear - row - linear.gather(0, best) + corner
    tableau = quadratic - row[:, None] - row[None] + corner
    basis = torch.zeros_like(linear).scatter_(0, best, 1.0)
    _put(tableau, best, 1 - basis)
    target = gain * (1 - basis) + basis
    return _state(active, tolerance, gain, tableau, target, basis.clone(), basis)


def _state(active: Tensor, tolerance: float, gain: Tensor, *parts: Tensor) -> _State:
    tableau, target, weights, basis = parts
    barrier = torch.where(active & (basis == 0), 0.0, -torch.inf).to(basis)
    entering = torch.full_like(weights[0], -1, dtype=torch.int64)
    gain_floor = tolerance * (1 + gain.masked_fill(~active, 0.0).abs().amax(0))
    return _State(tableau, target, weights, basis, barrier, entering, gain_floor)


def _fresh_start(
    quadratic: Tensor, linear: Tensor, active: Tensor, weights: Tensor, tolerance: float
) -> tuple[_State, Tensor]:
    """Return the state whose basis is all neighbors with weight.

    The second result says whether their images are affinely independent (B,)."""
    gram, basis = quadratic.permute(2, 0, 1), (weights > 0).to(linear)
    inside = basis.mT.contiguous()
    factors, regular = factor(gram + 1, inside, tolerance)
    edge = solve(factors, inside[:, :, None])[:, :, 0]
    rate = edge.sum(1)
    inner = reduced_inverse(factors, inside, edge, rate)
    share = (edge / rate[:, None])[:, :, None]  # has sum 1 and equal gradients on all of S
    # While j enters at the rate 1, weights in S fall by (N G + share 1^T)_j to stay optimal.
    yields = inner @ gram + share
    pull = gram @ share
    schur = gram - gram @ inner @ gram - pull - pull.mT + share.mT @ pull
    outside = (1 - inside)[:, :, None]
    across = inside[:, :, None] * yields * outside.mT
    tableau = across + across.mT + schur * outside * outside.mT - inner

    aim = inner @ linear.mT[:, :, None] + share
    slope = linear.mT[:, :, None] - gram @ aim
    gain = slope - aim.mT @ slope
    target = (aim * inside[:, :, None] + gain * outside)[:, :, 0].mT.contiguous()
    tableau = tableau.permute(1, 2, 0).contiguous()
    parts = gain[:, :, 0].mT, tableau, target, weights.clone(), basis
    return _state(active, tolerance, *parts), regular


def _pick(matrix: Tensor, index: Tensor) -> Tensor:
    """Return row index[b] (K,B) of every matrix (K,K,B), for an index (1,B)."""
    return matrix.gather(0, index[None].expand(1, *matrix.shape[1:]))[0]


def _put(matrix: Tensor, index: Tensor, row: Tensor) -> None:
    """Write (K,B) as row and as column index[b] of every matrix (K,K,B)."""
    place = index[None].expand(1, *matrix.shape[1:])
    matrix.scatter_(0, place, row[None])
    matrix.scatter_(1, place.transpose(0, 1), row[:, None])


def _advance(state: _State, tolerance: float) -> Tensor:
    """Do one pivot in every unfinished row, and return which rows are finished (B,)."""
    # Masks are multiplied or added where possible, which is many times faster than selecting.
    target, weights = state.target, state.weights
    due = state.entering >= 0
    point = target * state.basis
    # If weights would turn negative, go towards the target until the first one reaches zero.
    fall = (point + tolerance).clamp_max_(0.0)
    step, leaving = ((weights + tolerance) / (weights + tolerance - fall)).min(0)
    blocked = (step < 1) & ~due
    # Otherwise the target is the new point, and the neighbor with the largest gain may enter.
    gain, best = (target + state.barrier).max(0)
    done = ~blocked & ~due & (gain <= state.gain_floor)
    # Without curvature along the entering direction, move until a weight vanishes; exchange both.
    curvature = state.tableau.diagonal(dim1=0, dim2=1).mT.gather(0, best[None])[0]
    flat = (curvature <= tolerance) & ~blocked & ~due & ~done

    pivot = torch.where(due, state.entering, torch.where(blocked, leaving, best))
    fraction = torch.where(due, 0.0, torch.where(blocked, step, 1.0))
    state.weights = (weights + fraction * (point - weights)).clamp_min_(0.0)
    state.entering = torch.full_like(best, -1)
    if bool(flat.any()):
        pivot = _exchange(state, flat, best, pivot, tolerance)
    _pivot(state, pivot[None], blocked | flat, ~done)
    return done


def _exchange(state: _State, flat: Tensor, best: Tensor, pivot: Tensor, tolerance: float) -> Tensor:
    """Move `flat` rows as far as possible along the entering direction.

    The neighbor that leaves is the pivot, which is returned."""
    column = _pick(state.tableau, best[None])
    open_end = (column <= tolerance) | (state.basis == 0)
    reach, leaving = (state.weights / column).masked_fill(open_end, torch.inf).min(0)
    moved = (state.weights - reach * column * state.basis).clamp_min_(0.0)
    moved.scatter_(0, best[None], reach[None])
    state.weights = torch.where(flat, moved, state.weights)
    state.entering = torch.where(flat, best, -1)
    return torch.where(flat, leaving, pivot)


def _pivot(state: _State, pivot: Tensor, outward: Tensor, go: Tensor) -> None:
    """Do a symmetric pivot on entry (p,p) of every row in `go`: p leaves (outward) or joins S."""
    column = _pick(state.tableau, pivot)
    height = torch.where(go, column.gather(0, pivot)[0], 1.0)
    change = go / height  # zero leaves finished rows as they are
    scaled = column * change
    aim = state.target.gather(0, pivot)
    state.target.addcmul_(scaled, aim, value=-1)
    state.tableau.addcmul_(scaled[:, None], column[None], value=-1)

    factor = torch.where(go, torch.where(outward, -change, change), 1.0)
    corner = torch.where(go, -change, column.gather(0, pivot)[0])
    _put(state.tableau, pivot, (column * factor).scatter_(0, pivot, corner[None]))
    state.target.scatter_(0, pivot, aim * factor)
    before = state.basis.gather(0, pivot)[0]
    state.basis.scatter_(0, pivot, torch.where(go, (~outward).to(before), before)[None])
    shut = state.barrier.gather(0, pivot)[0]
    opened = torch.where(outward, 0.0, -torch.inf).to(shut)
    state.barrier.scatter_(0, pivot, torch.where(go, opened, shut)[None])
