"""What a finished batch of an attack depends on: tensors by their contents, settings by value, and
code by the `version` that a class declares (1 by default). Of a user's own classes and functions
the code, default arguments, closures and class values count too, but not the code of what they
call: raise `version` when you change it. Batches are not saved where an attribute, a class value or
a hook has no plain description (a lambda)."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from inspect import Parameter, Signature
from pathlib import Path
from types import (
    CellType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from otad.attacks import Attack
from otad.baselines import Knn, MajorityKnn, MeanFeatureKnn
from otad.errors import InputError
from otad.io.codec import digest_of, to_plain
from otad.io.tensor_files import fingerprint, fingerprint_of
from otad.model.answerers import Answerer
from otad.model.otad import OTAD
from otad.nets import Backbone
from otad.training.checkpoint import stable_repr

NET, DEFENDED, MAJORITY, MEAN_FEATURE = "net", "otad", "knn_majority", "knn_mean_feature"
_KINDS = {Backbone: NET, OTAD: DEFENDED, MajorityKnn: MAJORITY, MeanFeatureKnn: MEAN_FEATURE}
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_NO_CODE = ("__doc__", "__firstlineno__", "__module__", "_abc_impl")  # of what a class holds
# Packages whose code is known by a version.
_NOT_OF_USERS = ("otad", "torch", "builtins", "abc", "typing", "dataclasses", "reprlib")


def kind_of(model: nn.Module) -> str:
    """The name of a model among the predictors of a record."""
    return next((name for kind, name in _KINDS.items() if isinstance(model, kind)), "model")


def generator_for(*names: object) -> torch.Generator:
    """A CPU generator whose seed is a hash of these names."""
    text = "/".join(str(name) for name in names)
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
    return torch.Generator().manual_seed(seed)


class Identity:
    """Describe objects in plain values. `unknown` names what has no such description."""

    def __init__(self) -> None:
        self.unknown: list[str] = []
        self._within: list[nn.Module] = []  # modules that are being described
        self._known: dict[Any, str] = {}  # users' classes and functions; at first without contents

    def model(self, model: nn.Module, where: str = "model") -> dict[str, Any]:
        """Return what a record says about a model: its kind, its settings and a fingerprint of
        everything."""
        card: dict[str, Any] = {"kind": kind_of(model), "class": type(model).__qualname__}
        card |= _settings(model)
        state = model.state_dict() | dict(model.named_buffers())  # also those that are not saved
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        self._within.append(model)
        modules: dict[str, list[Any]] = {}
        for name, part in model.named_modules():
            attributes = self._attributes(part, where, name)
            version = self.version(part, ".".join(filter(None, (where, name))))
            modules[name] = [type(part).__qualname__, version, attributes]
            hooks = [*part._forward_pre_hooks.values(), *part._forward_hooks.values()]
            modules[name] += [self._plain(hook, f"{where}.hook") for hook in hooks]
            if isinstance(part, OTAD) and not part.resident:  # its bank is no buffer
                banks = ("bank_inputs", "bank_features", "bank_labels")
                tensors |= {".".join(filter(None, (name, it))): getattr(part, it) for it in banks}
        self._within.pop()
        return card | {"fingerprint": fingerprint_of(tensors, note=digest_of([card, modules]))}

    def attack(self, attack: Attack) -> dict[str, Any]:
        """Return the settings of an attack, with modules and tensors by their fingerprint."""
        own: Any = attack
        if is_dataclass(own):
            names = [field.name for field in fields(own) if field.init]
        else:
            names = [name for name in vars(own) if name != "remarks"]
        return {name: self._plain(getattr(own, name), f"{attack.name}.{name}") for name in names}

    def _attributes(self, module: nn.Module, where: str, name: str) -> dict[str, Any]:
        """What a module holds beside its tensors and parts."""
        place = ".".join(filter(None, (where, name)))
        if isinstance(module, (OTAD, Knn)):
            settings = _settings(module) if name else {}  # the card describes the model itself
            defended = module if isinstance(module, OTAD) else module.model
            if not defended.searches_exactly:
                settings |= {"search": self._plain(defended._search(), f"{place}.search")}
            return settings
        if isinstance(module, Answerer):
            return {"solver": self._plain(module.solver, f"{place}.solver")}
        own = {key: value for key, value in vars(module).items() if key not in _OF_EVERY_MODULE}
        package = type(module).__module__.partition(".")[0]
        if package == "diffusers":  # the config of a whole network describes its parts
            own = {"config": getattr(module, "config", None)}
        if package in ("otad", "torch"):  # private attributes follow from the others
            own = {key: value for key, value in own.items() if not key.startswith("_")}
        return {key: self._plain(value, f"{place}.{key}") for key, value in own.items()}

    def _plain(self, value: Any, where: str) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return to_plain(value)
        if isinstance(value, (torch.dtype, torch.device, Path, Enum, Signature, Parameter)):
            return str(value)
        if isinstance(value, (list, tuple)):
            return [self._plain(item, f"{where}[{k}]") for k, item in enumerate(value)]
        if isinstance(value, (set, frozenset)):
            return sorted(str(self._plain(item, where)) for item in value)
        if isinstance(value, Mapping):
            return {str(k): self._plain(item, f"{where}[{k}]") for k, item in value.items()}
        if isinstance(value, Tensor):
            return {"tensor": fingerprint({"": value.detach()})}
        if isinstance(value, np.ndarray) and value.dtype != object:
            return {"array": hashlib.sha256(value.tobytes()).hexdigest(), "shape": value.shape}
        if isinstance(value, nn.Module):
            if any(value is part for module in self._within for part in module.modules()):
                return {"class": type(value).__qualname__}  # a part of what is being described
            card = self.model(value, where)
            return {"class": card["class"], "fingerprint": card["fingerprint"]}
        if isinstance(value, Attack):
            version = self.version(value, where)
            return {"attack": value.name, "version": version, **self.attack(value)}
        if is_dataclass(value) and not isinstance(value, type):
            held = {field.name: getattr(value, field.name) for field in fields(value)}
            kind = {"class": type(value).__qualname__, "version": self.version(value, where)}
            return {**kind, **self._plain(held, where)}
        if isinstance(value, MethodType):
            return {"method": value.__qualname__, "of": self._plain(value.__self__, where)}
        if isinstance(value, (functools.partial, functools.partialmethod)):
            return [self._plain(part, where) for part in (value.func, value.args, value.keywords)]
        if isinstance(value, type):
            return f"{value.__module__}.{value.__qualname__}{self._contents(value, where)}"
        name = getattr(value, "__qualname__", "<stable_repr>")
        owner = getattr(value, "__self__", None)  # that of a built-in function: its module or class
        is_static = owner is None or isinstance(owner, (type, ModuleType))
        if callable(value) and "<" not in name and is_static:
            return f"{value.__module__}.{name}{self._code(value, where)}"
        self.unknown.append(f"{where} ({type(value).__name__})")
        return stable_repr(value)

    def version(self, thing: object, where: str) -> str:
        """Return the version that a class declares and, if it is a user's own, a digest of what it
        holds."""
        return f"{getattr(type(thing), 'version', 1)}{self._contents(type(thing), where)}"

    def _contents(self, kind: type, where: str) -> str:
        """Return a digest of what a class and its bases hold, as far as they are users' own."""
        if kind not in self._known:
            self._known[kind] = ""
            kinds = (one for one in kind.__mro__ if _is_of_user(one))
            held = [item for one in kinds for item in vars(one).items() if _counts(*item)]
            plain = [[name, self._held(value, f"{where}.{name}")] for name, value in held]
            self._known[kind] = f" {digest_of(plain)}" if plain else ""
        return self._known[kind]

    def _held(self, value: Any, where: str) -> Any:
        """Describe a value of a class, a default argument or a closure, which may be a lambda."""
        value = getattr(value, "fget", value)  # of a property
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, functools.cached_property):
            value = value.func
        if isinstance(value, FunctionType):
            return f"{value.__module__}.{value.__qualname__}{self._code(value, where)}"
        return self._plain(value, where)

    def _code(self, value: Any, where: str) -> str:
        """Return a digest of a user's function, its default arguments and its closure."""
        if not (isinstance(value, FunctionType) and _is_of_user(value)):
            inner = getattr(value, "__wrapped__", None)  # such as by torch.no_grad()
            return "" if inner is None else self._code(inner, where)
        if value not in self._known:
            self._known[value] = ""
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            full = [one for one in cells if one[0] != "__class__" and one[1] != CellType()]
            held = {name: cell.cell_contents for name, cell in full} | (value.__kwdefaults__ or {})
            held |= {f"{place}": it for place, it in enumerate(value.__defaults__ or ())}
            if value.__name__ == "__init__":  # what it makes is described itself
                held = {}
            plain = {name: self._held(it, f"{where}.{name}") for name, it in held.items()}
            code = _plain_code(value.__code__, value.__doc__)
            self._known[value] = f" {digest_of([code, plain])}"
        return self._known[value]


