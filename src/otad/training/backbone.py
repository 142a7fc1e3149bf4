"""Training a backbone by the paper's Algorithm 1, with the transport energy as a penalty:

    min over theta of  mean_i [ loss(head(z_i), y_i)  +  alpha * sum_k |R_k(x_i^(k-1))|^2 ]

The penalty brings the map x_i -> z_i close to optimal transport of the training points."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from otad.checks import check_choice, require
from otad.nets.base import Backbone, LinearHead
from otad.nets.inputs import evaluating
from otad.threat import LpBall
from otad.training.acceleration import compiled, precision
from otad.training.adversarial_losses import divergence, mart_losses, trades_losses
from otad.training.adversary import perturbed_weights
from otad.training.augmentation import mix_some
from otad.training.config import check_share
from otad.training.loop import Batches
from otad.training.margins import pair_excess, scaled_margins
from otad.training.supervised import (
    Data,
    InputConfig,
    Progress,
    SupervisedTraining,
    TrainResult,
    parts_of,
    scaled_weights,
)

Loss = Callable[..., Tensor]
"""Maps outputs (B,C) or values (B,), targets (labels, shares of classes or values) and the head to
the mean loss, or with `reduction="none"` to the losses (B,). The losses of `COMPARING` take the
outputs at perturbed inputs followed by the outputs at clean inputs, 2 B rows."""
COMPARING = ("trades", "mart")
_SCORED_ROWS = 1024  # rows that are scored at a time
_AUGMENTED_ROWS = 4096


@dataclass(frozen=True)
class TrainConfig(InputConfig):
    """The settings of `train`.

    The objective of a batch is the mean loss plus `energy_weight` times the mean transport energy.

    Parameters
    ----------
    epochs, batch_size : int
        How often all examples are used, and how many are used at a time.
    learning_rate, optimizer : float, str
        The largest learning rate, and "sgd" or "adamw".
    momentum, nesterov : float, bool
        The momentum of SGD, which may be Nesterov's, or the first beta of AdamW.
    weight_decay, decay_on : float, str
        The weight decay, and what it acts on: "all" parameters, or the "matrices" of layers.
    schedule : str
        After the warmup, "cosine" lowers the learning rate to zero, "step" divides it by ten after
        1/2 and 3/4 of the training, and "constant" leaves it.
    warmup : float
        The number of epochs in which the learning rate rises linearly from zero.
    gradient_clip : float
        The largest norm of the gradient of all parameters together; 0 for no limit.
    ema : float
        The decay of a running average of all weights, which is the result; 0 for none.
    mixed_precision : bool
        Whether the network computes in bfloat16 where autocast allows it.
    whole_batches : bool
        Whether rows that do not fill a batch are skipped. Other epochs use them.
    seed : int
        The seed of everything random.
    device : str
        Where the training runs, such as "cpu" or "cuda".
    log_every : int
        The number of epochs between two lines to the `otad` logger.
    augment : str
        Random changes of images: "none", "light" or "strong".
    adversary : Adversary or None
        Perturbs the inputs of each training step, and the weights, to raise the loss.
    channels_last : bool
        Whether images use a memory layout that is faster on GPUs.
    cuda_graph : bool
        Whether one step on whole batches is captured on a GPU and replayed.
    loss : str
        "fit" for the cross-entropy or the squared error; "margin" for margins
        `(o_y - o_j) / |w_y - w_j|` of at least `target_margin`, where w are the rows of the head.
        With an adversary, both are taken at perturbed inputs. "trades" and "mart" need an adversary
        and compare the outputs at perturbed and at clean inputs.
    energy_weight : float
        The weight of the transport energy, alpha in the paper.
    label_smoothing : float
        The label smoothing of the cross-entropy.
    target_margin : float
        The margin that the loss "margin" asks for.
    beta : float
        The weight of the comparison in the losses "trades" and "mart".
    pair_weight, pair_smoothness : float
        The weight of a penalty for pairs of a batch that contradict a convex potential, and the
        smoothness of that potential.
    mixing : float
        The share of batches in which images and labels are mixed in pairs, by mixup or CutMix.
    compiled : bool
        Whether the network runs under torch.compile, which takes a minute and needs a compiler.
        The steps of an adversary are not compiled.

    Examples
    --------
    >>> from otad.training import TrainConfig
    >>> config = TrainConfig(epochs=10, learning_rate=0.1, energy_weight=0.01)
    >>> config.optimizer, round(config.rate_at(5), 3)
    ('sgd', 0.05)
    """

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
    """Return the cross-entropy, or for regression the squared error."""
    smoothing, loss = config.label_smoothing, functional.mse_loss
    if task == "classification":
        loss = partial(functional.cross_entropy, label_smoothing=smoothing)
    else:
        require(smoothing == 0, "label_smoothing", "0 for regression", smoothing)
    return lambda outputs, targets, _head, **reduction: loss(outputs, targets, **reduction)


def margin_loss(task: str, config: TrainConfig) -> Loss:
    """Return the mean amount by which scaled margins fall short of `target_margin`.

    If features change by at most K times the change of the input, a label y cannot change within
    the radius min over j of (o_y - o_j) / (K |w_y - w_j|). The penalty `pair_excess`, the energy or
    the network itself bounds K."""
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


@torch.inference_mode(False)  # gradients work in inference mode too
def train(
    net: Backbone, data: Data, config: TrainConfig, *, progress: Progress = None, **options: Any
) -> TrainResult:
    """Train a backbone in place and leave it on `config.device` in evaluation mode.

    Parameters
    ----------
    net : Backbone
        The network.
    data : Split or sequence of Tensor
        A `Split`, or (train_x, train_y), or (train_x, train_y, val_x, val_y). It is moved to the
        device as a whole. Inputs may be bytes: 0 to 255 then mean the bounds of the network.
    config : TrainConfig
        The settings.
    progress : callable, bool or None
        A function that is called with each `EpochRecord`; True or False to show or hide a progress
        bar. If None, a bar appears on a terminal or in a notebook after two seconds.
    weights : Tensor (N,) or None
        Positive weights of the training examples, in any unit: a row of weight 2 counts like two
        rows of weight 1.
    augment : callable or None
        Your own augmentation, instead of `config.augment`. It gets several batches at once.
    checkpoint_dir : path or None
        A folder in which the run is saved after every epoch. A call with the same initial network,
        data and config resumes a run that was killed and ends with the same weights bit for bit.
    save_seconds : float
        The least time between two saves.
    max_seconds : float or None
        The time after which the run stops, after at least one epoch. It needs a `checkpoint_dir`,
        from which the same call resumes.

    Returns
    -------
    TrainResult
        A record of every epoch. With an adversary, its scores are taken at perturbed inputs.

    Raises
    ------
    InputError
        If the data do not fit the network, or a checkpoint belongs to another run.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> from otad.training import TrainConfig, train
    >>> x = torch.rand(40, 4, generator=torch.Generator().manual_seed(0))
    >>> y = (x[:, 0] > 0.5).long()
    >>> net = otad.nets.fc_resnet((4,), 2, blocks=1)
    >>> result = train(net, (x, y), TrainConfig(epochs=3, batch_size=10, energy_weight=0.01))
    >>> len(result.history), result.metric, net.training
    (3, 'accuracy', False)
    """
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
        """Return embedded inputs and features (B,d), outputs, and energies (B,)."""
        net = self.weights.net
        embedded = net.embed(x)
        features, energies = net.transport(embedded)
        return embedded, features, net.head(features), energies

    def batches(self, row_batches: Sequence[Tensor], generator: torch.Generator) -> Batches:
        x, y, net = self.data["train_x"], self.data["train_y"], self.weights.net
        weights = self.data.get("weights")
        mixing = self.config.mixing
        # Many images are augmented at once, because every operation on a GPU has to be launched.
        at_once = max(1, _AUGMENTED_ROWS // self.config.batch_size)
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
        """Take one gradient step and return the batch means of loss, energy and score (3,)."""
        x, y, start, *weights = batch
        inputs = x
        if self.config.adversary is not None:
            inputs = self._attack(self.weights.net, self.ball, x, y, start)
            if self.config.loss in COMPARING:
                # In one pass, so that the statistics of a batch include both.
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
        """Return the objective of a step, its loss and energy, and the outputs (B,...)."""
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
        """Return the inputs that the adversary makes of x (B,*input_shape)."""
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


def _scores(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return for each row whether the (most likely) label is right, or the squared error."""
    if outputs.dim() == 2:
        labels = targets if targets.dim() == 1 else targets.argmax(1)
        return (outputs.argmax(1) == labels).float()
    return (outputs - targets).square()
