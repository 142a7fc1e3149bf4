"""Batch normalization by the statistics of a whole batch of which each process has a share.

`torch.nn.SyncBatchNorm` does the same on GPUs only, and would change the class of the layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from otad.checks import require
from otad.processes import Processes
from otad.training.config import LoopConfig


def check_layers(net: nn.Module, config: LoopConfig, processes: Processes, rows: int) -> None:
    """Refuse layers that shares of batches of `rows` examples would train differently."""
    for name, layer in net.named_modules():
        own = getattr(layer, "uses_batch_statistics", False)
        expected = "no layer with statistics of its own, to train on several processes"
        require(not own, "net", expected, f"{type(layer).__name__} at {name!r}")
    if not _normalizing(net):
        return
    last = min(rows, config.batch_size)
    if not config.whole_batches and rows > config.batch_size:
        last = rows % config.batch_size or last
    what = f"for batch normalization on {processes.count} processes"
    expected = f"at least {processes.count} rows in the last batch {what}"
    require(last >= processes.count, "batch_size", expected, f"{last}; try whole_batches")
    compiled = getattr(config, "compiled", False)
    require(not compiled, "compiled", f"False {what}", compiled)


@contextmanager
def whole_batch_statistics(net: nn.Module, processes: Processes) -> Iterator[None]:
    """Let all layers of batch normalization use the statistics of all shares of a batch."""
    layers = _normalizing(net) if processes.count > 1 else []
    for layer in layers:
        layer.forward = partial(_normalized, layer, processes)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _normalizing(net: nn.Module) -> list[_BatchNorm]:
    return [layer for layer in net.modules() if isinstance(layer, _BatchNorm)]


def _normalized(layer: _BatchNorm, processes: Processes, x: Tensor) -> Tensor:
    if not layer.training:
        return type(layer).forward(layer, x)
    dims, shape = [0, *range(2, x.dim())], (1, -1, *[1] * (x.dim() - 2))
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    values = wide.new_full((1,), x.numel() / x.shape[1])
    sums = processes.sum(torch.cat([wide.sum(dims), values]))
    mean, values = sums[:-1] / sums[-1], sums[-1]
    off = wide - mean.view(shape)
    variance = processes.sum(off.square().sum(dims)) / values
    running, spread, steps = layer.running_mean, layer.running_var, layer.num_batches_tracked
    if running is not None and spread is not None and steps is not None:
        with torch.no_grad():
            steps += 1
            share = (1 / steps).to(running) if layer.momentum is None else layer.momentum
            unbiased = variance * (values / (values - 1))
            running.lerp_(mean.to(running.dtype), share)
            spread.lerp_(unbiased.to(spread.dtype), share)
    result = off * (variance + layer.eps).rsqrt().view(shape)
    if layer.affine:
        result = result * layer.weight.view(shape) + layer.bias.view(shape)
    return result.to(x.dtype)
