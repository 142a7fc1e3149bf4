"""Public functions refuse arguments that do not have the declared type, and name them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import cache, wraps
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

from otad.errors import InputError

# What fits beside the type itself, and the kinds of NumPy's dtypes that do.
_TAKEN: dict[Any, Any] = {int: Integral, float: Real, Path: os.PathLike, tuple: (tuple, list)}
_ARRAYS: dict[Any, str] = {Any: "biufOUST", int: "iu", float: "iuf", str: "OUST"}
_WORDS: dict[Any, str] = {NoneType: "None", float: "a number", str: "text", Path: "a path"}
_WORDS |= {int: "an integer", Callable: "a function"}
_NAMED: dict[str, str] = {  # classes that this module does not import
    "LpBall": "a threat model such as otad.L2(0.5)",
    "Tensor": "a torch.Tensor (dense and real, on a device such as cpu)",
    "OTAD": "an OTAD model",
    "Estimator": "an OTADClassifier or OTADRegressor",
}
_REMEDIES = (  # a word in what was expected, the module of what came, and what to do
    ("DataLoader", "torch.utils.data.dataset", "give a DataLoader of it"),
    ("OTADClassifier", "sklearn.pipeline", "give its last step and transformed inputs"),
)
_PATHS = (Path, Path | None)
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])
_NO_MEMORY = ("can't allocate memory", "Storage size calculation overflowed")
_SEVERAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def guard(namespace: dict[str, Any], names: Iterable[str]) -> None:
    """Check the arguments of the functions that a package exports under these names, and of the
    constructors and methods of its classes. Methods of networks are not checked, because
    networks are compiled and captured. Calls within the package use the unchecked functions."""
    for name in names:
        value = namespace[name]
        if inspect.isroutine(value):
            made: Any = checked(value)
            namespace[name] = made
            if made is not value:  # other processes find it here, not where the bare function is
                made.__module__, made.__qualname__ = namespace["__name__"], name
        elif inspect.isclass(value) and not issubclass(value, (BaseException, Enum)):
            _guard_class(value)


def _guard_class(cls: type) -> None:
    if getattr(cls, "_is_protocol", False):
        return
    if inspect.isfunction(cls.__init__):  # type: ignore[misc]
        cls.__init__ = checked(cls.__init__)  # type: ignore[misc]
    for name, one in list(vars(cls).items()):
        if hasattr(cls, "state_dict") or (name.startswith("_") and name != "__call__"):
            continue
        if isinstance(one, (classmethod, staticmethod)):
            setattr(cls, name, type(one)(checked(one.__func__)))
        elif inspect.isfunction(one):
            setattr(cls, name, checked(one))


def checked(function: AnyFunction) -> AnyFunction:
    """Return the same function with checked arguments: it refuses an argument that does not fit its
    annotation, accepts text for a path, and reports a lack of memory in one line."""
    if hasattr(function, "_is_checked"):
        return function
    signature = inspect.signature(function)
    several = [name for name, one in signature.parameters.items() if one.kind in _SEVERAL]
    names, hints, must_bind = tuple(signature.parameters), dict[str, Any](), bool(several)
    # By the types and names of arguments that fitted: those of which another value might not fit.
    doubtful: dict[tuple[object, ...], list[tuple[int, str]]] = {}

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        nonlocal must_bind
        kinds: tuple[object, ...] = tuple(map(type, args))
        if options:
            kinds += *options, *map(type, options.values())
        if kinds in doubtful:
            for place, name in doubtful[kinds]:
                value = args[place] if place < len(args) else options[name]
                _check(name, value, hints[name])
        else:
            if not hints:
                hints.update(dict.fromkeys(names, Any) | hints_of(function))
                must_bind |= any(hint in _PATHS for hint in hints.values())
            given = dict(zip(names, args, strict=False)) | options
            known = len(given) == len(args) + len(options) and given.keys() <= hints.keys()
            if must_bind or not known:  # binding takes longer than the rest
                try:
                    bound = signature.bind(*args, **options)
                except TypeError:
                    return function(*args, **options)  # Python says what is missing or unknown
                given = bound.arguments
                for name, value in given.items():
                    if isinstance(value, str) and hints[name] in _PATHS:
                        given[name] = Path(value)
                        args, options = bound.args, bound.kwargs
                given = {name: value for name, value in given.items() if name not in several}
            check_options(hints, given)
            if not must_bind:
                sure = map(_is_uniform, map(type, given.values()))
                places = zip(range(len(given)), given, sure, strict=True)
                doubtful[kinds] = [(place, name) for place, name, fits in places if not fits]
        try:
            return function(*args, **options)
        except (MemoryError, RuntimeError) as error:
            signs = (sign in str(error) for sign in _NO_MEMORY)
            if not isinstance(error, MemoryError) and not any(signs):
                raise
            reason = str(error).partition("you tried")[2].partition("\n")[0] or f" {error}"
            expected = "sizes for which memory suffices"
            raise InputError(f"{function.__name__}: expected {expected}, got:{reason}") from error

    call._is_checked = True  # type: ignore[attr-defined]
    return cast(AnyFunction, call)


@cache
def _is_uniform(kind: type) -> bool:
    """Return whether all values of a type fit if one does: plain types, and those of the library
    that have no other bases."""
    own = (base is object or base.__module__.startswith("otad.") for base in kind.__mro__)
    return kind in (float, bool, slice, NoneType) or all(own)


def check_options(hints: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse a value that does not fit its type."""
    for name, value in given.items():
        _check(name, value, hints[name])


