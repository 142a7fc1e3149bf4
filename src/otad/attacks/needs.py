"""What an attack needs of a model, its inputs and the threat, and why they do not fit it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

from torch import Tensor, nn

from otad.threat import NORMS, LpBall


@dataclass(frozen=True, eq=False)
class Knowledge:
    """What an attacker knows about a model beside its answers and gradients: by default nothing, as
    of a plain network. Of a model that answers from a bank: the undefended `network` inside; the
    `keys`, which map inputs (B,*) to the points (B,d) whose neighbors in the bank are searched;
    whether they are the normalized inputs (`affine_keys`), so that straight lines stay straight;
    whether the attacker `knows_inputs` of training, as they can be computed from the bank or are
    given as `train_x` (N,*), a row per bank point."""

    network: nn.Module | None = None
    keys: Callable[[Tensor], Tensor] | None = None
    affine_keys: bool = True
    knows_inputs: bool = False
    train_x: Tensor | None = None


class Setting(NamedTuple):
    """What is attacked: inputs of shape `input_shape` each, a task, and the threat if known."""

    input_shape: Sequence[int]
    task: str
    threat: LpBall | None = None


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What an attack needs: `gradients` of the attacked model, without which it goes nowhere; the
    undefended `network` inside a defended model; a model that answers from a `bank`; its
    `affine_keys` or `train_inputs` (see `Knowledge`); `images` (channels, height, width);
    `unit_box`, bounded inputs and a threat that treats all features alike; images that the
    `windows` of pyautoattack's Square can tile; a threat with `groups`, categories that can switch;
    a `package` of the extra `attacks`. `norms`, `tasks`: those it works for."""

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
        """Why the attack does not fit a model, None where it fits."""
        if self.network and known.network is None:
            return "it needs the network inside a defended model; pgd attacks a plain network"
        if (self.bank or self.affine_keys or self.train_inputs) and known.keys is None:
            return "it needs a model that answers from a bank of training points"
        if self.affine_keys and not known.affine_keys:
            return "it needs neighbors of inputs that are only normalized; see the attack keys"
        if self.train_inputs and not known.knows_inputs:
            return "it needs the training inputs, which the bank does not hold; pass train_x"
        if self.package is not None and find_spec(self.package) is None:
            return f"{self.package} is not installed: pip install 'otad[attacks]'"
        return None

    def unmet_in(self, setting: Setting) -> str | None:
        """Why the attack does not fit such inputs under such a threat, None where it fits."""
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
            expected = "images that the l2 windows of Square can tile, such as 28 x 28 or 32 x 32"
            got = " x ".join(map(str, input_shape[1:]))
            return f"expected {expected}, got {got}; random_search takes any shape"
        return None


def _can_tile(height: int, width: int) -> bool:
    """Whether the library's first l2 step fits: windows of a fifth of the height, from a margin of
    half of what five leave, as many as the sides hold. Only a single pixel may stick out."""
    side = height // 5
    margin = (height - 5 * side) // 2
    return side == 1 or (
        side > 1 and all(margin + length // side * side <= length for length in (height, width))
    )
