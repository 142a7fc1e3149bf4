"""The base classes of backbones, which map an input to a feature and to outputs, and of metrics,
which map an input to the key by which neighbors are searched."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from otad.checks import check_choice, check_count, check_shape, check_tensor, require
from otad.nets.inputs import AnyClass, InputNet, Registry, Sizes


class LinearHead(nn.Linear):
    """The linear head of a backbone: features z (B, d) -> W z + b.

    Parameters
    ----------
    dim : int
        The dimension d of features.
    n_outputs : int
        The number of classes C, or 1 for regression.
    task : str
        "classification" for logits (B, C), "regression" for values (B,).
    bias : bool
        Whether there is a bias b.

    Notes
    -----
    The parameters are on the meta device until the backbone that owns the head sets them, so that
    the global random generator is not used.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> head = otad.nets.LinearHead(4, 3, "classification").to_empty(device="cpu")
    >>> head(torch.rand(5, 4)).shape
    torch.Size([5, 3])
    """

    order: float = 2.0
    """The order of the norm of differences of rows by which the loss "margin" scales margins."""
    uses_autocast: bool = True
    """If not, outputs keep full precision, because margins may be small beside them."""

    def __init__(self, dim: int, n_outputs: int, task: str, *, bias: bool = True) -> None:
        sizes = check_count(dim, "dim"), check_count(n_outputs, "n_outputs")
        super().__init__(*sizes, bias=bias, device="meta")
        self.is_value = task == "regression"

    @property
    def matrix(self) -> Tensor:
        """The matrix W (C, d) of the map W z + b. A head that pools stores fewer weights."""
        return self.weight

    def forward(self, input: Tensor) -> Tensor:
        full = torch.autocast(input.device.type, enabled=False)
        with nullcontext() if self.uses_autocast else full:
            outputs = functional.linear(input, self.weight, self.bias)
        return outputs.squeeze(-1) if self.is_value else outputs

    @torch.no_grad()
    def take_units(self, shift: float, scale: float) -> None:
        """Change the weights so that the output becomes shift + scale * output.

        After training on standardized targets this restores the units of the targets."""
        self.weight.mul_(scale)
        self.bias.mul_(scale).add_(shift)


class LipschitzBound(NamedTuple):
    """What is proved about the features z of a network: `|z(u) - z(v)| <= constant |u - v|`.

    Here u and v are normalized inputs. `otad.certify` certifies a network whose `lipschitz` is such
    a bound.

    Attributes
    ----------
    norm : str
        The norm of both distances, "l2" or "linf".
    constant : float
        The Lipschitz constant in exact arithmetic.
    offset : float
        A number such that features and all values of hidden layers are no larger than `constant |u|
        + offset`. Rounding errors are measured by it.

    Examples
    --------
    >>> import otad
    >>> net = otad.nets.LinfDistNet((4,), 3, widths=(8,))
    >>> net.lipschitz.norm, net.lipschitz.constant
    ('linf', 1.0)
    """

    norm: str
    constant: float
    offset: float


class Backbone(InputNet, ABC):
    """The base class of networks x -> head(transport(embed(x))) with a linear head.

    Embedded inputs and features are in one space R^d, so that transport moves a point of R^d. A
    subclass writes `transport`, sets `head`, and overrides `embed` if it does more than normalize
    and flatten.

    Parameters
    ----------
    input_shape : sequence of int
        The shape of one input.
    n_outputs : int
        The number of classes C, or 1 for regression.
    task : str
        "classification" or "regression".
    dim : int or None
        The dimension d, if `embed` changes the size of the input.
    bounds : (float, float) or None
        The lowest and the highest legal input value. If None, inputs are unbounded.
    mean, std : float, sequence of float or Tensor
        The numbers by which inputs are normalized. They broadcast to `input_shape`.

    Attributes
    ----------
    head : LinearHead
        The map from features (B, d) to logits (B, C), or to values (B,) in regression.
    lift : int
        How many of the last coordinates are 0 in every embedded input and are the only ones that
        `transport` changes: see `LiftedNet`. It is 0 for most backbones.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> class Halves(otad.nets.Backbone):
    ...     def __init__(self):
    ...         super().__init__((4,), 2)
    ...         self.head = otad.nets.LinearHead(4, 2, self.task).to_empty(device="cpu")
    ...     def transport(self, e):
    ...         return e / 2, (e / 2).square().sum(1)
    >>> features, energy = Halves().transport(torch.ones(3, 4))
    >>> features.shape, energy.tolist()
    (torch.Size([3, 4]), [1.0, 1.0, 1.0])
    """

    family: ClassVar[Registry[Backbone]] = Registry("otad.nets.register")
    settings: ClassVar[Sequence[str]] = ("n_outputs", "task")
    head: LinearHead
    lift: int = 0

    def __init__(
        self,
        input_shape: Sizes,
        n_outputs: int,
        *,
        task: str = "classification",
        dim: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(input_shape, **options)
        self.dim = math.prod(self.input_shape) if dim is None else check_count(dim, "dim")
        self.task = check_choice(task, "task", ("classification", "regression"))
        self.n_outputs = check_count(n_outputs, "n_outputs")
        expected = "1 for regression and at least 2 for classification"
        fits = (n_outputs == 1) == (task == "regression")
        require(fits, "n_outputs", expected, f"{n_outputs} for {task}")

    def embed(self, x: Tensor) -> Tensor:
        """Return embedded inputs (B, d): normalized and flattened unless a subclass does more."""
        return self.normalize(x).flatten(1)

    @property
    def lipschitz(self) -> LipschitzBound | None:
        """What is proved about the features in evaluation mode, or None."""
        return None

    @property
    def embedding_lipschitz(self) -> LipschitzBound | None:
        """What is proved about embedded inputs in evaluation mode, or None."""
        return None

    @property
    def prototypes(self) -> tuple[Tensor, Tensor] | None:
        """The labeled points (n, p) and labels (n,) that are the weights of the network, or None.

        Points are in the units of the first p coordinates of embedded inputs."""
        return None

    def begin_step(self, share: float) -> None:
        """Adapt the network to the share of its training that is done, from 0 to 1.

        It is called before every training step and does nothing by default."""

    @abstractmethod
    def transport(self, e: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features (B, d) of embedded inputs (B, d), and the energy (B,).

        The energy is the sum of the squared lengths of all steps, `sum_k |x^k - x^(k-1)|^2`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, C), or values (B,) in regression, of inputs (B, *input_shape)."""
        return self.head(self.transport(self.embed(x))[0])  # type: ignore[no-any-return]

    def check_targets(self, y: object, rows: int, name: str = "y") -> Tensor:
        """Return `y` if it holds legal targets for that many rows, and raise `InputError` if not.

        Labels are 0..C-1 (B,) in int64, values are finite numbers (B,) in the dtype of the net."""
        dtype = torch.int64 if self.task == "classification" else self.mean.dtype
        targets = check_tensor(y, name, "B", dtypes=(dtype,))
        check_shape(targets, name, (rows,), "with one target per input")
        if self.task == "classification":
            low, high = (int(value) for value in torch.aminmax(targets))
            expected = f"labels from 0 to {self.n_outputs - 1}"
            got = f"the unknown label {low if low < 0 else high}; values to predict are floats"
            require(0 <= low <= high < self.n_outputs, name, expected, got)
        return targets


