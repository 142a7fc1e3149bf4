"""What an experiment learns, as its TOML file says it: data sets, nets, metrics, surrogates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from otad.checks import check_choice, check_count
from otad.errors import InputError
from otad.experiments.features import FEATURES
from otad.training import RECIPES

KINDS = ("fc", "lifted", "prototypes", "vit")
METRIC_KINDS = ("resnet", "cnn", "vit", "attention", "lipschitz", "pretrained", "pixels")
UNLEARNED = ("pretrained", "pixels")
NORMALIZATIONS = ("none", "feature", "channel", "all")
BANKS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class DataSpec:
    """A name in the registry of data sets and the options to load it with."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """A training setting chosen by the score of `row` on a held-out share of the train part; or by
    what is proved of it at the radius `certified`.

    Each value is tried with `epochs` epochs on the rest; the net is then trained on all of it.
    """

    setting: str
    values: tuple[float, ...]
    row: str
    validation: float = 0.1
    epochs: int | None = None
    certified: float | None = None

    def __post_init__(self) -> None:
        if not self.values:
            raise InputError("values: expected at least one to choose from, got none")


@dataclass(frozen=True)
class NetSpec:
    """A net, how it is trained, and how its bank is kept.

    `kind`: "fc", a fully connected net of `blocks` blocks; "lifted", such a net that writes into
    coordinates of its own; "prototypes", labeled points that are the weights of their own map, made
    of the train part; "vit", a vision transformer of `blocks` blocks. `options` are those of its
    maker, `train` fields of `TrainConfig`, which change those of the `recipe` if there is one;
    `untrained` prototypes are used as they are.

    `bank`: the dtype of inputs and features in the bank. Unless it is `resident` it is written to
    the work folder and mapped from there.
    """

    data: str
    kind: str = "fc"
    blocks: int = 5
    residual: bool = True
    normalize: str = "none"
    options: dict[str, Any] = field(default_factory=dict)
    recipe: str | None = None
    train: dict[str, Any] = field(default_factory=dict)
    untrained: bool = False
    choose: Choice | None = None
    bank: str = "float32"
    resident: bool = True

    def __post_init__(self) -> None:
        check_choice(self.kind, "kind", KINDS)
        check_choice(self.normalize, "normalize", NORMALIZATIONS)
        check_choice(self.bank, "bank", BANKS)
        if self.recipe is not None:
            check_choice(self.recipe, "recipe", tuple(RECIPES))
        if self.untrained and self.kind != "prototypes":
            raise InputError(f"untrained: expected for prototypes alone, got it for {self.kind}")
        if self.kind == "prototypes" and (self.bank, self.resident) != ("float32", True):
            raise InputError("bank: expected float32 and resident for prototypes, its own weights")

    @property
    def settings(self) -> dict[str, Any]:
        """All settings of its training that are not as they come."""
        return RECIPES.get(self.recipe or "", {}) | self.train


@dataclass(frozen=True)
class MetricSpec:
    """A net in whose keys neighbors are sought.

    `kind`: one of the metric nets of `otad.nets`, trained on the data set by `train`, fields of
    `MetricConfig` (with a table `adversary`, to train against attacks on the neighbors); or without
    any training "pixels", the inputs themselves, and "pretrained", the features of a network that
    others trained, by its name in `FEATURES`. `options` are those of the net.
    """

    data: str
    kind: str = "resnet"
    normalize: str = "none"
    features: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice(self.kind, "kind", METRIC_KINDS)
        check_choice(self.normalize, "normalize", NORMALIZATIONS)
        if self.kind == "pretrained":
            check_choice(self.features, "features", tuple(FEATURES))
        elif self.features:
            raise InputError(f"features: expected for pretrained alone, got it for {self.kind}")
        if self.kind in UNLEARNED and (self.train or self.normalize != "none"):
            raise InputError(
                f"train: expected nothing to train or to normalize by for {self.kind}, got some"
            )


@dataclass(frozen=True)
class SurrogateSpec:
    """A CIP-net that learns the answers of `row`, a row of OTAD, at the points of its bank.

    Each point is asked about among its neighbors other than itself (see `otad.model.imitation`).
    `options` are those of `CipNet`, `train` fields of `TrainConfig` that change `CIP_NET_RECIPE`,
    and `alpha` is the weight of the solver's answers against the net's own features. The error that
    is recorded is that on `held_out` points.
    """

    row: str
    alpha: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    held_out: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise InputError(f"alpha: expected a number from 0 to 1, got {self.alpha}")
        check_count(self.held_out, "held_out", least=0)
