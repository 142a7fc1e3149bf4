"""One input sent through a user's module, to see what it takes and gives before it is relied on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from otad.errors import InputError


def run(module: nn.Module, x: Tensor, name: str, gives: str = "an output of shape (B,d)") -> Tensor:
    """What the module makes of x (B,...): numbers (B,d), or an error that tells what was asked."""
    try:
        output = module(x)
    except (RuntimeError, ValueError, IndexError) as error:
        dtype = str(x.dtype).removeprefix("torch.")
        raise InputError(
            f"{name}: expected a module that takes a {dtype} tensor of shape {tuple(x.shape)} on "
            f"{x.device}, got: {error}"
        ) from error
    if not isinstance(output, Tensor) or output.dim() != 2:
        got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise InputError(f"{name}: expected {gives}, got {got}")
    return output


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while, in which batch statistics do not move; every part is left in
    the mode it was in."""
    modes = {module: module.training for module in net.modules()}
    net.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
