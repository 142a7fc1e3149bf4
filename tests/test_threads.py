"""Parts of work on threads."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from threadpoolctl import threadpool_info

from otad.cip import execution as cip
from otad.nets import lipschitz as nets
from otad.threads import _ONE_THREAD_EACH, run_on_threads


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


def test_a_setting_of_the_process_is_undone_by_the_last_thread_that_needs_it() -> None:
    def limits() -> list[int]:
        found = [one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"]
        return [torch.get_num_threads(), *found]

    before, inside, gate = limits(), threading.Barrier(2, timeout=300), threading.Event()

    def first() -> None:
        with _ONE_THREAD_EACH:
            inside.wait()

    def second() -> None:
        with _ONE_THREAD_EACH:
            inside.wait()
            gate.wait(300)

    with ThreadPoolExecutor(2) as pool:  # both threads stay alive until the end
        one, two = pool.submit(first), pool.submit(second)
        one.result()
        assert limits()[1:] == [1] * (len(before) - 1)
        gate.set()
        two.result()
        assert limits() == before
        with _ONE_THREAD_EACH:  # in another thread again
            assert limits()[1:] == [1] * (len(before) - 1)
    assert limits() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no forks")
def test_both_ways_to_set_the_precision_of_torch_are_supported() -> None:
    code = """
        import itertools, os, traceback, torch, otad, otad.precision
        from otad.cip.kernels.cpu_products import sum_of_squares
        # What these import is not imported again by each child.
        otad.defend, otad.nets, sum_of_squares(torch.rand(3).numpy())

        def check(setting, is_first):
            if not is_first:
                with otad.precision.FULL_PRODUCTS:
                    pass
            exec("torch.backends." + setting)
            backends = torch.backends
            places = backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn
            places += backends.mkldnn.matmul, backends.mkldnn.conv
            now = lambda: [place.fp32_precision.replace("none", "ieee") for place in places]
            before, x = now(), torch.rand(20, 4)
            with otad.precision.FULL_PRODUCTS:
                assert now() == ["ieee"] * 5, now()
            model = otad.defend(None, x, torch.arange(20) % 3, inputs="pixels", scope="local")
            net = otad.nets.SOCNet((1, 8, 8), 3, widths=(4,)).eval()
            assert model(x).isfinite().all() and net(torch.rand(2, 1, 8, 8)).isfinite().all()
            assert now() == before, now()

        settings = (
            "cuda.matmul.fp32_precision = 'tf32'",
            "cudnn.conv.fp32_precision = 'tf32'",
            "mkldnn.matmul.fp32_precision = 'bf16'",
            "mkldnn.conv.fp32_precision = 'bf16'",
            "mkldnn.fp32_precision = 'bf16'",
            "fp32_precision = 'tf32'",
        )
        for setting, is_first in itertools.product(settings, (True, False)):
            child = os.fork()  # a setting may change others for good
            if child == 0:
                try:
                    check(setting, is_first)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0, (setting, is_first)
    """
    run = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_full_precision_lasts_until_the_last_thread_is_done() -> None:
    before, device = torch.get_float32_matmul_precision(), torch.device("cpu")
    torch.set_float32_matmul_precision("high")
    try:
        one, other = nets.full_precision(device), cip.full_precision(device)
        one.__enter__()
        other.__enter__()
        one.__exit__(None, None, None)
        assert torch.get_float32_matmul_precision() == "highest"
        other.__exit__(None, None, None)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
