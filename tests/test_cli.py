"""The command line: exit codes, what goes where, and the files left behind."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from otad.cli.main import COMMANDS, load_command, main


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CliRunner:
    """A terminal in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return CliRunner()


def test_version(cli: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", {"otad": "1.2.3"}.__getitem__)
    result = cli.invoke(main, ["--version"])
    assert (result.exit_code, result.stdout) == (0, "otad 1.2.3\n")


@pytest.mark.parametrize(
    "command",
    [
        "demo",
        "train digits --out net",
        "defend net --out model",
        "imitate model --out other",
        "attack model test --eps 1",
        "certify model test",
        "evaluate model test --eps 1",
        "reproduce mnist",
    ],
)
def test_every_seed_is_one_that_generators_take(cli: CliRunner, command: str) -> None:
    for seed, bound in ((-1, "at least 0"), (2**64, f"at most {2**64 - 1}")):
        result = cli.invoke(main, [*command.split(), "--seed", str(seed)])
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr == f"otad: seed: expected an integer of {bound}, got {seed}\n"


def test_commands_are_listed_in_the_order_of_use(cli: CliRunner) -> None:
    shown = cli.invoke(main, ["--help"], env={"COLUMNS": "120"}).stdout
    listed = [line.strip(" │").split()[0] for line in shown.splitlines() if line.startswith("│ ")]
    assert [word for word in listed if not word.startswith("-")] == list(COMMANDS)
    assert cli.invoke(main, ["bench"]).exit_code == 2


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_shows_the_first_sentence_and_an_example(cli: CliRunner, name: str) -> None:
    command = load_command(name)
    assert command.name == name
    assert command.help.partition("\n\n")[0].replace("\n", " ") == COMMANDS[name]
    shown = cli.invoke(main, [name, "--help"], env={"COLUMNS": "100"}).stdout
    assert f"Example: otad {name} " in shown
    assert "--json" in shown


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train no_such_data --out net", "otad: data: "),
        ("reproduce mnist --device meta", "otad: device: expected one that is present, got 'meta'"),
        ("predict model test --batch-size many", "--batch-size"),
    ],
)
def test_an_error_of_the_user_is_exit_code_2(cli: CliRunner, command: str, message: str) -> None:
    result = cli.invoke(main, command.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert not list(Path.cwd().iterdir())


def test_other_errors_keep_their_traceback(cli: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("otad.data.load", fail)
    result = cli.invoke(main, ["train", "digits", "--out", "net"])
    assert result.exit_code == 1
    assert isinstance(result.exception, ZeroDivisionError)
