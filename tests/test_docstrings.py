"""Every public name has a docstring with an example, and all examples run as they are written."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import registries

PACKAGES = [
    "otad",
    "otad.attacks",
    "otad.attacks.adaptive",
    "otad.baselines",
    "otad.certify",
    "otad.cip",
    "otad.cip.surrogate",
    "otad.cluster",
    "otad.data",
    "otad.evaluate",
    "otad.experiments",
    "otad.explain",
    "otad.model.prototypes",
    "otad.nets",
    "otad.search.ivf",
    "otad.search.sharded",
    "otad.serve",
    "otad.training",
]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def public_names() -> dict[str, Any]:
    """Functions and classes by their full names. Modules and constants have no docstring that an
    example could be in."""
    found = {}
    for package in PACKAGES:
        loaded = importlib.import_module(package)
        for name in loaded.__all__:
            thing = getattr(loaded, name)
            documented = inspect.isclass(thing) or inspect.isroutine(thing)
            if documented and thing not in found.values():
                found[f"{package}.{name}"] = thing
    return found


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """What users can call or read of a class that is defined here, inherited members included."""
    for owner in inspect.getmro(cls):
        if owner.__module__.partition(".")[0] != "otad":
            continue
        for name, member in vars(owner).items():
            if name.startswith("_"):
                continue
            inner = getattr(member, "__func__", member)
            if inspect.isroutine(inner) or isinstance(inner, property):
                yield name, inner


THINGS = public_names()
REFERENCE = Path(__file__).parents[1] / "docs" / "api"


@pytest.mark.parametrize("page", sorted(REFERENCE.glob("*.md")), ids=lambda page: page.stem)
def test_reference_lists_every_public_name(page: Path) -> None:
    text = page.read_text() + REFERENCE.with_suffix(".md").read_text()
    modules = {*re.findall(r"currentmodule:: (\S+)", text)}
    public = {name for module in modules for name in importlib.import_module(module).__all__}
    missing = public - {*re.findall(r"\w+", text)}
    assert modules
    assert missing <= {"__version__"}


def test_public_methods_are_documented() -> None:
    missing = [
        f"{where}.{name}"
        for where, thing in THINGS.items()
        if inspect.isclass(thing)
        for name, member in members(thing)
        if not inspect.getdoc(getattr(thing, name))
    ]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("where", THINGS)
def test_examples_run(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    thing = THINGS[where]
    texts = {where: inspect.getdoc(thing) or ""}
    generated = inspect.isclass(thing) and texts[where].startswith(f"{thing.__name__}(")
    assert not generated, "it has no docstring of its own"
    assert ">>> " in texts[where], "its docstring has no example"
    if inspect.isclass(thing):
        texts |= {f"{where}.{name}": inspect.getdoc(one) or "" for name, one in members(thing)}
    monkeypatch.chdir(tmp_path)
    runner, failures = doctest.DocTestRunner(optionflags=OPTIONS, verbose=False), list[str]()
    with registries.restored():
        for name, text in texts.items():
            globs = {"__name__": "__main__"}
            examples = doctest.DocTestParser().get_doctest(text, globs, name, name, 0)
            runner.run(examples, out=failures.append)
    assert not failures, "".join(failures)
