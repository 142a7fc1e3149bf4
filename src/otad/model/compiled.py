"""Models under `torch.compile` and `torch.export`.

The loops of an exact solver depend on the data, so its answer is a single operation for the
compiler, `otad::answer`. Its arguments are tensors and the settings of the answerer in JSON. So an
exported program holds all it needs and runs wherever this package is imported. For the gradient the
queries are answered again, as in checkpointing."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from otad.errors import InputError
from otad.model.answerers import CURVATURE, Answer, Answerer, NeighborAnswerer, WholeBankAnswerer
from otad.model.bank import FeatureBank
from otad.model.bank_module import BankModule

_MOST = 8  # rebuilt banks that are cached with their neighbor search


class _Rebuilt(NamedTuple):
    bank: BankModule
    answerer: Answerer
    tensors: tuple[Tensor | None, ...]  # kept alive, because their addresses are the cache's key


_rebuilt: OrderedDict[tuple[Any, ...], _Rebuilt] = OrderedDict()


def settings_of(bank: BankModule, answerer: Answerer) -> str:
    """Return what `otad::answer` needs beside tensors, in JSON."""
    try:
        own = answerer.settings()
    except InputError as error:
        raise InputError(
            f"solver: expected one that can be compiled or exported: {error}"
        ) from error
    entry = {name: getattr(answerer, name) for name in CURVATURE if hasattr(answerer, name)}
    about = {"settings": own, "entry": entry}
    return json.dumps(about | {"n_neighbors": bank.n_neighbors, "search": bank.search})


# This is what `torch.compiler.assume_constant_result` does, which takes seconds to import.
settings_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def answer_compiled(
    bank: BankModule, answerer: Answerer, embedded: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the images (B,d) of embedded queries, and their distances (B,) from the bank."""
    traced = answerer.traced(bank, embedded, keys)
    if traced is not None:
        return traced
    if torch.onnx.is_in_onnx_export():
        raise InputError(
            "model: expected a CIP-net in the solver's place to export to ONNX (otad imitate), "
            "got an exact solver, whose loops depend on the data; torch.export takes it"
        )
    levels = getattr(answerer, "levels", None)
    tensors = bank.bank_inputs, bank.bank_features, bank.bank_keys, levels
    found: tuple[Tensor, Tensor] = torch.ops.otad.answer(
        embedded, keys, *tensors, settings_of(bank, answerer)
    )
    return found


@torch.library.custom_op("otad::answer", mutates_args=())
def _answer(
    embedded: Tensor,
    keys: Tensor,
    inputs: Tensor,
    features: Tensor,
    points: Tensor | None,
    levels: Tensor | None,
    settings: str,
) -> tuple[Tensor, Tensor]:
    bank, answerer, _ = _rebuild(settings, inputs, features, points, levels)
    found = answerer.answer(bank, embedded, keys, None)
    return found.solution.image.clone(), _nearest(bank, answerer, found, keys)


@torch.library.custom_op("otad::answer_slope", mutates_args=())
def _answer_slope(
    gradient: Tensor,
    embedded: Tensor,
    keys: Tensor,
    inputs: Tensor,
    features: Tensor,
    points: Tensor | None,
    levels: Tensor | None,
    settings: str,
) -> Tensor:
    """Return the gradient (B,d) with respect to the queries from the gradient of the image."""
    bank, answerer, _ = _rebuild(settings, inputs, features, points, levels)
    with torch.enable_grad():
        query = embedded.detach().requires_grad_()
        image = answerer.answer(bank, query, keys, None).solution.image
        (slope,) = torch.autograd.grad(image, query, gradient)
    return slope.clone()


@_answer.register_fake
def _(embedded: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(embedded), embedded.new_empty(embedded.shape[0], dtype=torch.float64)


@_answer_slope.register_fake
def _(gradient: Tensor, embedded: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(embedded)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.settings = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    slope = torch.ops.otad.answer_slope(gradient, *ctx.saved_tensors, ctx.settings)
    return slope, *[None] * 6  # neighbors are fixed and the bank is constant


_answer.register_autograd(_backward, setup_context=_save)


def _nearest(bank: BankModule, answerer: Answerer, found: Answer, keys: Tensor) -> Tensor:
    near = found.neighbors if answerer.rests_on_neighbors else bank.neighbors(keys, 1)
    return near.distances[:, 0].clone()


def _rebuild(
    settings: str,
    inputs: Tensor,
    features: Tensor,
    points: Tensor | None,
    levels: Tensor | None,
) -> _Rebuilt:
    """Return the bank and the answerer of these tensors, which are cached."""
    tensors = inputs, features, points, levels
    key = settings, *(None if one is None else _identity(one) for one in tensors)
    if key in _rebuilt:
        _rebuilt.move_to_end(key)
        return _rebuilt[key]
    about = json.loads(settings)
    kind = NeighborAnswerer if levels is None else WholeBankAnswerer
    options = kind.restore(
        about["settings"], about["entry"], {} if levels is None else {"levels": levels}
    )
    if levels is None:
        curvature = about["entry"]["smoothness"], about["entry"]["strong_convexity"]
        answerer: Answerer = NeighborAnswerer(options["solver"], *curvature)
    else:
        answerer = WholeBankAnswerer(options["potential"])
    first, second = (one.float() if one.dtype == torch.float64 else one for one in tensors[:2])
    labels = torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device)
    bank = BankModule(
        FeatureBank(first, second, labels, "compiled", verify=False),
        about["n_neighbors"], about["search"], resident=True, keys=points,
    )  # fmt: skip
    bank.bank_inputs, bank.bank_features = inputs, features
    bank.n_searched += answerer.spares
    made = _rebuilt[key] = _Rebuilt(bank, answerer, tensors)
    if len(_rebuilt) > _MOST:
        _rebuilt.popitem(last=False)
    return made


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """Return what is equal for the same memory with the same contents.

    The version of a tensor counts the writes to it."""
    version = 0 if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), tuple(tensor.shape), tensor.dtype, str(tensor.device), version
