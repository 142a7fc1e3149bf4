"""The feature bank: training points with features and labels."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import InitVar, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from otad.arguments import guard
from otad.checks import (
    WORKING_DTYPES,
    check_alike,
    check_count,
    check_finite,
    check_shape,
    check_tensor,
    require,
)
from otad.errors import InputError
from otad.io import tensor_files
from otad.io.files import read_settled
from otad.io.mapped_rows import JoinedRows, block_of, gathered, remember, spread_rows
from otad.model.bank_shards import checked_index, join_shards, shard_name, shard_rows
from otad.progress import Counter, progress_bar
from otad.short_repr import short_repr

BANK_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FORMAT = "otad-feature-bank"
VERSION = "1"

Kind = tuple[torch.dtype, tuple[int, int]]  # the dtype and the shape of inputs and features
Blocks = Iterator[tuple[Tensor, Tensor]]
Transport = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Maps a batch of raw inputs to embedded inputs (B, d) and their features (B, d)."""


@dataclass(frozen=True, eq=False)
class FeatureBank:
    """Training points: embedded inputs x_i (N, d), their features z_i (N, d) and labels (N,).

    Labels are class numbers (int64) or targets (float32, float64). Inputs and features are float16,
    bfloat16 or float32. They are in memory or mapped from one or more files, of which only the
    needed rows are read. `fingerprint` names the network and the data that they come from. With
    `verify` all values are read once and must be finite."""

    inputs: Tensor
    features: Tensor
    labels: Tensor
    fingerprint: str
    verify: InitVar[bool] = True
    __repr__ = short_repr

    def __post_init__(self, verify: bool) -> None:
        check_tensor(self.inputs, "inputs", "N,d", dtypes=BANK_DTYPES, finite=False)
        check_tensor(self.features, "features", "N,d", dtypes=BANK_DTYPES, finite=False)
        check_shape(self.features, "features", tuple(self.inputs.shape), "like the inputs")
        check_alike(self.features, "features", self.inputs, "inputs")
        _check_labels(self.labels, len(self))
        is_text = isinstance(self.fingerprint, str) and self.fingerprint
        require(is_text, "fingerprint", "some text", repr(self.fingerprint))
        row = 0
        for inputs, features in self._blocks() if verify else ():
            check_finite(inputs, f"inputs from row {row} on")
            check_finite(features, f"features from row {row} on")
            row += len(inputs)

    def __len__(self) -> int:
        return self.inputs.shape[0]

    @property
    def dim(self) -> int:
        return self.inputs.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.inputs.dtype

    def sample(self) -> str:
        """Return a fingerprint of at most 64 points, evenly spread over the bank."""
        rows = spread_rows(len(self), 64)
        parts = {"inputs": self.inputs, "features": self.features, "labels": self.labels}
        return tensor_files.fingerprint({name: gathered(t, rows) for name, t in parts.items()})

    def select(self, rows: Tensor) -> FeatureBank:
        """Return a bank of these rows, in memory."""
        name = self.fingerprint + tensor_files.fingerprint({"subset": rows})
        name = hashlib.sha256(name.encode()).hexdigest()
        pairs = gathered(self.inputs, rows), gathered(self.features, rows)
        return FeatureBank(*pairs, self.labels[rows], name, verify=False)

    def to(self, device: torch.device | str) -> FeatureBank:
        """Return the bank in the memory of a device."""
        inputs, features = self.inputs.to(device), self.features.to(device)
        return FeatureBank(inputs, features, self.labels.to(device), self.fingerprint, verify=False)

    @classmethod
    def build(
        cls,
        transport: Transport,
        x: Tensor,
        y: Tensor,
        *,
        fingerprint: str,
        batch_size: int = 1024,
        dtype: torch.dtype = torch.float32,
        path: str | Path | None = None,
        progress: Counter | bool | None = None,
    ) -> FeatureBank:
        """Make a bank by one pass of `transport` over x (N, ...), with labels y (N,).

        It is in memory, or written to the file at `path` and mapped from there; an earlier bank is
        replaced, and another file is refused. `progress` is called with (rows done, all rows), see
        `otad.progress`."""
        check_count(batch_size, "batch_size")
        require(dtype in BANK_DTYPES, "dtype", "float16, bfloat16 or float32", dtype)
        for name, value in (("x", x), ("y", y)):
            has_rows = isinstance(value, Tensor) and value.dim() > 0 and len(value) > 0
            require(has_rows, name, "a torch.Tensor with at least one row", type(value).__name__)
        wide = torch.promote_types(y.dtype, torch.float32)
        labels = y.to("cpu", wide if y.is_floating_point() else torch.int64)
        _check_labels(labels, len(x))
        if path is not None:
            tensor_files.refuse_other_file(Path(path), FORMAT, "path")
        with progress_bar("building the bank", progress) as report:
            blocks = _transported(transport, x, batch_size, dtype, report)
            first = next(blocks)
            blocks, shape = chain([first], blocks), (len(x), first[0].shape[1])
            if path is not None:
                _write(Path(path), fingerprint, labels, (dtype, shape), blocks)
                return cls.load(path, verify=False)
            inputs, features = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
            for start, (some_inputs, some_features) in enumerate(blocks):
                rows = slice(start * batch_size, (start + 1) * batch_size)
                inputs[rows], features[rows] = some_inputs, some_features
        return cls(inputs, features, labels, fingerprint, verify=False)

    def save(self, path: str | Path, *, shards: int | None = None) -> str:
        """Write the bank to a safetensors file with a checksum, which is returned.

        With `shards`, write a folder of so many files and an index, whose checksum is returned."""
        if shards is not None:
            shard_rows(len(self), 1, shards)  # refuses more shards than points at once
            with ThreadPoolExecutor() as pool:
                numbers = range(1, shards + 1)
                list(pool.map(lambda number: self.save_shard(path, number, shards), numbers))
            return join_shards(path)
        kind = self.dtype, (len(self), self.dim)
        return _write(Path(path), self.fingerprint, self.labels.cpu(), kind, self._blocks())

    def save_shard(self, folder: str | Path, number: int, shards: int) -> Path:
        """Write one of so many shards to a folder, and return its path; the first is number 1.

        A shard that is already there and whole is kept. Several processes may each write their own;
        then `otad.model.bank_shards.join_shards` writes the index."""
        path = Path(folder) / shard_name(number, shards)
        rows = shard_rows(len(self), number, shards)
        inputs = block_of(self.inputs, rows.start, rows.stop)
        features = block_of(self.features, rows.start, rows.stop)
        part = FeatureBank(inputs, features, self.labels[rows], self.fingerprint, verify=False)
        try:
            stored = FeatureBank.load(path, expect_fingerprint=self.fingerprint)
            whole = stored.sample() == part.sample() and len(stored) == len(part)
        except (InputError, FileNotFoundError):
            whole = False
        if not whole:
            part.save(path)
        return path

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        expect_fingerprint: str | None = None,
        expect_checksum: str | None = None,
        verify: bool = True,
        mmap: bool = True,
    ) -> FeatureBank:
        """Return the bank of a file or of a folder of shards, mapped from it or read into memory.

        With `verify` all is read once, and a changed byte or a value that is not finite is refused;
        the message names every damaged shard. `expect_fingerprint` refuses a bank of another
        network or of other data, and `expect_checksum` refuses any other bank."""
        path = Path(path)
        expected = expect_fingerprint, expect_checksum
        return read_settled(path, lambda: cls._load(path, *expected, verify, mmap))

    @classmethod
    def _load(
        cls,
        path: Path,
        expect_fingerprint: str | None,
        expect_checksum: str | None,
        verify: bool,
        mmap: bool,
    ) -> FeatureBank:
        if path.is_dir():
            index = checked_index(path, expect_fingerprint, expect_checksum, verify=verify)
            return cls._load_shards(path, index, verify, mmap)
        tensors, metadata = tensor_files.map_sealed(path)
        kind, version = metadata.get("format"), metadata.get("version")
        is_bank = kind == FORMAT and set(tensors) == {"inputs", "features", "labels"}
        require(is_bank, str(path), "a feature bank", kind or "other tensors")
        require(version == VERSION, str(path), f"a bank of version {VERSION}", version)
        checksum = metadata.get("checksum", "none")
        if expect_checksum not in (None, checksum):
            raise InputError(f"{path}: expected the bank {expect_checksum}, got {checksum}")
        if verify:
            tensor_files.check_seal(path)
        fingerprint = metadata.get("fingerprint", "")
        expected = fingerprint if expect_fingerprint is None else expect_fingerprint
        wanted = f"the bank of net and data {expected}"
        require(fingerprint == expected, str(path), wanted, f"the bank of {fingerprint}")
        if mmap:
            remember(path, {name: tensors[name] for name in ("inputs", "features")})
        else:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        return cls(**tensors, fingerprint=fingerprint, verify=verify)

    @classmethod
    def _load_shards(
        cls, folder: Path, index: dict[str, Any], verify: bool, mmap: bool
    ) -> FeatureBank:
        name, parts = index["metadata"]["fingerprint"], []
        for shard, entry in index["shards"].items():
            part = cls.load(
                folder / shard,
                expect_fingerprint=name,
                expect_checksum=entry["checksum"],
                verify=False,
            )
            require(len(part) == entry["points"], shard, f"{entry['points']} points", len(part))
            parts.append(part)
        kinds = {(part.dim, part.dtype, part.labels.dtype) for part in parts}
        require(len(kinds) == 1, str(folder), "shards of one dimension and dtype", kinds)
        join: Callable[[list[Tensor]], Tensor] = JoinedRows if mmap else torch.cat
        inputs, features = join([it.inputs for it in parts]), join([it.features for it in parts])
        return cls(inputs, features, torch.cat([it.labels for it in parts]), name, verify=verify)

    def _blocks(self) -> Blocks:
        rows = max(1, tensor_files.BLOCK_BYTES // (4 * self.dim))
        for start in range(0, len(self), rows):
            stop = start + rows
            yield block_of(self.inputs, start, stop), block_of(self.features, start, stop)


def _transported(
    transport: Transport, x: Tensor, batch_size: int, dtype: torch.dtype, report: Counter
) -> Blocks:
    """Yield checked batches of inputs and features, on the CPU in the dtype of the bank."""
    dim = None
    for start in range(0, len(x), batch_size):
        batch = x[start : start + batch_size]
        with torch.no_grad():
            inputs, features = transport(batch)
        check_tensor(inputs, "inputs", "B,d", finite=False)
        dim = dim or inputs.shape[1]
        check_shape(inputs, "inputs", (len(batch), dim), "(rows of the batch, d)")
        check_shape(features, "features", (len(batch), dim), "like the inputs, in the same R^d")
        # Converted and checked before the copy to the CPU, because a GPU is faster.
        inputs, features = inputs.to(dtype), features.to(dtype)
        check_finite(inputs, f"inputs from row {start} on, as {dtype}")
        check_finite(features, f"features from row {start} on, as {dtype}")
        yield inputs.cpu(), features.cpu()
        report(start + len(batch), len(x))


def _write(path: Path, fingerprint: str, labels: Tensor, kind: Kind, blocks: Blocks) -> str:
    # Labels, the widest entries, come first, so that all entries are aligned.
    layout = {"labels": (labels.dtype, (len(labels),)), "inputs": kind, "features": kind}
    metadata = {"format": FORMAT, "version": VERSION, "fingerprint": fingerprint}
    pairs = (zip(("inputs", "features"), block, strict=True) for block in blocks)
    rows = chain([("labels", labels)], chain.from_iterable(pairs))
    return tensor_files.write_sealed(path, layout, metadata, rows)


def _check_labels(labels: Tensor, count: int) -> None:
    check_tensor(labels, "labels", "N", dtypes=(torch.int64, *WORKING_DTYPES))
    check_shape(labels, "labels", (count,), "one for each input")
    if labels.dtype == torch.int64:
        least = int(labels.min())
        require(least >= 0, "labels", "class numbers from 0", least)


guard(globals(), ["FeatureBank"])