def _is_of_user(thing: Any) -> bool:
    """Whether a class or function is; a function may be wrapped in the name of another one."""
    module = getattr(thing, "__globals__", {}).get("__name__", thing.__module__)
    return (module or "").partition(".")[0] not in _NOT_OF_USERS


def _counts(name: str, value: Any) -> bool:
    """Whether a value of a class does; those of Python itself, such as __slots__, do not."""
    if name in _NO_CODE or isinstance(value, MemberDescriptorType):
        return False
    return callable(value) or not name.startswith("__")


def _plain_code(code: CodeType, text: str | None = None) -> list[Any]:
    """Return what counts of the code of a function with a docstring `text`, which does not."""
    constants = [
        _plain_code(one) if isinstance(one, CodeType) else repr(one)
        for one in code.co_consts
        if text is None or one != text
    ]
    return [code.co_code.hex(), code.co_names, code.co_varnames, constants]


def _settings(model: nn.Module) -> dict[str, Any]:
    if isinstance(model, Backbone):
        try:
            return {"net": model.config()}
        except InputError:  # not a registered kind: its class and weights identify it
            return {"net": {"class": type(model).__name__}}
    if isinstance(model, Knn):
        return _settings(model.model) | {"n_neighbors": model.n_neighbors}
    if not isinstance(model, OTAD):
        return {}
    return _settings(model.backbone) | model.describe()
