"""The feature bank: every training point, its feature, and its label."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from otad.checks import check_alike, check_count, check_finite, check_shape, check_tensor
from otad.errors import InputError
from otad.io.mapped_rows import block_of, gathered, remember
from otad.io.tensor_files import BLOCK_BYTES, check_seal, map_sealed, write_sealed
from otad.io.tensor_files import fingerprint as tensor_fingerprint

BANK_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FORMAT = "otad-feature-bank"
VERSION = "1"

Blocks = Iterator[tuple[Tensor, Tensor]]
Transport = Callable[[Tensor], tuple[Tensor, Tensor]]
"""A batch of raw inputs -> its embedded inputs (B, d) and their features (B, d)."""


@dataclass(frozen=True, eq=False)
class FeatureBank:
    """Pairs of inputs x_i (N, d) and features z_i (N, d) in the same R^d, with labels (N,).

    Labels are class numbers (int64) or targets (float32). Inputs and features are float16, bfloat16
    or float32, in memory or mapped from a file, of which `gather` and the solvers read only the
    rows they need. `fingerprint` names the net and the data they come from (see
    `fingerprint_of`). With `verify` all values are read once and must be finite.
    """

    inputs: Tensor
    features: Tensor
    labels: Tensor
    fingerprint: str
    verify: InitVar[bool] = True

    def __post_init__(self, verify: bool) -> None:
        check_tensor(self.inputs, "inputs", "N,d", dtypes=BANK_DTYPES, finite=False)
        check_tensor(self.features, "features", "N,d", dtypes=BANK_DTYPES, finite=False)
        check_shape(self.features, "features", tuple(self.inputs.shape), "like the inputs")
        check_alike(self.features, "features", self.inputs, "inputs")
        _check_labels(self.labels, len(self))
        if not isinstance(self.fingerprint, str) or not self.fingerprint:
            raise InputError(f"fingerprint: expected some text, got {self.fingerprint!r}")
        if verify:
            row = 0
            for inputs, features in self._blocks():
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

    @property
    def classes(self) -> Tensor:
        """The class numbers present (C,), ascending."""
        if self.labels.dtype != torch.int64:
            raise InputError("labels: expected class numbers (int64), got targets (float32)")
        present: Tensor = self.labels.unique()
        return present

    def gather(self, indices: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Inputs and features (..., d) at indices (...), in `dtype`, on the device of indices."""
        if not isinstance(indices, Tensor):
            raise InputError(f"indices: expected a torch.Tensor, got {type(indices).__name__}")
        if indices.dtype != torch.int64:
            raise InputError(f"indices: expected dtype int64, got {indices.dtype}")
        if indices.numel() > 0:
            low, high = (int(bound) for bound in indices.aminmax())
            if low < 0 or high >= len(self):
                raise InputError(f"indices: expected 0 to {len(self) - 1}, got {low} to {high}")
        inputs, features = (
            gathered(part, indices, indices.device) for part in (self.inputs, self.features)
        )
        return inputs.to(dtype), features.to(dtype)

    def subset(self, per_class: int, generator: torch.Generator) -> FeatureBank:
        """`per_class` random points of each class, in the order of the bank, in memory."""
        check_count(per_class, "per_class")
        chosen = []
        for label in self.classes:
            members = (self.labels == label).nonzero()[:, 0]
            if len(members) < per_class:
                raise InputError(
                    f"per_class: expected at most {len(members)}, the points of class "
                    f"{int(label)}, got {per_class}"
                )
            order = torch.randperm(len(members), generator=generator, device=generator.device)
            chosen.append(members[order[:per_class].to(members.device)])
        return self.select(torch.cat(chosen).sort().values)

    def select(self, rows: Tensor) -> FeatureBank:
        """The points of these rows, in memory."""
        part = hashlib.sha256(self.fingerprint.encode())
        part.update(tensor_fingerprint({"subset": rows}).encode())
        pairs = gathered(self.inputs, rows), gathered(self.features, rows)
        return FeatureBank(*pairs, self.labels[rows], part.hexdigest(), verify=False)

    def to(self, device: torch.device | str) -> FeatureBank:
        """The bank in the memory of a device."""
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
        progress: Callable[[int, int], None] | None = None,
    ) -> FeatureBank:
        """One pass of `transport` over x (N, ...), with labels y (N,).

        With a path, batches are written to that file and the bank is mapped from it, so it need not
        fit in memory. `progress` is called with (rows done, rows in all) after each batch.
        """
        check_count(batch_size, "batch_size")
        if dtype not in BANK_DTYPES:
            raise InputError(f"dtype: expected float16, bfloat16 or float32, got {dtype}")
        for name, value in (("x", x), ("y", y)):
            if not isinstance(value, Tensor) or value.dim() == 0 or len(value) == 0:
                raise InputError(f"{name}: expected a torch.Tensor with at least one row")
        labels = y.to("cpu", torch.float32 if y.is_floating_point() else torch.int64)
        _check_labels(labels, len(x))
        blocks = _transported(transport, x, batch_size, dtype, progress)
        first = next(blocks)
        blocks, shape = chain([first], blocks), (len(x), first[0].shape[1])
        if path is not None:
            _write(Path(path), labels, shape, dtype, fingerprint, blocks)
            return cls.load(path, verify=False)
        inputs, features = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
        for start, (some_inputs, some_features) in enumerate(blocks):
            rows = slice(start * batch_size, (start + 1) * batch_size)
            inputs[rows], features[rows] = some_inputs, some_features
        return cls(inputs, features, labels, fingerprint, verify=False)

    def save(self, path: str | Path) -> None:
        """Write one sealed safetensors file."""
        shape = (len(self), self.dim)
        labels = self.labels.cpu()
        _write(Path(path), labels, shape, self.dtype, self.fingerprint, self._blocks())

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        expect_fingerprint: str | None = None,
        verify: bool = True,
        mmap: bool = True,
    ) -> FeatureBank:
        """The bank of a file, mapped from it or (`mmap=False`) read into memory.

        `verify` reads the file once, in blocks, and refuses one changed byte or value that is not
        finite. `expect_fingerprint` refuses the bank of another net or of other data.
        """
        path = Path(path)
        tensors, metadata = map_sealed(path)
        kind, version = metadata.get("format"), metadata.get("version")
        if kind != FORMAT or set(tensors) != {"inputs", "features", "labels"}:
            raise InputError(f"{path}: expected a feature bank, got {kind or 'other tensors'}")
        if version != VERSION:
            raise InputError(f"{path}: expected a bank of version {VERSION}, got {version}")
        if verify:
            check_seal(path)
        fingerprint = metadata.get("fingerprint", "")
        if expect_fingerprint is not None and fingerprint != expect_fingerprint:
            raise InputError(
                f"{path}: expected the bank of net and data {expect_fingerprint}, got the bank of "
                f"{fingerprint}"
            )
        if mmap:
            remember(path, {name: tensors[name] for name in ("inputs", "features")})
        else:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        return cls(**tensors, fingerprint=fingerprint, verify=verify)

    def _blocks(self) -> Blocks:
        rows = max(1, BLOCK_BYTES // (4 * self.dim))
        for start in range(0, len(self), rows):
            stop = start + rows
            yield block_of(self.inputs, start, stop), block_of(self.features, start, stop)


def _transported(
    transport: Transport,
    x: Tensor,
    batch_size: int,
    dtype: torch.dtype,
    progress: Callable[[int, int], None] | None,
) -> Blocks:
    """Checked batches of inputs and features, on the CPU in the dtype of the bank."""
    dim = None
    for start in range(0, len(x), batch_size):
        batch = x[start : start + batch_size]
        with torch.no_grad():
            inputs, features = transport(batch)
        check_tensor(inputs, "inputs", "B,d", finite=False)
        dim = dim or inputs.shape[1]
        check_shape(inputs, "inputs", (len(batch), dim), "(rows of the batch, d)")
        check_shape(features, "features", (len(batch), dim), "like the inputs, in the same R^d")
        inputs, features = inputs.to(dtype), features.to(dtype)  # before the copy to the CPU:
        check_finite(inputs, f"inputs from row {start} on, as {dtype}")  # a GPU does this at once
        check_finite(features, f"features from row {start} on, as {dtype}")
        yield inputs.cpu(), features.cpu()
        if progress is not None:
            progress(start + len(batch), len(x))


def _write(
    path: Path,
    labels: Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype,
    fingerprint: str,
    blocks: Blocks,
) -> None:
    layout = {
        "labels": (labels.dtype, (shape[0],)),  # first: the widest entries, so all are aligned
        "inputs": (dtype, shape),
        "features": (dtype, shape),
    }
    metadata = {"format": FORMAT, "version": VERSION, "fingerprint": fingerprint}
    pairs = (zip(("inputs", "features"), block, strict=True) for block in blocks)
    rows = chain([("labels", labels)], chain.from_iterable(pairs))
    write_sealed(path, layout, metadata, rows)


def _check_labels(labels: Tensor, count: int) -> None:
    check_tensor(labels, "labels", "N", dtypes=(torch.int64, torch.float32))
    check_shape(labels, "labels", (count,), "one for each input")
    if labels.dtype == torch.int64 and int(labels.min()) < 0:
        raise InputError(f"labels: expected class numbers from 0, got {int(labels.min())}")
