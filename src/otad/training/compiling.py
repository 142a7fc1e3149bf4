"""torch.compile, or an error that says why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from otad.errors import InputError

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


def compiled(function: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
    """The same function, fused on its first call; never silently the plain one."""
    from torch._dynamo.exc import TorchDynamoException  # seconds to load

    try:
        fused = torch.compile(function, dynamic=False)
    except RuntimeError as error:  # this Python or system is not supported
        raise _refusal(error) from error

    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
        try:
            return fused(*args, **kwargs)
        except TorchDynamoException as error:
            raise _refusal(error) from error

    return call


def _refusal(error: Exception) -> InputError:
    reason = str(error).strip().partition("\n")[0]
    return InputError(
        "compiled: expected a net and a machine on which torch.compile works, got "
        f"{type(error).__name__}: {reason}"
    )
