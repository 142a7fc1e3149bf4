"""What all tests share: one thread, repeatable randomness, and a browser if there is one."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

# Read when the numerical libraries are first imported. The suite runs in parallel processes,
# and small problems are faster on one thread.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported

# The same examples in every run, and no verdict that depends on how busy the machine is.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("suite")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Garbage is not looked for among the tests and all that they import: these stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of workers come first: at the end, where the processes of the suite share what is left,
    each of them would start a cluster of its own. Others that need the fork server follow them."""
    by_server = lambda item: "fork_server" in item.fixturenames  # noqa: E731
    items.sort(key=lambda item: 0 if item.path == WORKERS else 1 if by_server(item) else 2)


WORKERS = Path(__file__).with_name("test_workers.py")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture
def generator() -> torch.Generator:
    """A freshly seeded source of randomness, the same for every test."""
    return torch.Generator().manual_seed(0)


@pytest.fixture
def brief_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations attack the network alone for a few steps, and reports have empty plots: the
    undefended network has tests of its own, and so have plots."""
    from otad.evaluate import undefended
    from otad.report import eps_picture, evaluation_report, plots

    monkeypatch.setattr(undefended, "APGD", {"steps": 5})
    empty = "data:image/svg+xml;base64,PHN2Zy8+"
    for module in (eps_picture, evaluation_report):
        monkeypatch.setattr(module, "plot_uri", lambda figure: empty)
    for draw in ("accuracy_curves", "change_bars", "error_curves", "radii_plots", "seconds_bars"):
        monkeypatch.setattr(plots, draw, lambda *given: None)


@pytest.fixture
def brief_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags that vary an attack give it a few steps, and two examples get a planted weakness."""
    from otad.evaluate import attack_flags, make_attack

    def briefly(name: str, *given: Any, **how: Any) -> Any:
        return make_attack(name, *given, **how | ({"polish": 5} if name == "soft_knn" else {}))

    monkeypatch.setattr(attack_flags, "make_attack", briefly)
    monkeypatch.setattr(attack_flags, "STEPS", 3)
    monkeypatch.setattr(attack_flags, "PLANTS", 2)


@pytest.fixture(scope="session")
def fork_server() -> None:
    """Processes are forked from a server that has imported what any of them needs: else each would
    take seconds to import it."""
    from multiprocessing import forkserver

    modules = ["nevergrad", "otad.experiments.run", "sklearn.datasets", "torch._dynamo"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
    forkserver.ensure_running()


@pytest.fixture(scope="session")
def browser() -> str:
    """The path of a Chromium-like browser; a test that asks for it is left out without one."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"needs a browser, none of {', '.join(BROWSERS)} is installed")
    return found
