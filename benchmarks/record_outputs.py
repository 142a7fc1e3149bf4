"""Runs the Python snippets of docs/get_started.md and shows their output below each one.

The output is also recorded in results/benchmarks/get_started.json.

    python benchmarks/record_outputs.py
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import warnings
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from output import environment

ROOT = Path(__file__).parents[1]
PAGE, RECORD = ROOT / "docs/get_started.md", ROOT / "results/benchmarks/get_started.json"
SHOWN = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def main() -> None:
    names: dict[str, Any] = {}
    outputs = []

    def run(snippet: re.Match[str]) -> str:
        with redirect_stdout(StringIO()) as printed:
            exec(compile(snippet[1], str(PAGE), "exec"), names)
        outputs.append(printed.getvalue())
        code = f"```python\n{snippet[1]}```\n"
        return code + (f"\n```text\n{outputs[-1]}```\n" if outputs[-1] else "")

    where = environment(torch.device("cpu"), torch.get_num_threads())
    warnings.filterwarnings("ignore", "defense")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        PAGE.write_text(SHOWN.sub(run, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        os.chdir(ROOT)
    RECORD.write_text(json.dumps({"environment": where, "outputs": outputs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
