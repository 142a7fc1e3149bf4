"""The settings of `train`, and the losses that they name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from otad.checks import check_choice, check_count, require
from otad.nets.base import LinearHead
from otad.training.augmentation import MIXINGS
from otad.training.config import check_share
from otad.training.margins import margins_to_classes, scaled_margins
from otad.training.supervised import InputConfig

Loss = Callable[..., Tensor]
"""Maps outputs (B,C) or values (B,), targets (labels, shares of classes or values) and the head to
the mean loss, or with `reduction="none"` to the losses (B,). The losses of `COMPARING` take the
outputs at perturbed inputs followed by the outputs at clean inputs, 2 B rows."""
COMPARING = ("trades", "mart")
BISECTOR = "bisector"  # of margins (B,) instead of outputs
_ROOM = 1e-4  # added so that the second logarithm of MART is finite


@dataclass(frozen=True)
class TrainConfig(InputConfig):
    """The settings of `train`.

    The objective of a batch is the mean loss plus `energy_weight` times the mean transport energy.

    Parameters
    ----------
    epochs, batch_size : int
        How often all examples are used, and how many are used at a time.
    learning_rate, optimizer : float, str
        The largest learning rate, and "sgd" or "adamw". Networks of orthogonal matrices need
        "orthogonal_muon", whose steps keep them orthogonal; other weights have AdamW.
    momentum, nesterov : float, bool
        The momentum of SGD, which may be Nesterov's, or the first beta of Adam.
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
        Random changes of images: "none", "affine", "light" or "strong".
    adversary : Adversary or None
        Perturbs the inputs of each training step, and the weights, to raise the loss.
    channels_last : bool
        Whether images use a memory layout that is faster on GPUs. A CPU does without it.
    cuda_graph : bool
        Whether one step on whole batches is captured on a GPU and replayed.
    loss : str
        "fit" for the cross-entropy or the squared error; "margin" for margins
        `(o_y - o_j) / |w_y - w_j|` of at least `target_margin`, where w are the rows of the head;
        "soft_margin" for the same with a soft maximum over j; "fit_margin" for the cross-entropy
        less `beta` times the margin where that is positive; "bisector" for soft certified radii of
        at least `target_margin`, for prototypes of which the nearest answers. With an adversary,
        the first four are taken at perturbed inputs. "trades" and "mart" need an adversary and
        compare the outputs at perturbed and at clean inputs.
    energy_weight : float
        The weight of the transport energy, alpha in the paper.
    label_smoothing : float
        The label smoothing of the cross-entropy.
    target_margin : float
        The margin that the losses "margin", "soft_margin" and "bisector" ask for. Radii are in the
        units of embedded inputs.
    margin_rivals, margin_temperature : int, float
        For "bisector", how many of the nearest points of the label, and of all others, count for
        each example; for "bisector" and "soft_margin", the temperature of a soft maximum.
    beta : float
        The weight of the comparison in the losses "trades" and "mart", and of the margin in
        "fit_margin".
    pair_weight, pair_smoothness : float
        The weight of a penalty for pairs of a batch that contradict a convex potential, and the
        smoothness of that potential.
    mixing, mixing_by : float, str
        The share of batches in which images and labels are mixed in pairs, and how: by "mixup", by
        "cutmix", or by one of "both" at random. An adversary perturbs the mixed images.
    compiled : bool
        Whether the network runs under torch.compile, which takes a minute and needs a compiler.

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
    margin_rivals: int = 8
    margin_temperature: float = 0.2
    beta: float = 6.0
    pair_weight: float = 0.0
    pair_smoothness: float = 2.0
    mixing: float = 0.0
    mixing_by: str = "both"
    compiled: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.loss, "loss", tuple(LOSSES))
        self.check_ranges(0.0, math.inf, "energy_weight", "pair_weight", "beta")
        self.check_ranges(1e-12, math.inf, "target_margin", "pair_smoothness")
        self.check_ranges(1e-6, math.inf, "margin_temperature")
        check_count(self.margin_rivals, "margin_rivals")
        self.check_ranges(0.0, 1.0, "label_smoothing")
        check_share(self.mixing, "mixing")
        check_choice(self.mixing_by, "mixing_by", tuple(MIXINGS))
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
    _check_labels(task, config, "margin")
    return _averaging(
        lambda *scored: (config.target_margin - scaled_margins(*scored)).clamp_min(0.0)
    )


