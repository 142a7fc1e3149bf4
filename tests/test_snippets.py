"""Every Python snippet of the README and the documentation runs. Data and networks that a page
takes for granted are small ones here, and the lengths of trainings are cut."""

from __future__ import annotations

import re
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from factories import exact

import otad
from otad import data, nets, training
from otad.data import Dataset
from otad.evaluate import suite, undefended
from otad.evaluate.suite import Choice

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What takes a GPU or hours on the pages.
SHORTER = {
    '"cuda"': '"cpu"',
    ".cuda()": "",
    "epochs=50": "epochs=1",
    "epochs=5,": "epochs=1,",
    "epochs=3,": "epochs=1,",
    "validation_x[:100], parts.validation_y[:100]": "validation_x[:9], parts.validation_y[:9]",
    "train_x[:200].numpy(), parts.train_y[:200]": "train_x[:80].numpy(), parts.train_y[:80]",
    "(parts.train_x.numpy(), parts.train_y": "(parts.train_x[:200].numpy(), parts.train_y[:200]",
    "(1.0, 2.0, 5.0)": "(2.0,)",
    "warmup=3": "warmup=0",
    "batch_size=256": "batch_size=16",
    "mixed_precision=True": "mixed_precision=False",
    "cuda_graph=True": "cuda_graph=False",
    "(64, 128, 256, 512)": "(4,)",
    "most_central(keys, train_y, 100)": "most_central(keys, train_y, 2)",
    "most_central(keys, train_y, 100, among=~attacked.broken)": "most_central(keys, train_y, 2)",
    "held_out=1000": "held_out=4",
    "test_x[:30], digits.test_y[:30]": "test_x[:6], digits.test_y[:6]",
    "X_test, target_test, threat": "X_test[:4], target_test[:4], threat",
    "range(60)": "range(3)",
    "pairs = digits.train_x, digits.train_y": "pairs = digits.train_x[:99], digits.train_y[:99]",
    'attacks=["categories", "pgd"]': 'attacks=["categories", otad.attacks.Pgd(steps=3)]',
    "executor=4": "executor=1",
    "from otad.cluster import": "from contextlib import nullcontext as",
    'RayExecutor("auto")': "RayExecutor(1)",
    'scope="global", random_state=0': 'scope="global", random_state=0, epochs=2',
}

BRIEF = [
    Choice("straight", {"points": 3}),
    Choice("pgd", {"steps": 3}),
    Choice("noise", {"draws": 3}),
]


def save_and_ask(path: str, *, python_model: Any, artifacts: dict[str, str]) -> None:
    """What MLflow does with a model: it loads it and asks it with a table."""
    context = SimpleNamespace(artifacts=artifacts)
    python_model.load_context(context)
    rows = images((1, 28, 28), 3)[0]
    answers = python_model.predict(context, rows.flatten(1).numpy())
    with torch.no_grad():
        found = python_model.model(rows).argmax(1).tolist()
    assert answers == [str(code) for code in found]


MLFLOW = SimpleNamespace(pyfunc=SimpleNamespace(PythonModel=object, save_model=save_and_ask))


def snippets_of(page: Path) -> list[str]:
    return SNIPPET.findall(page.read_text())


def images(shape: tuple[int, ...], rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(rows)
    return torch.rand(rows, *shape, generator=drawn), torch.arange(rows) % 10


def taken_for_granted(shape: tuple[int, ...]) -> dict[str, Any]:
    """What snippets use without a definition."""
    (train_x, train_y), (x, y) = images(shape, 40), images(shape, 12)
    options: dict[str, Any] = {"blocks": 1, "hidden": 8, "bounds": (0.0, 1.0)}
    net = nets.fc_resnet(shape, 10, **options)
    values = nets.fc_resnet(shape, 1, task="regression", **options)
    drawn = torch.Generator().manual_seed(1)
    query, anchors = torch.rand(4, 6, generator=drawn), torch.rand(4, 3, 6, generator=drawn)
    return {
        "otad": otad, "net": net, "train_x": train_x, "train_y": train_y, "x": x, "y": y,
        "X": x[..., :4].sum((1, 2)).numpy(), "X_new": x[:3, ..., :4].sum((1, 2)).numpy(),
        "y_new": y[:3],
        "x_test": x[:3],
        "model": otad.defend(net, train_x, train_y),
        "regressor": otad.defend(values, train_x, train_x.flatten(1).sum(1)),
        "query": query, "anchors": anchors, "images": 0.5 * anchors,
    }  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snippets = snippets_of(page)
    if not snippets:
        assert "```python" not in page.read_text()
        return
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(suite.PRESETS, "standard", BRIEF[:1])
    monkeypatch.setitem(suite.PRESETS, "quick", BRIEF)
    monkeypatch.setattr(undefended, "APGD", {"steps": 3})
    if page != PAGES[0]:  # the README shows what is gained
        brief = partial(otad.evaluate, flags=False, undefended=False)
        monkeypatch.setattr(otad, "evaluate", brief)
    monkeypatch.setitem(sys.modules, "mlflow", MLFLOW)
    vision = page.stem == "vision"
    granted = taken_for_granted((3, 32, 32) if vision else (1, 28, 28))
    if vision:
        exact().save("vit-model")
        rows = images((3, 32, 32), 20)
        about: dict[str, Any] = {"bounds": (0.0, 1.0), "classes": tuple("0123456789")}
        tiny = Dataset("cifar10", *rows, *rows, "classification", "drawn", **about)
        monkeypatch.setattr(data, "load", lambda *_, **__: tiny)
        recipe, vit = training.recipe, nets.vision_transformer
        monkeypatch.setattr(training, "recipe", lambda *a, **o: recipe(*a, **o, epochs=1, warmup=0))
        small = {"patch": 16, "width": 8, "blocks": 1, "heads": 2}
        monkeypatch.setattr(nets, "vision_transformer", lambda *a, **o: vit(*a, **o, **small))
    for code in snippets:
        for long, short in SHORTER.items():
            code = code.replace(long, short)
        if "from otad.serve import" in code and find_spec("fastapi") is None:
            continue  # an extra
        exec(compile(code, str(page), "exec"), granted)
