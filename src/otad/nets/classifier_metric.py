"""A trained classifier as a metric, so that inputs it finds alike are neighbors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from otad.checks import check_choice, check_count, check_finite, refusing, require
from otad.nets.adapt import adapt
from otad.nets.base import Backbone, Metric, build, register_metric
from otad.nets.features import parts_of_user, unwrapped
from otad.nets.inputs import with_memory
from otad.nets.lift import Lift

KEYS = ("features", "logits", "softmax")
_RANK = 1e-6  # singular values below this share of the norm of the head are rounding errors


@register_metric("classifier")
class ClassifierMetric(Metric):
    """The features of a classifier, followed by a linear map and, for "softmax", the softmax.

    Use `metric_of` to make one from a trained network."""

    settings = ("keys",)

    def __init__(self, classifier: Backbone, layer: nn.Linear, *, keys: str, key_norm: str) -> None:
        shape, bounds = classifier.input_shape, classifier.bounds
        super().__init__(shape, bounds=bounds, key_dim=layer.out_features, key_norm=key_norm)
        self.mean, self.std = classifier.mean, classifier.std
        self.keys = check_choice(keys, "keys", KEYS)
        self.classifier = classifier
        classifier.head.requires_grad_(False)  # the projection takes its place
        self.projection = nn.Sequential(layer, nn.Softmax(1)) if keys == "softmax" else layer

    def normalize(self, x: Tensor) -> Tensor:
        """Return x itself: the classifier normalizes its inputs."""
        return x

    def features(self, u: Tensor) -> Tensor:
        """Return the features (B, d) that the head of the classifier reads."""
        return self.classifier.transport(self.classifier.embed(u))[0]

    def config(self) -> dict[str, Any]:
        described = super().config() | {"classifier": self.classifier.config()}
        for part in parts_of_user(self.classifier):
            described["probe"] = part.probe()
        return described

    @classmethod
    def from_config(cls, options: Mapping[str, Any]) -> Self:
        net, keys = build(options["classifier"]), options["keys"]
        layer = _layer_like(net, options["key_dim"], bias=keys != "features")
        return cls(net, layer, keys=keys, key_norm=options["key_norm"])


@torch.no_grad()
def metric_of(
    classifier: nn.Module, *, keys: str = "softmax", key_norm: str = "free", **options: Any
) -> Metric:
    """Make a metric of a trained classifier, so that inputs it finds alike are neighbors.

    A classifier that is sure of a bank point gives it a key near a corner of the softmax. If all
    bank keys are at corners, the nearest one has the class that the classifier predicts. So
    neighbors by this metric are as robust as the classifier is, and no more: train it against an
    adversary first, and choose bank points that it gets right under attack.

    Parameters
    ----------
    classifier : nn.Module
        A `Backbone`, or any network that `otad.nets.adapt` takes. The metric has a copy of it, so
        training the metric leaves the classifier unchanged.
    keys : str
        "softmax": the probabilities of classes. "logits": the logits less their mean. "features":
        the features that enter the head, projected on the directions that change the differences
        of its logits.
    key_norm : str
        As in `otad.nets.Metric`: "free", "ball" or "unit".
    **options
        For a network that is no `Backbone`, the arguments of `otad.nets.adapt`.

    Returns
    -------
    Metric
        The metric in evaluation mode, for `otad.defend(..., metric=...)`. It is saved with the
        model, and `otad.training.train_metric` trains it further.

    Raises
    ------
    InputError
        If the network is no classifier, or its head gives the same logit to all classes.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> digits = otad.data.load("digits")
    >>> net = otad.nets.fc_resnet((1, 8, 8), 10, blocks=1, hidden=16, bounds=(0.0, 1.0))
    >>> metric = otad.metric_of(net)
    >>> metric(digits.test_x[:5]).shape
    torch.Size([5, 10])
    >>> model = otad.defend(net, digits.train_x[:100], digits.train_y[:100], metric=metric)
    >>> model(digits.test_x[:5]).shape
    torch.Size([5, 10])
    """
    check_choice(keys, "keys", KEYS)
    with refusing("classifier: expected a module that can be copied"):
        own = copy.deepcopy(unwrapped(classifier))
    if isinstance(own, Backbone):
        require(not options, "options", "none for a Backbone", ", ".join(options))
    net = adapt(own, **options)
    net = net.inner if isinstance(net, Lift) else net
    require(net.task == "classification", "classifier", "one of classes", net.task)
    weight, bias = net.head.matrix.double(), net.head.bias
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            check_finite(tensor, f"classifier: head.{name}")
    # Logits change their order only with the differences of their rows.
    centered = weight - weight.mean(0)
    _, sizes, directions = torch.linalg.svd(centered, full_matrices=False)
    rank = int((sizes > _RANK * torch.linalg.matrix_norm(weight)).sum())
    require(rank > 0, "classifier", "a head whose logits differ", "equal rows")
    varied = rank > 1 or keys == "softmax" or key_norm != "unit"
    require(varied, "key_norm", "'free' or 'ball' for keys on a line", repr(key_norm))
    if keys == "features":
        centered = directions[:rank]
    layer = _layer_like(net, len(centered), bias=keys != "features")
    layer.weight.copy_(centered)
    if layer.bias is not None:
        layer.bias.copy_(torch.zeros(()) if bias is None else bias - bias.mean())
    return ClassifierMetric(net, layer, keys=keys, key_norm=key_norm).eval()


def _layer_like(net: Backbone, outputs: int, *, bias: bool) -> nn.Linear:
    """Return a layer that reads the features of a network, whose weights are yet to be set."""
    layer = nn.Linear(net.dim, check_count(outputs, "key_dim"), bias=bias, device="meta")
    return with_memory(layer, net.mean.device).to(net.mean.dtype)