class Metric(InputNet, ABC):
    """The base class of metrics: inputs (B, *input_shape) -> keys (B, m).

    Inputs are neighbors if their keys are close in l2. A subclass writes `features` and sets
    `projection`, a linear map from its features to m numbers k, of which the key is made.

    Parameters
    ----------
    input_shape : sequence of int
        The shape of one input.
    key_dim : int
        The dimension m of keys.
    key_norm : str
        "unit" for keys `k / |k|`, "ball" for `k / max(|k|, 1)`, "free" for k itself. The ball is
        convex, so projecting to it never lengthens a distance; near 0, `k / |k|` lengthens
        distances without limit.
    bounds, mean, std
        As in `Backbone`.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> class Means(otad.nets.Metric):
    ...     def __init__(self):
    ...         super().__init__((1, 4, 4), key_dim=1, key_norm="free")
    ...         self.projection = torch.nn.Identity()
    ...     def features(self, u):
    ...         return u.mean((2, 3))
    >>> Means()(torch.ones(2, 1, 4, 4)).tolist()
    [[1.0], [1.0]]
    """

    family: ClassVar[Registry[Metric]] = Registry("otad.nets.register_metric")
    settings: ClassVar[Sequence[str]] = ("key_dim", "key_norm")
    projection: nn.Module

    def __init__(
        self, input_shape: Sizes, *, key_dim: int = 128, key_norm: str = "unit", **options: Any
    ) -> None:
        super().__init__(input_shape, **options)
        self.key_dim = check_count(key_dim, "key_dim")
        self.key_norm = check_choice(key_norm, "key_norm", ("unit", "ball", "free"))

    @property
    def lipschitz(self) -> float | None:
        """A proved constant Q with `|key(x) - key(x')| <= Q |x - x'|` in l2, or None.

        It holds in evaluation mode."""
        return None

    @abstractmethod
    def features(self, u: Tensor) -> Tensor:
        """Return the features (B, f) of normalized inputs (B, *input_shape)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the keys (B, m) of inputs (B, *input_shape)."""
        keys: Tensor = self.projection(self.features(self.normalize(x)))
        if self.key_norm == "unit":
            return functional.normalize(keys, dim=1)
        if self.key_norm == "ball":
            keys = keys / torch.linalg.vector_norm(keys, dim=1, keepdim=True).clamp_min(1.0)
        return keys


