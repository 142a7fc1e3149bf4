"""What chance decides in an epoch follows from seed and epoch alone: a resumed run repeats it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from otad.training.recipe import TrainConfig


def epoch_seed(seed: int, epoch: int) -> int:
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def epoch_batches(
    rows: int, config: TrainConfig, epoch: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, ...]:
    """All rows in a random order, in batches; with `whole_batches` without a shorter last one,
    unless it is the only one."""
    generator = torch.Generator().manual_seed(epoch_seed(config.seed, epoch))
    order = torch.randperm(rows, generator=generator).to(device)  # drawn alike for all devices
    batches: tuple[Tensor, ...] = order.split(config.batch_size)
    if config.whole_batches and len(batches) > 1 and len(batches[-1]) < config.batch_size:
        batches = batches[:-1]
    return batches


@contextmanager
def own_randomness(device: torch.device, seed: int) -> Iterator[None]:
    """Layers that draw (dropout) do so from `seed`; the caller's global state is put back."""
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        torch.default_generator.manual_seed(seed)
        if on_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
