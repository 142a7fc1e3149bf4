"""Training of purifiers by the training loop of the library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from otad.baselines.purification import Purifier
from otad.checks import check_device, refusing, require
from otad.io.tensor_files import fingerprint, fingerprint_of
from otad.nets import Backbone
from otad.nets.inputs import evaluating
from otad.threat import LpBall
from otad.training import Adversary
from otad.training.acceleration import precision
from otad.training.config import LoopConfig
from otad.training.loop import Batches, Saving, Training

DEFAULTS: dict[str, Any] = {"optimizer": "adamw", "learning_rate": 1e-3, "weight_decay": 0.0}


@dataclass(frozen=True)
class PurifierEpoch:
    """The mean loss of an epoch; purifiers have no validation score."""

    epoch: int
    loss: float
    val_score: None = None
    seconds: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        return f"epoch {self.epoch}: loss {self.loss:.4f}"


class PurifierTraining(Training[Purifier, PurifierEpoch]):
    record_type: ClassVar[type] = PurifierEpoch
    label = "training purifier"

    def __init__(
        self,
        purifier: Purifier,
        x: Tensor,
        config: LoopConfig,
        saving: Saving,
        attacked: tuple[Backbone, Adversary] | None,
    ) -> None:
        def identity() -> dict[str, Any]:
            by = None if attacked is None else [fingerprint_of(attacked[0]), asdict(attacked[1])]
            return {"data": fingerprint({"train_x": x}), "attacked": by}

        super().__init__(purifier, config, saving, check_device(config.device), identity)
        self.x, self.attacked = x.to(self.device), attacked
        if attacked is not None:
            attacked[0].to(self.device)

    @property
    def n_rows(self) -> int:
        return len(self.x)

    def batches(self, row_batches: Sequence[Tensor], generator: torch.Generator) -> Batches:
        for rows in row_batches:
            x = self.x[rows]
            yield x, x if self.attacked is None else self._attack(x, *self.attacked, generator)

    def _attack(
        self, x: Tensor, net: Backbone, adversary: Adversary, generator: torch.Generator
    ) -> Tensor:
        """Return inputs (B,*) that raise the loss of a network at its own answers for x."""
        with torch.no_grad(), evaluating(net):
            labels = net(x).argmax(1)
        ball = adversary.ball(net)

        def loss(outputs: Tensor) -> Tensor:
            return functional.cross_entropy(outputs, labels, reduction="none")

        return adversary.attack(ball, net, x, loss, adversary.start(ball, x, generator)).detach()

    def step(self, *batch: Tensor, first: bool) -> Tensor:
        with precision(self.device, mixed=self.config.mixed_precision):
            loss = self.weights.net.loss(*batch)
        self.backward(loss)
        self.update(first=first)
        return loss.detach()[None]


@torch.inference_mode(False)  # gradients work in inference mode too
def train_purifier(
    purifier: Purifier,
    train_x: Tensor,
    *,
    net: Backbone | None = None,
    threat: LpBall | None = None,
    steps: int = 1,
    settings: dict[str, Any] | None = None,
    progress: Callable[[Any], None] | bool | None = None,
    **saving: Any,
) -> tuple[float, ...]:
    """Train a purifier in place on images, and leave it in evaluation mode.

    Parameters
    ----------
    purifier : Purifier
        A `SparseCoding`, an `ApeGan` or a `Diffusion`.
    train_x : Tensor (N, C, H, W)
        The training images, which need no labels.
    net, threat : Backbone and LpBall, or None
        For `ApeGan` alone: the classifier whose attacks are undone, and the norm and eps of these.
    steps : int
        The number of steps of these attacks. With one step they are FGSM.
    settings : dict or None
        Settings of the training loop, such as `epochs` and `learning_rate`: see
        `otad.training.TrainConfig`. The default optimizer is AdamW with the rate 1e-3.
    progress, **saving
        As in `otad.training.train`. A run resumes from its `checkpoint_dir`.

    Returns
    -------
    tuple of float
        The mean loss of each epoch.

    Raises
    ------
    InputError
        If the purifier has no weights, or the images do not fit it.

    Examples
    --------
    >>> import otad
    >>> from otad.baselines import SparseCoding, train_purifier
    >>> digits = otad.data.load("digits")
    >>> purifier = SparseCoding((1, 8, 8), patch=4, atoms=16, bounds=(0.0, 1.0))
    >>> losses = train_purifier(purifier, digits.train_x[:100], settings={"epochs": 3})
    >>> len(losses), losses[-1] < losses[0]
    (3, True)
    """
    x = purifier.check_inputs(train_x, "train_x")
    with refusing("settings: expected those of a training loop"):
        config = LoopConfig(**(DEFAULTS | (settings or {})))
    needed = purifier.learns_from_attacks
    for name, value in (("net", net), ("threat", threat)):
        expected = "one whose attacks are undone" if needed else "None for this purifier"
        require((value is not None) == needed, name, expected, value and type(value).__name__)
    attacked = None
    if net is not None and threat is not None:
        require(net.task == "classification", "net", "a classifier", net.task)
        for name in ("input_shape", "bounds"):
            mine, other = getattr(net, name), getattr(purifier, name)
            require(mine == other, f"net.{name}", f"{other}, as the purifier has", mine)
        start = steps > 1
        attacked = net, Adversary(threat.eps, norm=threat.norm, steps=steps, random_start=start)
    run = PurifierTraining(purifier, x.detach(), config, Saving(**saving), attacked)
    run.run(progress)
    return tuple(record.loss for record in run.history)
