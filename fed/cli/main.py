"""Entry point of the command line: its commands, options and exit codes.

Exit codes: 0 done; 2 bad input, with one line for each thing wrong; 1 a run that failed, or an unexpected error, with
its traceback; 130 interrupted, with what was done so far kept. Results go to standard output, all else to standard
error. This module and those beside it import neither torch nor pydantic until a command needs them, so that help and
completion come at once.
"""

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, cast

import typer

import fed
from fed.cli import keys, runs, tables
from fed.cli.documents import in_force, read, read_comparison, read_experiment
from fed.errors import FedError, InvalidInput
from fed.machine import usable_cores

__all__ = ["app", "main"]

app = typer.Typer(
    name="fed",
    help="Federated and decentralised learning: simulate clients, compare algorithms.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.add_typer(keys.app, name="keys")

_File = Annotated[Path, typer.Argument(metavar="FILE", help="A YAML file.", show_default=False)]
_FileUnlessResumed = Annotated[Path | None, typer.Argument(metavar="FILE", help="A YAML file.", show_default=False)]
_Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Another value for one key of the file, in YAML: rounds.count=5, or base.rounds.count=5 in a comparison. "
        "A mapping replaces the whole section. Repeatable.",
        show_default=False,
    ),
]
_Output = Annotated[
    Path | None,
    typer.Option(help="The folder to write into; a new one in runs/ unless given.", metavar="DIR", show_default=False),
]
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Take the place of an earlier run in that folder.")]
_Resume = Annotated[
    Path | None,
    typer.Option(help="Resume the run in this folder, from its last checkpoint.", metavar="DIR", show_default=False),
]
_Credentials = Annotated[
    Path | None, typer.Option(metavar="DIR", help="The folder of keys, of fed keys.", show_default=False)
]
_Insecure = Annotated[bool, typer.Option("--insecure", help="Go without certificates, on loopback alone.")]
_Patience = Annotated[list[str] | None, typer.Option(metavar="NAME=SECONDS", hidden=True, show_default=False)]
_Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Say what rounds wait for, and which clients fail and why.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print the summary as JSON alone on standard output.")]
_Picture = Annotated[
    Path | None, typer.Option(help="Draw it into this file as well, as SVG.", metavar="FILE.svg", show_default=False)
]
_Jobs = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Runs side by side; as many as cores unless given.", show_default=False),
]


class _Document(StrEnum):
    EXPERIMENT = "experiment"
    COMPARISON = "comparison"


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


@app.command("simulate")
def _simulate(
    file: _FileUnlessResumed = None,
    settings: _Settings = None,
    output: _Output = None,
    overwrite: _Overwrite = False,
    resume: _Resume = None,
    verbose: _Verbose = False,
    json: _Json = False,
) -> int:
    """Run an experiment on simulated clients, on this machine; or resume a run that was interrupted."""
    if resume is not None:
        if file is not None or settings or output is not None or overwrite:
            raise InvalidInput("--resume goes on with a run as it is: give its folder alone")
        return runs.resume(resume, verbose=verbose, as_json=json)
    if file is None:
        raise InvalidInput("fed simulate needs an experiment, got none: give a file, or --resume DIR")
    experiment = read_experiment(file, settings or ())
    return runs.simulate(experiment, output=output, overwrite=overwrite, verbose=verbose, as_json=json)


@app.command("server")
def _server(
    file: _FileUnlessResumed = None,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where nodes dial in.")] = "127.0.0.1:8443",
    credentials: _Credentials = None,
    insecure: _Insecure = False,
    min_nodes: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many nodes must be there before the first round.")
    ] = 1,
    settings: _Settings = None,
    output: _Output = None,
    overwrite: _Overwrite = False,
    resume: _Resume = None,
    json: _Json = False,
    patience: _Patience = None,
) -> int:
    """Coordinate an experiment over real nodes, which dial in with fed client."""
    from fed.cli.nodes import server

    if resume is not None and (settings or output is not None or overwrite):
        raise InvalidInput("--resume goes on with a run as it is: give neither --set, --output nor --overwrite")
    if file is None and resume is None:
        raise InvalidInput("fed server needs an experiment, got none: give a file, or --resume DIR")
    if file is not None:
        experiment = read_experiment(file, settings or ())
    else:
        from fed.storage.run_folder import RunFolder

        assert resume is not None
        experiment = RunFolder.existing(resume).experiment()
    return server(
        experiment,
        listen=listen,
        credentials=credentials,
        insecure=insecure,
        min_nodes=min_nodes,
        output=resume or output,
        overwrite=overwrite,
        resume=resume is not None,
        as_json=json,
        patience=patience or (),
    )


