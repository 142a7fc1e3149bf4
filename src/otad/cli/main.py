"""The command `otad`. Each command is a function in a module of its own name."""

from __future__ import annotations

from importlib import import_module, metadata
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from otad.errors import InputError, OtadError

# In the order of use, each with the first sentence of its help. The modules import torch, which
# takes seconds, so a module is imported only when its command runs.
COMMANDS = {
    "demo": "Train, defend, attack and certify on handwritten digits, and write a report.",
    "train": "Train a residual network whose blocks move the data as little as possible.",
    "defend": "Build the bank of training points, test the model, and save it.",
    "imitate": "Train a network to replace a model's solver, test both, and save the new model.",
    "predict": "Predict every row of an input, and report what each prediction rests on.",
    "explain": "Show the training points a prediction rests on, with weight, label and distance.",
    "attack": "Run one attack on a model, and report how many of its predictions remain right.",
    "certify": "Prove how far each input can change in l2 without changing its prediction.",
    "evaluate": "Attack a model by a suite of attacks, certify it, and write a report.",
    "reproduce": "Reproduce published tables, with the published figures beside ours.",
}


class _Commands(TyperGroup):
    """Errors that users can fix (our own, of files) are one line; others keep their traceback."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, summary in COMMANDS.items():
            self.add_command(TyperCommand(name, help=summary), name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] == "bench":
            raise InputError("no command 'bench': run the scripts in benchmarks/")
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else load_command(name), rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (OtadError, OSError) as error:
            typer.echo(f"otad: {error}", err=True)
            raise typer.Exit(2) from error


def load_command(name: str) -> Any:
    module = import_module(f"otad.cli.{'predict' if name == 'explain' else name}")
    alone = typer.Typer(add_completion=False)
    alone.command(name)(getattr(module, name))
    return typer.main.get_command(alone)


main = typer.Typer(
    cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"otad {metadata.version('otad')}")
        raise typer.Exit


_EAGER: dict[str, Any] = {"callback": _print_version, "is_eager": True}
_Version = Annotated[bool, typer.Option("--version", help="Print the version.", **_EAGER)]


@main.callback()
def otad(version: _Version = False) -> None:
    """Robust prediction by optimal transport and exact convex integration.

    Start with: otad demo
    """
