"""The tables of an experiment's TOML file, one dataclass each. `Experiment` checks annotated types:
a `Count` is at least 1, a `NetName` an entry of [nets]. Radii with unit "std" are in units of the
standard deviations that the net divides its inputs by."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from otad.attacks import ATTACKS
from otad.checks import check_choice, require
from otad.training import RECIPES

RANDOM_STEP = "random_step"
UNLEARNED = ("pretrained", "pixels", "classifier")
LIPSCHITZ = ("linf_dist", "orthogonal", "soc")
BLOCKLESS = ("resnet", "linf_dist", "soc")
Normalization = Literal["none", "feature", "channel", "all"]
Unit = Literal["input", "std"]
Options = dict[str, Any]
MetricKind = Literal[
    "resnet", "cnn", "vit", "attention", "lipschitz", "pretrained", "pixels", "classifier", "tuned"
]
Count = Annotated[int, "count"]
DataName = Annotated[str, "data"]
NetName = Annotated[str, "nets"]
MetricName = Annotated[str, "metrics"]
SurrogateName = Annotated[str, "surrogates"]
PurifierName = Annotated[str, "purifiers"]
RowName = Annotated[str, "rows"]


@dataclass(frozen=True)
class DataSpec:
    """A data set of the registry."""

    name: str
    options: Options = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """A training setting chosen by its score on a held-out part of the train part."""

    setting: str
    values: tuple[float, ...]
    row: RowName  # whose score decides
    validation: float = 0.1  # share of the train part
    epochs: int | None = None  # of each trial
    certified: float | None = None  # the certified score at this radius decides

    def __post_init__(self) -> None:
        require(self.values, "values", "at least one to choose from", "none")


@dataclass(frozen=True)
class NetSpec:
    """A net and how it is trained: fully connected ("fc"), the same but writing into coordinates of
    its own ("lifted"), labeled points drawn from the train part, which are the weights of their own
    map ("prototypes"), a vision transformer ("vit"), a ResNet ("resnet"), or a net with a proved
    Lipschitz constant ("orthogonal", "linf_dist", "soc"). The last two and ResNets have no
    `blocks`. A table `adversary` among the training settings asks for adversarial training."""

    data: DataName
    kind: Literal[
        "fc", "lifted", "prototypes", "vit", "resnet", "orthogonal", "linf_dist", "soc"
    ] = "fc"  # fmt: skip
    blocks: int = 5
    residual: bool = True
    normalize: Normalization = "none"
    options: Options = field(default_factory=dict)  # of the constructor
    recipe: str | None = None
    train: Options = field(default_factory=dict)  # training settings, over those of the recipe
    untrained: bool = False  # prototypes as drawn
    choose: Choice | None = None
    bank: Literal["float32", "float16", "bfloat16"] = "float32"  # inputs and features

    def __post_init__(self) -> None:
        if self.kind == "prototypes":
            check_choice(self.bank, "bank", ("float32",))
        else:
            require(not self.untrained, "untrained", "prototypes", self.kind)

    @property
    def settings(self) -> Options:
        """All training settings that differ from the defaults."""
        if self.recipe is None:
            return self.train
        return RECIPES[check_choice(self.recipe, "recipe", tuple(RECIPES))] | self.train


@dataclass(frozen=True)
class MetricSpec:
    """A net whose keys are compared to find neighbors; without training: the inputs themselves
    ("pixels"), the `features` of a public network ("pretrained") or what `net` computes
    ("classifier"). A metric of the kind "tuned" is that of `row`, trained further on the vote of
    the points in the bank of that row."""

    data: DataName
    kind: MetricKind = "resnet"
    net: NetName | None = None
    row: RowName | None = None
    normalize: Normalization = "none"
    features: Literal["", "efficientnet_lite0"] = ""
    options: Options = field(default_factory=dict)  # of the constructor
    train: Options = field(default_factory=dict)  # with a table `adversary`: adversarial training

    def __post_init__(self) -> None:
        is_named = bool(self.features) == (self.kind == "pretrained")
        require(is_named, "features", "them for pretrained alone", self)
        for name, kind in (("net", "classifier"), ("row", "tuned")):
            is_given = getattr(self, name) is not None
            require(is_given == (self.kind == kind), name, f"one for {kind} alone", self)
        is_own = self.kind != "tuned" or not (self.options or self.normalize != "none")
        require(is_own, "options", "those of the metric that is tuned", self)
        fits = self.kind not in UNLEARNED or (not self.train and self.normalize == "none")
        require(fits, "train", "no training and no normalization", self)


@dataclass(frozen=True)
class SurrogateSpec:
    """A CIP-net that learns the answers of `row`, a row of OTAD, at the points of its bank."""

    row: RowName
    alpha: float = 1.0  # weight of the solver's answers against the net's own features
    options: Options = field(default_factory=dict)  # of `CipNet`
    train: Options = field(default_factory=dict)
    held_out: int = 0  # points to measure the error on


@dataclass(frozen=True)
class PurifierSpec:
    """What cleans the inputs of `net`. Only "ape_gan" learns from attacks on it, those of a table
    `attack`, and only "median_filter" is not trained."""

    net: NetName
    kind: Literal["median_filter", "sparse_coding", "ape_gan", "diffusion"]
    options: Options = field(default_factory=dict)  # of the constructor
    train: Options = field(default_factory=dict)
    attack: PurifierAttack | None = None

    def __post_init__(self) -> None:
        learns = self.kind == "ape_gan"
        require(learns == (self.attack is not None), "attack", "one for 'ape_gan' alone", self.kind)
        require(self.kind != "median_filter" or not self.train, "train", "no training", self.train)


@dataclass(frozen=True)
class PurifierAttack:
    """The attacks that a purifier learns to undo."""

    eps: float
    norm: Literal["l2", "linf"] = "linf"
    steps: Count = 1


@dataclass(frozen=True)
class AttackSpec:
    """An attack, or "random_step": one random step of length eps. All rows get the same points."""

    name: str
    eps: float | None = None  # None: the whole box of valid inputs
    norm: Literal["l2", "linf"] = "l2"
    points: Count = 1000  # random test points
    label: str = ""
    unit: Unit = "input"
    on: Literal["model", "net"] = "model"  # net: its adversarial examples are given to the model
    options: Options = field(default_factory=dict)
    also: dict[str, Options] = field(default_factory=dict)  # for each point the worst counts

    def __post_init__(self) -> None:
        for name in self.runs:
            check_choice(name, "attack", (RANDOM_STEP, *ATTACKS))
        is_alone = RANDOM_STEP not in self.runs or len(self.runs) == 1
        require(is_alone, "also", f"no attacks beside {RANDOM_STEP}", list(self.runs))
        has_radius = self.eps is not None or self.unit == "input"
        require(has_radius, "eps", "a radius with unit 'std'", "none")

    @property
    def runs(self) -> dict[str, Options]:
        return {self.name: self.options} | self.also


@dataclass(frozen=True)
class CertifySpec:
    """The radii to certify at, on the test part; in regression, to bound the error at. They are in
    l2, and in linf for a net of kind "linf_dist"."""

    eps: tuple[float, ...]
    unit: Unit = "input"
    within_bounds: bool = False  # also for inputs within the bounds alone, in a column of its own


@dataclass(frozen=True)
class LipschitzSpec:
    """How many test points get a local Lipschitz constant, and within which radius."""

    radius: float
    points: int = 500
    steps: int = 20


@dataclass(frozen=True)
class RowSpec:
    """One row: a method on a net, and what is measured of it."""

    net: NetName
    method: Literal["net", "otad", "mean_feature_knn", "majority_knn"]
    label: str = ""
    n_neighbors: int = 10
    scope: Literal["local", "global"] = "local"
    smoothness: float | None = None
    strong_convexity: float = 0.0
    mode: str = "consistent"
    climb: tuple[float, float] | None = None
    max_smoothness: float | None = None
    spares: int = 0
    potential: str = "canonical"
    lipschitz: LipschitzSpec | None = None
    certify: CertifySpec | None = None
    attacks: dict[str, AttackSpec] = field(default_factory=dict)
    metric: MetricName | None = None
    surrogate: SurrogateName | None = None  # answers instead of the exact solver
    purifier: PurifierName | None = None  # cleans the inputs of the net
    per_class: Count | None = None  # points of each class in the bank; random ones
    central: bool = False  # or those whose keys are nearest to the mean key of their class
    robust: bool = False  # of those that the classifier gets right under its training's adversary
    unread: float | None = None  # lifts the outputs of a Lipschitz net, see `feature_lift`

    def __post_init__(self) -> None:
        has_effect = {
            "metric": self.uses_neighbors,
            "per_class": self.uses_neighbors,
            "central": self.metric is not None and self.per_class is not None,
            "robust": self.central,
            "surrogate": self.uses_neighbors and self.method == "otad",
            "purifier": self.method == "net",
            "unread": self.method == "otad" and self.scope == "global",
            "certify": self.method in ("otad", "net") and self.purifier is None,
            "lipschitz": self.method in ("otad", "net") and self.purifier is None,
        }
        for name, is_used in has_effect.items():
            given = getattr(self, name)
            got = f"{given!r} with method {self.method!r} and scope {self.scope!r}"
            require(is_used or not given, name, "none, because it would have no effect", got)

    @property
    def uses_neighbors(self) -> bool:
        return self.method != "net" and self.scope != "global"

    @property
    def in_trial(self) -> RowSpec:
        """The row with only what a `Choice` compares."""
        certify = self.certify and replace(self.certify, within_bounds=False)
        return replace(self, certify=certify, lipschitz=None, attacks={})


@dataclass(frozen=True)
class EvaluateSpec:
    """The model of `row` under the whole suite, in l2, on `points` random test points."""

    row: RowName
    eps: tuple[float, ...]
    headline: float  # the eps of the threat model
    beside: tuple[RowName, ...] = ()  # rows with the same attacks on the same points
    points: Count = 1000
    batch_size: Count = 1000
    flags: bool = True
    attacks: dict[str, Options] = field(default_factory=dict)  # empty: the preset "standard"
    skip_proved: tuple[str, ...] = ()  # attacks that skip points with a certificate of the radius
    certify: tuple[RowName, ...] = ()  # rows to certify on these points; if any, those beside too


@dataclass(frozen=True)
class CostSpec:
    """Predictions of the defended `net` with random banks of these sizes, on these devices."""

    net: NetName
    banks: tuple[Count, ...]
    queries: Count
    batch_size: Count = 1000
    threads: Count = 2
    devices: tuple[str, ...] = ("cpu", "cuda")


@dataclass(frozen=True)
class SpeedSpec:
    """The cost of a query for the models of `rows`, on the device of the run."""

    rows: tuple[RowName, ...]
    queries: Count = 1000
    batch_size: Count = 100
    threads: Count = 2
    places: tuple[Literal["memory", "disk"], ...] = ("memory", "disk")  # of the bank
    steps: bool = False  # also the time of each step of the defense


@dataclass(frozen=True)
class CurveSpec:
    """A figure of the rows of OTAD over L - l."""

    title: str


def name_of(radius: float) -> str:
    return f"{radius:g}"
