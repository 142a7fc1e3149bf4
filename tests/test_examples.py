"""Each page of examples/ runs, draws a picture, and prints what it gains."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch

PAGES = sorted((Path(__file__).parents[1] / "examples").glob("plot_*.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OTAD_PROGRESS", "0")
    monkeypatch.delenv("OTAD_DATA", raising=False)
    with torch.random.fork_rng(), plt.rc_context():
        runpy.run_path(str(page), run_name="__main__")
        figures = [plt.figure(number) for number in plt.get_fignums()]
        drawn = [panel.has_data() for figure in figures for panel in figure.axes]
        plt.close("all")
    assert drawn
    assert all(drawn)
    assert re.search(r"gain.*\d", capsys.readouterr().out)


def test_pages_have_the_form_of_a_gallery() -> None:
    assert len(PAGES) >= 10
    for page in PAGES:
        text = page.read_text()
        title, underline = text.split("\n")[1:3]
        assert underline == "=" * len(title), page.name
        assert text.count("\n# %%\n") >= 3, page.name
        assert len(text.split("\n")) <= 110, page.name
