"""Requests of the protocol as plain values."""

from __future__ import annotations

from typing import Any

import torch


def body_of(x: torch.Tensor, *outputs: str, **more: Any) -> dict[str, Any]:
    """A request in JSON for the tensor "input" of a model."""
    given = {"name": "input", "shape": list(x.shape), "datatype": "FP32", "data": x.tolist()}
    asked = {"outputs": [{"name": name} for name in outputs]} if outputs else {}
    return {"inputs": [given], **asked, **more}


def outputs_of(answer: dict[str, Any]) -> dict[str, Any]:
    """The flat data of each output of a response."""
    return {one["name"]: one["data"] for one in answer["outputs"]}
