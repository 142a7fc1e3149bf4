"""Triton functions on one K x K tile in registers: its parts, and its longest paths.

Registers have no addresses: an entry is read by masking out all others and adding up. Tiles are
float64 and padded to a power of two; what lies beyond the neighbors in use never reaches them.
"""

# Kernels are compiled from their source, not called: their arguments carry no Python types.
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_of(tile, k, padded: tl.constexpr):
    """tile[k, :]."""
    i = tl.arange(0, padded)
    return tl.sum(tl.where(i[:, None] == k, tile, 0.0), axis=0)


@triton.jit
def column_of(tile, k, padded: tl.constexpr):
    """tile[:, k]."""
    j = tl.arange(0, padded)
    return tl.sum(tl.where(j[None, :] == k, tile, 0.0), axis=1)


@triton.jit
def diagonal_of(tile, padded: tl.constexpr):
    """tile[k, k] for all k."""
    i = tl.arange(0, padded)
    return tl.sum(tl.where(i[:, None] == i[None, :], tile, 0.0), axis=0)


@triton.jit
def entry_of(vector, k, padded: tl.constexpr):
    """vector[k]."""
    return tl.sum(tl.where(tl.arange(0, padded) == k, vector, 0.0), axis=0)


@triton.jit
def first_at(vector, value, padded: tl.constexpr):
    """The first place where the vector has this value."""
    i = tl.arange(0, padded)
    return tl.min(tl.where(vector == value, i, padded), axis=0)


@triton.jit
def with_cross(tile, k, vector, padded: tl.constexpr):
    """The tile with a vector as row k and as column k."""
    i = tl.arange(0, padded)
    tile = tl.where(i[:, None] == k, vector[None, :], tile)
    return tl.where(i[None, :] == k, vector[:, None], tile)


@triton.jit
def largest(tile):
    """The largest entry of a tile."""
    return tl.max(tl.max(tile, axis=1), axis=0)


@triton.jit
def pairs_of(count: tl.constexpr, padded: tl.constexpr):
    """Where both neighbors are among the first `count`."""
    i = tl.arange(0, padded)
    return (i[:, None] < count) & (i[None, :] < count)


@triton.jit
def closure(weights, count: tl.constexpr, padded: tl.constexpr):
    """Longest paths D_ij from j to i, by Floyd and Warshall."""
    longest = weights
    for k in range(count):
        path = column_of(longest, k, padded)[:, None] + row_of(longest, k, padded)[None, :]
        longest = tl.maximum(longest, path)
    return longest


@triton.jit
def closure_with_slope(weights, bend, count: tl.constexpr, padded: tl.constexpr):
    """Value and slope of the longest closed walk through each neighbor."""
    i = tl.arange(0, padded)
    longest = weights
    slope = tl.where(i[:, None] == i[None, :], 0.0, bend)
    for k in range(count):
        path = column_of(longest, k, padded)[:, None] + row_of(longest, k, padded)[None, :]
        rate = column_of(slope, k, padded)[:, None] + row_of(slope, k, padded)[None, :]
        longer = path > longest
        longest = tl.where(longer, path, longest)
        slope = tl.where(longer, rate, slope)
    return diagonal_of(longest, padded), diagonal_of(slope, padded)
