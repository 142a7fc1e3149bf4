"""Faster training steps: mixed precision, torch.compile and CUDA graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from otad.errors import InputError

Returned = TypeVar("Returned")
_WARMUP_STEPS = 3  # steps before the capture, in which libraries choose their kernels


@contextmanager
def precision(device: torch.device | str, *, mixed: bool) -> Iterator[None]:
    """Let layers compute in bfloat16 where autocast allows it, or without autocast.

    The cache of cast weights is cleared at both ends. Inside an outer autocast torch would keep it,
    and every step would use the weights of the first step."""
    torch.clear_autocast_cache()
    try:
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=mixed):
            yield
    finally:
        torch.clear_autocast_cache()


def compiled(function: Callable[..., Returned]) -> Callable[..., Returned]:
    """Return the function under torch.compile; raise `InputError` where that fails."""
    from torch._dynamo.exc import TorchDynamoException  # takes seconds to import

    with _compile_errors(RuntimeError):  # this Python or system is not supported
        fused = torch.compile(function, dynamic=False)

    def call(*args: Any) -> Returned:
        with _compile_errors(TorchDynamoException):
            return fused(*args)

    return call


@contextmanager
def _compile_errors(kind: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kind as error:
        reason, name = str(error).strip().partition("\n")[0], type(error).__name__
        expected = "a net and a machine on which torch.compile works"
        raise InputError(f"compiled: expected {expected}, got {name}: {reason}") from error


class CapturedStep:
    """A training step as a CUDA graph, for batches of one shape.

    The first steps run normally on a side stream. Then one step is captured, which runs nothing.
    From then on each call copies its batch to the captured tensors and replays the graph. So the
    step must read nothing back from the GPU, and what changes, such as the learning rate, must be a
    tensor.
    """

    def __init__(self, step: Callable[..., Tensor]) -> None:
        self._step, self._warmed_up = step, 0
        self._captured: tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor] | None = None

    def __call__(self, *batch: Tensor, first: bool) -> Tensor:
        if self._captured is None and self._warmed_up < _WARMUP_STEPS:
            self._warmed_up += 1
            return self._on_side_stream(batch, first=first)
        if self._captured is None:
            graph, inputs = torch.cuda.CUDAGraph(), [tensor.clone() for tensor in batch]
            with torch.cuda.graph(graph):
                output = self._step(*inputs, first=False)
            self._captured = graph, inputs, output
        graph, inputs, output = self._captured
        for static, tensor in zip(inputs, batch, strict=True):
            static.copy_(tensor)
        graph.replay()
        return output.clone()

    def _on_side_stream(self, batch: tuple[Tensor, ...], *, first: bool) -> Tensor:
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side), warnings.catch_warnings():
            # A capturable optimizer warns when it is not being captured.
            warnings.filterwarnings("ignore", message=".*capturable.*")
            output = self._step(*batch, first=first)
        current.wait_stream(side)
        return output
