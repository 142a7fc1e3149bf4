"""The command line as a whole: help, exit codes, refusals; `otad reproduce` and `otad demo`."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from cli.small import read_csv, terminal
from experiments.toml_files import WINE
from typer.testing import CliRunner

import otad
from otad import data
from otad.cli import demo
from otad.cli.console import show
from otad.cli.main import COMMANDS, load_command, main
from otad.evaluate import PRESETS, undefended
from otad.evaluate.records import Evaluation
from otad.evaluate.suite import Choice
from otad.experiments import names
from otad.report import evaluation_report, map_pictures, model_report
from otad.report.verdict import verdict


def test_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", {"otad": "1.2.3"}.__getitem__)
    assert terminal.succeed("--version").stdout == "otad 1.2.3\n"


def test_commands_are_listed_in_the_order_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    shown = terminal.succeed("--help").stdout.splitlines()
    listed = [line.strip(" │").split()[0] for line in shown if line.startswith("│ ")]
    assert [word for word in listed if not word.startswith("-")] == list(COMMANDS)


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("otad e", {"explain", "evaluate"}),
        ("otad evaluate --su", {"--suite"}),
        ("otad train dig", {"digits"}),
        ("otad attack model test --attack ap", {"apgd"}),
        ("otad attack model te", {"test"}),
        ("otad evaluate model test --suite ", set(PRESETS)),
        ("otad predict mod", set()),  # a path, which the shell completes
        ("otad predict bad\x07 mod", set()),
    ],
)
def test_a_shell_completes_commands_options_and_names(typed: str, completed: set[str]) -> None:
    count = len(typed.split(" ")) - 1
    asked = {"_OTAD_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(count)}
    result = CliRunner().invoke(main, [], prog_name="otad", env=asked)
    assert set(result.stdout.split()) == completed
    assert result.stderr == ""


def test_completion_can_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(Path.cwd()))
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))
    shown = CliRunner().invoke(main, ["--show-completion", "bash"], prog_name="otad").stdout
    assert "complete -o default -F _otad_completion otad" in shown
    result = CliRunner().invoke(main, ["--install-completion", "bash"], prog_name="otad")
    assert result.exit_code == 0
    assert "otad" in Path(".bashrc").read_text()
    assert Path(".bash_completions/otad.sh").read_text().strip() == shown.strip()


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_shows_the_first_sentence_and_an_example(name: str) -> None:
    command = load_command(name)
    assert command.name == name
    paragraphs = command.help.split("\n\n")
    assert paragraphs[0] == COMMANDS[name]
    assert not any("\n" in one for one in paragraphs)  # the terminal breaks lines
    shown = terminal.text(name, "--help")
    assert f"Example: otad {name} " in shown
    assert "--json" in shown


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("demo --seed -1", "seed: .*0, got -1"),
        ("train digits --out net --seed -1", "seed: .*-1"),
        ("defend net --out model --seed -1", "seed: .*-1"),
        ("imitate model --out other --seed -1", "seed: .*-1"),
        ("attack model test --eps 1 --seed -1", "seed: .*-1"),
        ("certify model test --seed -1", "seed: .*-1"),
        (f"evaluate model test --eps 1 --seed {2**64}", f"{2**64 - 1}, got {2**64}"),
        ("reproduce mnist --seed -1", "seed: .*-1"),
        ("reproduce mnist --device meta", "device: .*'meta'"),
        ("reproduce all mnist", "names: .*'all' alone, got all, mnist"),
        ("train no_such_data --out net", "data: "),
        ("train digits --out=", "out: expected a value, got an empty text"),
        ("demo --out EMPTY", "out: expected a value, got an empty text"),
        ("predict model EMPTY --out answers.csv", "expected a value, got an empty text"),
    ],
)
def test_an_error_of_the_user_is_one_line(command: str, message: str) -> None:
    given = ("" if part == "EMPTY" else part for part in command.split())
    assert re.search(message, terminal.refuse(*given))
    assert not list(Path().iterdir())


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    assert terminal.run("predict", "model", "test", "--batch-size", "many").exit_code == 2
    monkeypatch.setattr("otad.data.load", lambda *args, **options: 1 / 0)
    result = terminal.run("train", "digits", "--out", "net")
    assert result.exit_code == 1
    assert isinstance(result.exception, ZeroDivisionError)


STARTS = {
    "attack": "attack digits-model test --eps 0.5",
    "certify": "certify digits-model test --out radii.csv",
    "certify values": "certify body-model test --out intervals.csv",
    "defend": "defend digits-net --out model",
    "defend values": "defend body-net --out model",
    "evaluate": "evaluate digits-model test --eps 0.5,1",
    "explain": "explain digits-model test",
    "explain values": "explain body-model test",
    "imitate": "imitate digits-model --out nn --width 32 --blocks 1 --heads 2 --epochs 2",
}


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("attack", "--attack magic", "attack: expected one of"),
        ("attack", "--option speed=3", "options of pgd"),
        ("attack", "--option metric=l2", "option: .*metric"),
        ("attack", "--option train_x=0", "option: .*train_x"),
        ("attack", "--norm l7", "norm: .*l2, linf, got 'l7'"),
        ("attack", "--out found.csv", r"out: .*\.npz.*got found.csv"),
        ("attack", "--rows 41", "rows: .*40.*41"),
        ("attack", "--immutable age", "immutable: .*tables"),
        ("attack", "--targets y", "targets: .*test"),
        ("attack", "--eps -1", "eps: .*0, got -1"),
        ("certify", "--eps little", "eps: .*'little'"),
        ("certify", "--eps 0,5", "eps: expected a decimal point.*'0,5'"),
        ("evaluate", "--eps 0,25,1", "eps: expected a decimal point.*'0,25,1'"),
        ("certify values", "--embedding-lipschitz 2", "embedding_lipschitz: .*None"),
        ("certify", "--unit inch", "unit: .*1, std"),
        ("defend", "--climb 0.2", "climb: .*two.*'0.2'"),
        ("defend", "--climb 0.2,x", "climb: .*'0.2,x'"),
        ("defend", "--neighbors 5000", "n_neighbors: .*160"),
        ("defend", "--smoothness 0", "smoothness: "),
        ("defend", "--neighbors 150", "n_neighbors: .*128, got 150: .* s a query.*OTAD_MOST"),
        ("defend", "--scope global --spares 2", "scope: .*'local'.*spares.*'global'"),
        ("defend", "--scope global --smoothness 0.01", "160 points"),
        ("defend", "--bank-dtype int8", "bank_dtype: .*float32, float16, bfloat16"),
        ("defend", "--per-class 1000", "per_class: .*1000"),
        ("defend values", "--per-class 5", "per_class: .*regression"),
        ("defend", "--device quantum", "device: .*'quantum'"),
        ("evaluate", "--headline 2", "headline: .*0.5,1, got 2"),
        ("evaluate", "--suite huge", "suite: .*quick, standard, full, got 'huge'"),
        ("evaluate", "--attack magic", "magic"),
        ("explain", "--row 40", "row: expected .* such as '0'; .* got '40', the name of 0 rows"),
        ("explain", "--out why.bmp", r"out: .*\.png, \.svg.*why.bmp"),
        ("explain values", "--out why.png", "only images can be drawn, got why.png"),
        ("imitate", "--alpha 2", "alpha: .*0 to 1, got 2"),
        ("imitate", "--device cuda:99", "device: .*'cuda:99'"),
    ],
)
def test_refusals_write_nothing(workshop: Path, command: str, options: str, message: str) -> None:
    name, folder, *given = f"{STARTS[command]} {options}".split()
    assert re.search(message, terminal.refuse(name, workshop / folder, *given))
    assert not list(Path().iterdir())


def test_experiments_are_reproduced_by_name_or_file() -> None:
    for name in ("one", "two"):
        Path(f"{name}.toml").write_text(WINE, encoding="utf-8")
    printed = terminal.json("reproduce", "one.toml", "two.toml", "--pages", "docs")
    assert [record["name"] for record in printed] == ["one", "two"]
    for record in printed:
        assert record == json.loads(Path("results", f"{record['name']}.json").read_text())
    assert "tab:cw" in Path("docs/paper.md").read_text(encoding="utf-8")
    before = {path: path.read_bytes() for path in Path("results").glob("*.json")}
    message = terminal.refuse("reproduce", "one.toml", "two.toml")
    assert "--force" in message
    assert "results/one.json" in message
    Path("results/one.json").unlink()  # as if killed between the two
    result = terminal.succeed("reproduce", "one.toml", "two.toml")
    assert "results/two.json exists and is not changed" in result.stderr
    assert len(re.findall(r"right +│ \d+.\d%", result.stdout)) == 2, "a table of each"
    assert Path("results/two.json").read_bytes() == before[Path("results/two.json")]
    assert terminal.json("reproduce", "one.toml", "--force")["name"] == "one"
    assert "docs/paper.md" in terminal.refuse("reproduce", "--pages", "docs")
    terminal.succeed("reproduce", "--pages", "docs", "--force")


def test_experiments_are_listed() -> None:
    lines = terminal.succeed("reproduce", "--list").stdout.splitlines()
    assert [line for line in lines if line[0] != " "] == ["Of the paper", "Beyond the paper"]
    assert sorted(line.split()[0] for line in lines if line[0] == " ") == list(names())
    assert "(tab:cw, tab:bpda, tab:square)" in lines[1]
    listed = terminal.json("reproduce")
    assert listed[0]["labels"] == ["tab:cw", "tab:bpda", "tab:square"]
    assert "names: " in terminal.refuse("reproduce", "mnist", "--list")
    assert "did you mean tab:cw" in terminal.refuse("reproduce", "tab:cv")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few digits and epochs, a coarse grid for the picture, and two attacks."""
    whole = data.load("digits", seed=1)
    few = {name: getattr(whole, name)[:300] for name in ("train_x", "train_y")}
    few |= {name: getattr(whole, name)[:60] for name in ("test_x", "test_y")}
    monkeypatch.setattr(data, "load", lambda *given, **options: replace(whole, **few))
    monkeypatch.setattr(demo, "RECIPE", replace(demo.RECIPE, epochs=12))
    monkeypatch.setattr(undefended, "APGD", {"steps": 20})
    monkeypatch.setattr(demo, "ATTACKED", 6)
    monkeypatch.setattr(demo, "RADII", (0.5, 2.0))
    monkeypatch.setattr(demo, "EXPLORED", 2)
    attacks = [Choice("straight", {"points": 5}), Choice("noise", {"draws": 5})]
    monkeypatch.setitem(PRESETS, "quick", attacks)
    monkeypatch.setattr(map_pictures, "LINES", 5)
    monkeypatch.setattr(model_report, "plot_uri", evaluation_report.plot_uri)


