"""Runs a function in other processes, which may exchange tensors by gloo as those of `torchrun`."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

TIMEOUT = timedelta(seconds=300)
needs_gloo = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")


def forked(work: Callable[[int], object], count: int) -> list[int | None]:
    """Run `work(rank)` in new processes, and return how they ended. Forks need not import torch."""
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("needs fork")
    context = multiprocessing.get_context("fork")
    running = [context.Process(target=work, args=(rank,)) for rank in range(count)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process.*is multi-threaded", DeprecationWarning)
        for process in running:
            process.start()
    for process in running:
        process.join(TIMEOUT.total_seconds())
        process.kill()  # if it hangs
        process.join()
    return [process.exitcode for process in running]


def together(folder: Path, work: Callable[[], Any], count: int = 2) -> list[Any]:
    """Return the results of `work` in each of `count` processes, None for one that was killed."""
    folder.mkdir()
    method = f"file://{folder / 'group'}"

    def run(rank: int) -> None:
        dist.init_process_group(
            "gloo", init_method=method, rank=rank, world_size=count, timeout=TIMEOUT
        )
        torch.save(work(), folder / f"{rank}.pt")
        dist.destroy_process_group()

    ended = forked(run, count)
    assert all(code in (0, -9) for code in ended), ended
    files = [folder / f"{rank}.pt" for rank in range(count)]
    return [torch.load(path, weights_only=False) if path.exists() else None for path in files]
