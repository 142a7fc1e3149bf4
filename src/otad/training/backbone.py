"""Training a backbone by the paper's Algorithm 1, loss + alpha * transport energy:

    min over theta of  mean_i [ loss(head(z_i), y_i)  +  alpha * sum_k |R_k(x_i^(k-1))|^2 ]

which brings the map x_i -> z_i close to optimal transport of the training points."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from otad.checks import check_choice, check_shape, check_tensor, require
from otad.nets.base import Backbone, LinearHead
from otad.nets.inputs import evaluating
from otad.threat import LpBall
from otad.training.acceleration import compiled, precision
from otad.training.adversarial_losses import divergence, mart_losses, trades_losses
from otad.training.adversary import perturbed_weights
from otad.training.augmentation import mix_some
from otad.training.config import check_share
from otad.training.loop import Batches
from otad.training.supervised import (
    Data,
    InputConfig,
    Progress,
    SupervisedTraining,
    TrainResult,
    parts_of,
)

Loss = Callable[..., Tensor]
"""outputs (B,C) or values (B,), targets (labels, shares of classes, values), head -> mean loss; or
with `reduction="none"` the losses (B,). Losses of `COMPARING` take the outputs at perturbed inputs
followed by those at the clean ones, 2 B rows."""
COMPARING = ("trades", "mart")
_SCORED_ROWS = 1024  # at a time
_AUGMENTED_ROWS = 4096


@dataclass(frozen=True)
class TrainConfig(InputConfig):
    """Settings of `train` beside those of `LoopConfig` and `InputConfig`. The objective of a batch
    is mean loss + `energy_weight` (the paper's alpha) * mean energy.

    - `loss`: a name of `LOSSES`: "fit" for cross-entropy or squared error, with `label_smoothing`;
      "margin" for margins (o_y - o_j) / |w_y - w_j| of at least `target_margin`. With an adversary
      they are those of the perturbed inputs; "trades" and "mart", which need one, compare outputs
      at perturbed and clean inputs, with the weight `beta` (`otad.training.adversarial_losses`).
    - `pair_weight`: of the penalty for pairs of a batch that contradict a convex potential of
      smoothness `pair_smoothness` (`pair_excess`).
    - `mixing`: share of batches in which images and labels are mixed in pairs, by mixup or CutMix.
    - `compiled`: run the net under torch.compile, which takes a minute and needs a compiler; the
      steps of an adversary are not compiled."""

    loss: str = "fit"
    energy_weight: float = 0.0
    label_smoothing: float = 0.0
    target_margin: float = 1.0
    beta: float = 6.0
    pair_weight: float = 0.0
    pair_smoothness: float = 2.0
    mixing: float = 0.0
    compiled: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.loss, "loss", tuple(LOSSES))
        self.check_ranges(0.0, math.inf, "energy_weight", "pair_weight", "beta")
        self.check_ranges(1e-12, math.inf, "target_margin", "pair_smoothness")
        self.check_ranges(0.0, 1.0, "label_smoothing")
        check_share(self.mixing, "mixing")
        fits = self.loss not in COMPARING or self.adversary is not None
        require(fits, "adversary", f"one for the loss {self.loss!r}", None)
        still = self.loss == "trades" and not (self.adversary and self.adversary.random_start)
        require(not still, "adversary", "a random start for 'trades', flat at the input", "none")


def fit_loss(task: str, config: TrainConfig) -> Loss:
    """Cross-entropy, or for regression the squared error."""
    smoothing, loss = config.label_smoothing, functional.mse_loss
    if task == "classification":
        loss = partial(functional.cross_entropy, label_smoothing=smoothing)
    else:
        require(smoothing == 0, "label_smoothing", "0 for regression", smoothing)
    return lambda outputs, targets, _head, **reduction: loss(outputs, targets, **reduction)


def margin_loss(task: str, config: TrainConfig) -> Loss:
    """The mean of what scaled margins lack to `target_margin`. If features change by at most K
    times the change of the input, a label y is certain within min over j of
    (o_y - o_j) / (K |w_y - w_j|); K is bounded by `pair_excess`, the energy or the net."""
    require(task == "classification", "loss", "'fit' for regression", "'margin'")
    for name in ("label_smoothing", "mixing"):
        value = getattr(config, name)
        require(value == 0, name, "0 for the loss 'margin'", value)

    def loss(*scored: Any, reduction: str = "mean") -> Tensor:
        lacking = (config.target_margin - scaled_margins(*scored)).clamp_min(0.0)
        return lacking.mean() if reduction == "mean" else lacking

    return loss


def trades_loss(task: str, config: TrainConfig) -> Loss:
    fit = fit_loss(task, config)

    def loss(outputs: Tensor, targets: Tensor, head: LinearHead, reduction: str = "mean") -> Tensor:
        perturbed, clean = outputs.chunk(2)
        fitted = fit(clean, targets, head, reduction="none")
        losses = trades_losses(fitted, clean, perturbed, config.beta)
        return losses.mean() if reduction == "mean" else losses

    return loss


def mart_loss(task: str, config: TrainConfig) -> Loss:
    require(task == "classification", "loss", "'fit' or 'trades' for regression", "'mart'")
    for name in ("label_smoothing", "mixing"):
        value = getattr(config, name)
        require(value == 0, name, "0 for the loss 'mart'", value)

    def loss(outputs: Tensor, labels: Tensor, _: LinearHead, reduction: str = "mean") -> Tensor:
        perturbed, clean = outputs.chunk(2)
        losses = mart_losses(labels, clean, perturbed, config.beta)
        return losses.mean() if reduction == "mean" else losses

    return loss


LOSSES: dict[str, Callable[[str, TrainConfig], Loss]] = {
    "fit": fit_loss, "margin": margin_loss, "trades": trades_loss, "mart": mart_loss,
}  # fmt: skip


def scaled_margins(outputs: Tensor, labels: Tensor, head: LinearHead) -> Tensor:
    """min over j of (o_y - o_j) / |w_y - w_j| (B,) for outputs (B,C), below 0 where wrong."""
    rows = head.matrix
    apart = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")[labels]
    own = outputs.gather(1, labels[:, None])
    tiny = torch.finfo(outputs.dtype).tiny
    margins = (own - outputs) / apart.to(outputs.dtype).clamp_min(tiny)
    return margins.scatter(1, labels[:, None], torch.inf).amin(1)


def pair_excess(embedded: Tensor, features: Tensor, smoothness: float) -> Tensor:
    """How much the points of a batch (B,d) contradict one map of smoothness L, in the mean: scalar.

    Pairs (e_i, z_i) belong to the gradient of a convex, L-smooth function only if for all i, j

        |z_i - z_j|^2 / L  <=  <z_i - z_j, e_i - e_j>.

    The excess of a point is the sum of its violations. For a lifted net, z = (x, g) and e = (x, 0),
    and L = 2 the condition is |g_i - g_j| <= |x_i - x_j| and sufficient
    (`cip.whole_bank.lifted_bank`); for other nets cycles of more points matter too."""

    def pair_products(one: Tensor, other: Tensor) -> Tensor:
        """<a_i - a_j, b_i - b_j> of all pairs (B,B)."""
        products = one @ other.mT
        own = products.diagonal()
        return own[:, None] + own - products - products.mT

    steps, moves = embedded - embedded.mean(0).detach(), features - features.mean(0).detach()
    excess = pair_products(moves, moves) / smoothness - pair_products(steps, moves)
    return excess.clamp_min(0.0).sum(1).mean()


@torch.inference_mode(False)  # gradients, whatever mode the caller is in
def train(
    net: Backbone, data: Data, config: TrainConfig, *, progress: Progress = None, **options: Any
) -> TrainResult:
    """Train `net` in place, leaving it on `config.device` in evaluation mode.

    `data` is a `Split`, or (train_x, train_y) or (train_x, train_y, val_x, val_y), and is moved to
    the device as a whole. Inputs may be bytes, 0 to 255 over the bounds of the net. `progress`:
    see `otad.progress`; a function is called with each `EpochRecord`. `options` are:

    - `weights` (N,): of the training examples in the mean of loss + alpha * energy, positive and in
      any unit; a row of weight 2 counts like two of weight 1
    - `augment`: your own augmentation in place of `config.augment`; it gets several batches at once
    - `checkpoint_dir`: the run is saved there after every epoch, or every `save_seconds`; a call
      with the same initial net, data and config resumes a killed run and ends with the same weights
      bit for bit
    - `max_seconds`: stop in time, after at least one epoch, with a result that is not `finished`

    With an adversary, all scores of a record are those of perturbed inputs."""
    return BackboneTraining(net, data, config, **options).fit(progress)


class BackboneTraining(SupervisedTraining[Backbone]):
    config: TrainConfig

    def __init__(
        self,
        net: Backbone,
        data: Data,
        config: TrainConfig,
        *,
        weights: Tensor | None = None,
        **options: Any,
    ) -> None:
        images = net.task == "classification" and len(net.input_shape) == 3
        got = f"{config.mixing} for {net.task} of shape {net.input_shape}"
        expected = "0 unless images (C,H,W) are classified"
        require(images or config.mixing == 0, "mixing", expected, got)
        if weights is not None:
            for name in ("mixing", "pair_weight"):
                value = getattr(config, name)
                require(value == 0, name, "0 with weights of examples", value)
            scaled = scaled_weights(weights, len(parts_of(data)["train_x"]))
            options["more"] = {"weights": scaled.to(net.mean.dtype)}
        self.loss = LOSSES[config.loss](net.task, config)
        # What the adversary raises, unless it raises the divergence of TRADES.
        self.raised = fit_loss(net.task, config) if config.loss in COMPARING else self.loss
        super().__init__(net, data, config, **options)
        self.forward = compiled(self._forward) if config.compiled else self._forward

    def check_targets(self, net: Backbone, y: Tensor, rows: int, name: str) -> None:
        net.check_targets(y, rows, name)

    def _forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Embedded inputs and features (B,d), outputs, energies (B,)."""
        net = self.weights.net
        embedded = net.embed(x)
        features, energies = net.transport(embedded)
        return embedded, features, net.head(features), energies

    def batches(self, row_batches: Sequence[Tensor], generator: torch.Generator) -> Batches:
        x, y, net = self.data["train_x"], self.data["train_y"], self.weights.net
        weights = self.data.get("weights")
        mixing = self.config.mixing
        at_once = max(1, _AUGMENTED_ROWS // self.config.batch_size)  # few launches for many images
        number = 0
        for start in range(0, len(row_batches), at_once):
            some = row_batches[start : start + at_once]
            rows, sizes = torch.cat(list(some)), [len(part) for part in some]
            inputs, targets = net.from_bytes(x[rows]), y[rows]
            if self.augment is not None:
                inputs = self.augment(inputs, generator)
            of_rows = [] if weights is None else [weights[rows].split(sizes)]
            pairs = zip(inputs.split(sizes), targets.split(sizes), *of_rows, strict=True)
            for x_part, y_part, *more in pairs:
                batch = x_part, y_part
                if mixing > 0:
                    batch = mix_some(*batch, net.n_outputs, generator, probability=mixing)
                x_part, y_part = self.laid_out(batch[0]), batch[1]
                share, number = number / len(row_batches), number + 1
                yield x_part, y_part, self.begin_attack(x_part, share, generator), *more

    def step(self, *batch: Tensor, first: bool) -> Tensor:
        """One gradient step; the batch means of loss, energy and score (3,)."""
        x, y, start, *weights = batch
        inputs = x
        if self.config.adversary is not None:
            inputs = self._attack(self.weights.net, self.ball, x, y, start)
            if self.config.loss in COMPARING:
                # In one pass, so that batch statistics are those of both.
                inputs = torch.cat([inputs, x])
        with perturbed_weights(
            self.weight_perturbation(lambda: self._objective(inputs, y, *weights)[0])
        ):
            objective, loss, energy, outputs = self._objective(inputs, y, *weights)
            self.backward(objective)
        self.update(first=first)
        score = _scores(outputs[: len(y)].detach(), y).mean()
        return torch.stack([loss.detach(), energy.detach(), score])

    def _objective(
        self, inputs: Tensor, y: Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What a step lowers, its loss and energy, and the outputs (B,...)."""
        net, config = self.weights.net, self.config
        with precision(self.device, mixed=config.mixed_precision):
            passed = self.forward(inputs)
        embedded, features, outputs, energies = (part.to(net.mean.dtype) for part in passed)
        if weights is None:
            loss, energy = self.loss(outputs, y, net.head), energies.mean()
        else:
            losses = self.loss(outputs, y, net.head, reduction="none")
            energies = energies.reshape(-1, len(y)).mean(0)
            loss, energy = ((weights * part).mean() for part in (losses, energies))
        objective = loss + config.energy_weight * energy if config.energy_weight > 0 else loss
        if config.pair_weight > 0:
            excess = pair_excess(embedded, features, config.pair_smoothness)
            objective = objective + config.pair_weight * excess
        return objective, loss, energy, outputs

    def _attack(self, net: Backbone, ball: LpBall, x: Tensor, y: Tensor, start: Tensor) -> Tensor:
        """The inputs that the adversary makes of x (B,*input_shape)."""
        adversary, dtype = self.config.adversary, net.mean.dtype
        assert adversary is not None
        with precision(self.device, mixed=self.config.mixed_precision):
            if self.config.loss == "trades":
                with evaluating(net):
                    clean = net(x).to(dtype).detach()  # not `no_grad`: autocast caches its casts

            def loss(outputs: Tensor) -> Tensor:
                if self.config.loss == "trades":
                    return divergence(clean, outputs.to(dtype))
                return self.raised(outputs.to(dtype), y, net.head, reduction="none")

            return adversary.attack(ball, net, x, loss, start)

    def validate(self) -> float | None:
        data, net, adversary = self.data, self.weights.best, self.config.adversary
        if "val_x" not in data:
            return None
        net.eval()
        sums, generator = [], torch.Generator(self.device).manual_seed(self.config.seed)
        parts = (data[name].split(_SCORED_ROWS) for name in ("val_x", "val_y"))
        for x, y in zip(*parts, strict=True):
            x = self.laid_out(net.from_bytes(x))
            if adversary is not None:
                ball = adversary.ball(net)
                x = self._attack(net, ball, x, y, adversary.start(ball, x, generator))
            with torch.no_grad(), precision(self.device, mixed=self.config.mixed_precision):
                sums.append(_scores(net(x), y).sum())
        return float(torch.stack(sums).double().sum()) / len(data["val_y"])


def scaled_weights(weights: Tensor, rows: int) -> Tensor:
    """Weights (rows,) of training examples in float64, scaled to a mean of 1."""
    check_tensor(weights, "weights", "N")
    check_shape(weights, "weights", (rows,), "with one for each training example")
    least = float(weights.min())
    require(least > 0, "weights", "positive numbers (leave out rows of weight 0)", least)
    shares = weights.double() / weights.double().max()  # whose sum is finite
    return shares / shares.mean()


def _scores(outputs: Tensor, targets: Tensor) -> Tensor:
    """Per row, whether the (largest) label is right, or the squared error of a value."""
    if outputs.dim() == 2:
        labels = targets if targets.dim() == 1 else targets.argmax(1)
        return (outputs.argmax(1) == labels).float()
    return (outputs - targets).square()
