"""Record the answers of the saved models anew: only where a change of behavior is intended.

Run in the folder `tests` as `python -m golden.record KIND...`. Undecided places stay marked.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from golden.arrays import HERE, Arrays, given_in, read_arrays
from golden.cases import (
    CASES,
    answers_of,
    attack_answers,
    evaluation_answers,
    evaluation_of,
    flag_answers,
    loaded,
)


def write_arrays(path: Path, arrays: Arrays) -> None:
    """Texts go into the index; files of equal contents are equal."""
    rows: dict[str, list[np.ndarray]] = {}
    index = []
    for name, value in arrays.items():
        texts = value.tolist() if value.dtype.kind == "U" else None
        if texts is None:
            rows.setdefault(value.dtype.str, []).append(value.ravel())
        index.append([name, value.dtype.str, list(value.shape), texts])
    packed = {kind: np.concatenate(parts) for kind, parts in rows.items()}
    kinds = {f"numbers{place}": value for place, value in enumerate(packed.values())}
    text = json.dumps({"order": list(packed), "entries": index})
    np.savez_compressed(path, index=np.array(text), **kinds)


def record(kind: str) -> None:
    golden, case, model = read_arrays(HERE / f"{kind}.npz"), CASES[kind], loaded(kind)
    x, y = given_in(golden)
    found = answers_of(model, case, x, y) | attack_answers(model, case, x, y)
    if case.evaluated:
        found |= evaluation_answers(evaluation_of(model, case, x, y))
    if case.flagged:
        found |= flag_answers(model, case, x, y)
    unasked = {name: golden[name] for name in golden if name.startswith(("given/", "undecided/"))}
    write_arrays(HERE / f"{kind}.npz", unasked | found)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        record(name)