def squared_lengths(steps: Tensor) -> Tensor:
    """Return the squared length (B,) of each row, at least in single precision.

    bfloat16 has too few digits for sums."""
    wide = steps.to(torch.promote_types(steps.dtype, torch.float32))
    return wide.square().sum(tuple(range(1, steps.dim())))


def register(kind: str) -> Callable[[AnyClass], AnyClass]:
    """Return a class decorator that makes a backbone available by this name.

    A registered backbone can be saved in a model folder. Programs that load the folder must have
    registered the same class.

    Parameters
    ----------
    kind : str
        A name that no other backbone has.

    Examples
    --------
    >>> import otad
    >>> @otad.nets.register("my_resnet")
    ... class MyResNet(otad.nets.FCResNet):
    ...     pass
    >>> net = MyResNet((4,), 2, blocks=1)
    >>> net.config()["kind"], type(otad.nets.build(net.config())).__name__
    ('my_resnet', 'MyResNet')
    """
    return Backbone.family.register(kind)


def build(config: Mapping[str, Any]) -> Backbone:
    """Make the backbone that a config describes, with fresh weights.

    Parameters
    ----------
    config : mapping
        What `config()` of a registered backbone returned.

    Returns
    -------
    Backbone
        The network. Load its state dict afterwards.

    Raises
    ------
    InputError
        If the kind is not registered, or its options do not fit.

    Examples
    --------
    >>> import otad
    >>> net = otad.nets.fc_resnet((4,), 2, blocks=1)
    >>> same = otad.nets.build(net.config())
    >>> _ = same.load_state_dict(net.state_dict())
    >>> same.input_shape, same.n_outputs
    ((4,), 2)
    """
    return Backbone.family.build(config)


def register_metric(kind: str) -> Callable[[AnyClass], AnyClass]:
    """Return a class decorator that makes a metric available by this name.

    A registered metric can be saved in a model folder. Programs that load the folder must have
    registered the same class.

    Parameters
    ----------
    kind : str
        A name that no other metric has.

    Examples
    --------
    >>> import otad
    >>> @otad.nets.register_metric("my_cnn")
    ... class MyCNN(otad.nets.CNNMetric):
    ...     pass
    >>> MyCNN((1, 8, 8), widths=(2, 4), key_dim=3).config()["kind"]
    'my_cnn'
    """
    return Metric.family.register(kind)


def build_metric(config: Mapping[str, Any]) -> Metric:
    """Make the metric that a config describes, with fresh weights.

    Parameters
    ----------
    config : mapping
        What `config()` of a registered metric returned.

    Returns
    -------
    Metric
        The network. Load its state dict afterwards.

    Raises
    ------
    InputError
        If the kind is not registered, or its options do not fit.

    Examples
    --------
    >>> import otad
    >>> metric = otad.nets.CNNMetric((1, 8, 8), widths=(2, 4), key_dim=3)
    >>> otad.nets.build_metric(metric.config()).key_dim
    3
    """
    return Metric.family.build(config)
