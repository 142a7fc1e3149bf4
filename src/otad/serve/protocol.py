"""The Open Inference Protocol (version 2) with its binary tensors: requests in, responses out.

A body is JSON, or JSON of `Inference-Header-Content-Length` bytes followed by binary tensors in the
order of their inputs. Numbers are little-endian. A text has its length before it, in four bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otad.checks import require
from otad.errors import InputError
from otad.io.codec import parse_json

Array = NDArray[Any]
HEADER_LENGTH = "Inference-Header-Content-Length"
BYTES = "BYTES"
DTYPES: dict[str, np.dtype[Any]] = {
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "INT64": np.dtype("<i8"),
}
DATATYPES = {dtype: name for name, dtype in DTYPES.items()}
MOST_AXES = 16
UNSUPPORTED = ("classification", "shared_memory_region")  # parameters that would change the answer


@dataclass(frozen=True)
class Tensor:
    """What the model declares about one tensor; -1 in the shape is any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}


@dataclass(frozen=True)
class Request:
    """The arrays of a request by name, and the outputs that it asks for.

    `outputs` says for each name whether it is wanted as a binary tensor. It is empty where the
    request asks for nothing, and then `binary` is for all.
    """

    inputs: dict[str, Array]
    outputs: dict[str, bool]
    binary: bool = False
    id: str | None = None


def read_request(body: bytes, header_length: str | None, expected: Sequence[Tensor]) -> Request:
    """Return the request in a body whose inputs are exactly the `expected` tensors."""
    length = len(body)
    if header_length is not None:
        fits = header_length.isascii() and header_length.isdigit() and len(header_length) < 20
        fits = fits and int(header_length) <= len(body)
        got = f"{header_length[:40]!r}"
        require(fits, HEADER_LENGTH, f"a number of bytes up to {len(body)}", got)
        length = int(header_length)
    try:
        text = body[:length].decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"request: expected JSON in UTF-8, got: {error}") from error
    content = _object(parse_json(text, "request"), "request")
    parameters = _parameters(content, "request")
    outputs = {}
    for place, wanted in enumerate(_objects(content.get("outputs", []), "outputs")):
        where = f"outputs[{place}]"
        name, options = _text(wanted, "name", where), _parameters(wanted, where)
        require(name not in outputs, where, "each output once", f"{name[:80]!r} again")
        outputs[name] = _flag(options, "binary_data", bool(parameters.get("binary_data_output")))
    return Request(
        _read_inputs(content, memoryview(body)[length:], expected),
        outputs,
        _flag(parameters, "binary_data_output", False),
        _text(content, "id", "request") if "id" in content else None,
    )


def _read_inputs(
    content: dict[str, Any], rest: memoryview, expected: Sequence[Tensor]
) -> dict[str, Array]:
    known = {tensor.name: tensor for tensor in expected}
    names = ", ".join(list(known)[:50])
    found: dict[str, Array] = {}
    for place, given in enumerate(_objects(content.get("inputs"), "inputs")):
        name, where = _text(given, "name", f"inputs[{place}]"), f"inputs[{place}]"
        require(
            name in known and name not in found, where, f"one of {names}, once", repr(name)[:80]
        )
        tensor, where = known[name], f"input {name!r}"
        datatype = _text(given, "datatype", where)
        require(datatype == tensor.datatype, where, f"datatype {tensor.datatype}", datatype[:40])
        shape = _shape(given.get("shape"), tensor, where)
        options = _parameters(given, where)
        if (size := options.get("binary_data_size")) is None:
            found[name] = _from_json(given.get("data"), shape, datatype, where)
            continue
        fits = type(size) is int and 0 <= size <= len(rest) and "data" not in given
        got = f"{str(size)[:40]}" + " and data in JSON" * ("data" in given)
        require(fits, f"{where}, binary_data_size", f"at most the {len(rest)} bytes left", got)
        found[name] = _from_binary(rest[:size], shape, datatype, where)
        rest = rest[size:]
    require(not len(rest), "body", "no bytes behind the last tensor", f"{len(rest)} bytes")
    missing = [name for name in known if name not in found]
    require(not missing, "inputs", f"all of {names}", f"none named {', '.join(missing)[:200]}")
    return found


def _shape(given: Any, tensor: Tensor, where: str) -> tuple[int, ...]:
    axes = isinstance(given, list) and all(type(size) is int for size in given)
    require(axes, f"{where}, shape", "a list of whole numbers", repr(given)[:80])
    column = tensor.shape == (-1, 1) and len(given) == 1  # a column may be a vector
    pairs = zip(given, tensor.shape, strict=False)
    fits = len(given) == len(tensor.shape) or column
    fits = fits and all(size > 0 and known in (size, -1) for size, known in pairs)
    expected = f"{list(tensor.shape)} with the number of rows for -1"
    require(fits, f"{where}, shape", expected, repr(given[:MOST_AXES]))
    return tuple(given)


