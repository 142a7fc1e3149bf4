"""One small model and one report for all tests here."""

from __future__ import annotations

from pathlib import Path

import pytest
from report.evaluations import Attacked, Small, make_small, of_digits, write_report


@pytest.fixture(scope="session")
def small() -> Small:
    return make_small()


@pytest.fixture(scope="session")
def report(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(small, tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="session")
def attacked(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Attacked:
    return of_digits(small, tmp_path_factory.mktemp("attacked"))
