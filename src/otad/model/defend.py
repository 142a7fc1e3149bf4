"""`defend` makes an OTAD model of a trained network and its training data."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from otad.checks import check_choice, check_shape, check_weights, naming, require
from otad.cip.whole_bank.lifted_bank import least_lipschitz
from otad.cip.whole_bank.potential import Progress
from otad.data.dataset import warn_of_labels
from otad.errors import InputError, SolverError
from otad.io.mapped_rows import spread_rows
from otad.io.tensor_files import fingerprint_of, refuse_other_file
from otad.model.answerer_options import check_settings
from otad.model.answerers import is_global
from otad.model.bank import FORMAT, FeatureBank
from otad.model.conversion import ArrayLike, converted
from otad.model.otad import OTAD
from otad.model.prototypes import PrototypeNet, prototype_net
from otad.nets import Backbone, Lift, Metric, PretrainedMetric, lifted_net
from otad.nets.adapt import UNREAD, Adapted, adapted
from otad.nets.features import keys_of
from otad.nets.inputs import output_of
from otad.nets.lift import MARGIN
from otad.nets.lipschitz import is_lipschitz_in_l2
from otad.progress import Counter

Bounds = tuple[float, float]
INPUTS = ("auto", "features", "pixels")
SAMPLE = 32  # inputs by which the head of a network is found
COMPARED = 1000  # training points whose labels are compared with the answers of a network
RANDOM_ROWS = 4  # rows that a network answers twice
ONE_LIPSCHITZ = 2.0  # the smoothness at which a lifted map is 1-Lipschitz
STEEP = 1e4  # a global map with a larger L certifies next to nothing


@torch.inference_mode(False)  # tensors made in inference mode have no gradients
def defend(
    net: nn.Module | None,
    x: ArrayLike,
    y: ArrayLike | None = None,
    *,
    inputs: str = "auto",
    bounds: Bounds | None = None,
    n_neighbors: int = 10,
    search: str = "torch",
    resident: bool = True,
    bank_dtype: torch.dtype = torch.float32,
    bank_path: str | None = None,
    metric: nn.Module | None = None,
    abstain_beyond: float | None = None,
    batch_size: int = 1024,
    progress: Counter | bool | None = None,
    sweep_progress: Progress | bool | None = None,
    **answering: Any,
) -> OTAD:
    """Turn a trained network into an OTAD model with a bank of its training data.

    The network is put in evaluation mode, and its weights are shared. What is interpolated between
    training points depends on `inputs`:

    - "auto": a `Backbone`, or a network whose features have the size of the input and change in
      similar directions, transports inputs as in the paper. For any other network, and for one
      whose features have a proved Lipschitz constant in l2, such as an `OrthogonalNet`, a Lipschitz
      map leads from the features that enter its last Linear layer to its outputs.
    - "features": that Lipschitz map for every network.
    - "pixels": a Lipschitz map from the inputs themselves, which may be numbers of a table, to the
      labels or values y. No network is used, so `net` may be None. Certificates exist for every
      input. The scope is global by default.

    If a global map has no finite smoothness, or one above 10,000, a Lipschitz map from embedded
    inputs to the outputs of the network takes its place. A warning says what was chosen, and
    `model.notes["defense"]` records it.

    Parameters
    ----------
    net : nn.Module or None
        A module that maps a batch to logits (B, C), or in regression to values (B,) or (B, 1).
    x : Tensor, array, DataFrame or DataLoader (N, *input_shape)
        The training inputs. A DataLoader yields x and y.
    y : Tensor or array (N,)
        The labels (integers), or the values in regression.
    inputs : str
        "auto", "features" or "pixels".
    bounds : (float, float) or None
        The lowest and the highest legal input value. If None, inputs are unbounded.
    metric : nn.Module or None
        As in `OTAD`. The keys of the bank are computed by it. `nn.Flatten()` compares the inputs
        themselves, and certificates exist.
    n_neighbors, search, resident, abstain_beyond
        As in `OTAD`.
    bank_dtype : torch.dtype
        The precision of the bank: float32, float16 or bfloat16.
    bank_path : path or None
        A file to which the bank is written and from which it is mapped. An earlier bank there is
        replaced, and another file is refused.
    batch_size : int
        How many inputs are used at a time.
    progress : callable, bool or None
        A function of (rows done, all rows), or True or False to show or hide a progress bar. If
        None, a bar appears on a terminal or in a notebook after two seconds.
    sweep_progress, scope, smoothness, strong_convexity, solver, potential
        As in `OTAD`.

    Returns
    -------
    OTAD
        The model. It maps inputs to logits (B, C), or in regression to values (B,). A network with
        one logit becomes a model with two.

    Raises
    ------
    InputError
        If data and network do not fit, or an option is out of range.
    SolverError
        If too many points contradict each other for the smoothness you asked for.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> digits = otad.data.load("digits")
    >>> x, y = digits.train_x[:100], digits.train_y[:100]
    >>> net = torch.nn.Sequential(  # your own trained network
    ...     torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
    ... )
    >>> model = otad.defend(net, x, y, bounds=(0.0, 1.0))
    >>> model(digits.test_x[:5]).shape, model.notes["defense"]["path"]
    (torch.Size([5, 10]), 'features')
    """
    columns = getattr(x, "columns", None)  # of a DataFrame
    _, x, targets = converted(nn.Identity() if net is None else net, x, y)
    if targets is None:
        raise InputError("y: expected one target per input, got None")
    y = targets
    if check_choice(inputs, "inputs", INPUTS) == "pixels":
        made = _points(net, x, y, bounds)
        answering = {"scope": "global"} | answering
    else:
        # Short distances do not survive the rounding of a bank in half precision.
        unread = UNREAD if bank_dtype == torch.float32 else 1.0
        made = _adapted(net, x, y, inputs, bounds, unread)
    if not isinstance(net, Backbone):  # which has a task of its own
        warn_of_labels(y, "y", "for classification, pass labels as integers", stacklevel=5)
    backbone = made.backbone.eval()
    check_weights(backbone, "net")
    rows = backbone.check_inputs(x)
    targets = backbone.check_targets(y, len(rows))
    device = backbone.mean.device
    metric = _fitting(metric, backbone, rows[:1].to(device))
    asked: dict[str, Any] = {"n_neighbors": n_neighbors, **answering}
    check_settings(len(rows), metric=metric, dim=backbone.dim, **asked)

    def transport(batch: Tensor) -> tuple[Tensor, Tensor]:
        embedded = backbone.embed(batch.to(device))
        return embedded, backbone.transport(embedded)[0]

    if isinstance(backbone, PrototypeNet) and made.path == "inputs":
        bank = _stored(backbone.bank(bank_dtype), bank_path)
    else:
        with naming(path="bank_path"):
            bank = FeatureBank.build(
                transport,
                rows,
                targets,
                fingerprint=fingerprint_of(backbone, {"x": rows, "y": targets}),
                batch_size=batch_size,
                dtype=bank_dtype,
                path=bank_path,
                progress=progress,
            )
        if not isinstance(net, Backbone):
            _warn_of_other_labels(backbone, bank)
            _warn_of_randomness(backbone, rows[:RANDOM_ROWS].to(device))
    keys = None
    if metric is not None:
        with torch.no_grad():
            batches = rows.split(batch_size)
            keys = torch.cat([keys_of(batch.to(device), metric) for batch in batches])
    asked |= {"search": search, "resident": resident, "metric": metric, "keys": keys}
    asked["abstain_beyond"] = abstain_beyond

    def build(backbone: Backbone, bank: FeatureBank, **more: Any) -> OTAD:
        place = bank.to(device) if resident else bank
        sweeps = False if progress is False else sweep_progress
        return OTAD(backbone, place, sweep_progress=sweeps, **(asked | more))

    given = ("smoothness", "strong_convexity", "potential")
    if is_global(asked.get("scope", "local")) and not any(asked.get(name) for name in given):
        model, made = _global_by_default(build, made, bank, bank_path)
    else:
        model = build(backbone, bank)
    if columns is not None:
        model.notes["feature_names"] = [str(name) for name in columns]
    if made.says:
        says = made.says + ("" if metric is not None else made.remedy)
        model.notes["defense"] = {"path": made.path, "says": says}
        warnings.warn(f"defense: {says}", stacklevel=4)
    return model


def _adapted(
    net: nn.Module | None, x: Tensor, y: Tensor, inputs: str, bounds: Bounds | None, unread: float
) -> Adapted:
    if net is None:
        raise InputError("net: expected a module, or inputs='pixels' to do without, got None")
    if isinstance(net, Backbone):
        fits = bounds in (None, net.bounds)
        require(fits, "bounds", f"None, or those of the backbone, {net.bounds}", bounds)
        bounds = net.bounds
        if inputs == "auto" and not is_lipschitz_in_l2(net):
            return Adapted(net, "transport", "")
        inputs = "features"
    task = _task(x, y)
    rows = spread_rows(len(x), SAMPLE)
    how: dict[str, Any] = {"inputs": inputs, "unread": unread, "task": task, "bounds": bounds}
    return adapted(net, x[rows.to(x.device)], **how)


@torch.no_grad()
def _warn_of_other_labels(backbone: Backbone, bank: FeatureBank) -> None:
    """Warn if the network gives the labels of far fewer points than by chance."""
    rows = spread_rows(len(bank), COMPARED)
    if backbone.task == "regression" or len(rows) < 20 * backbone.n_outputs:
        return
    predictions = backbone.head(bank.features[rows].to(backbone.mean)).argmax(1)
    share = float((predictions.cpu() == bank.labels[rows].cpu()).double().mean())
    if share < 0.5 / backbone.n_outputs:
        says = f"the network gives the labels of {share:.1%} of {len(rows)} training points"
        wrong = "less than by chance: are its classes numbered as in y?"
        warnings.warn(f"y: {says}, {wrong}", stacklevel=6)


@torch.no_grad()
def _warn_of_randomness(backbone: Backbone, x: Tensor) -> None:
    """Warn if the network answers the same inputs differently, by more than rounding."""
    first, again = (backbone(x) for _ in range(2))
    if bool(((first - again).abs() > 1e-3 * first.abs().max()).any()):
        says = "answers the same inputs differently in evaluation mode"
        assumed = "attacks and certificates assume that it does not, and a saved model is refused"
        warnings.warn(f"net: the network {says}; {assumed}", stacklevel=6)


@torch.no_grad()
def _fitting(metric: nn.Module | None, backbone: Backbone, x: Tensor) -> nn.Module | None:
    """Return the metric, on the device of the inputs x (1,*), if it takes them. Flatten becomes a
    metric whose Lipschitz constant is known."""
    if metric is None:
        return None
    if type(metric) is nn.Flatten:
        plain = PretrainedMetric(metric, input_shape=backbone.input_shape, key_norm="free")
        metric = plain.to(backbone.mean.dtype)
    if isinstance(metric, Metric):
        expected = f"one for inputs of shape {backbone.input_shape} like x"
        fits = metric.input_shape == backbone.input_shape
        require(fits, "metric", expected, f"one for {metric.input_shape}")
    metric = metric.to(x.device).eval()
    check_weights(metric, "metric")
    output_of(metric, x.clone(), "metric", "keys of shape (B,m)")
    return metric


def _points(net: nn.Module | None, x: Tensor, y: Tensor, bounds: Bounds | None) -> Adapted:
    """Return the Lipschitz map from inputs to targets, normalized like a given backbone."""
    task = _task(x, y)
    count = 1 if task == "regression" else int(y.max()) + 1
    expected = "labels of at least two classes, counted from 0"
    require(task == "regression" or count > 1, "y", expected, f"labels up to {count - 1}")
    options: dict[str, Any] = {"task": task, "bounds": bounds}
    if isinstance(net, Backbone):
        options |= {"mean": net.mean.cpu(), "std": net.std.cpu(), "bounds": bounds or net.bounds}
    frame = lifted_net(x.shape[1:], count, blocks=0, **options)
    frame = frame.to(x.dtype).to(net.mean.device if isinstance(net, Backbone) else x.device)
    answers = "values" if task == "regression" else "labels"
    says = f"a Lipschitz map from the inputs themselves to the {answers} of training points"
    unused = "" if net is None else f"; {type(net).__name__} is not used"
    return Adapted(prototype_net(frame, x, y, neighbors=1), "inputs", says + unused)


def _task(x: Tensor, y: Tensor) -> str:
    """Return the task by the dtype of the targets: labels are integers."""
    rows = x.dim() > 1 and x.is_floating_point()
    got = f"{x.dtype} of shape {tuple(x.shape)}"
    require(rows, "x", "floating-point inputs (N,*input_shape)", got)
    require(len(x) > 0, "x", "at least one input", f"none, of shape {tuple(x.shape)}")
    check_shape(y, "y", (len(x),), "with one target per input")
    return "regression" if y.is_floating_point() else "classification"


def _stored(bank: FeatureBank, path: str | None) -> FeatureBank:
    """Return the bank, after it was written to the file at `path` and mapped from it."""
    if path is None:
        return bank
    refuse_other_file(Path(path), FORMAT, "bank_path")
    bank.save(path)
    return FeatureBank.load(path, verify=False)


def _global_by_default(
    build: Callable[..., OTAD], made: Adapted, bank: FeatureBank, path: str | None
) -> tuple[OTAD, Adapted]:
    """Return the model of a global map with the default smoothness, and what it is made of."""
    net = made.backbone
    if made.path == "inputs" and net.task == "classification":
        return build(net, bank, smoothness=ONE_LIPSCHITZ), made
    try:
        model = build(net, bank)
        why = f"needs L = {model.smoothness:.3g}"
    except SolverError:
        model, why = None, "does not exist"
    most = ONE_LIPSCHITZ if made.path == "features" else STEEP
    if model is not None and model.smoothness <= most:
        return model, made
    if made.path == "features":  # two points differ by less than rounding
        return build(net, bank, smoothness=ONE_LIPSCHITZ), made
    lift, lifted_bank = _lifted(net, bank)
    says = (
        f"{made.says + '. ' if made.says else ''}The global map of least L {why}. A Lipschitz map "
        "from embedded inputs to the network's own outputs takes its place; its constant is "
        f"{lift.stretch:.3g}. Training with more transport energy avoids that"
    )
    return build(lift, _stored(lifted_bank, path)), Adapted(lift, "lift", says)


@torch.no_grad()
def _lifted(net: Backbone, bank: FeatureBank) -> tuple[Lift, FeatureBank]:
    """Return the lift of a backbone with the least stretch, and its bank.

    Equal inputs get equal outputs in the bank."""
    points = bank.inputs.float()
    batches = bank.features.split(1024)
    outputs = torch.cat([net.head(some.to(net.mean)).float().cpu() for some in batches])
    _, place = points.unique(dim=0, return_inverse=True)
    first = torch.full((len(points),), len(points)).scatter_reduce(
        0, place, torch.arange(len(points)), "amin"
    )
    answers = outputs.reshape(len(points), -1)[first[place]]
    lift = Lift(net, stretch=(1 + MARGIN) * least_lipschitz(points, answers) or 1.0)
    answers = (answers / lift.stretch).to(bank.dtype)
    pairs = functional.pad(bank.inputs, (0, lift.lift)), torch.cat([bank.inputs, answers], 1)
    return lift.eval(), FeatureBank(*pairs, bank.labels, fingerprint_of(lift, {"x": bank.inputs}))
