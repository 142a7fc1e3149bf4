"""The command `otad`. Only registers; every group of commands has a file in `otad.cli`."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from otad.cli.attack import attack
from otad.cli.certify import certify
from otad.cli.defend import defend
from otad.cli.demo import demo
from otad.cli.evaluate import evaluate
from otad.cli.explain import explain
from otad.cli.imitate import imitate
from otad.cli.predict import predict
from otad.cli.reproduce import reproduce
from otad.cli.train import train
from otad.errors import OtadError


class _Commands(TyperGroup):
    """What the user can mend (our errors, files and folders) is one clear line and exit code 2; any
    other error keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (OtadError, OSError) as error:
            typer.echo(f"otad: {error}", err=True)
            raise typer.Exit(2) from error


main = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    demo, train, defend, imitate, predict, explain, attack, certify, evaluate, reproduce
):  # fmt: skip
    main.command()(command)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"otad {metadata.version('otad')}")
        raise typer.Exit


@main.callback()
def otad(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Robust prediction by optimal transport and exact convex integration.

    Start with: otad demo
    """
