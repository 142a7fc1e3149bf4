"""Training state in one safetensors file: atomically replaced, checksummed, never pickle.

Tensors and a JSON header travel in the same file, so one rename makes a whole epoch valid: a
kill at any moment leaves the previous epoch's file or the new one, never a mixture.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from otad.errors import InputError
from otad.io.files import as_bytes, replacing

_FORMAT = "otad-checkpoint-1"


class Checkpoint(NamedTuple):
    tensors: dict[str, Tensor]
    header: dict[str, Any]


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, whatever the device and the order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].cpu()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(as_bytes(tensor))
    return digest.hexdigest()


def write_checkpoint(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Put the whole file in place of the one before, or leave that as it is."""
    # Copies: shared weights have no place in the format.
    copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    text = json.dumps(header, sort_keys=True)
    # One entry: the order of several is left to chance, and equal contents shall be equal files.
    metadata = {_FORMAT: _checksum(copies, text) + text}
    with replacing(path) as partial:
        # Not `save_file`: it writes under a name of its own first, which a kill would leave behind.
        content = save({name: copy.contiguous() for name, copy in copies.items()}, metadata)
        partial.write_bytes(content)


def read_checkpoint(path: Path) -> Checkpoint:
    """Tensors on the CPU and the header, or an `InputError` if any byte is not as written."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        found = "a folder" if path.is_dir() else error
        raise InputError(f"{path}: expected a safetensors checkpoint, got: {found}") from error
    if list(metadata) != [_FORMAT]:
        raise InputError(f"{path}: expected format {_FORMAT!r}, got {sorted(metadata)}")
    checksum, text = metadata[_FORMAT][:64], metadata[_FORMAT][64:]
    if checksum != _checksum(tensors, text):
        raise InputError(
            f"{path}: expected contents that match their checksum, got a damaged file"
            f"{_advice(text)}"
        )
    return Checkpoint(tensors, json.loads(text))


def _advice(text: str) -> str:
    """What to do about a damaged file with this header, if it is that of a training run."""
    try:
        of_a_run = "run" in json.loads(text)
    except (TypeError, ValueError):  # the header is damaged too
        return ""
    return "; delete it to train from the start" if of_a_run else ""


def nameless(value: object) -> str:
    """In words, without places in memory, which are others in every process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def refuse_foreign(path: Path, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise, naming every difference, unless two (nested) descriptions of a run agree."""
    there, here = _flatten(saved), _flatten(current)
    differences = [
        f"{name} ({here.get(name, 'nothing')!r} here, {there.get(name, 'nothing')!r} there)"
        for name in sorted({*there, *here})
        if there.get(name) != here.get(name)
    ]
    if differences:
        raise InputError(
            f"{path}: expected a checkpoint of this very run, got one that differs in "
            f"{'; '.join(differences)}; take another folder, or start from the same net and data"
        )


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    leaves: dict[str, Any] = {}
    for name, branch in tree.items():
        leaves |= _flatten(branch, f"{prefix}.{name}" if prefix else name)
    return leaves


def _checksum(tensors: Mapping[str, Tensor], text: str) -> str:
    return hashlib.sha256((fingerprint(tensors) + text).encode()).hexdigest()
