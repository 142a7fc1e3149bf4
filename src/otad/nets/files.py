"""A backbone in a file of its own: safetensors, with its description as JSON in the header."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from otad.checks import check_device, refusing
from otad.io.tensor_files import read_tensors, write_tensors
from otad.nets.base import Backbone, build
from otad.nets.inputs import restored


def save_net(net: Backbone, path: Path, **about: Any) -> None:
    """Write the weights and the description of a net, and what you note of it in plain JSON."""
    write_tensors(path, net.state_dict(), {"config": net.config(), "about": about})


def load_net(path: Path, *, device: str = "cpu") -> Backbone:
    """The net of a file by `save_net`, in evaluation mode. Nothing is unpickled."""
    tensors, header = read_tensors(path)
    with refusing(f"{path}: expected a net with its config"):
        return restored(build, header["config"], tensors).to(check_device(device))
