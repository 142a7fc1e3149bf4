"""What a part of an evaluation depends on, in plain values: model, attack, code, randomness."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from otad.attacks import Attack
from otad.baselines import MajorityKnn, MeanFeatureKnn
from otad.baselines.knn import Knn
from otad.errors import InputError
from otad.evaluate.code_prints import class_print, function_print, is_known
from otad.io.codec import digest_of, to_plain
from otad.model.bank import fingerprint_of
from otad.model.otad import OTAD
from otad.nets import Backbone
from otad.training.checkpoint import fingerprint, nameless

NET, DEFENDED, MAJORITY, MEAN_FEATURE = "net", "otad", "knn_majority", "knn_mean_feature"
FOREIGN = "model"
_KINDS: dict[type, str] = {
    Backbone: NET,
    OTAD: DEFENDED,
    MajorityKnn: MAJORITY,
    MeanFeatureKnn: MEAN_FEATURE,
}

_OF_ANY_MODULE = frozenset(vars(nn.Module()))
_PRINTS: MutableMapping[Tensor, tuple[int, str]] = WeakTensorKeyDictionary()


def kind_of(model: nn.Module) -> str:
    """The name of a model among the predictors of a record."""
    return next((name for kind, name in _KINDS.items() if isinstance(model, kind)), FOREIGN)


def model_card(model: nn.Module) -> dict[str, Any]:
    """What a record says about a model: its kind, its settings and a fingerprint of all of it."""
    card: dict[str, Any] = {"kind": kind_of(model), "class": type(model).__name__}
    card |= _settings(model)
    state = model.state_dict() | dict(model.named_buffers())  # also those that are not saved
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    others = {name: nameless(value) for name, value in state.items() if name not in tensors}
    note = f"{type(model).__module__}|{nameless(model)}|{card}|{others}|{_untold(model)}"
    return card | {"fingerprint": fingerprint_of(tensors, note=note)}


def _untold(model: nn.Module) -> list[Any]:
    """What neither weights nor names tell: a temperature, say, or an edit of `forward`."""
    kinds = {type(module): None for module in model.modules()}
    values = {
        f"{place}.{name}": value
        for place, module in model.named_modules()
        for name, value in _attributes(module).items()
    }
    return [values, [class_print(kind) for kind in kinds]]


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Plain public values; of modules that are not the library's all they hold on their own."""
    if not is_known(type(module)):
        own = {name: value for name, value in vars(module).items() if name not in _OF_ANY_MODULE}
        return {name: _by_itself(value) for name, value in own.items()}
    plain = (bool, int, float, str, tuple)
    return {
        name: repr(value)
        for name, value in sorted(vars(module).items())
        if isinstance(value, plain) and not name.startswith("_") and name != "training"
    }


def _by_itself(value: object) -> Any:
    """Without following what else a function knows, which may be the module it belongs to."""
    if isinstance(value, FunctionType):
        return function_print(value)
    return _plain(value) if isinstance(value, (Tensor, np.ndarray)) else nameless(value)


def _settings(model: nn.Module) -> dict[str, Any]:
    if isinstance(model, Backbone):
        try:
            return {"net": model.config()}
        except InputError:  # not a registered kind: its class and weights still tell it apart
            return {"net": {"class": type(model).__name__}}
    if isinstance(model, Knn):
        return _settings(model.model) | {"n_neighbors": model.n_neighbors}
    if not isinstance(model, OTAD):
        return {}
    return _settings(model.backbone) | {
        "n_neighbors": model.n_neighbors,
        "smoothness": model.smoothness,
        "strong_convexity": model.strong_convexity,
        "search": model.search,
        "bank": {"points": len(model.bank_inputs), "fingerprint": model.bank_fingerprint},
        **model.answerer.describe(),
    }


def settings_of(attack: Attack) -> dict[str, Any]:
    """The settings of an attack in plain values; modules and tensors by their fingerprint."""
    own: Any = attack
    if is_dataclass(own):
        names = [field.name for field in fields(own) if field.init]
    else:
        names = [name for name in vars(own) if name != "remarks"]
    return {name: _plain(getattr(attack, name)) for name in names}


def _plain(value: Any) -> Any:
    if isinstance(value, nn.Module):
        card = model_card(value)
        return {"class": card["class"], "fingerprint": card["fingerprint"]}
    if isinstance(value, Tensor):
        return {"tensor": _tensor_print(value)}
    if isinstance(value, Attack):
        own = class_print(type(value))
        code = {"code": digest_of(own)} if own else {}
        return {"attack": value.name, **settings_of(value), **code}
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        text = f"{value.dtype}|{value.shape}|".encode() + value.tobytes()
        return {"array": hashlib.sha256(text).hexdigest()}
    if isinstance(value, FunctionType):
        return _function(value)
    if isinstance(value, MethodType):
        return {"method": value.__qualname__, "of": _plain(value.__self__)}
    if isinstance(value, functools.partial):
        return {"partial": [_plain(part) for part in (value.func, value.args, value.keywords)]}
    plain = value is None or is_dataclass(value) or isinstance(value, (bool, int, float, str))
    return to_plain(value) if plain else nameless(value)


def _function(function: FunctionType) -> dict[str, str]:
    """By its code and all it refers to."""
    seen = inspect.getclosurevars(function)
    used = {**seen.globals, **seen.nonlocals}
    known = {
        name: _plain(value) if isinstance(value, nn.Module) else _by_itself(value)
        for name, value in used.items()
    }
    return {
        "function": function.__qualname__,
        "digest": digest_of([function_print(function), known]),
    }


def _tensor_print(tensor: Tensor) -> str:
    """Read once as long as it is the same: training inputs are large, and every part asks. One of
    inference mode does not tell whether it is."""
    if tensor.is_inference():
        return fingerprint({"": tensor})
    known = _PRINTS.get(tensor)
    if known is None or known[0] != tensor._version:
        known = tensor._version, fingerprint({"": tensor.detach()})
        _PRINTS[tensor] = known
    return str(known[1])


@functools.cache
def code_digest() -> str:
    """A fingerprint of the library's own code and of torch: parts of other code do not count."""
    digest = hashlib.sha256(str(torch.__version__).encode())
    package = Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def generator_for(*names: object) -> torch.Generator:
    """A CPU generator whose seed is a hash of these: the same names, the same numbers."""
    text = "/".join(str(name) for name in names)
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
    return torch.Generator().manual_seed(seed)
