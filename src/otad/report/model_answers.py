"""What a model answers, wherever it is."""

from __future__ import annotations

import torch
from torch import Tensor, nn


@torch.no_grad()
def answers(model: nn.Module, inputs: Tensor) -> Tensor:
    """Outputs, on the CPU, for inputs (B,*) on any device."""
    device = next((it.device for it in model.parameters()), inputs.device)
    outputs: Tensor = model(inputs.to(device))
    return outputs.cpu()
