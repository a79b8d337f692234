"""Entry point of the command line: its commands, options and exit codes.

Exit codes: 0 done; 2 bad input, with one line for each thing wrong; 1 a run that failed, or an unexpected error, with
its traceback; 130 interrupted, with what was done so far kept. Results go to standard output, all else to standard
error. This module and those beside it import neither torch nor pydantic until a command needs them, so that help and
completion come at once.
"""

import contextlib
import errno
import gc
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer

import fed
from fed.cli import algorithms, audit, codecs, documents, export, keys, nodes, peers, privacy, runs, tables, topology
from fed.cli import compare as comparisons
from fed.cli import list as kept_runs
from fed.config.docstrings import summary
from fed.errors import FedError, is_interrupt

__all__ = ["app", "main"]

app = typer.Typer(
    name="fed",
    help="Federated and decentralised learning: simulate clients, compare algorithms.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.add_typer(keys.app, name="keys")


@app.callback(invoke_without_command=True)
def _fed(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(f"fed {fed.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _doctor() -> int:
    """Say what this machine has, and what is missing for which feature."""
    from fed.cli.doctor import examine

    return examine()


_COMMANDS: dict[str, Callable[..., int | None]] = {
    "simulate": runs.simulate,
    "server": nodes.server,
    "client": nodes.client,
    "peer": peers.peer,
    "compare": comparisons.compare,
    "audit": audit.audit,
    "report": runs.report,
    "show": documents.show,
    "data": tables.data,
    "runs": kept_runs.runs,
    "export": export.export,
    "algorithms": algorithms.algorithms,
    "codecs": codecs.codecs,
    "topology": topology.topology,
    "privacy": privacy.privacy,
    "schema": documents.schema,
    "flower-app": documents.flower_app,
    "doctor": _doctor,
}
for _name, _command in _COMMANDS.items():
    app.command(_name, help=summary(_command))(_command)


_NEW_OBJECTS = 50_000
"""Number of new objects after which a command looks for garbage, in place of 700: modules make many, and leave none."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: arguments that follow ``fed`` on the command line; those of this process unless given.

    Returns:
        The exit code.
    """
    if arguments is None:
        gc.set_threshold(_NEW_OBJECTS)
    _append_working_folder()
    _prepare_streams()
    try:
        code = typer.main.get_command(app).main(arguments, prog_name="fed", standalone_mode=False)
        sys.stdout.flush()  # while a closed pipe can still be told from a failure
    except BaseException as error:
        return _exit_code(error)
    return code or 0


def _exit_code(error: BaseException) -> int:
    """Exit code for what has ended a command, once the user has been told."""
    if is_interrupt(error) or isinstance(error, typer.Abort):
        return 130
    if isinstance(error, _UsageError):
        return _refuse(_usage(error), 2)
    if isinstance(error, FedError):
        return _refuse(str(error), error.exit_code)
    if isinstance(error, BrokenPipeError | SystemExit):
        return _leave_quietly(error)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        _write_no_more()
        return _refuse("there is no space left to write to: free some, and run the command again", 1)
    if not isinstance(error, Exception):
        raise error
    traceback.print_exception(error)
    return 1


# The root of Typer's own errors, which has moved between its versions.
_UsageError = cast("type[Exception]", typer.BadParameter.mro()[2])


def _usage(error: Any) -> str:
    text = " ".join(error.format_message().split()).replace("Value error, ", "").rstrip(".")
    context = getattr(error, "ctx", None)
    return f"{text}; see {context.command_path} --help" if context else text


def _refuse(message: str, code: int) -> int:
    for line in message.splitlines() or [""]:
        typer.echo(f"error: {line}", err=True)
    return code


def _leave_quietly(end: BaseException) -> int:
    """Exit in silence when the reader of standard output, like ``head``, has left; libraries raise SystemExit then."""
    if isinstance(end, SystemExit) and not isinstance(end.__context__, BrokenPipeError):
        raise end
    _write_no_more()
    return 1


def _write_no_more() -> None:
    """Drop what standard output still holds: Python would try once more on its way out, and complain."""
    with contextlib.suppress(OSError):  # standard output that is no file has nothing more to write
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _append_working_folder() -> None:
    """Let ``python:`` kinds name the user's own modules; last on the path, so that they shadow no installed module."""
    # Its name as it is now: the program, or a module of the user's, may change to another.
    with contextlib.suppress(FileNotFoundError):  # it has been removed
        if (folder := str(Path.cwd())) not in sys.path:
            sys.path.append(folder)


def _prepare_streams() -> None:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123  # it stays until the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a narrow encoding costs a symbol, not the answer
