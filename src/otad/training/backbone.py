"""Training a backbone by the paper's Algorithm 1, with the transport energy as a penalty:

    min over theta of  mean_i [ loss(head(z_i), y_i)  +  alpha * sum_k |R_k(x_i^(k-1))|^2 ]

The penalty brings the map x_i -> z_i close to optimal transport of the training points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from otad.checks import require
from otad.errors import InputError
from otad.nets.base import Backbone
from otad.nets.inputs import evaluating, frozen
from otad.threat import LpBall
from otad.training.acceleration import compiled, precision
from otad.training.adversary import perturbed_weights
from otad.training.augmentation import mix_some
from otad.training.backbone_config import (
    BISECTOR,
    COMPARING,
    LOSSES,
    TrainConfig,
    divergence,
    fit_loss,
)
from otad.training.loop import Batches
from otad.training.margins import bisector_margins, pair_excess
from otad.training.supervised import (
    Data,
    Progress,
    SupervisedTraining,
    TrainResult,
    parts_of,
    scaled_weights,
)

_SCORED_ROWS = 1024  # rows that are scored at a time
_AUGMENTED_ROWS = 4096


@torch.inference_mode(False)  # gradients work in inference mode too
def train(
    net: Backbone, data: Data, config: TrainConfig, *, progress: Progress = None, **options: Any
) -> TrainResult:
    """Train a backbone in place and leave it on `config.device` in evaluation mode.

    If the program has a process group of `torch.distributed`, its processes share every batch, and
    all of them must make the same call. The records are those of one process, up to rounding.

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
    shares_batches = True

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
        if config.loss == BISECTOR:
            named, got = net.prototypes, f"{BISECTOR!r} for a {type(net).__name__}"
            if named is None:
                raise InputError(f"loss: expected one for nets without prototypes, got {got}")
            missing = {*parts_of(data)["train_y"].tolist()} - {*named[1].tolist()}
            require(not missing, "train_y", "labels that prototypes have", sorted(missing)[:5])
        # What the adversary raises, unless it raises the divergence of TRADES.
        self.raised = fit_loss(net.task, config) if config.loss in COMPARING else self.loss
        super().__init__(net, data, config, **options)
        self.forward = compiled(self._forward) if config.compiled else self._forward
        self.attacked = compiled(self._attacked) if config.compiled else None

    def check_targets(self, net: Backbone, y: Tensor, rows: int, name: str) -> None:
        net.check_targets(y, rows, name)

    def _forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return embedded inputs and features (B,d), outputs, and energies (B,)."""
        net = self.weights.net
        embedded = net.embed(x)
        features, energies = net.transport(embedded)
        return embedded, features, net.head(features), energies

    def _attacked(self, x: Tensor) -> Tensor:
        return self.weights.net(x)  # type: ignore[no-any-return]

    def batches(self, row_batches: Sequence[Tensor], generator: torch.Generator) -> Batches:
        x, y, net = self.data["train_x"], self.data["train_y"], self.weights.net
        weights = self.data.get("weights")
        mixing: dict[str, Any] = {"probability": self.config.mixing, "by": self.config.mixing_by}
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
                if self.config.mixing > 0:
                    batch = mix_some(*batch, net.n_outputs, generator, **mixing)
                x_part, y_part = self.laid_out(batch[0]), batch[1]
                share, number = number / len(row_batches), number + 1
                net.begin_step((len(self.history) + share) / self.config.epochs)
                yield x_part, y_part, self.begin_attack(x_part, share, generator), *more

    def step(self, *batch: Tensor, first: bool) -> Tensor:
        """Take one gradient step and return the batch means of loss, energy and score (3,)."""
        x, y, start, *weights = batch  # the loss is that of the whole batch, so y stays whole
        x, start = map(self.processes.share_rows, (x, start))
        inputs = x
        if self.config.adversary is not None:
            own_y = self.processes.share_rows(y)
            inputs = self._attack(self.weights.net, self.ball, x, own_y, start, self.attacked)
            if self.config.loss in COMPARING:
                # In one pass, so that the statistics of a batch include both.
                inputs = torch.cat([inputs, x])
        with perturbed_weights(
            self.weight_perturbation(lambda: self._objective(inputs, y, *weights)[0])
        ):
            objective, loss, energy, scores = self._objective(inputs, y, *weights)
            self.backward(objective)
        self.update(first=first)
        return torch.stack([loss.detach(), energy.detach(), scores.mean()])

    def _objective(
        self, inputs: Tensor, y: Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the objective of a step, its loss and energy, and the scores (B,).

        The inputs are the share of this process, and all else is that of the whole batch."""
        net, config = self.weights.net, self.config
        if config.loss == BISECTOR:
            return self._bisector_objective(inputs, y, weights)

        def whole(own: Tensor) -> Tensor:
            return self.processes.gather_rows(own, len(y))

        with precision(self.device, mixed=config.mixed_precision):
            passed = self.forward(inputs)
        embedded, features, outputs, energies = (part.to(net.mean.dtype) for part in passed)
        outputs, energies = whole(outputs), whole(energies)
        if weights is None:
            loss, energy = self.loss(outputs, y, net.head), energies.mean()
        else:
            losses = self.loss(outputs, y, net.head, reduction="none")
            energies = energies.reshape(-1, len(y)).mean(0)
            loss, energy = ((weights * part).mean() for part in (losses, energies))
        objective = loss + config.energy_weight * energy if config.energy_weight > 0 else loss
        if config.pair_weight > 0:
            excess = pair_excess(whole(embedded), whole(features), config.pair_smoothness)
            objective = objective + config.pair_weight * excess
        return objective, loss, energy, _scores(outputs[: len(y)].detach(), y)

    def _bisector_objective(
        self, inputs: Tensor, y: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the same for prototypes that answer by the nearest one."""
        net, config = self.weights.net, self.config
        assert net.prototypes is not None
        points, labels = net.prototypes
        embedded = net.embed(inputs)[:, : points.shape[1]]
        soft = config.margin_rivals, config.margin_temperature
        own_y = self.processes.share_rows(y)
        found = bisector_margins(embedded, own_y, points, labels, *soft)
        margins, scores = (self.processes.gather_rows(own, len(y)) for own in found)
        losses = self.loss(margins, reduction="none")
        loss = losses.mean() if weights is None else (weights * losses).mean()
        return loss, loss, torch.zeros_like(loss), scores.detach()

    def _attack(
        self,
        net: Backbone,
        ball: LpBall,
        x: Tensor,
        y: Tensor,
        start: Tensor,
        forward: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return the inputs that the adversary makes of x (B,*input_shape).

        Compiled code computes the gradients of all that has one, so weights then have none. Without
        it they keep theirs, because autocast remembers the casts of such weights only."""
        adversary, dtype = self.config.adversary, net.mean.dtype
        assert adversary is not None
        weights = nullcontext() if forward is None else frozen(net)
        with precision(self.device, mixed=self.config.mixed_precision), weights:
            if self.config.loss == "trades":
                with evaluating(net):
                    clean = net(x).to(dtype).detach()  # not `no_grad`: autocast caches its casts

            def loss(outputs: Tensor) -> Tensor:
                if self.config.loss == "trades":
                    return divergence(clean, outputs.to(dtype))
                return self.raised(outputs.to(dtype), y, net.head, reduction="none")

            return adversary.attack(ball, net, x, loss, start, forward)

    def validate(self) -> float | None:
        data, net, adversary = self.data, self.weights.best, self.config.adversary
        share = self.processes.share_rows
        if "val_x" not in data:
            return None
        net.eval()
        sums, generator = [], torch.Generator(self.device).manual_seed(self.config.seed)
        parts = (data[name].split(_SCORED_ROWS) for name in ("val_x", "val_y"))
        for x, y in zip(*parts, strict=True):
            x, own_y = self.laid_out(net.from_bytes(x)), share(y)
            if adversary is None:
                x = share(x)
            else:
                ball = adversary.ball(net)
                start = share(adversary.start(ball, x, generator))
                x = self._attack(net, ball, share(x), own_y, start)
            with torch.no_grad(), precision(self.device, mixed=self.config.mixed_precision):
                scores = _scores(net(x), own_y)
                sums.append(self.processes.gather_rows(scores, len(y)).sum())
        return float(torch.stack(sums).double().sum()) / len(data["val_y"])


def _scores(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return for each row whether the (most likely) label is right, or the squared error."""
    if outputs.dim() == 2:
        labels = targets if targets.dim() == 1 else targets.argmax(1)
        return (outputs.argmax(1) == labels).float()
    return (outputs - targets).square()
