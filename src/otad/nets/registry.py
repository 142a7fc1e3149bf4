"""Nets by name: classes registered under a kind are built again from their plain JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from otad.checks import check_choice
from otad.errors import InputError

Net = TypeVar("Net")
AnyClass = TypeVar("AnyClass", bound=type)


class Registry(Generic[Net]):
    """Kinds of one family of nets. A class has `kind`, `config()` and `from_config(options)`."""

    def __init__(self, family: str, decorator: str) -> None:
        self._family, self._decorator = family, decorator
        self._kinds: dict[str, Any] = {}

    def register(self, kind: str) -> Callable[[AnyClass], AnyClass]:
        """Class decorator: lets `build` make this class from its `config()`."""

        def name_class(cls: AnyClass) -> AnyClass:
            if kind in self._kinds:
                raise InputError(f"kind: expected a new name, got {kind!r}, which is registered")
            cls.kind = kind  # type: ignore[attr-defined]
            self._kinds[kind] = cls
            return cls

        return name_class

    def kind_of(self, net: Net) -> str:
        """The registered kind of a net, refusing a class that has none."""
        if type(net) not in self._kinds.values():
            raise InputError(
                f"net: expected a registered kind of {self._family} to describe, got "
                f"{type(net).__name__}; decorate the class with {self._decorator}(name)"
            )
        return str(net.kind)  # type: ignore[attr-defined]

    def build(self, config: Mapping[str, Any]) -> Net:
        """The net `config` describes, with fresh weights."""
        options = dict(config)
        kind = check_choice(str(options.pop("kind", None)), "config['kind']", tuple(self._kinds))
        try:
            net: Net = self._kinds[kind].from_config(options)
        except (KeyError, TypeError) as error:
            raise InputError(f"config: expected the options of {kind}, got {options!r}") from error
        return net
