"""A backbone in a file of its own: safetensors, with its config as JSON in the header."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from otad.checks import check_device, refusing, require
from otad.io.tensor_files import read_tensors, write_tensors
from otad.nets.base import Backbone, build
from otad.nets.features import classes_of_user
from otad.nets.inputs import restored

NET_FILE = "net.safetensors"  # in the folder that `otad train` writes


def save_net(net: Backbone, path: Path, **about: Any) -> None:
    """Write a backbone to a safetensors file, with its config in the header.

    Parameters
    ----------
    net : Backbone
        A backbone of a registered class. One with a module of your own class, or with a
        parametrization such as weight_norm, is refused, because the file has no code.
    path : path
        The file. It is replaced as a whole, so it never holds half a network.
    **about
        Notes of your own in plain JSON, which are stored in the header.

    Examples
    --------
    >>> import tempfile
    >>> import otad
    >>> net = otad.nets.fc_resnet((4,), 2, blocks=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     otad.nets.save_net(net, f"{folder}/net.safetensors", data="digits")
    ...     print(otad.nets.load_net(f"{folder}/net.safetensors").input_shape)
    (4,)
    """
    config = net.config()
    unknown = ", ".join(classes_of_user(config))
    require(not unknown, "net", "one that its config describes", f"one that needs code: {unknown}")
    write_tensors(path, net.state_dict(), {"config": config, "about": about})


def load_net(path: Path, *, device: str = "cpu") -> Backbone:
    """Load a backbone from a file that `save_net` wrote, in evaluation mode.

    Nothing is unpickled, so a file cannot run code.

    Parameters
    ----------
    path : path
        The file.
    device : str
        Where the network goes, such as "cpu" or "cuda".

    Returns
    -------
    Backbone

    Raises
    ------
    InputError
        If the file is damaged, or its kind of backbone is not registered.

    Examples
    --------
    >>> import tempfile
    >>> import otad
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     otad.nets.save_net(otad.nets.fc_resnet((4,), 2), f"{folder}/net.safetensors")
    ...     print(otad.nets.load_net(f"{folder}/net.safetensors").training)
    False
    """
    tensors, header = read_tensors(path)
    with refusing(f"{path}: expected a net with its config"):
        return restored(build, header["config"], tensors).to(check_device(device))
