"""What every network of the library knows about its inputs: shape, bounds and normalization."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from otad.checks import check_count, check_finite, check_shape, check_tensor
from otad.errors import InputError

Bounds = tuple[float, float]


class InputNet(nn.Module):
    """A net on inputs (B,*input_shape) within `bounds`, which it normalizes itself."""

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        input_shape: Sequence[int],
        *,
        bounds: Sequence[float] | None = None,
        mean: float | Sequence[float] | Tensor = 0.0,
        std: float | Sequence[float] | Tensor = 1.0,
    ) -> None:
        """`bounds` are the lowest and highest legal input value, None for unbounded inputs; `mean`
        and `std` broadcast to `input_shape`."""
        super().__init__()
        if len(input_shape) == 0:
            raise InputError("input_shape: expected at least one axis, got ()")
        self.input_shape = tuple(check_count(size, "input_shape") for size in input_shape)
        self.bounds = None if bounds is None else _check_bounds(bounds)
        self.register_buffer("mean", self._per_input(mean, "mean"))
        self.register_buffer("std", self._per_input(std, "std"))
        if not bool((self.std > 0).all()):
            raise InputError(f"std: expected positive values, got {self.std.min().item()}")

    def _per_input(self, value: float | Sequence[float] | Tensor, name: str) -> Tensor:
        given = torch.as_tensor(value, dtype=torch.get_default_dtype())  # that of layers
        check_finite(given, name)
        try:
            return given.expand(self.input_shape).clone()
        except RuntimeError as error:
            raise InputError(
                f"{name}: expected a shape that broadcasts to {self.input_shape}, "
                f"got {tuple(given.shape)}"
            ) from error

    def normalize(self, x: Tensor) -> Tensor:
        """(x - mean) / std, same shape as x."""
        return (x - self.mean) / self.std

    def check_inputs(self, x: object, name: str = "x") -> Tensor:
        """Inputs (B,*input_shape) of the net's dtype, finite and within the declared bounds."""
        axes = ",".join(["B", *(str(size) for size in self.input_shape)])
        bounds = self.bounds
        inputs = check_tensor(x, name, axes, dtypes=(self.mean.dtype,), finite=bounds is None)
        expected = (inputs.shape[0], *self.input_shape)
        check_shape(inputs, name, expected, "as the net declares")
        if bounds is not None:
            low, high = torch.stack(torch.aminmax(inputs.detach())).tolist()
            if not bounds[0] <= low <= high <= bounds[1]:  # nor where one of them is NaN
                check_finite(inputs, name)
                raise InputError(
                    f"{name}: expected values within the declared bounds {bounds}, "
                    f"got values from {low} to {high}"
                )
        return inputs


def _check_bounds(bounds: Sequence[float]) -> Bounds:
    if len(bounds) != 2 or not all(math.isfinite(value) for value in bounds):
        raise InputError(f"bounds: expected two finite numbers (low, high), got {bounds!r}")
    low, high = (float(value) for value in bounds)
    if low >= high:
        raise InputError(f"bounds: expected low < high, got {bounds!r}")
    return low, high
