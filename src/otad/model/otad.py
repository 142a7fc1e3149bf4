"""OTAD: a network whose features are interpolated from training points."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from otad.arguments import check_options, checked
from otad.checks import check_evaluation, check_positive, require
from otad.cip import BankProblem
from otad.cip.protocols import Solver
from otad.cip.whole_bank.map import WholeBank
from otad.cip.whole_bank.potential import BankPotential
from otad.errors import InputError
from otad.io.codec import to_plain
from otad.model.answerer_options import make_answerer
from otad.model.answerers import Answer
from otad.model.bank import FeatureBank
from otad.model.bank_module import BankModule
from otad.model.compiled import answer_compiled
from otad.model.folder import Block, write_model
from otad.model.model_card import EvaluationLike, add_evaluation
from otad.model.names import interface_of
from otad.model.trace import Trace
from otad.nets import Backbone, Metric
from otad.nets.features import keys_of, parts_of_user

SETTINGS = ("n_neighbors", "smoothness", "strong_convexity", "search")  # of a card and a record
METRIC_VERSION = 2  # the least version of a model card with a metric


class OTAD(BankModule):
    """A network whose features are interpolated from training points: the model of this library.

    The backbone embeds an input. Convex integration gives it the feature of a Lipschitz map through
    pairs of embedded training points and their features. The backbone's own linear head reads that
    feature. The module maps inputs (B, *input_shape) to logits (B, C), or to values (B,) in
    regression, and is differentiable in its inputs for fixed neighbors. Use `otad.defend` to make
    one from a network and its training data, and `otad.load` to read one from a folder.

    The bank of training points was made by the networks as they were. So `train()` leaves all parts
    in evaluation mode, and networks that you train further must be defended again.

    Parameters
    ----------
    backbone : Backbone
        The network that embeds inputs and reads features.
    bank : FeatureBank
        The embedded training inputs (N, d) with their features and labels.
    n_neighbors : int
        K, the number of neighbors of an input. In global scope only k-NN baselines and attacks use
        it.
    search : str
        "torch", or "faiss" from the extra `index`.
    resident : bool
        Whether the bank moves with the module (`to`, `state_dict`). If False, it stays where it is,
        such as in a file, and only neighbors are read.
    metric : nn.Module or None
        A network (B, *input_shape) -> keys (B, m) in whose space neighbors are searched. If None,
        neighbors are searched among embedded inputs.
    keys : Tensor (N, m) or None
        The keys of the bank, if there is a metric.
    abstain_beyond : float or None
        Inputs at a larger `distance` from the bank get no answer (NaN). If None, there is no limit.
        `otad.distance_threshold` chooses it on held-out data, and you can set it later.
    scope : str
        "local" for a map of each input's own K neighbors, or "global" for one map of all points.
    smoothness : float or None
        L, the Lipschitz constant of the map. If None, it is 2 in local scope, and in global scope
        the least L that all bank points allow. For a smaller L, points that contradict others are
        left out.
    strong_convexity : float
        l, the least curvature of the potential.
    solver : solver or None
        What solves the problems in local scope, by default an `otad.cip.ExactCip` that answers
        every row. A trained `otad.cip.surrogate.CipNet` estimates the answers instead.
    potential, sweep_progress
        In global scope, the potential of the bank if it is known, and a function that is called
        after each sweep that searches it, with (sweeps done, largest raise of a value).

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> digits = otad.data.load("digits")
    >>> net = otad.nets.fc_resnet((1, 8, 8), 10, blocks=1, hidden=16, bounds=(0.0, 1.0))
    >>> model = otad.defend(net, digits.train_x[:100], digits.train_y[:100], n_neighbors=5)
    >>> model(digits.test_x[:3]).shape
    torch.Size([3, 10])
    >>> model.scope, model.n_neighbors, model.smoothness
    ('local', 5, 2.0)
    """

    _abstain_beyond: float | None = None

    def __init__(
        self,
        backbone: Backbone,
        bank: FeatureBank,
        *,
        n_neighbors: int = 10,
        search: str = "torch",
        resident: bool = True,
        metric: nn.Module | None = None,
        keys: Tensor | None = None,
        abstain_beyond: float | None = None,
        **answering: Any,
    ) -> None:
        expected = f"features of dimension {backbone.dim} like the backbone's"
        require(bank.dim == backbone.dim, "bank", expected, bank.dim)
        most = None if bank.labels.is_floating_point() else int(bank.labels.max())
        is_value, count = backbone.task == "regression", backbone.n_outputs
        expected = "values" if is_value else f"labels from 0 to {count - 1}, one for each output"
        fits = most is None if is_value else most is not None and most < count
        require(fits, "bank", expected, "values" if most is None else f"labels up to {most}")
        asked = {"n_neighbors": n_neighbors, "metric": metric, **answering}
        answerer = make_answerer(bank, lift=backbone.lift, **asked)
        paired = (metric is None) == (keys is None)
        require(paired, "metric", "together with the bank's keys", "one of the two")
        super().__init__(bank, n_neighbors, search, resident, keys)
        self.n_searched += answerer.spares
        self.backbone, self.answerer, self.metric = backbone, answerer, metric
        self.notes: dict[str, Any] = {}
        self.abstain_beyond = abstain_beyond
        self.eval()

    def train(self, mode: bool = True) -> OTAD:
        """Stay in evaluation mode, in which the bank was made."""
        return super().train(False)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse another setting of a model, which its other parts would not follow."""
        if name in (*SETTINGS, "scope", "metric", "solver", "potential") and hasattr(self, name):
            expected = "no change of a finished model; `replace` returns one with another setting"
            raise InputError(f"{name}: expected {expected}, got {value!r}")
        super().__setattr__(name, value)

    @property
    def abstain_beyond(self) -> float | None:
        """The distance from the bank beyond which inputs get no answer, or None for no limit."""
        return self._abstain_beyond

    @abstain_beyond.setter
    def abstain_beyond(self, value: float | None) -> None:
        check_options({"abstain_beyond": float | None}, {"abstain_beyond": value})
        if value is not None:
            check_positive(value := float(value), "abstain_beyond")
        self._abstain_beyond = value

    @property
    def scope(self) -> str:
        """Either "local" or "global"."""
        return self.answerer.scope

    @property
    def smoothness(self) -> float:
        """The Lipschitz constant L that the map was asked to have."""
        return self.answerer.smoothness

    @property
    def strong_convexity(self) -> float:
        """The least curvature l of the potential."""
        return self.answerer.strong_convexity

    @property
    def solver(self) -> Solver | None:
        """The solver of local scope, or None in global scope."""
        return self.answerer.solver

    @property
    def potential(self) -> BankPotential | None:
        """The potential of the bank in global scope, or None in local scope."""
        return self.answerer.potential

    @property
    def whole_bank(self) -> WholeBank:
        """The global map. It raises `InputError` in local scope."""
        return self.answerer.whole_bank(self)

    @checked
    def query_keys(self, x: Tensor) -> Tensor:
        """Return the keys (B, m) of inputs (B, *input_shape), by which neighbors are searched."""
        check_evaluation(self, "model")
        self.backbone.check_inputs(x, dtype=x.dtype)  # checks the shape only
        require(x.is_floating_point(), "x", "floating-point numbers", x.dtype)
        return self.backbone.embed(x) if self.metric is None else keys_of(x, self.metric)

    @checked
    def solve(
        self, embedded: Tensor, keys: Tensor | None = None, *, exclude: Tensor | None = None
    ) -> Answer:
        """Return the answer for embedded inputs (B, d), with query keys (B, m) for a metric.

        `exclude` is as in `trace`."""
        known = keys is not None or self.metric is None
        require(known, "keys", "query keys, as neighbors are searched by a metric", None)
        return self.answerer.answer(self, embedded, embedded if keys is None else keys, exclude)

    def problem(self, embedded: Tensor, indices: Tensor) -> BankProblem:
        """Return the convex integration problem of embedded inputs (B, d) and bank rows (B, K)."""
        return self.answerer.problem(self, embedded, indices)

    @checked
    def trace(self, x: Tensor, *, exclude: Tensor | None = None) -> Trace:
        """Return predictions and what they are based on.

        Parameters
        ----------
        x : Tensor (B, *input_shape)
            Inputs.
        exclude : Tensor (B,) of int64 or None
            In local scope, a bank row for each input that must not be its neighbor, or -1. Use it
            for inputs that are in the bank themselves.

        Returns
        -------
        Trace
            Outputs, neighbors, weights and distances, with one row per input.
        """
        found, keys = self._answer(x, exclude)
        distance = self._distance(found, keys, exclude)
        labels = self.bank_labels[found.neighbors.indices.to(self.bank_labels.device)].to(x.device)
        outputs = self._outputs(found.solution.image, distance)
        return Trace(**vars(found), outputs=outputs, labels=labels, distance=distance)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, C), or values (B,) in regression, of inputs (B, *input_shape).

        Rows for which the model abstains are NaN. Inputs of a wrong shape or dtype, or outside the
        bounds, raise `InputError`."""
        if torch.compiler.is_compiling():  # then the values of x are not checked
            shape, expected = tuple(x.shape[1:]), self.backbone.input_shape
            require(shape == expected, "x", f"inputs of shape {expected}", shape)
            return self._outputs(*answer_compiled(self, self.answerer, *self._queries(x)))
        found, keys = self._answer(x)
        distance = None if self.abstain_beyond is None else self._distance(found, keys)
        return self._outputs(found.solution.image, distance)

    def _answer(self, x: Tensor, exclude: Tensor | None = None) -> tuple[Answer, Tensor]:
        """Return the answer for inputs, and their query keys (B,m)."""
        check_evaluation(self, "model")
        embedded, keys = self._queries(self.backbone.check_inputs(x))
        return self.solve(embedded, keys, exclude=exclude), keys

    def _queries(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return embedded inputs (B,d) and query keys (B,m), without checks."""
        embedded = self.backbone.embed(x)
        return embedded, embedded if self.metric is None else keys_of(x, self.metric)

    def _outputs(self, image: Tensor, distance: Tensor | None) -> Tensor:
        outputs: Tensor = self.backbone.head(image)
        if self.abstain_beyond is None or distance is None:
            return outputs
        foreign = (distance > self.abstain_beyond).view(-1, *[1] * (outputs.dim() - 1))
        return outputs.masked_fill(foreign, torch.nan)

    @checked
    @torch.no_grad()
    def distance(self, x: Tensor) -> Tensor:
        """Return how far inputs (B, *input_shape) are from the bank (B,), in float64.

        It is the distance to the nearest bank point in the space in which neighbors are searched.
        It changes by no more than an input moves in that space."""
        return self.neighbors(self.query_keys(x).detach(), 1).distances[:, 0]

    def _distance(self, found: Answer, keys: Tensor, exclude: Tensor | None = None) -> Tensor:
        near, rests = found.neighbors, self.answerer.rests_on_neighbors
        near = near if rests else self.neighbors(keys.detach(), 1, exclude=exclude)
        return near.distances[:, 0]

    def replace(self, **changes: Any) -> OTAD:
        """Return a copy of the model with other arguments of the constructor.

        Another scope starts from its defaults. For another bank or curvature a global potential is
        computed again, unless it is given. With a metric, another bank needs its `keys`.

        Examples
        --------
        >>> import torch
        >>> import otad
        >>> model = otad.defend(None, torch.eye(3), torch.arange(3), inputs="pixels", n_neighbors=2)
        >>> model.replace(n_neighbors=1).n_neighbors, model.n_neighbors
        (1, 2)
        """
        options = self.answerer.options()
        if changes.get("scope", self.scope) != self.scope:
            options = {}
        elif "potential" in changes:
            options = {"scope": self.scope}
        elif "potential" in options and {"bank", "smoothness", "strong_convexity"} & set(changes):
            options = {"scope": self.scope, "smoothness": self.smoothness}
            if not self.backbone.lift:
                options["strong_convexity"] = self.strong_convexity
        same = ("backbone", "bank", "n_neighbors", "search", "resident", "metric", "abstain_beyond")
        current = {name: getattr(self, name) for name in same} | {"keys": self.bank_keys}
        model = OTAD(**(current | options | changes))
        model.notes = dict(self.notes)
        return model

    @checked
    def save(
        self,
        folder: str | Path,
        *,
        evaluation: EvaluationLike | None = None,
        shards: int | None = None,
        **notes: Any,
    ) -> Path:
        """Write the model to a folder that `otad.load` reads.

        The folder holds safetensors files, card.json, and a model card for people in README.md.
        Saving again replaces the model; if that is interrupted, the old model stays whole.

        Parameters
        ----------
        folder : path
            The folder, which is made if it does not exist.
        evaluation : Evaluation or None
            What `otad.evaluate` returned for this model. The model card shows its figures.
        shards : int or None
            How many files hold the bank, for banks of many gigabytes. If None, one file.
        **notes
            Notes in plain JSON, such as `data` or `classes`, which are added to `model.notes`.

        Returns
        -------
        Path
            The path of card.json.

        Examples
        --------
        >>> import tempfile
        >>> import torch
        >>> import otad
        >>> model = otad.defend(None, torch.eye(3), torch.arange(3), inputs="pixels", n_neighbors=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     card = model.save(folder, classes=["a", "b", "c"])
        ...     print(card.name, otad.load(folder).notes["classes"])
        card.json ['a', 'b', 'c']
        """
        answerer, metric, keys = self.answerer, self.metric, self.bank_keys
        settings = {name: getattr(self, name) for name in SETTINGS} | answerer.settings()
        if self.abstain_beyond is not None:
            settings["abstain_beyond"] = self.abstain_beyond
        about: dict[str, Any] = {"version": answerer.card_version, "settings": settings}
        about["interface"] = self.interface()
        about["notes"] = add_evaluation(self.notes | notes, evaluation, self.describe())
        for part in parts_of_user(self.backbone):
            about["probe"] = part.probe()
        config = {"config": self.backbone.config()}
        blocks = {"backbone": Block("backbone", self.backbone.state_dict(), config, config)}
        if metric is not None and keys is not None:
            if not isinstance(metric, Metric):
                found = type(metric).__name__
                raise InputError(f"metric: expected an otad.nets.Metric to save it, got {found}")
            about["version"] = max(METRIC_VERSION, answerer.card_version)
            about["metric"] = {"config": metric.config()}
            blocks["metric.metric"] = Block("metric", metric.state_dict())
            blocks["metric.keys"] = Block("keys", {"keys": keys})
        if answerer.card_entry is not None and (block := answerer.block()) is not None:
            blocks[answerer.card_entry] = block
        return write_model(folder, about, self.bank, blocks, shards=shards)

    def interface(self) -> dict[str, Any]:
        """Return the task, the shape and bounds of inputs, and the number of outputs."""
        return interface_of(self.backbone)

    def describe(self) -> dict[str, Any]:
        """Return the settings and the bank in plain JSON, as records of evaluations do."""
        settings = {name: getattr(self, name) for name in SETTINGS} | {
            "bank": {"points": len(self.bank_inputs), "fingerprint": self.bank_fingerprint},
            **self.answerer.describe(),
            **({} if self.abstain_beyond is None else {"abstain_beyond": self.abstain_beyond}),
        }
        return dict(to_plain(settings))

    def __repr__(self) -> str:
        """Return a few lines without the layers, which are in `repr(model.backbone)`."""
        net, metric = self.backbone, self.metric
        classes = "" if net.task == "regression" else f" of {net.n_outputs} classes"
        used = f"backbone={_named(net)}" + ("" if metric is None else f", metric={_named(metric)}")
        lines = f"{net.task}{classes}, inputs {net.input_shape}", self.extra_repr(), used
        return "OTAD(" + ",\n  ".join(lines) + ")"

    def extra_repr(self) -> str:
        """Return the size of the bank and the settings in one line."""
        curvature = f"smoothness={self.smoothness:g}, strong_convexity={self.strong_convexity:g}, "
        bank = f"bank={len(self.bank_inputs)} points, "
        if self.abstain_beyond is not None:
            bank += f"abstain_beyond={self.abstain_beyond:g}, "
        if (potential := self.potential) is not None:
            return f"{bank}scope=global, {curvature}left_out={len(potential.left_out)}"
        return f"{bank}n_neighbors={self.n_neighbors}, {curvature}mode={self.answerer.mode}"


def _named(net: nn.Module) -> str:
    return f"{type(net).__name__} with {sum(one.numel() for one in net.parameters()):,} weights"
