"""The report in a real browser: nothing goes wrong, all pictures show, it fits a phone."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

PROBE = """
<script>
const faults = [];
addEventListener("error", event => faults.push(String(event.message || event.target.src)), true);
addEventListener("load", () => {
  const images = [...document.images];
  const found = {
    images: images.length,
    blank: images.filter(image => !image.complete || image.naturalWidth === 0).length,
    overflow: document.documentElement.scrollWidth - innerWidth,
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


def test_a_browser_shows_all_of_it(browser: str, report: Path, tmp_path: Path) -> None:
    probed = tmp_path / "probed.html"
    content = report.read_text(encoding="utf-8")
    probed.write_text(content.replace("<head>", "<head>" + PROBE), encoding="utf-8")
    done = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=500,900", "--virtual-time-budget=5000", "--dump-dom",
            probed.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    match = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout)
    assert match, done.stderr
    found = json.loads(match[1])
    assert found["images"] == content.count("<img ")
    assert found["blank"] == 0
    assert found["overflow"] <= 0
    assert found["requests"] == []
    assert found["faults"] == []
    assert "CONSOLE" not in done.stderr
