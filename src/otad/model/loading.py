"""Loading a model from its folder."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from otad.checks import check_device, refusing, require
from otad.errors import InputError
from otad.model import prototypes  # noqa: F401  (registers its network)
from otad.model.answerers import ANSWERERS, NeighborAnswerer
from otad.model.folder import CARD, read_bank, read_block, read_card
from otad.model.otad import OTAD
from otad.model.training_inputs import SAME
from otad.nets import Backbone, build, build_metric
from otad.nets.features import parts_of_user, unwrapped, with_module
from otad.nets.inputs import restored


@torch.inference_mode(False)  # tensors made in inference mode have no gradients
def load(
    folder: str | Path,
    *,
    net: nn.Module | Callable[[], nn.Module] | None = None,
    device: str = "cpu",
    resident: bool = True,
    verify: bool = True,
) -> OTAD:
    """Load a model from a folder that `OTAD.save` wrote.

    Nothing is unpickled and no module is imported on behalf of the folder, so a folder cannot run
    code.

    Parameters
    ----------
    folder : path
        The folder.
    net : nn.Module, callable or None
        If the network has a class of your own, a module of that class or a function that makes one.
        Its weights are replaced by the saved ones, which must have the same names and shapes and
        give the same outputs.
    device : str
        Where the model goes, such as "cpu" or "cuda".
    resident : bool
        If False, the bank stays mapped from its file, and only neighbors are read.
    verify : bool
        Whether the whole bank is read to detect a changed byte. If False, only its header and a
        sample of its points are compared.

    Returns
    -------
    OTAD
        The model. The notes of the folder are in `model.notes`.

    Raises
    ------
    InputError
        If the folder has no model, was changed, or needs a `net`.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> import otad
    >>> model = otad.defend(None, torch.eye(3), torch.arange(3), inputs="pixels", n_neighbors=2)
    >>> x = torch.rand(4, 3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     card = model.save(folder)
    ...     print(torch.allclose(otad.load(folder)(x), model(x)))
    True
    """
    if net is not None and not isinstance(net, nn.Module):
        net = net()
        require(isinstance(net, nn.Module), "net", "a function that makes a module", type(net))
    folder = Path(folder)
    card = read_card(folder)
    try:
        model = _read_model(folder, card, net, resident, verify)
    except (InputError, FileNotFoundError):
        if read_card(folder) == card:
            raise
        again: dict[str, Any] = {"net": net, "resident": resident, "verify": verify}
        return load(folder, device=device, **again)  # the model was replaced in the meantime
    return model.to(check_device(device))


def _read_model(
    folder: Path, card: dict[str, Any], net: nn.Module | None, resident: bool, verify: bool
) -> OTAD:
    with refusing(f"{folder / CARD}: expected a whole model card"):
        nets, metric, keys = card["backbone"], None, None
        backbone = _read_backbone(card, read_block(folder, card, nets), net)
        bank = read_bank(folder, card, verify=verify, mmap=not resident)
        if "metric" in card:
            nets = card["metric"]
            state = read_block(folder, card, nets["metric"])
            own = None if net is None else copy.deepcopy(net)  # its weights are others
            metric = restored(build_metric, with_module(nets["config"], own), state)
            _check_probe(metric, nets["config"].get("probe"))
            keys = read_block(folder, card, nets["keys"])["keys"]
        users = [part for one in (backbone, metric) if one for part in parts_of_user(one)]
        expected = f"None, as the {type(backbone).__name__} of this folder is complete"
        require(net is None or users, "net", expected, type(net).__name__)
        kind = next((kind for kind in ANSWERERS if kind.card_entry in card), NeighborAnswerer)
        entry = card[kind.card_entry] if kind.card_entry else {}
        tensors = read_block(folder, card, entry) if entry else {}
        options = kind.restore(card["settings"], entry, tensors)
        given: dict[str, Any] = {"resident": resident, "metric": metric, "keys": keys}
        model = OTAD(backbone, bank, **given, **options)
        model.notes = dict(card["notes"])
        return model


def _read_backbone(
    card: dict[str, Any], state: dict[str, Tensor], net: nn.Module | None
) -> Backbone:
    """Return the backbone that the card describes, with the user's own module if it needs one."""
    net = None if net is None else unwrapped(net)
    try:
        backbone = restored(build, with_module(card["backbone"]["config"], net), state)
    except InputError as error:
        if net is None or str(error).startswith("net:"):
            raise
        expected = f"{type(net).__name__} with layers of the sizes that were saved"
        raise InputError(f"net: expected {expected}, got one with others: {error}") from error
    _check_probe(backbone, card.get("probe"))
    return backbone


def _check_probe(net: nn.Module, probe: list[float] | None) -> None:
    """Refuse a module of the user that gives other outputs than those noted in the folder."""
    for part in parts_of_user(net):
        noted, found = torch.tensor(probe), torch.tensor(part.probe())
        same = noted.shape == found.shape
        same = same and bool((found - noted).abs().max() <= SAME * noted.abs().max())
        got = f"{type(part.net).__name__}, which gives others with the same weights"
        require(same, "net", "a module that gives the outputs noted in the folder", got)