def _check(name: str, value: Any, hint: Any) -> None:
    if not _fits(value, hint):
        expected, modules = _words(hint), {base.__module__ for base in type(value).__mro__}
        if type(value) in (int, list, tuple):  # whose numbers may be too large
            expected = expected.replace("an integer", "an integer of at most 64 bits")
        fitting = (do for word, module, do in _REMEDIES if word in expected and module in modules)
        got = ": ".join([_shown(value), *fitting])
        raise InputError(f"{name}: expected {expected}, got {got}")


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of the parameters, except names that are imported for type checkers only."""
    inner, found = inspect.unwrap(function), {}
    for name, hint in inspect.get_annotations(inner).items():
        with suppress(NameError):
            found[name] = eval(hint, inner.__globals__) if isinstance(hint, str) else hint
    return found


def _fits(value: Any, hint: Any) -> bool:
    if hint is type(value) and hint.__name__ == "Tensor":
        return _is_dense(value)
    kind: Any = get_origin(hint) or hint
    parts: Any = get_args(hint)
    if kind in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if isinstance(kind, TypeVar):
        return kind.__bound__ is None or _fits(value, kind.__bound__)
    if kind is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if kind is type and parts:
        return isinstance(value, type) and all(issubclass(value, part) for part in parts)
    if hint is None:
        return value is None
    if not isinstance(kind, type) or kind in (Any, object):
        return True
    if getattr(kind, "_is_protocol", False):
        members = {*vars(kind), *inspect.get_annotations(kind)}
        return all(hasattr(value, one) for one in members if one[0] != "_" or one == "__call__")
    if isinstance(value, bool) or kind is bool:
        return kind is bool and isinstance(value, bool)
    if isinstance(value, (str, bytes)) or kind is str:
        return isinstance(value, kind if kind in (str, bytes) else ()) and "\0" not in str(value)
    if kind is Sequence and hasattr(getattr(value, "dtype", None), "kind"):  # NumPy or pandas
        kinds = _ARRAYS.get(parts[0], "") if parts else value.dtype.kind
        return getattr(value, "ndim", 0) == 1 and value.dtype.kind in kinds
    if kind is float and hasattr(value, "__float__") and getattr(value, "ndim", 1) == 0:
        return True  # a number of an array or a tensor
    if not isinstance(value, _TAKEN.get(kind, kind)):
        return False
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return False
    if kind is Path:
        return "\0" not in os.fspath(value)
    if getattr(getattr(value, "forward", None), "__name__", "") == "_forward_unimplemented":
        return False  # torch's own: nothing can be asked of such a module
    if kind.__name__ == "Tensor":
        return _is_dense(value)
    if kind is tuple and parts and parts[-1] is not Ellipsis:
        return len(value) == len(parts) and all(map(_fits, value, parts))
    if len(parts) == 2 and isinstance(value, Mapping):
        return all(_fits(key, parts[0]) and _fits(item, parts[1]) for key, item in value.items())
    if parts and isinstance(value, (list, tuple)):
        if parts[0] in (int, float) and {*map(type, value)} == {parts[0]}:  # records have long ones
            return parts[0] is float or (min(value) >= -(2**63) and max(value) < 2**64)
        return all(_fits(item, parts[0]) for item in value)
    return True


def _is_dense(tensor: Any) -> bool:
    return str(tensor.layout) == "torch.strided" and not (tensor.is_meta or tensor.is_complex())


def _words(hint: Any) -> str:
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return " or ".join(map(_words, parts))
    if kind is Literal:
        return f"one of {', '.join(map(repr, parts))}"
    if kind is Callable:
        return _WORDS[kind]
    inner = ", ".join("..." if part is Ellipsis else _words(part) for part in parts)
    name = _WORDS.get(kind, getattr(kind, "__name__", str(kind)))
    if kind is tuple and parts and Ellipsis not in parts:
        return f"a tuple ({inner})"
    if name in _NAMED:
        name = _NAMED[name]
    elif getattr(kind, "__module__", "").startswith("torch.nn"):
        name = f"an nn.{name}" + " with a forward method" * (name == "Module")
    said = parts and isinstance(parts[0], type) and parts[0] is not Any
    return f"{name} of {inner}" if said else name


def _shown(value: Any) -> str:
    """Return a short value in full with its type, or only the type."""
    name, text = type(value).__name__, ""
    with suppress(ValueError):  # Python writes no number of more than 4,300 digits
        text = repr(value) if isinstance(value, (str, bytes, int, float, list, tuple)) else ""
    if hasattr(value, "layout"):
        return f"{name} of {value.dtype} and {value.layout} on {value.device}".replace("torch.", "")
    return f"{text} ({name})" if 0 < len(text) <= 60 else name
