"""The reports in a real browser: nothing goes wrong, all pictures show, they fit a phone."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from report.evaluations import Attacked, hand_report, of_values

from otad.report.evaluation_report import evaluation_report

PROBE = """
<script>
const faults = [];
addEventListener("error", event => faults.push(String(event.message || event.target.src)), true);
addEventListener("load", () => {
  const images = [...document.images];
  const size = element => {
    const box = element.getBoundingClientRect();
    return [box.width, box.height];
  };
  const found = {
    images: images.length,
    blank: images.filter(image => !image.complete || image.naturalWidth === 0).length,
    plots: [...document.querySelectorAll("img.plot")].map(size),
    verdicts: [...document.querySelectorAll(".verdict")].map(element => ({
      text: element.textContent, size: size(element),
      color: getComputedStyle(element).backgroundColor,
    })),
    overflow: document.documentElement.scrollWidth - innerWidth,
    beyond: [...document.querySelectorAll(".side, .side *")]
      .filter(it => it.scrollWidth > it.clientWidth + 1 && it.clientWidth > 0).length,
    ground: getComputedStyle(document.body).backgroundColor,
    requests: performance.getEntriesByType("resource").map(entry => entry.name)
      .filter(name => !name.startsWith("data:")),
    faults,
  };
  const pre = document.createElement("pre");
  pre.id = "probe";
  pre.textContent = JSON.stringify(found);
  document.body.append(pre);
});
</script>
"""


def look(browser: str, page: Path, folder: Path, *options: str) -> dict[str, Any]:
    """What a phone's width of the page shows, after all that must hold of any page was checked."""
    probed = folder / "probed.html"
    content = page.read_text(encoding="utf-8")
    probed.write_text(content.replace("<head>", "<head>" + PROBE), encoding="utf-8")
    done = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}",
            "--window-size=500,900", "--virtual-time-budget=5000", "--dump-dom", *options,
            probed.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    match = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout)
    assert match, done.stderr
    found: dict[str, Any] = json.loads(match[1])
    assert found["images"] == content.count("<img ")
    assert found["overflow"] <= 0
    assert (found["blank"], found["requests"], found["faults"]) == (0, [], [])
    assert "CONSOLE" not in done.stderr
    return found


def brightness(color: str) -> int:
    """The largest of the three levels of rgb(...), 0 to 255."""
    return max(int(level) for level in re.findall(r"\d+", color)[:3])


def test_a_browser_shows_all_of_it(
    browser: str, report: Path, attacked: Attacked, tmp_path: Path
) -> None:
    """Also with names without a space, on cards and in tables, and a title of one word."""
    look(browser, report, tmp_path)
    names = [f"n{number}_" + "wort" * 30 for number in range(10)]
    known = attacked.known | {"classes": names, "title": "m" * 200}
    page = evaluation_report(attacked.evaluation, **known).write(tmp_path / "robust.html")
    found = look(browser, page, tmp_path)
    assert found["beyond"] == 0
    assert len(found["plots"]) == 3
    assert all(width > 300 and height > 80 for width, height in found["plots"])
    assert [it["text"] for it in found["verdicts"]] == ["FAIL", "NOT RUN", "PASS"]
    assert len({it["color"] for it in found["verdicts"]}) == 3
    assert all(min(it["size"]) > 10 for it in found["verdicts"])
    assert brightness(found["ground"]) > 200


def test_a_browser_can_show_it_in_the_dark(browser: str, tmp_path: Path) -> None:
    page = hand_report(of_values).write(tmp_path / "values.html")
    found = look(browser, page, tmp_path, "--blink-settings=preferredColorScheme=0")
    assert brightness(found["ground"]) < 60
