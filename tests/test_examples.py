"""The pages of examples/ have the form of a gallery, which runs them when `make docs` builds it."""

from __future__ import annotations

import re
from pathlib import Path

PAGES = sorted((Path(__file__).parents[1] / "examples").glob("plot_*.py"))


def test_pages_have_the_form_of_a_gallery() -> None:
    assert len(PAGES) >= 10
    for page in PAGES:
        text = page.read_text()
        title, underline = text.split("\n")[1:3]
        assert underline == "=" * len(title), page.name
        assert text.count("\n# %%\n") >= 3, page.name
        assert len(text.split("\n")) <= 112, page.name
        assert "plt.subplot" in text, page.name
        assert re.search(r"print\(\s*f\".*gain", text, re.DOTALL), page.name
