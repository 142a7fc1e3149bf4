"""The explorer in a real browser: drawing, files, rows, slider, keyboard, phone, dark and light."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import factories
import numpy as np
import pytest
import torch
from chromium import Chromium
from PIL import Image
from serve.running import running

import otad
from otad.explorer.explorer import Explorer, explorer_page
from otad.serve import create_app

NAMES = ["<b>top</b>", "<img src=x onerror=alert(1)>", "low & wide"]
TOKEN = "only-for-friends"
PHONE = {"width": 390, "height": 844}
READY = "state.found && byId('explorer').getAttribute('aria-busy') === 'false'"


@pytest.fixture(scope="module")
def images() -> otad.OTAD:
    model = factories.exact("fc")
    model.notes["classes"] = NAMES
    return model


@pytest.fixture(scope="module")
def address(images: otad.OTAD) -> Iterator[str]:
    with running(create_app(images, name="bars")) as found:
        yield f"http://{found}/"


@pytest.fixture(scope="module")
def page(browser: str) -> Iterator[Chromium]:
    found = Chromium(browser)
    yield found
    found.close()


@pytest.fixture(autouse=True)
def quiet(page: Chromium) -> Iterator[None]:
    """No page writes to the console, except where a test expects it and clears it."""
    yield
    page.js("0")  # reads what is left to read
    assert page.messages == []


def asked(page: Chromium) -> int:
    """How often the page has asked the server for a path."""
    return sum(url.endswith("/explore") for url in page.requests) - 1  # one is for the setup


def explored(page: Chromium, count: int) -> dict[str, Any]:
    """What is shown once the page has asked so often."""
    page.until(lambda: asked(page) >= count or page.js("0"))
    page.wait(READY)
    found: dict[str, Any] = page.js("state.found")
    return found


def center(page: Chromium, selector: str, x: float = 0.5, y: float = 0.5) -> tuple[float, float]:
    """A place in the window, as shares of an element."""
    into = "{block: 'center', behavior: 'instant'}"
    page.js(f"document.querySelector('{selector}').scrollIntoView({into})")
    box = page.js(f"document.querySelector('{selector}').getBoundingClientRect().toJSON()")
    return box["left"] + x * box["width"], box["top"] + y * box["height"]


def fits(page: Chromium) -> bool:
    width: bool = page.js("document.documentElement.scrollWidth <= innerWidth")
    return width


def test_the_slider_moves_through_the_path_without_the_server(
    page: Chromium, address: str, images: otad.OTAD
) -> None:
    page.open(address)
    found = explored(page, 1)
    x = torch.tensor(found["input"]).view(1, *factories.SHAPE)
    answer = NAMES[int(images(x).argmax())]
    assert page.js("byId('answer').textContent") == answer  # names are text, never HTML
    assert page.js("document.querySelectorAll('#answer img, #answer b').length") == 0
    assert page.js("document.title") == "otad explorer: bars"
    requests = len(page.requests)

    flip = found["answer_flip"]
    assert flip is not None
    page.js("byId('slider').focus()")
    seen, shown = set(), []
    points = "[...document.querySelectorAll('#points img')].map(it => it.title).join()"
    for step in range(1, 64):
        page.press("ArrowRight")
        state = page.js(f"[byId('slider').value, {points}, byId('answer').textContent]")
        assert state[0] == str(step)
        seen.add(state[1])
        shown.append(state[2])
    assert shown == [NAMES[one] for one in found["answer"][1:]]
    assert len(seen) > 1, "neighbors switch"
    assert "changed the answer" in page.js("byId('story').textContent")
    assert page.js("byId('slider').getAttribute('aria-valuetext')").endswith(shown[-1])
    assert page.js("byId('flip-mark').hidden") is False
    proved = sum(one < found["certificate"]["radius"] for one in found["distance"])
    stops = page.js("byId('proved-track').style.background")
    assert stops.count("var(--accent)") == proved

    page.press("Home")
    assert "the input itself" in page.js("byId('story').textContent")
    page.js("byId('play').focus()")
    page.press(" ")
    page.wait("byId('slider').value === byId('slider').max && byId('play').textContent === 'Play'")
    own = [url for url in page.requests[requests:] if not url.startswith("data:")]
    assert own == [], "sliding asks nobody"
    assert all(url.startswith(("data:", address)) for url in page.requests)


def test_a_drawing_is_averaged_undone_and_painted_by_keys(page: Chromium, address: str) -> None:
    page.open(address)
    first = explored(page, 1)["input"]
    page.drag(center(page, "#clear"))
    assert explored(page, 2)["input"] == [0.0] * 64
    row = [center(page, "#pad", share, 3.5 / 8) for share in (0.1, 0.4, 0.9)]
    page.drag(*row)
    drawn = np.array(explored(page, 3)["input"]).reshape(8, 8)
    assert drawn[3, 1:7].min() > 0.8  # the brush is nearly one pixel wide
    assert drawn[[0, 1, 5, 6, 7]].max() == 0
    assert page.js("document.querySelectorAll('#examples [aria-pressed=true]').length") == 0
    page.drag(center(page, "#undo"))
    assert explored(page, 4)["input"] == [0.0] * 64
    page.js("byId('pad').focus()")
    for key in ("ArrowUp", "ArrowLeft", " "):
        page.press(key)
    painted = np.array(explored(page, 5)["input"]).reshape(8, 8)
    assert (painted[3, 3], painted.sum()) == (1.0, 1.0)
    page.drag(center(page, "#invert"))
    assert np.allclose(np.array(explored(page, 6)["input"]).reshape(8, 8), 1 - painted)
    page.js("document.querySelector('#examples button').click()")
    assert explored(page, 7)["input"] == first, "an example is sent as it is, not in 8 bits"


def test_an_image_is_cropped_and_gray_and_other_files_are_refused(
    page: Chromium, address: str, tmp_path: Path
) -> None:
    page.open(address)
    explored(page, 1)
    colors = np.zeros((80, 120, 3), dtype=np.uint8)
    colors[:40, 20:60] = (255, 0, 0)
    colors[40:, 60:100] = (0, 0, 255)
    colors[:, :20] = 255  # which is cropped, like the other edge
    Image.fromarray(colors).save(tmp_path / "colors.png")
    page.choose_file("#file", tmp_path / "colors.png")
    found = np.array(explored(page, 2)["input"]).reshape(8, 8)
    assert np.allclose(found[:4, :4], 0.299, atol=0.01)
    assert np.allclose(found[4:, 4:], 0.114, atol=0.01)
    assert np.allclose(found[:4, 4:], 0, atol=0.01)
    page.js(
        """{ const dataTransfer = new DataTransfer();
        dataTransfer.items.add(new File(["no picture"], "notes.txt", { type: "text/plain" }));
        byId("pad").dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true })); }"""
    )
    page.wait("!byId('error').hidden")
    told = page.js("byId('error').textContent")
    assert told == "image: expected a picture, got notes.txt (text/plain)"
    assert asked(page) == 2


def test_a_row_is_edited_and_an_illegal_value_is_explained(page: Chromium) -> None:
    model = factories.model()
    names = ["<i>a</i>", "b", "c", "d", "e"]
    model.notes |= {"feature_names": names, "classes": NAMES}
    with running(create_app(model, name="rows", token=TOKEN)) as found:
        page.open(f"http://{found}/", **PHONE)
        page.wait("!byId('login').hidden")
        page.js("byId('token').value = 'wrong'; byId('login').requestSubmit()")
        page.wait("byId('error').textContent.includes('got another token')")
        page.js(f"byId('token').value = '{TOKEN}'; byId('login').requestSubmit()")
        page.wait(READY)
        assert page.js("byId('login').hidden && byId('error').hidden")
        shown = page.js("[...document.querySelectorAll('#fields label')].map(l => l.textContent)")
        assert shown == names
        change = "byId('field-1').value = '{}'; byId('field-1').dispatchEvent(new Event('change'))"
        page.js(change.format("0.25"))
        page.wait(f"state.found.input[1] === 0.25 && {READY}")
        row = torch.tensor(page.js("state.found.input"))[None]
        assert page.js("byId('answer').textContent") == NAMES[int(model(row).argmax())]
        heads = page.js("[...document.querySelectorAll('#rows thead th')].map(h => h.textContent)")
        assert {*heads} == {"label", "weight", "contribution", *names}
        page.js(change.format("7"))
        page.wait("!byId('error').hidden")
        assert "bounds (0.0, 1.0), got values" in page.js("byId('error').textContent")
        page.js(change.format("0.5"))
        page.wait(f"state.found.input[1] === 0.5 && byId('error').hidden && {READY}")
        assert fits(page)
        # The browser itself reports each status that is an error.
        assert all(re.search("status of (401|400) ", one) for one in page.messages)
        page.messages.clear()


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_file_needs_no_server(page: Chromium, tmp_path: Path, task: str) -> None:
    is_image = task == "classification"
    model = factories.exact("fc") if is_image else factories.model(task=task)
    explorer = Explorer(model, "stored", examples=factories.queries(model, 2))
    (tmp_path / "explorer.html").write_text(explorer_page(explorer, "otad serve there"), "utf-8")
    page.open((tmp_path / "explorer.html").as_uri() + "#1,40", **PHONE, dark=not is_image)
    page.wait(READY)
    pressed = "[...document.querySelectorAll('#examples button')].map(b => b.ariaPressed)"
    assert (page.js(pressed), page.js("byId('slider').value")) == (["false", "true"], "40")
    assert page.js("byId('command').textContent") == "otad serve there"
    assert page.js("byId('notice').hidden") is False
    assert page.js("byId('drawing').hidden && byId('editing').hidden")
    assert fits(page)
    page.js("document.querySelectorAll('#examples button')[0].click()")
    assert page.js("byId('slider').value") == "0"
    x = explorer.examples
    assert x is not None
    assert page.js("state.found.input") == pytest.approx(x[0].flatten().tolist(), abs=1e-5)
    page.js("byId('slider').focus()")
    page.press("End")
    assert "moved by" in page.js("byId('story').textContent")
    assert all(url.startswith(("data:", "file:")) for url in page.requests)

    ground = "getComputedStyle(document.body).backgroundColor"
    before = page.js(ground)
    page.js("byId('theme').click()")
    assert page.js(ground) != before
    page.js("byId('theme').click()")
    assert page.js(ground) == before == ("rgb(244, 246, 247)" if is_image else "rgb(15, 19, 22)")
    named = "it.textContent.trim() || it.ariaLabel || it.alt || it.labels?.length || it.ariaHidden"
    unnamed = f"""[...document.querySelectorAll('button, input, select, canvas, svg, img')]
        .filter(it => !({named})).map(it => it.outerHTML)"""
    assert page.js(unnamed) == []