@pytest.mark.usefixtures("brief_reports", "short")
def test_the_demo_leaves_report_model_and_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    facts: dict[str, str] = {}
    monkeypatch.setattr(
        demo, "show", lambda *args, **shown: facts.update(shown["facts"]) or show(*args, **shown)
    )
    record = terminal.json("demo", "--out", "there", "--seed", 1)
    pages = {"report": "report.html", "explorer": "explorer.html", "robustness": "robustness.md"}
    for name, path in pages.items():
        assert f"there/{path}" in facts[name]
    assert "2 attacks on 6 digits" in facts["under attack"]
    page = Path(record["report"]).read_text(encoding="utf-8")
    for text in (f"{record['otad']:.1%}", f"{record['share_raised']:.1%}", "seed 1"):
        assert text in page
    model = otad.load(record["model"])
    assert model.notes["metrics"]["otad"] == record["otad"]
    assert len(read_csv(record["predictions"])) == 60
    assert Path("there/net/training.json").is_file()
    assert Path("there/map.png").read_bytes().startswith(b"\x89PNG")

    explored = Path(record["explorer"]).read_text(encoding="utf-8")
    assert f"otad serve {record['model']}" in explored
    assert explored.count('"certificate"') == 2
    assert not list(Path("there/evaluation").rglob("parts"))

    # The robustness is in the record, on the page and in Markdown alike.
    assert record["evaluation"] == "there/evaluation/evaluation.json"
    evaluation = Evaluation.read(Path(record["evaluation"]))
    assert (evaluation.n, evaluation.eps, evaluation.seed) == (6, (0.5, 2.0), 1)
    assert record["worst_case_accuracy"] == evaluation.worst_case_accuracy
    proved = evaluation.certified_accuracy(0.5)
    assert proved is not None
    assert record["certified_accuracy"] == proved.value / 100
    text = Path(record["robustness"]).read_text(encoding="utf-8")
    worst = evaluation.worst_case(2.0)
    assert worst.value < evaluation.worst_case_accuracy * 100  # else the next line says little
    for content in (page, text):
        assert f"{worst.value:.1f}%" in content
        for flag in evaluation.flags:
            assert flag.verdict in content
            assert flag.name in content
    assert page.index('id="threat"') < page.index('id="examples"') < page.index('id="cost"')

    # What is gained comes first: the undefended network beside the model.
    alone = evaluation.undefended
    assert alone is not None
    assert record["undefended"]["worst_case_accuracy"] == alone.worst_case_accuracy
    assert f"{alone.worst_case_accuracy:.1%} right" in facts["undefended network"]
    assert record["verdict"] == verdict(evaluation, "test digits")
    for content in (page, text):
        assert content.index(record["verdict"][0]) < content.index("undefended network")
    numbers = re.findall(r"<dt>(.*?)</dt>", page)[:5]
    assert numbers[:2] == ["worst-case accuracy", "undefended network"]
    assert "accuracy of OTAD" in numbers
    assert len(list(Path("there/robustness_files").iterdir())) > 3

    # The same net in global scope beside it.
    beside = record["global"]
    one_map = otad.load(beside["model"])
    assert (one_map.scope, beside["scope"]) == ("global", "global")
    assert one_map.bank_fingerprint == model.bank_fingerprint
    assert one_map.notes["metrics"]["otad"] == beside["otad"]
    assert beside["attacks"] == ["noise"]
    figures = [beside[name] for name in ("certified_accuracy", "worst_case_accuracy")]
    for content in (page, text):
        section = content[content.index("Local maps or a global map") :]
        assert f"{beside['potential']['smoothness']:.3g}, through all points" in section
        for figure in (*figures, record["points"]["certified_accuracy"]):
            assert f"{100 * figure:.1f}%" in section
    assert record["points"]["certified_accuracy"] <= record["points"]["worst_case_accuracy"]

    # What the summary proposes next works on what was left behind.
    terminal.succeed("explain", record["model"], "test", "--row", 0)


def test_the_readme_quotes_a_record_of_the_demo_as_it_is() -> None:
    repository = Path(__file__).parents[2]
    recorded = Evaluation.read(repository / "results" / "demo" / "evaluation.json")
    assert (recorded.n, recorded.eps, recorded.seed) == (demo.ATTACKED, demo.RADII, 0)
    assert recorded.headline_eps == demo.EPS
    assert {*recorded.per_attack} <= {choice.name for choice in PRESETS[demo.SUITE]}
    quoted = " ".join(verdict(recorded, "test digits"))
    assert f"> {quoted}\n" in (repository / "README.md").read_text(encoding="utf-8")