def _from_json(data: Any, shape: tuple[int, ...], datatype: str, where: str) -> Array:
    """Return the entries of nested or flat lists; null becomes NaN, or None in a text."""
    require(isinstance(data, list), f"{where}, data", "a list", type(data).__name__)
    while data and all(isinstance(item, list) for item in data):
        data = [item for part in data for item in part]
    count = math.prod(shape)
    entries = f"{count} entries for the shape {list(shape)}"
    require(len(data) == count, f"{where}, data", entries, f"{len(data)}")
    kinds = (str, type(None)) if datatype == BYTES else (int, float, type(None))
    for place, item in enumerate(data):
        if type(item) not in kinds:
            expected = "text or null" if datatype == BYTES else "numbers"
            got = f"{type(item).__name__} at entry {place}"
            raise InputError(f"{where}, data: expected {expected}, got {got}")
    if datatype == BYTES:
        return np.array(data, dtype=object).reshape(shape)
    with np.errstate(over="ignore"):  # infinity is refused by whoever uses the numbers
        return np.array(data, dtype=np.float64).astype(DTYPES[datatype]).reshape(shape)


def _from_binary(data: memoryview, shape: tuple[int, ...], datatype: str, where: str) -> Array:
    count = math.prod(shape)
    if datatype == BYTES:
        return np.array(_texts(data, count, where), dtype=object).reshape(shape)
    size = count * DTYPES[datatype].itemsize
    expected = f"{size} bytes for the shape {list(shape)} of {datatype}"
    require(len(data) == size, f"{where}, binary data", expected, f"{len(data)}")
    return np.frombuffer(data, DTYPES[datatype]).reshape(shape)


def _texts(data: memoryview, count: int, where: str) -> list[str]:
    found: list[str] = []
    expected = f"{count} texts in UTF-8, each behind its length in 4 bytes"
    while len(data):
        whole = len(data) >= 4 and len(data) - 4 >= (size := struct.unpack("<I", data[:4])[0])
        require(whole and len(found) < count, f"{where}, binary data", expected, "other bytes")
        try:
            found.append(bytes(data[4 : 4 + size]).decode("utf-8"))
        except UnicodeDecodeError as error:
            raise InputError(f"{where}, binary data: expected {expected}, got: {error}") from error
        data = data[4 + size :]
    require(len(found) == count, f"{where}, binary data", expected, f"{len(found)}")
    return found


def _object(value: Any, where: str) -> dict[str, Any]:
    require(isinstance(value, dict), where, "a JSON object", type(value).__name__)
    return value  # type: ignore[no-any-return]


def _objects(value: Any, where: str) -> list[dict[str, Any]]:
    got = "none" if value is None else type(value).__name__
    require(isinstance(value, list), where, "a list of JSON objects", got)
    return [_object(item, f"{where}[{place}]") for place, item in enumerate(value)]


def _text(given: dict[str, Any], name: str, where: str) -> str:
    value = given.get(name)
    require(isinstance(value, str), f"{where}, {name}", "a text", type(value).__name__)
    return value  # type: ignore[return-value]


def _parameters(given: dict[str, Any], where: str) -> dict[str, Any]:
    found = _object(given.get("parameters", {}), f"{where}, parameters")
    for name in UNSUPPORTED:
        require(name not in found, f"{where}, parameters", f"no {name}", repr(found.get(name))[:80])
    return found


def _flag(parameters: dict[str, Any], name: str, default: bool) -> bool:
    value = parameters.get(name, default)
    require(isinstance(value, bool), name, "true or false", repr(value)[:80])
    return bool(value)


def write_response(
    about: Mapping[str, Any], outputs: Mapping[str, Array], binary: Mapping[str, bool]
) -> tuple[bytes, int | None]:
    """Return the body of a response, and the length of its JSON if binary tensors follow."""
    described: list[dict[str, Any]] = []
    tail: list[bytes] = []
    for name, values in outputs.items():
        datatype = DATATYPES.get(values.dtype, BYTES)
        one: dict[str, Any] = {"name": name, "datatype": datatype, "shape": list(values.shape)}
        if binary[name]:
            data = values.tobytes() if datatype != BYTES else _packed(values)
            one["parameters"] = {"binary_data_size": len(data)}
            tail.append(data)
        else:
            one["data"] = _in_json(values)
        described.append(one)
    head = json.dumps({**about, "outputs": described}, allow_nan=False).encode()
    return head + b"".join(tail), len(head) if tail else None


def _packed(texts: Array) -> bytes:
    encoded = [text.encode() for text in texts.ravel().tolist()]
    return b"".join(struct.pack("<I", len(text)) + text for text in encoded)


def _in_json(values: Array) -> list[Any]:
    """Return plain entries. JSON has neither NaN, which becomes null, nor infinity, which becomes
    the largest number: a radius is certified for every smaller one too."""
    flat = values.ravel()
    if flat.dtype.kind != "f":
        return flat.tolist()
    bounded = np.clip(flat, np.finfo(flat.dtype).min, np.finfo(flat.dtype).max)
    return [None if math.isnan(value) else value for value in bounded.tolist()]


def check_name(name: str) -> str:
    """Return a name of a model that is one segment of a path."""
    plain = name.isascii() and name.replace("-", "").replace("_", "").replace(".", "").isalnum()
    require(plain, "name", "letters, digits, -, _ and .", repr(name))
    return name