def soft_margin_loss(task: str, config: TrainConfig) -> Loss:
    """Return the soft version T log(1 + sum over j of exp((t - m_j) / T)) of the loss "margin".

    Here m_j are the scaled margins, t is `target_margin`, and T is `margin_temperature`. If the
    rows of the head are orthonormal, this is up to units the cross-entropy of outputs of which the
    own one is lowered."""
    _check_labels(task, config, "soft_margin")
    target, temperature = config.target_margin, config.margin_temperature

    def losses(outputs: Tensor, labels: Tensor, head: LinearHead) -> Tensor:
        margins = margins_to_classes(outputs, labels, head, target)
        return temperature * ((target - margins) / temperature).logsumexp(1)

    return _averaging(losses)


def bisector_loss(task: str, config: TrainConfig) -> Loss:
    """Return the mean amount by which margins (B,) fall short of `target_margin`."""
    _check_labels(task, config, BISECTOR)
    unused = {"adversary": None, "energy_weight": 0, "pair_weight": 0, "compiled": False}
    for name, value in unused.items():
        got = getattr(config, name)
        require(got == value, name, f"{value} for the loss {BISECTOR!r}", got)
    return _averaging(lambda margins: (config.target_margin - margins).clamp_min(0.0))


def fit_margin_loss(task: str, config: TrainConfig) -> Loss:
    """Return the cross-entropy less a reward for margins, the certificate regularization of
    arXiv:2108.04062."""
    _check_labels(task, config, "fit_margin")

    def losses(outputs: Tensor, labels: Tensor, head: LinearHead) -> Tensor:
        fitted = functional.cross_entropy(outputs, labels, reduction="none")
        return fitted - config.beta * scaled_margins(outputs, labels, head).clamp_min(0.0)

    return _averaging(losses)


def trades_loss(task: str, config: TrainConfig) -> Loss:
    """Return loss(f(x), y) + beta D(f(x), f(x')) at clean inputs x and at perturbed inputs x'
    (arXiv:1901.08573), with the `divergence` D."""
    fit = fit_loss(task, config)

    def losses(outputs: Tensor, targets: Tensor, head: LinearHead) -> Tensor:
        perturbed, clean = outputs.chunk(2)
        fitted = fit(clean, targets, head, reduction="none")
        return fitted + config.beta * divergence(clean, perturbed)

    return _averaging(losses)


def mart_loss(task: str, config: TrainConfig) -> Loss:
    """Return - log p'_y - log(1.0001 - max over j != y of p'_j) + beta (1 - p_y) D(f(x), f(x'))
    (MART, ICLR 2020), with the probabilities p at clean inputs x and p' at perturbed inputs x'."""
    _check_labels(task, config, "mart", "'fit' or 'trades'")

    def losses(outputs: Tensor, labels: Tensor, _: LinearHead) -> Tensor:
        perturbed, clean = outputs.chunk(2)
        logs, own = functional.log_softmax(perturbed, 1), labels[:, None]
        others = logs.scatter(1, own, -torch.inf).amax(1).exp()
        boosted = -logs.gather(1, own)[:, 0] - torch.log(1 + _ROOM - others)
        doubt = 1 - functional.softmax(clean, 1).gather(1, own)[:, 0]
        return boosted + config.beta * doubt * divergence(clean, perturbed)

    return _averaging(losses)


def divergence(clean: Tensor, perturbed: Tensor) -> Tensor:
    """Return KL(p || p') (B,) of logits (B,C), or the squared difference of values (B,)."""
    if clean.dim() == 1:
        return (clean - perturbed).square()
    logs = functional.log_softmax(clean, 1), functional.log_softmax(perturbed, 1)
    return (logs[0].exp() * (logs[0] - logs[1])).sum(1)


def _check_labels(task: str, config: TrainConfig, loss: str, other: str = "'fit'") -> None:
    """Refuse what a loss of labels cannot use: values, and shares of classes."""
    require(task == "classification", "loss", f"{other} for regression", repr(loss))
    for name in ("label_smoothing", "mixing"):
        value = getattr(config, name)
        require(value == 0, name, f"0 for the loss {loss!r}", value)


def _averaging(losses: Callable[..., Tensor]) -> Loss:
    def loss(*scored: Any, reduction: str = "mean") -> Tensor:
        found = losses(*scored)
        return found.mean() if reduction == "mean" else found

    return loss


LOSSES: dict[str, Callable[[str, TrainConfig], Loss]] = {
    "fit": fit_loss, "margin": margin_loss, "fit_margin": fit_margin_loss, "trades": trades_loss,
    "mart": mart_loss, "soft_margin": soft_margin_loss, BISECTOR: bisector_loss,
}  # fmt: skip
