"""The typer application: its commands, and one place that turns every error into one line and an exit code."""

from __future__ import annotations

import errno
import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from untorch.cli.bench import bench
from untorch.cli.bench_llm import bench_llm
from untorch.cli.chat import chat
from untorch.cli.doctor import doctor
from untorch.cli.export import export
from untorch.cli.generate import generate
from untorch.cli.inspect import inspect
from untorch.cli.ops import ops
from untorch.cli.output import one_line
from untorch.cli.profile import profile
from untorch.cli.quantize_report import quantize_report
from untorch.cli.run import run
from untorch.cli.serve import serve
from untorch.cli.sign import sign
from untorch.cli.triton import triton
from untorch.cli.tune import tune
from untorch.cli.verify import verify
from untorch.runtime.text import escape_controls

__all__ = ["app", "one_line"]


class _Group(TyperGroup):
    """Reports errors as one line each instead of typer's panels."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        # Names that the terminal's encoding lacks are no error.
        reconfigure = getattr(sys.stdout, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
        try:
            code = super().main(
                args=args,
                prog_name=prog_name,
                complete_var=complete_var,
                standalone_mode=False,
                windows_expand_args=windows_expand_args,
                **extra,
            )
            sys.stdout.flush()
        except Exception as error:
            _fail(error, given)
        except KeyboardInterrupt:
            print("untorch: interrupted", file=sys.stderr, flush=True)
            sys.exit(130)
        sys.exit(code if isinstance(code, int) else 0)


def _fail(error: Exception, arguments: list[str]) -> NoReturn:
    """Prints the error as the arguments ask for it and exits: 2 for a wrong command line, 1 for the rest."""
    from untorch.runtime.errors import UntorchError

    if isinstance(error, OSError) and error.errno == errno.EPIPE:
        # The reader closed the pipe (untorch ops | head): print nothing, and let Python's final flush succeed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    if isinstance(error, typer.Abort):
        print("untorch: interrupted", file=sys.stderr, flush=True)
        sys.exit(130)
    # typer vendors click from 0.20 on, so its errors are recognised by their attributes, not by their class.
    message = getattr(error, "format_message", None)
    if message is not None:
        text, code = str(message()), int(getattr(error, "exit_code", 1))
    elif isinstance(error, UntorchError | OSError):
        text, code = str(error), 1
    else:
        text, code = f"{type(error).__name__}: {error} (--debug shows where)", 1
    if "--debug" in arguments:
        traceback.print_exception(error)
    if "--json" in arguments:
        print(json.dumps({"error": {"type": type(error).__name__, "message": text}}))
    if code == 2:
        context = getattr(error, "ctx", None)
        command = getattr(context, "command_path", None) or "untorch"
        text = f"{one_line(text).rstrip('.')}; see {command} --help"
    print(f"untorch: {escape_controls(one_line(text))}", file=sys.stderr, flush=True)
    sys.exit(code)


def _version(value: bool) -> None:
    if value:
        import untorch

        print(untorch.__version__)
        raise typer.Exit


app = typer.Typer(
    cls=_Group,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Compile PyTorch models ahead of time and run them without PyTorch.",
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr, flush=True)
        raise typer.Exit(2)


for _command in (
    export, run, bench, profile, inspect, sign, verify, ops, doctor, quantize_report, tune, generate, chat, bench_llm,
    serve, triton,
):  # fmt: skip
    app.command()(_command)
