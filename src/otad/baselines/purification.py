"""Purification: a map that cleans an input before a network sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from otad.checks import check_bounds, check_device, refusing, require
from otad.io.tensor_files import read_tensors, write_tensors
from otad.nets import Backbone, build
from otad.nets.inputs import AnyClass, InputNet, Registry, Sizes, check_image_shape, restored


class Purifier(InputNet, ABC):
    """The base class of purifiers: images (B, C, H, W) -> cleaned images of the same shape.

    A subclass writes `purify`. If it is trained by `train_purifier`, it writes `loss` as well.

    Parameters
    ----------
    input_shape : sequence of int
        The shape (C, H, W) of an image.
    bounds : (float, float) or None
        The lowest and the highest legal input value. Cleaned images are clipped to them.

    Attributes
    ----------
    randomized : bool
        Whether two calls give two results. Random numbers are drawn from torch's own generators.
    differentiable : bool
        Whether the result has a gradient that attacks can follow.
    learns_from_attacks : bool
        Whether it is trained on attacked images beside the images themselves.

    Examples
    --------
    >>> import torch
    >>> from otad.baselines import Purifier
    >>> class Darken(Purifier):
    ...     def purify(self, x):
    ...         return x - 0.5
    >>> Darken((1, 2, 2), bounds=(0.0, 1.0))(torch.ones(1, 1, 2, 2)).unique().tolist()
    [0.5]
    """

    family: ClassVar[Registry[Purifier]] = Registry("otad.baselines.register_purifier")
    randomized: ClassVar[bool] = False
    differentiable: ClassVar[bool] = True
    learns_from_attacks: ClassVar[bool] = False

    def __init__(self, input_shape: Sizes, **options: Any) -> None:
        check_image_shape(input_shape, 1)
        super().__init__(input_shape, **options)

    @abstractmethod
    def purify(self, x: Tensor) -> Tensor:
        """Return cleaned images (B, C, H, W), which may leave the bounds."""

    def forward(self, x: Tensor) -> Tensor:
        """Return cleaned images (B, C, H, W) within the bounds."""
        pure = self.purify(x)
        return pure if self.bounds is None else pure.clamp(*self.bounds)

    def loss(self, x: Tensor, attacked: Tensor) -> Tensor:
        """Return what a training step minimizes for images x and attacked images (B, C, H, W)."""
        raise NotImplementedError(f"{type(self).__name__} cannot be trained")


class BoundedPurifier(Purifier):
    """A purifier that works on images scaled from their bounds to [-1, 1]."""

    def __init__(self, input_shape: Sizes, *, bounds: Any = (0.0, 1.0), **options: Any) -> None:
        with refusing("bounds: expected two finite numbers low < high"):
            low, high = check_bounds(bounds)
        units = {"mean": (low + high) / 2, "std": (high - low) / 2}
        super().__init__(input_shape, bounds=bounds, **units, **options)

    def from_units(self, u: Tensor) -> Tensor:
        """Return images in [-1, 1] in the units of inputs."""
        return self.mean + self.std * u


def register_purifier(kind: str) -> Callable[[AnyClass], AnyClass]:
    """Return a class decorator that makes a purifier available by this name, so it can be saved.

    Parameters
    ----------
    kind : str
        A name that no other purifier has.

    Examples
    --------
    >>> from otad.baselines import MedianFilter, register_purifier
    >>> @register_purifier("wide_median")
    ... class WideMedian(MedianFilter):
    ...     pass
    >>> WideMedian((1, 8, 8), size=5).config()["kind"]
    'wide_median'
    """
    return Purifier.family.register(kind)


class Purified(nn.Module):
    """A purifier in front of a network: x -> net(purifier(x)), in evaluation mode.

    Attacks go through the purifier. Where it has no gradient, the backward pass takes the identity
    in its place (BPDA, Athalye et al. 2018). A random purifier makes the whole model random: see
    `otad.evaluate`.

    Parameters
    ----------
    net : Backbone
        The network. `otad.nets.adapt` makes a backbone of your own module.
    purifier : Purifier
        A purifier for the same inputs.
    straight_through : bool or None
        Whether gradients pass the purifier as if it were the identity. By default they do if it is
        not differentiable; then False is refused.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> from otad.baselines import MedianFilter, Purified
    >>> net = otad.nets.fc_resnet((1, 8, 8), 10, blocks=1, hidden=16, bounds=(0.0, 1.0))
    >>> model = Purified(net, MedianFilter((1, 8, 8), bounds=(0.0, 1.0)))
    >>> model.save("purified.safetensors")
    >>> same, x = Purified.load("purified.safetensors"), torch.rand(2, 1, 8, 8)
    >>> torch.equal(same(x), model(x)), same.randomized, same.straight_through
    (True, False, False)
    """

    def __init__(
        self, net: Backbone, purifier: Purifier, *, straight_through: bool | None = None
    ) -> None:
        super().__init__()
        for name in ("input_shape", "bounds"):
            mine, other = getattr(purifier, name), getattr(net, name)
            require(mine == other, f"purifier.{name}", f"{other}, as the net has", mine)
        missing = not purifier.differentiable
        possible = straight_through is not False or not missing
        require(possible, "straight_through", "True, as the purifier has no gradient", False)
        self.net, self.purifier = net, purifier
        self.straight_through = missing if straight_through is None else straight_through
        self.eval()

    @property
    def randomized(self) -> bool:
        """Whether two calls give two answers."""
        return self.purifier.randomized

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape (C, H, W) of an input."""
        return self.net.input_shape

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The lowest and the highest legal input value."""
        return self.net.bounds

    @property
    def task(self) -> str:
        """The task of the network."""
        return self.net.task

    def check_inputs(self, x: object, name: str = "x") -> Tensor:
        """Return `x` if it is a legal batch of inputs, and raise `InputError` if not."""
        return self.net.check_inputs(x, name)

    def purify(self, x: Tensor) -> Tensor:
        """Return the images (B, C, H, W) that the network sees."""
        if not self.straight_through:
            return self.purifier(x)  # type: ignore[no-any-return]
        with torch.no_grad():
            pure: Tensor = self.purifier(x)
        return pure + (x - x.detach())

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, C), or values (B,) in regression, of inputs (B, *input_shape)."""
        return self.net(self.purify(x))  # type: ignore[no-any-return]

    def straightened(self) -> Purified:
        """Return the same model with gradients that pass the purifier as the identity."""
        return Purified(self.net, self.purifier, straight_through=True)

    def save(self, path: str | Path, **about: Any) -> None:
        """Write the model to a safetensors file. `about` are notes in plain JSON."""
        parts = {"net": self.net.config(), "purifier": self.purifier.config()}
        header = {"purified": parts | {"straight_through": self.straight_through}, "about": about}
        write_tensors(Path(path), self.state_dict(), header)

    @staticmethod
    def load(path: str | Path, *, device: str = "cpu") -> Purified:
        """Load a model from a file that `save` wrote."""
        tensors, header = read_tensors(Path(path))
        with refusing(f"{path}: expected a purified model"):
            return restored(_build, header["purified"], tensors).to(check_device(device))


def _build(config: Mapping[str, Any]) -> Purified:
    net, purifier = build(config["net"]), Purifier.family.build(config["purifier"])
    return Purified(net, purifier, straight_through=config["straight_through"])
