"""A bank in many files: a folder of shards, each a whole bank of some rows, and an index of them.

The index (JSON, as for sharded checkpoints of Hugging Face) names the shards in order, with the
checksum of each. So shards are written by several processes, and each is verified alone."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from otad.checks import check_count, refusing, require
from otad.errors import InputError
from otad.io import tensor_files
from otad.io.codec import digest_of, read_json
from otad.io.files import is_inside, replacing

INDEX = "bank.safetensors.index.json"
FORMAT = "otad-feature-bank-index"
VERSION = 1
MOST_SHARDS = 99_999  # the digits in a name
_SHARD = r"bank-(\d{5})-of-(\d{5})\.safetensors"
_OWN_NAME = re.compile(rf"(\.)?(?:{_SHARD}|{re.escape(INDEX)})(?(1)\.[0-9a-f]{{16}}\.partial)")


def shard_name(number: int, shards: int) -> str:
    """Return the name of a shard; the first is number 1."""
    check_count(number, "number", most=check_count(shards, "shards", most=MOST_SHARDS))
    return f"bank-{number:05}-of-{shards:05}.safetensors"


def shard_rows(points: int, number: int, shards: int) -> slice:
    """Return the rows of a shard, of which all have nearly the same number of points."""
    expected = f"at most {points}, the points of the bank"
    require(check_count(shards, "shards") <= points, "shards", expected, shards)
    return slice((number - 1) * points // shards, number * points // shards)


def join_shards(folder: str | Path) -> str:
    """Write the index of all shards in a folder, and return its checksum.

    Each process writes its own shard. The last one, or another process, joins them: all shards must
    be there, and come from the same network and data."""
    folder = Path(folder)
    matches = (re.fullmatch(_SHARD, path.name) for path in folder.glob("bank-*"))
    counts = sorted({int(match[2]) for match in matches if match})
    found = f"shards of {', '.join(map(str, counts)) or 'none'}"
    require(len(counts) == 1, str(folder), "the shards of one bank", found)
    shards, about, size = dict[str, dict[str, Any]](), dict[str, Any](), 0
    for number in range(1, counts[0] + 1):
        name = shard_name(number, counts[0])
        path = folder / name
        require(path.is_file(), str(path), f"shard {number} of {counts[0]}", "no file")
        tensors, metadata = tensor_files.map_sealed(path)
        with refusing(f"{path}: expected a feature bank"):
            inputs, labels = tensors["inputs"], tensors["labels"]
            own = {
                "fingerprint": metadata["fingerprint"],
                "dim": inputs.shape[1],
                "dtype": str(inputs.dtype).removeprefix("torch."),
                "labels": str(labels.dtype).removeprefix("torch."),
            }
            shards[name] = {"points": len(inputs), "checksum": metadata["checksum"]}
        about, size = about or own, size + path.stat().st_size
        require(own == about, str(path), f"a shard like the first, {about}", own)
    points = sum(one["points"] for one in shards.values())
    index = {
        "format": FORMAT,
        "version": VERSION,
        "metadata": about | {"points": points, "total_size": size},
        "shards": shards,
    }
    checksum = digest_of(index, length=64)
    with replacing(folder / INDEX) as partial:
        text = json.dumps(index | {"checksum": checksum}, indent=1) + "\n"
        partial.write_text(text, encoding="utf-8")
    return checksum


def read_index(folder: Path) -> dict[str, Any]:
    """Return the content of the index, after its format, names and checksum were checked."""
    path = folder / INDEX
    require(path.is_file(), str(folder), f"a bank of shards with {INDEX}", "none")
    index = read_json(path)
    found = isinstance(index, Mapping) and (index.get("format"), index.get("version"))
    require(found == (FORMAT, VERSION), str(path), f"{FORMAT} of version {VERSION}", found)
    with refusing(f"{path}: expected the index of a bank"):
        content = {name: value for name, value in index.items() if name != "checksum"}
        checksum = digest_of(content, length=64)
        edited = f"{checksum}: the index was edited"
        stored = index.get("checksum")
        require(stored == checksum, str(path), f"contents with checksum {stored}", edited)
        names, count = list(index["shards"]), len(index["shards"])
        expected = [shard_name(number, count) for number in range(1, count + 1)]
        require(names == expected, str(path), f"the shards {expected[:1]} ...", names[:1])
        points = sum(one["points"] for one in index["shards"].values())
        total, name = index["metadata"]["points"], index["metadata"]["fingerprint"]
        require(isinstance(name, str) and name, str(path), "the fingerprint of a bank", name)
        require(points == total, str(path), f"shards of {total} points in all", points)
    return dict(index)


def checked_index(
    folder: Path, fingerprint: str | None, checksum: str | None, *, verify: bool
) -> dict[str, Any]:
    """Return the index of a bank, and refuse another bank than the expected one.

    With `verify`, a damaged shard is refused, too."""
    index = read_index(folder)
    for expected, found in (
        (fingerprint, index["metadata"]["fingerprint"]),
        (checksum, index["checksum"]),
    ):
        require(expected in (None, found), str(folder), f"the bank {expected}", found)
    if verify and (damaged := damaged_shards(folder)):
        got = f"{len(damaged)} damaged: {'; '.join(damaged.values())}"
        require(False, str(folder), f"{len(index['shards'])} whole shards", got)
    return index


def damaged_shards(folder: str | Path) -> dict[str, str]:
    """Verify each shard of a bank alone, and return what is wrong, by the names of the shards."""
    folder = Path(folder)
    shards = read_index(folder)["shards"]

    def fault(name: str) -> str | None:
        path, expected = folder / name, shards[name]["checksum"]
        if not (path.is_file() and is_inside(path, folder)):
            return f"{path}: expected a regular file inside the folder, got none"
        try:
            found = tensor_files.map_sealed(path)[1].get("checksum")
            require(found == expected, str(path), f"the shard {expected}", found)
            tensor_files.check_seal(path)
        except InputError as error:
            return str(error)
        return None

    with ThreadPoolExecutor() as pool:
        faults = zip(shards, pool.map(fault, shards), strict=True)
        return {name: found for name, found in faults if found is not None}


def remove_shards(folder: Path) -> None:
    """Remove the shards and the index in a folder, and the folder if nothing else is in it."""
    for path in folder.iterdir():
        if _OWN_NAME.fullmatch(path.name) and path.is_file():
            path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()
