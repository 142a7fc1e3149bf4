"""What an attack needs of a model, its inputs and the threat model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

from torch import Tensor, nn

from otad.threat import NORMS, LpBall


@dataclass(frozen=True, eq=False)
class Knowledge:
    """What an attacker knows about a model beside its answers and gradients.

    The default is what is known about a plain network: nothing more.

    Parameters
    ----------
    network : nn.Module or None
        The undefended network inside a defended model.
    keys : callable or None
        The map from inputs (B, *input_shape) to the keys (B, m) by which neighbors are searched.
    affine_keys : bool
        Whether keys are the normalized inputs, so that a straight line of inputs stays straight.
    knows_inputs : bool
        Whether the attacker knows the training inputs, from the bank or from `train_x`.
    train_x : Tensor (N, *input_shape) or None
        The training inputs, one row for each bank point.

    Examples
    --------
    >>> import otad
    >>> otad.attacks.Bpda.misfit(otad.attacks.Knowledge())
    'it needs the network inside a defended model; pgd attacks a plain network'
    """

    network: nn.Module | None = None
    keys: Callable[[Tensor], Tensor] | None = None
    affine_keys: bool = True
    knows_inputs: bool = False
    train_x: Tensor | None = None


class Setting(NamedTuple):
    """What is attacked: the shape of an input, the task, and the threat model if it is known."""

    input_shape: Sequence[int]
    task: str
    threat: LpBall | None = None


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What an attack needs of a model, its inputs and the threat model.

    Parameters
    ----------
    gradients : bool
        The attacked model must have gradients.
    network : bool
        There must be an undefended network inside the model.
    bank : bool
        The model must answer from a bank of training points.
    affine_keys, train_inputs : bool
        The attacker must know these: see `Knowledge`.
    images : bool
        Inputs must be images (channels, height, width).
    unit_box : bool
        Inputs must be bounded, and the threat model must treat all features alike.
    windows : bool
        The l2 windows of AutoAttack must be able to tile the images.
    groups : bool
        The threat model must have categorical features.
    package : str or None
        A package of the extra `attacks` that must be installed.
    norms, tasks : tuple of str
        The norms and the tasks for which the attack works.

    Examples
    --------
    >>> import otad
    >>> otad.attacks.Pixle.needs.images, otad.attacks.Pgd.needs.gradients
    (True, True)
    >>> otad.attacks.Needs().norms
    ('l2', 'linf')
    """

    gradients: bool = False
    network: bool = False
    bank: bool = False
    affine_keys: bool = False
    train_inputs: bool = False
    images: bool = False
    unit_box: bool = False
    windows: bool = False
    groups: bool = False
    package: str | None = None
    norms: tuple[str, ...] = tuple(NORMS)
    tasks: tuple[str, ...] = ("classification", "regression")

    def unmet_by_model(self, known: Knowledge) -> str | None:
        """Return why the attack does not fit a model, or None where it fits."""
        if self.network and known.network is None:
            return "it needs the network inside a defended model; pgd attacks a plain network"
        if (self.bank or self.affine_keys or self.train_inputs) and known.keys is None:
            return "it needs a model that answers from a bank of training points"
        if self.affine_keys and not known.affine_keys:
            return "it needs neighbors of inputs that are only normalized; see the attack keys"
        if self.train_inputs and not known.knows_inputs:
            missing = "it needs the training inputs, which the bank does not hold"
            return f"{missing}; pass train_x in Python, or attack a model that `otad defend` made"
        if self.package is not None and find_spec(self.package) is None:
            return f"{self.package} is not installed: pip install 'otad[attacks]'"
        return None

    def unmet_in(self, setting: Setting) -> str | None:
        """Return why the attack does not fit the inputs, the task or the threat model, or None."""
        input_shape, task, threat = setting
        if task not in self.tasks:
            return f"it attacks {' and '.join(self.tasks)} models, got {task}"
        if self.images and len(input_shape) != 3:
            return f"it attacks images (channels, height, width), got inputs {tuple(input_shape)}"
        if threat is None:
            return None
        if threat.norm not in self.norms:
            return f"it works in {' and '.join(self.norms)}, got {threat.norm}"
        if self.unit_box and threat.bounds is None:
            return "it needs bounded inputs, as pixels are, got a threat without bounds"
        if self.groups and not threat.groups:
            return "it switches categories, got a threat without `groups`"
        for name in ("scale", "mutable", "groups"):
            if self.unit_box and getattr(threat, name) is not None:
                return f"it treats all features alike, got a threat with `{name}`"
        if self.windows and threat.norm == "l2" and not _can_tile(*input_shape[1:]):
            expected = "images that the l2 windows of AutoAttack can tile, such as 28 x 28"
            got = " x ".join(map(str, input_shape[1:]))
            return f"expected {expected}, got {got}; square and random_search take any shape"
        return None


def _can_tile(height: int, width: int) -> bool:
    """Return whether the first l2 step of AutoAttack's Square stays within the image.

    Its windows have a fifth of the height and begin after half of the pixels that five windows
    leave over. Only windows of a single pixel may reach beyond the image."""
    side = height // 5
    margin = (height - 5 * side) // 2
    return side == 1 or (
        side > 1 and all(margin + length // side * side <= length for length in (height, width))
    )
