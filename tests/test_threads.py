"""Parts of work on threads."""

from __future__ import annotations

import threading

import pytest
import torch

from otad.threads import run_on_threads


@pytest.mark.parametrize("allowed", [1, 3])
def test_results_are_in_order_and_settings_stay(allowed) -> None:
    before, gate = torch.get_num_threads(), threading.Barrier(allowed, timeout=300)

    def work(part: int) -> tuple[int, int, bool]:
        gate.wait()  # as many parts run at the same time
        return 2 * part, torch.get_num_threads(), torch.is_grad_enabled()

    try:
        torch.set_num_threads(allowed)
        assert run_on_threads(range(6), work) == [(2 * part, 1, False) for part in range(6)]
        assert run_on_threads([], work) == []
        assert torch.get_num_threads() == allowed
        assert torch.is_grad_enabled()
        with pytest.raises(ZeroDivisionError):
            run_on_threads(range(3), lambda part: 1 / part)
        assert torch.get_num_threads() == allowed
    finally:
        torch.set_num_threads(before)
