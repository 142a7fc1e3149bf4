"""The explorer as one HTML page, which loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

from markupsafe import Markup

from otad.explorer.explorer import Explorer
from otad.report.page import page_templates

SCRIPTS = ("draw.js", "inputs.js", "main.js")


def explorer_page(explorer: Explorer | None = None, command: str = "") -> str:
    """Return the page as HTML.

    Without an explorer the page asks its server. With one it holds the examples of the explorer and
    their paths, works as a file, and names the `command` that serves the model.
    """
    data: dict[str, Any] | None = None
    if explorer is not None:
        known = [] if explorer.examples is None else list(explorer.examples)
        explored = [explorer.explore(one) for one in known]
        data = {"command": command, "setup": explorer.setup(), "explored": explored}
    templates = page_templates("otad.explorer")
    style, *scripts = (templates.get_template(it).render() for it in ("explorer.css", *SCRIPTS))
    # A tag within the JSON would end its element.
    plain = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", r"\u003c")
    given: dict[str, Any] = {"data": Markup(plain)}
    for name, text in (("style", style), ("script", "\n".join(scripts))):
        # The browser runs only the script and the style with these hashes.
        digest = hashlib.sha256(f"\n{text}\n".encode()).digest()
        given |= {name: Markup(text), f"{name}_hash": base64.b64encode(digest).decode()}
    return templates.get_template("explorer.html").render(given)
