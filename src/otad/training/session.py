"""What every training run has: weights and optimizer, data on the device, a checkpoint, epochs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Generic

import torch
from torch import Tensor

from otad.errors import InputError
from otad.training.augment import Augmentation
from otad.training.average import AnyNet, Averaged
from otad.training.checkpoint import nameless
from otad.training.cuda_graph import Replayed, Step
from otad.training.epochs import Saving, run_epochs
from otad.training.history import EpochRecord, Report, TrainResult
from otad.training.policies import choose_augmentation
from otad.training.precision import precision
from otad.training.recipe import TrainConfig, present_device
from otad.training.resume import CHECKPOINT_NAME, resume, run_identity, save
from otad.training.weight_decay import decay_groups


class Session(Generic[AnyNet]):
    """A run on checked data, taken up where it was left and saved.

    The net is moved to the device; `history` holds the records of the epochs done.
    """

    def __init__(
        self,
        net: AnyNet,
        data: Mapping[str, Tensor],
        config: TrainConfig,
        saving: Saving,
        augment: Augmentation | None,
    ) -> None:
        self.config, self.saving = config, saving
        if not any(weight.requires_grad for weight in net.parameters()):
            raise InputError("net: expected weights to train, got none that asks for a gradient")
        self.augment = choose_augmentation(config.augment, augment, net)
        device = present_device(config.device)
        self.path = saving.path(CHECKPOINT_NAME)
        self.identity: dict[str, Any] = {}
        if self.path is not None:
            own = None if augment is None else nameless(augment)
            self.identity = run_identity(net, data, config, own)
        self.run = Averaged(net, config.ema).to(device)
        self.optimizer = config.make_optimizer(decay_groups(net, config))
        self.history: list[EpochRecord] = []
        if self.path is not None and self.path.exists():
            self.history = resume(self.path, self.identity, self.run, self.optimizer)
        self.data = {name: tensor.detach().to(device) for name, tensor in data.items()}

    def run_epochs(
        self, run_epoch: Callable[[int], EpochRecord], progress: Report | bool, metric: str
    ) -> TrainResult:
        """All epochs still to do, as far as the time reaches; the net then has what remains. Scores
        are those of `metric`."""
        resumed_after = len(self.history)
        run_epochs(run_epoch, self.history, self.config, self.saving, self._save, progress)
        self.run.net.load_state_dict(self.run.best.state_dict())
        self.run.net.eval()
        return TrainResult(tuple(self.history), metric, resumed_after, self.config.epochs)

    def recorded(self, step: Step) -> Step:
        """The step, or on a GPU its record if the config asks for one."""
        return Replayed(step) if self.config.records_steps else step

    def step(self, loss: Tensor, *, first: bool) -> None:
        """Follow the gradient of the loss; `first` for the first step of all."""
        self.backward(loss)
        self.follow(first=first)

    def backward(self, loss: Tensor) -> None:
        """The gradient of the loss, in place of the last one."""
        self.optimizer.zero_grad()
        loss.backward()

    def follow(self, *, first: bool) -> None:
        """Follow the gradient that the weights have."""
        if self.config.gradient_clip > 0:
            parameters = self.run.net.parameters()
            torch.nn.utils.clip_grad_norm_(parameters, self.config.gradient_clip)
        self.optimizer.step()
        self.run.update(first=first)

    def set_rate(self, epoch: float) -> None:
        """The learning rate after so many epochs, fractions included."""
        rate = self.config.rate_at(epoch)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def precision(self) -> AbstractContextManager[None]:
        """Within it, layers compute as the config says."""
        return precision(self.config.device, mixed=self.config.mixed_precision)

    def refuse_divergence(self, loss: float, epoch: int) -> None:
        """A loss or weights that are no numbers any more."""
        total = torch.stack([weight.detach().sum() for weight in self.run.net.parameters()]).sum()
        if not math.isfinite(loss + float(total)):
            raise InputError(
                "learning_rate: expected one at which training converges, got "
                f"{self.config.learning_rate}, which made loss or weights infinite in epoch {epoch}"
            )

    def _save(self) -> None:
        if self.path is not None:
            save(self.path, self.identity, self.run, self.optimizer, self.history)
