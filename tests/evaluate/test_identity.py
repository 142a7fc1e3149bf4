"""Finished batches are named by weights, data, settings and declared versions, not by source."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evaluate.small import Plane, Walk, plane_data, two_sides
from torch import Tensor, nn
from torch.nn import functional

import otad
from otad.attacks import L2, Attack, MetricAttack, Transfer
from otad.attacks.adaptive import Straight
from otad.evaluate.identity import Identity
from otad.evaluate.protocol import run_attacks
from otad.search.ivf import IvfSearch, build_lists

SOURCE = """
class Net(nn.Module):
    "{text}"
    version = {version}
    offsets = {offsets}

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter({weight} * torch.ones(3))
        self.scale = {scale}

    @torch.enable_grad()
    def forward(self, x, power={power}):  # {text}
        "{text}"
        score = x @ self.weight * self.scale * {factor} + sum(self.offsets)
        return torch.stack([-score, score], 1)


def repeated(count):
    def decorate(step):
        def run(self, *given):
            for _ in range(count):
                x = step(self, *given)
            return x
        return run
    return decorate


class Step(Attack):
    "{text}"
    name, family, version = "step", "random", {attack_version}
    table = torch.tensor([{entry}])

    def __init__(self):
        self._length = {length}

    @repeated({count})
    def run(self, target, x, ball, generator, *, start={start}):  # {text}
        "{text}"
        return {sign} * (x + self._length + self.table + start)
"""
FACTS = {
    "text": "Once.",
    "factor": 1.0,
    "sign": 1,
    "version": 1,
    "attack_version": 1,
    "weight": 1,
    "scale": 1,
    "length": 0.1,
    "offsets": (0, 0),
    "power": 1,
    "entry": 0.0,
    "start": 0.0,
    "count": 1,
}


def names_of_batches(folder: Path, shift: float = 0.0, **changes: Any) -> set[str]:
    """Those of a run by classes whose source is as given."""
    space: dict[str, Any] = {"__name__": "notebook", "torch": torch, "nn": nn, "Attack": Attack}
    exec(SOURCE.format(**FACTS | changes), space)
    x, y = plane_data()
    before = set(folder.glob("parts/*"))
    run_attacks(space["Net"]().eval(), x + shift, y, L2(0.4), [space["Step"]()], folder=folder)
    return {path.name for path in set(folder.glob("parts/*")) - before}


def test_an_edited_comment_keeps_the_names_and_all_that_counts_changes_them(tmp_path: Path) -> None:
    assert names_of_batches(tmp_path)
    assert names_of_batches(tmp_path, text="Said in other words.") == set()
    counts = {"version": 2, "attack_version": 2, "weight": 1.5, "scale": 2.0, "length": 0.2}
    counts |= {"factor": 2.0, "sign": -1, "offsets": (0, 1), "power": 2}
    counts |= {"entry": 1.0, "start": 1.0, "count": 2}
    for change in [{name: value} for name, value in counts.items()] + [{"shift": 0.01}]:
        assert names_of_batches(tmp_path, **change), change
        assert names_of_batches(tmp_path, **change) == set(), change


def test_hooks_count(tmp_path: Path) -> None:
    """A hook that cannot be described keeps batches from being saved."""
    x, y = plane_data()
    model = Plane().eval()
    run_attacks(model, x, y, L2(0.4), [Walk()], folder=tmp_path)
    saved = len([*tmp_path.glob("parts/*")])
    assert saved > 0
    model.register_forward_pre_hook(lambda module, given: (3 * given[0],))
    with pytest.warns(UserWarning, match="hook"):
        run_attacks(model, x, y, L2(0.4), [Walk()], folder=tmp_path)
    model.register_forward_hook(doubled)
    assert Identity().model(Plane().eval())["fingerprint"] != Identity().model(model)["fingerprint"]
    assert len([*tmp_path.glob("parts/*")]) == saved


def doubled(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return 2 * output


class Holder(nn.Module):
    """Has a value where no state dict shows it."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self._value = value
        self.layer = nn.ReLU()
        if isinstance(value, Tensor):
            self._value = None
            self.register_buffer("hidden", value, persistent=False)


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (0.5, 2.0),
        ([1, (2, None)], [1, (3, None)]),
        ({"a": torch.float32}, {"a": torch.float64}),
        (np.arange(3000), np.arange(3000) // 2 * 2),
        (torch.arange(3000), torch.arange(3000) // 2 * 2),
        ([torch.zeros(2)], [torch.ones(2)]),
        (functional.relu, torch.tanh),
        (L2(0.5), L2(0.6)),
    ],
    ids=["number", "list", "dict", "array", "buffer", "tensor", "function", "dataclass"],
)
def test_what_a_model_holds_is_part_of_its_fingerprint(value: object, other: object) -> None:
    held = value, copy.deepcopy(value), other
    first, again, third = (Identity().model(Holder(it))["fingerprint"] for it in held)
    assert first == again != third


