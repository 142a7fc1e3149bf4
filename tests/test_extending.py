"""Every extension that CONTRIBUTING.md describes is one file and one line.

The code blocks of the page are saved as modules and used through the public interface.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import factories
import pytest
import registries
import torch
from typer.testing import CliRunner

import otad
from otad.cip import ExactCip
from otad.cli.main import main

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"
BLOCK = r"```(?:python|toml)\n# (\w+\.(?:py|toml))\n(.*?)```"
BLOCKS = dict(re.findall(BLOCK, PAGE.read_text(encoding="utf-8"), re.DOTALL))


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the files of the page, on the path that modules are imported from."""
    for name, text in BLOCKS.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with registries.restored():
        yield tmp_path


@pytest.fixture(scope="module")
def model() -> otad.OTAD:
    return factories.model()


def test_the_page_shows_every_extension() -> None:
    names = ("attack", "solver", "metric", "data", "backbone", "baseline")
    assert set(BLOCKS) == {f"my_{name}.py" for name in names} | {"my_experiment.toml"}


def test_an_attack(written: Path, model: otad.OTAD) -> None:
    import_module("my_attack")
    x, threat = factories.queries(model, 6), otad.L2(0.4, bounds=(0.0, 1.0))
    labels = model(x).argmax(1)
    alone = {"flags": False, "undefended": False}
    found = otad.evaluate(model, x, labels, threat, attacks=["darken"], **alone)
    darker = threat.project(torch.zeros_like(x), x)
    right = (model(darker).argmax(1) == labels).double().mean()
    assert found.per_attack["darken"] == pytest.approx(float(right))


def test_a_solver(written: Path, model: otad.OTAD) -> None:
    changed = model.replace(solver=import_module("my_solver").NearestPair())
    trace = changed.trace(factories.queries(model, 5))
    nearest = model.bank_features[trace.neighbors.indices[:, 0]]
    torch.testing.assert_close(trace.solution.image, nearest)
    assert isinstance(model.solver, ExactCip)


@pytest.mark.parametrize("kind", ["metric", "backbone"])
def test_a_metric_or_a_backbone(kind: str, written: Path, tmp_path: Path) -> None:
    x, half = factories.points(), factories.D // 2
    net, options = factories.net(), {"n_neighbors": 4}
    if kind == "metric":
        options["metric"] = import_module("my_metric").Halves((factories.D,))
    else:
        net = import_module("my_backbone").Shear((factories.D,), 3)
    model = otad.defend(net, x, (3 * x[:, 0]).long(), **options)
    queries = factories.queries(model, 5)
    model.save(tmp_path / "model")
    torch.testing.assert_close(otad.load(tmp_path / "model")(queries), model(queries))
    if kind == "metric":
        nearest = torch.cdist(queries[:, :half].double(), x[:, :half].double()).argmin(1)
        assert torch.equal(model.trace(queries).neighbors.indices[:, 0], nearest)


def test_a_data_set(written: Path) -> None:
    import_module("my_data")
    found = otad.data.load("two_moons", points=40)
    assert len(found.train_x) + len(found.test_x) == 40
    assert "two_moons" in otad.data.names()


def test_a_baseline(written: Path) -> None:
    x = factories.points()
    baseline = import_module("my_baseline").NearestMean(x, (3 * x[:, 0]).long()).eval()
    how = {"threat": otad.L2(0.1), "attacks": ["pgd"], "flags": False}
    found = otad.evaluate(baseline, x[:8], baseline(x[:8]).argmax(1), **how)
    assert found.clean["model"].value == 100


def test_an_experiment(written: Path, tmp_path: Path) -> None:
    arguments = ["reproduce", str(written / "my_experiment.toml"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "my_experiment.json").exists()
