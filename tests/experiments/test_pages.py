"""Pages say what the records say; layouts that ask for something else are refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from otad.errors import InputError
from otad.evaluate import Evaluation
from otad.experiments import RunRecord, list_experiments, names, write_pages
from otad.experiments import pages as pages_module
from otad.experiments.experiment import read_experiment
from otad.experiments.figures import draw_costs, draw_curve
from otad.experiments.listing import experiments_for
from otad.experiments.pages import Figures, Layout, Page, Row, Table, experiment_of, layout, render

REPOSITORY = Path(__file__).parents[2]
SAMPLE = Path(__file__).parent / "sample"


@pytest.fixture
def record() -> RunRecord:
    return RunRecord.read(SAMPLE / "sample.json")


def test_pages_in_the_repository_are_those_of_the_records(tmp_path: Path) -> None:
    """They are never typed: writing them again gives the very same."""
    (tmp_path / "results").symlink_to(REPOSITORY / "results")
    for path in write_pages(tmp_path / "results", tmp_path / "docs"):
        text = path.read_text(encoding="utf-8")
        known = REPOSITORY / path.relative_to(tmp_path)
        assert known.read_text(encoding="utf-8") == text, "run: otad reproduce --pages docs --force"


def test_every_table_stands_on_a_page_once() -> None:
    labels = [table.label for table in layout().tables if table.label]
    assert len(labels) == len({*labels}) == 23
    assert {table.page for table in layout().tables} | {"paper"} == {*layout().pages}
    assert all(table.experiments for table in layout().tables if table.label)
    assert {name for table in layout().tables for name in table.experiments} == {*names()}


def test_planned_figures_are_those_of_experiments() -> None:
    """A wrong address would be found only after the experiment had run."""
    specs = {name: read_experiment(name) for name in names()}
    cells = {
        address: row.why
        for table in layout().tables
        for row in table.rows
        for address in table.addresses(row)
    }
    for address, why in cells.items():
        spec = specs.get(experiment_of(address))
        if spec is None or why not in ("", "not run"):
            continue
        kind, key, *path = address.split("/")[1:]
        if kind == "rows":
            assert key in spec.rows, address
            assert path[0] != "attacks" or path[1] in spec.rows[key].attacks, address
        elif kind == "speeds" and spec.speed is not None:
            asked = dict(one.split("=") for one in key.split(";"))
            assert asked["row"] in spec.speed.rows, address
            assert asked.get("place", spec.speed.places[0]) in spec.speed.places, address
        elif kind in ("nets", "metrics", "surrogates", "speeds"):
            assert key in (getattr(spec, kind, None) or ()), address


def rendered(monkeypatch: pytest.MonkeyPatch, *rows: Row, **more: object) -> list[str]:
    """The rows of a table over the record of the sample, and the text below it."""
    columns = {"Clean": "score", "Push": "attacks/push"}
    table = replace(Table("page", "Sample", columns, rows, "Method"), **more)  # type: ignore[arg-type]
    monkeypatch.setattr(pages_module, "layout", lambda: Layout({"page": Page("Page")}, (table,)))
    return render("page", Figures(SAMPLE), "results").splitlines()[4:-2]


def test_cells_are_ours_and_the_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    suite = "sample/suites/row=otad/certified/otad/0.5"
    speed = "sample/speeds/row=otad;place=disk/milliseconds"
    lines = rendered(
        monkeypatch,
        Row("A group"),
        Row("as printed", "96.30 41", ("sample/rows/otad",)),
        Row("ours alone", ours=("sample/rows/otad",)),
        Row("addresses", "- 9.0", (suite, speed)),
        Row("in part", "95.0 40.0", ("sample/rows/bad",), why="too slow"),
        Row("planned", "95.0 40.0", ("later/rows/bad",), why="too slow"),
        Row("not planned", "95.0 40.0", why="part of another row"),
        Row("one column", ours=("sample/rows/otad/score", "")),
        Row("one column", ours=("sample/rows/otad/score", ""), why="no gradient"),
        Row("large", ours=("sample/rows/otad",), times=1000, digits=3),
        text="Left: {sample/rows/otad/attacks/push:.0f} %, later {later/seconds}.",
    )
    assert [line.replace("\u00a0", " ") for line in lines[2:]] == [
        "| *A group* |  |  |",
        "| as printed | 96.00 / 96.30 | 60 / 41 |",
        "| ours alone | 96.0 | 60.0 |",
        "| addresses | 86.5 | 2.0 / 9.0 |",
        "| in part | 94.0 / 95.0 | - (too slow) / 40.0 |",
        "| planned (not run) | - / 95.0 | - / 40.0 |",
        "| not planned (part of another row) | - / 95.0 | - / 40.0 |",
        "| one column | 96.0 |  |",
        "| one column | 96.0 | - (no gradient) |",
        "| large | 96,000 | 60,000 |",
        "",
        "Left: 60 %, later -. Record of 2024-01-01: [sample](results/sample.json).",
    ]


def test_an_evaluation_is_asked_for_a_radius() -> None:
    figures = Figures(SAMPLE)
    worst = figures.look("sample/evaluation/worst_case/2")
    assert worst == Evaluation.read(SAMPLE / "sample" / "evaluation.json").worst_case(2.0).value
    assert figures.look("sample/evaluation/worst", optional=True) is None


def test_settings_are_those_of_the_record_or_else_of_the_experiment(tmp_path: Path) -> None:
    figures, epochs = Figures(tmp_path), "mnist_fgsm/experiment/nets/fgsm/train/epochs"
    assert figures.fill(f"{{{epochs}:d}} epochs") == "30 epochs"
    assert figures.look(epochs) is None, "not a figure of a table"
    record = RunRecord.read(SAMPLE / "sample.json")
    config = {"title": "Sample", "data": {"digits": {"name": "digits"}}}
    config |= {"nets": {"fgsm": {"data": "digits", "train": {"epochs": 7}}}}
    replace(record, name="mnist_fgsm", config=config).write(tmp_path / "mnist_fgsm.json")
    assert Figures(tmp_path).fill(f"{{{epochs}:d}}") == "7"


def test_wrong_layouts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="address of a figure, got sample/rows/good/attacks/pull"):
        rendered(
            monkeypatch,
            Row("one", ours=("sample/rows/good/score", "sample/rows/good/attacks/pull")),
        )
    with pytest.raises(InputError, match="address of a figure, got sample/rows/none"):
        rendered(monkeypatch, text="{sample/rows/none}")


def test_pages_need_records(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected records of experiments"):
        write_pages(tmp_path, tmp_path)


def test_experiments_are_listed_with_what_is_recorded(record: RunRecord, tmp_path: Path) -> None:
    listed = list_experiments(tmp_path)
    assert sorted(one.name for one in listed) == list(names())
    assert listed[0].labels == ("tab:cw", "tab:bpda", "tab:square")
    ours = [one.name for one in listed if not one.labels]
    assert ours == [one.name for one in listed][-len(ours) :]
    assert "suite" in ours
    assert {(one.device, one.minutes, one.recorded) for one in listed} == {(None, None, 0)}
    rows = dict.fromkeys(("ResNet on MNIST", "OTAD of the ResNet on MNIST"), record.rows["good"])
    replace(record, name="plain", rows=rows).write(tmp_path / "plain.json")
    (plain,) = (one for one in list_experiments(tmp_path) if one.name == "plain")
    assert (plain.recorded, plain.cells, plain.labels) == (2, 12, ("tab:residual",))
    assert plain.data == ("mnist", "fashion_mnist")
    assert plain.minutes == pytest.approx(sum(record.seconds.values()) / 60)
    contents = render("paper", Figures(tmp_path), "results")
    assert re.search(r"`tab:residual` \|.*\| 2 of 12 \|", contents), "the pages count the same"


def test_labels_name_experiments() -> None:
    listed = ["mnist", "cifar10", "cifar10_potentials", "cifar10_pixels", "own.toml"]
    assert experiments_for(["tab:KNN", "mnist", "own.toml"]) == listed
    assert "mnist_attacks" in experiments_for(["tab:cw"])
    assert experiments_for(["tab:cw", "tab:square"]) == experiments_for(["tab:cw"])
    with pytest.raises(InputError, match=r"got 'tab:cv' \(did you mean tab:cw"):
        experiments_for(["tab:cv"])
    with pytest.raises(InputError, match=r"got 'mnist_attack' \(did you mean mnist_attacks"):
        experiments_for(["mnist_attack"])


def texts(path: Path) -> set[str]:
    root = ElementTree.fromstring(path.read_bytes())
    return {element.text for element in root.iter() if element.text}


def test_figures_are_the_same_for_the_same_record(record: RunRecord, tmp_path: Path) -> None:
    one, two, curve = (tmp_path / name for name in ("one.svg", "two.svg", "curve.svg"))
    for path in (one, two):
        draw_costs(record.costs, 2, path)
    assert one.read_bytes() == two.read_bytes()
    assert {"cpu, 2 threads", "cuda, on it", "seconds", "500 predictions"} <= texts(one)
    draw_curve(record, "over L - l", curve)
    panels = {"accuracy %", "local Lipschitz constant", "relative error"}
    assert panels | {"clean", "push", "median", "over L - l"} <= texts(curve)


def test_damaged_records_are_refused(record: RunRecord, tmp_path: Path) -> None:
    path = tmp_path / "sample.json"
    record.write(path)
    assert RunRecord.read(path) == record
    content = json.loads(path.read_text(encoding="utf-8"))
    content["rows"]["good"]["score"]["value"] = "high"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(InputError, match=r"rows.good.score.value: expected float, got 'high'"):
        RunRecord.read(path)
    path.write_text(json.dumps({"format": "otad-run-1"}), encoding="utf-8")
    with pytest.raises(InputError, match="format otad-run-2, got 'otad-run-1'"):
        RunRecord.read(path)


def test_headings_have_the_anchors_that_the_contents_link() -> None:
    table = replace(layout().tables[0], title="BPDA + PGD, ε = 8/255", label="tab:x_y")
    assert table.anchor == "bpda--pgd-ε--8255-tabx_y"
    assert re.fullmatch(r"[\w\-]+", table.anchor)
