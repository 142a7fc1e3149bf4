"""The command `otad`. Each command is a function in a module of its own name."""

from __future__ import annotations

import inspect
import os
import re
import sys
from functools import cache
from importlib import import_module, metadata
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from otad.errors import InputError, OtadError, printable

# In the order of use, each with the first sentence of its help. The modules import torch, which
# takes seconds, so a module is imported only when its command runs.
COMMANDS = {
    "demo": "Train, defend, attack and certify on handwritten digits, and write a report.",
    "train": "Train a residual network whose blocks move the data as little as possible.",
    "defend": "Defend a trained network with its training points, test the model, and save it.",
    "imitate": "Train a network that replaces the solver of a model, test both, and save it.",
    "predict": "Predict every row of an input, and list the training point behind each prediction.",
    "explain": "Show how much each training point contributes to a prediction.",
    "attack": "Run one attack on a model, and report how many predictions stay right.",
    "certify": "Prove how far each input can change in l2 without changing its prediction.",
    "evaluate": "Attack a model with a suite of attacks, certify it, and write a report.",
    "report": "Write the report of a saved evaluation.",
    "serve": "Answer requests over HTTP with a model, by the Open Inference Protocol.",
    "reproduce": "Reproduce published tables, and show the published figures beside ours.",
}


TOGETHER = ("train", "defend")  # commands that torchrun can start several times
RESUMING = ("train", "imitate", "evaluate", "reproduce")
_FULL_MEMORY = re.compile(
    "out of memory|allocate memory|not enough memory|alloc_failed", re.IGNORECASE
)


class _Commands(TyperGroup):
    """Errors that users can fix (of this library, of files, of memory) and interruptions are
    reported in one line; other errors keep their traceback."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, summary in COMMANDS.items():
            self.add_command(TyperCommand(name, help=summary), name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        for before, text in zip(["", *args], [] if ctx.resilient_parsing else args, strict=False):
            flag, equals, value = text.partition("=")
            if not text or (equals and not value and flag.startswith("--")):
                option = (flag or before).lstrip("-") or "arguments"
                raise InputError(f"{option}: expected a value, got an empty text")
            if text != printable(text):
                raise InputError(f"arguments: expected no control characters, got {text}")
        name, command, rest = super().resolve_command(ctx, args)
        if name not in TOGETHER and "TORCHELASTIC_RUN_ID" in os.environ:
            raise InputError(f"torchrun: expected the command {' or '.join(TOGETHER)}, got {name}")
        return name, command if name is None else load_command(name), rest

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # a closed pipe is noticed here, not when Python ends
            return result
        except BrokenPipeError:  # whoever read the output has enough: typer ends in silence
            raise
        except (OtadError, OSError, UnicodeError) as error:  # a name may be no text
            reason, status = str(error), 2
        except (MemoryError, RuntimeError) as error:
            text = str(error).partition("\n")[0]
            if not isinstance(error, MemoryError) and not _FULL_MEMORY.search(text):
                raise
            remedy = "try a smaller --batch-size, fewer --rows, or another --device"
            reason, status = f"out of memory: {remedy} ({text or 'no more to allocate'})", 2
        except KeyboardInterrupt:
            resumes = ctx.invoked_subcommand in RESUMING
            again = "resumes from the last saved step" if resumes else "starts again"
            reason, status = (
                f"interrupted: all files are complete, and the same command {again}",
                130,
            )
        typer.echo(f"otad: {printable(reason)}", err=True)
        raise typer.Exit(status)


@cache
def load_command(name: str) -> Any:
    module = import_module(f"otad.cli.{'predict' if name == 'explain' else name}")
    function, alone = getattr(module, name), typer.Typer(add_completion=False)
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")  # typer keeps single line breaks
    text = "\n\n".join(one.replace("\n", " ") for one in paragraphs)
    alone.command(name, help=text)(function)
    return typer.main.get_command(alone)


main = typer.Typer(cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"otad {metadata.version('otad')}")
        raise typer.Exit


_EAGER: dict[str, Any] = {"callback": _print_version, "is_eager": True}
_Version = Annotated[bool, typer.Option("--version", help="Print the version.", **_EAGER)]


@main.callback()
def otad(version: _Version = False) -> None:
    """Defend neural networks with their training points, attack them, and certify answers.

    Start with: otad demo
    """
