"""Imports only point down the layers, and never in a circle.

The source is read with `ast`: imports inside functions and under `if TYPE_CHECKING` count too.
"""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"

# Bottom up. A package covers all its modules.
TABLE = {
    0: (
        "arguments",
        "errors",
        "checks",
        "precision",
        "threat",
        "processes",
        "progress",
        "scores",
        "short_repr",
        "threads",
    ),
    1: ("io", "workers"),
    2: ("data", "nets"),
    3: ("search", "training"),
    4: ("cip",),
    5: ("model",),
    6: ("attacks", "certify", "explain", "baselines"),
    7: ("evaluate",),
    8: ("estimator_base", "estimator_folder", "estimators", "hub", "report"),
    9: ("experiments",),
    10: ("cluster", "explorer", "serve"),
    11: ("cli", "__main__"),
}
LAYERS = {f"otad.{name}": layer for layer, names in TABLE.items() for name in names}

FRONT_DOOR = "otad"  # `otad/__init__.py` gathers the public names: it may import everything


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def layer_of(module: str) -> int | None:
    return LAYERS.get(".".join(module.split(".")[:2]))


def find_modules(source: Path) -> dict[str, Path]:
    """Dotted name and file of every module below `source`; a package is its `__init__.py`."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def read_imports(module: str, path: Path, modules: dict[str, Path]) -> Iterator[tuple[str, int]]:
    """Every module of the package that is imported, at any depth of the file, and the line."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # one dot is the package of this module, each further dot its parent
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            # `from package import name` means a module where there is one of that name.
            paths = [f"{base}.{alias.name}" for alias in node.names]
            names = [path if path in modules else base for path in paths]
        else:
            continue
        for name in names:
            if is_within(name, FRONT_DOOR):
                yield name, node.lineno


def fault_of(importer: str, imported: str) -> str | None:
    """What is wrong with one import, or None."""
    if importer == FRONT_DOOR:
        return None
    if imported == FRONT_DOOR:
        return "the front door is for users; import the module that owns the name"
    above, below = layer_of(importer), layer_of(imported)
    if above is None or below is None:
        return None  # reported once for the module, by `find_faults`
    if below > above:
        return f"points up from layer {above} to layer {below}"
    pure = is_within(importer, "otad.cip") and not is_within(importer, "otad.cip.surrogate")
    known = ("otad.io", "otad.search", "otad.cip")
    if pure and below > 0 and not any(is_within(imported, package) for package in known):
        return "otad.cip is pure mathematics and knows no network, only files, search and itself"
    blind = is_within(importer, "otad.attacks") and not is_within(importer, "otad.attacks.adaptive")
    if blind and is_within(imported, "otad.model.otad"):
        return "an attack sees a classifier, never the defense (but for otad.attacks.adaptive)"
    return None


def find_faults(source: Path) -> list[str]:
    """Everything that breaks the layering below `source`, one sentence each."""
    modules = find_modules(source)
    faults = [
        f"{module}: in no layer; add it to LAYERS in {Path(__file__).name}"
        for module in modules
        if module != FRONT_DOOR and layer_of(module) is None
    ]
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        for imported, line in read_imports(module, path, modules):
            graph.setdefault(module, set()).add(imported)
            if fault := fault_of(module, imported):
                faults.append(f"{module}, line {line}: imports {imported}: {fault}")
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        faults.append("circle: " + " -> ".join(reversed(error.args[1])))
    return faults


def test_imports_point_down_and_close_no_circle() -> None:
    assert len(find_modules(SOURCE)) > 5, f"nothing to check below {SOURCE}"
    faults = find_faults(SOURCE)
    assert not faults, "\n" + "\n".join(faults)


def test_no_file_is_long() -> None:
    for path in find_modules(SOURCE).values():
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, path


def plant(source: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = source / "otad" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


UPWARD = "points up from layer 0 to layer 4"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("errors.py", "import os\n\nimport otad.cip\n", "otad.errors, line 3: imports otad.cip: "),
        ("errors.py", "import os, otad.cip.solver as solver", UPWARD),
        ("errors.py", "from otad import cip", UPWARD),
        ("errors.py", "from otad.cip.solver import ExactCip", UPWARD),
        ("errors.py", "from . import cip", UPWARD),
        ("errors.py", "from .cip.solver import ExactCip", UPWARD),
        ("errors.py", "def late():\n    import otad.cip", UPWARD),
        ("errors.py", "if TYPE_CHECKING:\n    from otad.cip import solver", UPWARD),
        ("cip/deep/part.py", "from ...model.otad import OTAD", "from layer 4 to layer 5"),
        ("cip/problem.py", "from otad.nets import base", "knows no network"),
        ("cip/surrogate.py", "import otad.model.otad", "from layer 4 to layer 5"),
        ("attacks/base.py", "from otad.model.otad import OTAD", "never the defense"),
        ("attacks/__init__.py", "from ..model.otad import OTAD", "never the defense"),
        ("nets/base.py", "import otad", "front door"),
        ("nets/base.py", "from otad import OTADClassifier", "front door"),
        ("nets/base.py", "from .. import OTADClassifier", "front door"),
        ("utils.py", "", "otad.utils: in no layer; add it to LAYERS"),
        ("cipher.py", "", "otad.cipher: in no layer"),
    ],
)
def test_checker_catches_one_planted_fault(
    tmp_path: Path, name: str, text: str, expected: str
) -> None:
    tree = {"__init__.py": "", "cip/__init__.py": "", "cip/solver.py": "", "model/otad.py": ""}
    plant(tmp_path, tree | {name: text})
    (fault,) = find_faults(tmp_path)
    assert expected in fault


@pytest.mark.parametrize(
    "files",
    [
        {
            "data/a.py": "from otad.data import b",
            "data/b.py": "def late():\n    from . import c",
            "data/c.py": "if TYPE_CHECKING:\n    from otad.data.a import A",
        },
        {"nets/__init__.py": "import otad.nets.a", "nets/a.py": "from otad.nets import B"},
        {"checks.py": "from otad.checks import check"},
    ],
)
def test_checker_catches_a_planted_circle(tmp_path: Path, files: dict[str, str]) -> None:
    plant(tmp_path, files)
    (fault,) = find_faults(tmp_path)
    head, _, chain = fault.partition(": ")
    assert head == "circle"
    assert set(chain.split(" -> ")) == set(find_modules(tmp_path))
