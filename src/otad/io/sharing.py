"""Values that several processes read, such as a model with its bank.

The structure of a value is pickled. Its tensors are put where all processes of a machine map the
same memory, or are named by the file that they are mapped from already. Only processes that one
user started exchange these bytes; nothing that comes from elsewhere is ever unpickled."""

from __future__ import annotations

import io
import pickle
import shutil
import tempfile
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from otad.errors import OtadError
from otad.io.mapped_rows import FileRows, JoinedRows, in_file, map_rows

Bytes = NDArray[np.uint8]
Opener = Callable[[], Sequence[Bytes]]
"""Returns, in another process, the arrays that were shared."""
Share = Callable[[Sequence[Bytes]], Opener]

OWN_BYTES = 2**20  # smaller tensors are copied, so that a model may change its counters in place
ALIGNMENT = 64
MOST_OPENED = 4  # values that a process remembers


class Shared(NamedTuple):
    """A pickled value and where its tensors are."""

    name: str
    structure: bytes
    openers: tuple[Opener, ...]

    def open(self) -> Any:
        """Return the value, which a process opens once while it works with it."""
        if self.name not in _opened:
            _opened[self.name] = unpack(self.structure, self.openers)
            if len(_opened) > MOST_OPENED:
                _opened.popitem(last=False)
        _opened.move_to_end(self.name)
        return _opened[self.name]


_opened: OrderedDict[str, Any] = OrderedDict()


class Sharing:
    """Shares values by `share`, each of them and each of their tensors once."""

    def __init__(self, share: Share, pickler: Any = pickle.Pickler) -> None:
        self._share, self._pickler = share, pickler
        self._values: dict[int, tuple[Any, Shared]] = {}  # holds the value, so its id stays its own
        self._tensors: dict[int, tuple[Tensor, int, int]] = {}
        self._openers: list[Opener] = []

    def __call__(self, value: Any) -> Shared:
        if id(value) not in self._values:
            new: list[Tensor] = []

            def name_of(tensor: Tensor) -> tuple[Any, ...]:
                if isinstance(rows := in_file(tensor), FileRows):
                    return "file", str(rows.path.absolute()), rows.offset, rows.changed
                if id(tensor) not in self._tensors:
                    self._tensors[id(tensor)] = tensor, len(self._openers), len(new)
                    new.append(tensor)
                return "shared", *self._tensors[id(tensor)][1:]

            structure = pack(value, self._pickler, name_of)
            if new:
                self._openers.append(self._share([_bytes_of(tensor) for tensor in new]))
            shared = Shared(uuid4().hex, structure, tuple(self._openers))
            self._values[id(value)] = value, shared
        return self._values[id(value)][1]


class _About(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    is_parameter: bool
    requires_grad: bool


def pack(
    value: Any,
    pickler: Any = pickle.Pickler,
    name_of: Callable[[Tensor], tuple[Any, ...]] | None = None,
) -> bytes:
    """Return a pickled value, with its tensors inside unless they have a name.

    Plain pickling would send the whole storage of a tensor that is a slice of another one."""

    def persistent_id(_: Any, one: Any) -> tuple[Any, ...] | None:
        if type(one) is JoinedRows and name_of is not None:
            return None, "joined", one.tensors  # each of which has a name
        if type(one) not in (Tensor, nn.Parameter) or not _is_plain(one):
            return None
        about = _About(
            tuple(one.shape), one.dtype, str(one.device), isinstance(one, nn.Parameter),
            one.requires_grad,
        )  # fmt: skip
        place = ("inside", _bytes_of(one).tobytes()) if name_of is None else name_of(one)
        return about, *place

    stream = io.BytesIO()
    packer = type("Packer", (pickler,), {"persistent_id": persistent_id})
    try:
        packer(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        expected = "values that can be pickled and sent to other processes"
        raise OtadError(f"executor: expected {expected}, got: {error}") from error
    return stream.getvalue()


def unpack(content: bytes, openers: Sequence[Opener] = ()) -> Any:
    """Return what `pack` packed. Only for bytes of a process of the same user."""
    arrays: dict[int, Sequence[Bytes]] = {}
    tensors: dict[Any, Tensor] = {}  # what was one tensor is one tensor again

    def find(name: tuple[Any, ...]) -> Tensor:
        about, kind, *place = name
        if kind == "file":
            path, offset, changed = place
            return map_rows(Path(path), offset, about.shape, about.dtype, changed)
        if kind == "inside":
            flat = torch.frombuffer(bytearray(place[0]), dtype=torch.uint8)
        else:
            source, position = place
            if source not in arrays:
                arrays[source] = openers[source]()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # shared memory may be read-only
                flat = torch.from_numpy(arrays[source][position])
            flat = flat.clone() if flat.nbytes < OWN_BYTES else flat
        found = flat.view(about.dtype).view(about.shape).to(about.device)
        if about.is_parameter:
            return nn.Parameter(found, about.requires_grad)
        return found.requires_grad_(about.requires_grad)

    def persistent_load(_: Any, name: tuple[Any, ...]) -> Tensor:
        if name[1] == "joined":
            return JoinedRows(name[2])
        if name[1] == "inside":
            return find(name)
        if name not in tensors:
            tensors[name] = find(name)
        return tensors[name]

    loader = type("Loader", (pickle.Unpickler,), {"persistent_load": persistent_load})
    return loader(io.BytesIO(content)).load()


class SharedFiles:
    """Arrays in files of a private folder, which all processes of this machine map."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="otad-"))

    def share(self, arrays: Sequence[Bytes]) -> Opener:
        """Write arrays to one file, and return how another process maps it."""
        handle, name = tempfile.mkstemp(dir=self.folder)
        with open(handle, "wb") as file:
            for array in arrays:
                file.write(array.data)
                file.write(bytes(-array.nbytes % ALIGNMENT))
        return MappedFile(name, tuple(array.nbytes for array in arrays))

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True)
class MappedFile:
    """A file of arrays with these sizes. Processes that map it share its memory; what one of them
    changes is its own."""

    path: str
    sizes: tuple[int, ...]

    def __call__(self) -> list[Bytes]:
        try:
            whole = np.memmap(self.path, np.uint8, "c")
        except OSError as error:
            expected = f"{self.path} on every machine (TMPDIR may name a folder that they share)"
            raise OtadError(f"executor: expected {expected}, got: {error}") from error
        starts = np.cumsum([0, *(size + -size % ALIGNMENT for size in self.sizes)])
        return [whole[at : at + size] for at, size in zip(starts, self.sizes, strict=False)]


def _is_plain(tensor: Tensor) -> bool:
    is_plain = tensor.layout == torch.strided and not (tensor.is_meta or tensor.is_quantized)
    return is_plain and tensor.is_contiguous() and tensor.is_leaf and tensor.numel() > 0


def _bytes_of(tensor: Tensor) -> Bytes:
    found: Bytes = tensor.detach().cpu().view(-1).view(torch.uint8).numpy()
    return found