@app.command("client")
def _client(
    data: Annotated[
        Path, typer.Option(metavar="DATA.yaml", help="What this node trains on; it stays here.", show_default=False)
    ],
    server: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where the server is.", show_default=False)
    ] = None,
    credentials: _Credentials = None,
    insecure: _Insecure = False,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The node's, where it has no certificate.", show_default=False)
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="python:…",
            help="Code on this node that an experiment may name. Repeatable; none unless given.",
            show_default=False,
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Where it keeps its state; beside DATA.yaml unless given.", show_default=False
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would leave this node, and end.")] = False,
    patience: _Patience = None,
) -> int:
    """Train on this node what a server asks for; its data never leave it."""
    from fed.cli.nodes import client

    return client(
        address=server,
        credentials=credentials,
        insecure=insecure,
        name=name,
        data=data,
        allowed=allow or (),
        state=state,
        dry_run=dry_run,
        patience=patience or (),
    )


@app.command("compare")
def _compare(
    file: _File,
    settings: _Settings = None,
    output: _Output = None,
    overwrite: _Overwrite = False,
    jobs: _Jobs = None,
    json: _Json = False,
) -> int:
    """Run the variants of an experiment with several seeds, and write a report."""
    comparison = read_comparison(file, settings or ())
    return runs.compare(comparison, output=output, overwrite=overwrite, jobs=jobs or usable_cores(), as_json=json)


@app.command("show")
def _show(file: _File, settings: _Settings = None) -> None:
    """Print every value in force, of an experiment or of a comparison, as YAML; then how clients train, and why."""
    from fed.config import yaml

    document = read(file, settings or ())
    typer.echo(yaml.dump(in_force(document)), nl=False)
    for line in runs.batching(document):
        typer.echo(f"# {line}")


@app.command("data")
def _data(file: _File, settings: _Settings = None, picture: _Picture = None) -> None:
    """Print and draw who holds what, class by client."""
    tables.data(read(file, settings or ()), picture)


@app.command("runs")
def _runs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run, or a folder that holds some.")] = Path("runs"),
    json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List runs: how they ended, how far they came, and what they could be resumed from."""
    from fed.cli.list import runs

    runs(folder, as_json=json)


@app.command("algorithms")
def _algorithms(
    name: Annotated[str | None, typer.Argument(help="Of which all is told.", show_default=False)] = None,
) -> None:
    """List the built-in algorithms, or tell all about one: equation, hyper-parameters, state, what it sends."""
    from fed.cli import algorithms

    algorithms.one_algorithm(name) if name else algorithms.all_algorithms()


@app.command("schema")
def _schema(
    document: Annotated[_Document, typer.Argument(help="Of what the schema is wanted.")] = _Document.EXPERIMENT,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a reference of both documents instead.")] = False,
) -> None:
    """Print the JSON schema by which editors complete and check the YAML, or a reference of all keys in Markdown."""
    from fed.config import reference
    from fed.config.schema import schema_text

    if markdown:
        typer.echo(reference.markdown(), nl=False)
        return
    typer.echo(schema_text(fed.Experiment if document is _Document.EXPERIMENT else fed.Comparison), nl=False)


@app.command("flower-app")
def _flower_app(
    file: _File,
    output: Annotated[
        Path, typer.Option(help="The folder to write the app into, a new one.", metavar="DIR", show_default=False)
    ],
    settings: _Settings = None,
) -> None:
    """Write an experiment as a Flower app, which flwr run starts on any Flower federation."""
    from fed.server.flower.app import write_app

    write_app(read_experiment(file, settings or ()), output)
    typer.echo(f"{output}: a Flower app; start it with: flwr run {output} FEDERATION --stream")


@app.command("doctor")
def _doctor() -> int:
    """Say what this machine has, and what is missing for which feature."""
    from fed.cli.doctor import examine

    return examine()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: what follows ``fed`` on the command line; that of this process unless given.

    Returns:
        The exit code.
    """
    _append_working_folder()
    _prepare_streams()
    try:
        code = typer.main.get_command(app).main(arguments, prog_name="fed", standalone_mode=False)
        sys.stdout.flush()
    except _UsageError as error:
        return _refuse(_usage(error), 2)
    except FedError as error:
        return _refuse(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except (BrokenPipeError, SystemExit) as end:
        return _leave_quietly(end)
    except Exception:
        traceback.print_exc()
        return 1
    return code or 0


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
    with contextlib.suppress(OSError):  # standard output that is no file has nothing more to write
        # Else Python would try once more on its way out, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _append_working_folder() -> None:
    """Let ``python:`` kinds name the user's own modules; last on the path, so that they shadow no installed module."""
    try:
        folder = str(Path.cwd())
    except FileNotFoundError:  # it has been removed
        return
    if folder not in sys.path:
        sys.path.append(folder)


def _prepare_streams() -> None:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this process
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123  # it stays until the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a narrow encoding costs a symbol, not the answer