def test_a_card_tells_models_apart_and_copies_not() -> None:
    whole = {"scope": "global"}
    changes = {}, {}, {"n_neighbors": 4}, {"smoothness": 3.0}, whole, whole | {"smoothness": 3.0}
    cards = [Identity().model(two_sides(points=60, **change)[0]) for change in changes]
    assert cards[0] == cards[1]
    assert len({card["fingerprint"] for card in cards}) == 5
    assert [card["scope"] for card in cards] == ["local"] * 4 + ["global"] * 2
    assert "potential" not in cards[0]
    assert cards[4]["potential"]["left_out"] == []


def test_a_bank_counts_by_its_contents_wherever_it_is(tmp_path: Path) -> None:
    """A bank that is not resident is no buffer; here it is also in files."""
    names = []
    for count, dtype in enumerate((torch.float32, torch.bfloat16)):
        model = two_sides(points=60, resident=False, bank_dtype=dtype)[0]
        model.save(tmp_path / f"{count}", shards=1 + count)
        mapped, resident = (otad.load(tmp_path / f"{count}", resident=it) for it in (False, True))
        same = [Identity().model(nn.Sequential(it)) for it in (model, mapped, resident)]
        assert same[0] == same[1] == same[2]
        names.append(same[0]["fingerprint"])
    with torch.no_grad():
        model.bank_features[7] += 1
    assert len({*names, Identity().model(nn.Sequential(model))["fingerprint"]}) == 3


@pytest.mark.parametrize(
    "attack",
    [
        lambda factor: Straight(train_x=torch.full((3, 2), factor)),
        lambda factor: Transfer(nn.Identity(), inner=Straight(shares=(factor,))),
        lambda factor: MetricAttack(metric=partial(torch.mul, other=factor)),
        lambda factor: MetricAttack(metric=nn.PReLU(init=factor).forward),
    ],
    ids=["tensor", "inner", "partial", "method"],
)
def test_attacks_that_do_other_things_have_other_settings(attack) -> None:
    first, again, other = (Identity().attack(attack(factor)) for factor in (1.0, 1.0, 0.5))
    assert first == again != other


def scaled(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: factor * x


class Drawing(nn.Module):
    """Its class has a value without a plain description."""

    generator = torch.Generator()


@dataclass(frozen=True)
class Listed(Walk):
    """Its `__init__` and `__repr__` hold values without one, which do not count."""

    shares: list[float] = field(default_factory=list)


def test_what_has_no_plain_description_is_named() -> None:
    identity = Identity()
    held = Holder(scaled(2.0)), Holder(torch.Generator()), Drawing()
    identity.model(nn.Sequential(nn.ReLU(), *held))
    identity.attack(MetricAttack(metric=scaled(2.0)))
    identity.version(Listed(), "listed")
    places = ["model.1._value (function)", "model.2._value (Generator)"]
    places += ["model.3.generator (Generator)", "metric.metric (function)"]
    assert identity.unknown == places


def test_a_model_may_refer_to_itself() -> None:
    class Looped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.again = self.forward
            self.all = [self]

    identity = Identity()
    assert identity.model(Looped()) == identity.model(Looped())
    assert identity.unknown == []


def test_batches_that_cannot_be_named_are_not_saved(tmp_path: Path) -> None:
    """Never a finished batch of another function."""
    model, attack = nn.Linear(3, 2).eval(), MetricAttack(scaled(2.0), steps=1)
    with pytest.warns(UserWarning, match=r"not saved.*metric\.metric \(function\)"):
        run_attacks(model, *plane_data(), L2(0.1), [attack], folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_defended_model_inside_another_module_is_described(tmp_path: Path) -> None:
    x, y = torch.rand(40, 3, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2

    def names(**settings: Any) -> tuple[str, list[str]]:
        given = {"inputs": "pixels", "scope": "local", "n_neighbors": 3} | settings
        probes = given.pop("probes", None)
        model = otad.defend(None, x, y, **given)
        if probes is not None:
            path = build_lists(model.bank_points, tmp_path / "lists", cells=5)
            model.use_search(IvfSearch(path, n_probe=probes))
        found = Identity()
        return found.model(nn.Sequential(model).eval())["fingerprint"], found.unknown

    plain = names()
    others = [names(n_neighbors=4), names(smoothness=3.0), names(abstain_beyond=1.0)]
    assert len({plain[0], *(name for name, _ in others)}) == 4
    assert names() == plain
    assert [unknown for _, unknown in (plain, *others)] == [[]] * 4
    if find_spec("faiss"):  # what a search finds that stops early is not known
        assert names(probes=1)[1]
