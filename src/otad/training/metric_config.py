"""How a metric is trained."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from otad.checks import check_choice, check_count
from otad.errors import InputError
from otad.training.adversary import Adversary
from otad.training.metric_losses import LOSSES, OWN_LOSSES
from otad.training.recipe import TrainConfig, check_range


@dataclass(frozen=True)
class MetricConfig(TrainConfig):
    """Settings of one run of `train_metric`; those of `TrainConfig` hold, but for the energy.

    - `loss`: "neighborhood", "means" (of the classes), "triplet" (semi-hard) or "contrastive" (the
      last two by the extra `metric`), with its `margin`; `temperature` is that of the first two.
    - `adversary`: each input is first moved to where its neighbors by the current metric are
      wrong, by ascent on the neighborhood loss; None for plain training.
    - `references`: neighbors are those in the "batch", or in a "bank" of the keys of all
      training inputs, made anew before every epoch and row by row within it.
    - `channels_last` lays images out for GPUs.
    - `n_neighbors` vote in the score on validation data.
    """

    epochs: int = 40
    batch_size: int = 512
    learning_rate: float = 1e-3
    optimizer: str = "adamw"
    loss: str = "neighborhood"
    margin: float | None = None
    temperature: float = 0.1
    adversary: Adversary | None = None
    references: str = "batch"
    whole_batches: bool = True
    channels_last: bool = False
    n_neighbors: int = 10

    losses: ClassVar[tuple[str, ...]] = tuple(LOSSES)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.references, "references", ("batch", "bank"))
        check_count(self.n_neighbors, "n_neighbors")
        check_count(self.batch_size, "batch_size", least=2)
        unmoved = ("energy_weight", "pair_weight", "pair_smoothness")
        self.refuse_changed(unmoved, "a metric carries nothing")
        unnamed = ("label_smoothing", "target_margin", "mixing")
        self.refuse_changed(unnamed, "a metric compares, and names no class")
        self.refuse_changed(("compiled",), "nets under attack are not fused")
        if self.replayed and (self.loss not in OWN_LOSSES or self.references == "bank"):
            raise InputError(
                f"replayed: expected with a loss of {', '.join(OWN_LOSSES)} among the batch, as "
                f"other steps ask the GPU back, got {self.loss!r} among the {self.references}"
            )
        if self.references == "bank" and self.loss != "neighborhood":
            raise InputError(
                f"references: expected 'batch' for the loss {self.loss}, whose pairs with all "
                "of a bank are too many, got 'bank'"
            )
        check_range(self.temperature, "temperature", 1e-12, math.inf)
        check_range(self.margin_used, "margin", 0.0, math.inf)

    @property
    def margin_used(self) -> float:
        """The margin, or the usual one of the loss."""
        return LOSSES[self.loss] if self.margin is None else self.margin
