"""A model as the service offers it: its tensors by name, and the answers that fill them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otad.certify import certify
from otad.checks import require
from otad.data.encoding import TableEncoding
from otad.errors import InputError, SolverError
from otad.explain import explain
from otad.explain.contributions import contributions_of
from otad.model.conversion import Estimator
from otad.model.names import check_names, class_names_of
from otad.model.otad import OTAD
from otad.serve import protocol
from otad.serve.compute import Answers
from otad.serve.protocol import Array

INPUT = "input"
POINTS = ("neighbors", "weights", "contributions")  # (B,K): one entry for each training point
RADIUS = "certified_radius"


class ServedModel:
    """The inputs and outputs by name of a defended model, or of the module of a fitted estimator.

    A model of images or plain tables has one tensor "input". A table with text or missing cells
    has one tensor per column. `name` is that of the model in paths."""

    def __init__(self, model: OTAD | Estimator, name: str) -> None:
        module: Any = getattr(model, "module_", model)
        require(isinstance(module, OTAD), "model", "an OTAD model", type(module).__name__)
        self.model: OTAD = module
        self.name, self.version = protocol.check_name(name), "1"
        net, self.encoding = self.model.backbone, TableEncoding.of(self.model.notes)
        self.is_classifier = net.task == "classification"
        check_names(self.model.notes, self.model.interface())
        self.classes = class_names_of(self.model)
        self._no_radius = self._warm_up()
        number = "FP64" if net.mean.dtype == torch.float64 else "FP32"
        self.inputs = self._describe_inputs(number)
        self.outputs = {tensor.name: tensor for tensor in self._describe_outputs(number)}
        self.usual = ("prediction", "label", "probabilities")[: 3 if self.is_classifier else 1]

    def _warm_up(self) -> str | None:
        """Answer and certify once, so that no request waits for what is prepared at first use.
        Return why there are no certified radii, or None."""
        net = self.model.backbone
        typical = net.mean.detach().expand(net.input_shape)
        if net.bounds is not None:
            typical = typical.clamp(*net.bounds)
        with suppress(SolverError), torch.no_grad():  # of a model that refuses rows
            self.model.trace(typical[None])
        try:
            with suppress(SolverError):
                certify(self.model, typical[None], progress=False)
        except InputError as error:
            return str(error)
        return None

    def _describe_inputs(self, number: str) -> list[protocol.Tensor]:
        if self.encoding is None:
            return [protocol.Tensor(INPUT, number, (-1, *self.model.backbone.input_shape))]
        return [
            protocol.Tensor(column.name, protocol.BYTES if column.categories else "FP64", (-1, 1))
            for column in self.encoding.columns
        ]

    def _describe_outputs(self, number: str) -> list[protocol.Tensor]:
        found: dict[str, tuple[str, tuple[int, ...]]] = {"prediction": (number, ())}
        if self.is_classifier:
            count = self.model.backbone.n_outputs
            found = {"prediction": ("INT64", ()), "label": (protocol.BYTES, ())}
            found |= {name: (number, (count,)) for name in ("probabilities", "logits")}
        found |= {"distance": ("FP64", ()), "neighbors": ("INT64", (-1,))}
        found |= {"weights": (number, (-1,)), "contributions": ("FP64", (-1,))}
        if self._no_radius is None:
            found[RADIUS] = ("FP64", ())
        return [protocol.Tensor(name, kind, (-1, *shape)) for name, (kind, shape) in found.items()]

    def describe(self) -> dict[str, Any]:
        """Return the metadata of the model."""
        return {
            "name": self.name,
            "versions": [self.version],
            "platform": "otad_pytorch",
            "inputs": [tensor.to_dict() for tensor in self.inputs],
            "outputs": [tensor.to_dict() for tensor in self.outputs.values()],
        }

    def check_outputs(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the outputs that are asked for, or the usual ones; refuse unknown names."""
        for name in names:
            if name == RADIUS and self._no_radius and self.is_classifier:
                raise InputError(f"outputs: expected a model with certificates: {self._no_radius}")
            require(
                name in self.outputs,
                "outputs",
                f"some of {', '.join(self.outputs)}",
                repr(name)[:80],
            )
        return tuple(names) or self.usual

    def as_inputs(self, arrays: dict[str, Array]) -> Tensor:
        """Return the inputs (B, *input_shape) of a request; refuse illegal values."""
        net = self.model.backbone
        if self.encoding is None:
            x = torch.tensor(arrays[INPUT])
        else:
            cells = {name: _cells(values) for name, values in arrays.items()}
            counts = {len(column) for column in cells.values()}
            require(len(counts) == 1, "inputs", "columns of the same length", sorted(counts)[:5])
            x = self.encoding.encode(cells, lambda name, row: f"input {name!r}, row {row}")
        return net.check_inputs(x.to(net.mean), "input")

    @torch.no_grad()
    def answer(self, x: Tensor, wanted: tuple[str, ...]) -> Answers:
        """Return the tensors from which the wanted outputs of inputs (B, *input_shape) are made."""
        trace = self.model.trace(x)
        found: Answers = {"outputs": trace.outputs, "distance": trace.distance}
        if any(name in POINTS for name in wanted):
            found["neighbors"] = trace.neighbors.indices
            found["weights"] = trace.solution.multipliers.to(trace.outputs.dtype)
        if "contributions" in wanted:
            found["contributions"] = contributions_of(self.model, x, trace)
        if RADIUS in wanted:
            found[RADIUS] = certify(self.model, x, progress=False).radius
        return {name: values.cpu() for name, values in found.items()}

    def finish(self, parts: list[Answers], wanted: Sequence[str]) -> dict[str, Array]:
        """Return the wanted outputs of a request from the answers to its parts."""
        if not self.model.answerer.rests_on_neighbors and "weights" in parts[0]:
            # How many points have weight depends on the rows that were joined.
            width = max(int((part["weights"] > 0).sum(1).max()) for part in parts)
            parts = [{name: _fit(name, part[name], width) for name in part} for part in parts]
        found = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        outputs = found["outputs"]
        if self.is_classifier:
            silent = outputs.isnan().any(1)
            found["prediction"] = outputs.argmax(1).masked_fill(silent, -1)
            found["probabilities"], found["logits"] = outputs.softmax(1), outputs
        else:
            found["prediction"] = outputs
        arrays: dict[str, Array] = {}
        for name in wanted:
            arrays[name] = (
                self._labels(found["prediction"]) if name == "label" else found[name].numpy()
            )
        return arrays

    def _labels(self, predictions: Tensor) -> Array:
        """Return the names of classes (B,), empty where the model abstains."""
        names = ["" if code < 0 else self.classes[code] for code in predictions.tolist()]
        return np.array(names, dtype=object)

    def explain(self, x: Tensor) -> list[dict[str, Any]]:
        """Return the explanations of inputs (B, *input_shape) in plain JSON."""
        return [explanation.to_dict() for explanation in explain(self.model, x)]


def _cells(values: Array) -> list[Any]:
    """Return the cells of a column, None where one is missing."""
    listed = values.ravel().tolist()
    return [None if cell != cell or cell == "" else cell for cell in listed]


def _fit(name: str, values: Tensor, width: int) -> Tensor:
    """Return the tensor of a global map with as many points as the widest row has, padded by its
    first point without weight."""
    if name not in POINTS or values.shape[1] == width:
        return values
    missing = width - values.shape[1]
    if missing < 0:
        return values[:, :width]
    filler = values[:, :1] if name == "neighbors" else torch.zeros_like(values[:, :1])
    return torch.cat([values, filler.expand(-1, missing)], 1)
