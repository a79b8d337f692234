"""``fed server`` and ``fed client``: an experiment on real nodes."""

import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fed.cli.deployments import (
    Credentials,
    Device,
    Insecure,
    Name,
    hold_to_certificates,
    name_of,
    obeys_signals,
    running,
    say_stopped,
)
from fed.cli.documents import changes
from fed.cli.dry_run import say_what_would_leave
from fed.cli.options import FileUnlessResumed, Json, Output, Overwrite, Report, Resume, RunOptions, Settings
from fed.cli.progress import Lines, RoundLines, display, say_all, score_in_words
from fed.cli.runs import tell, to_run
from fed.errors import InvalidInput
from fed.processes.machine import pool_freed_memory
from fed.quantities import bytes_text, counted

if TYPE_CHECKING:
    from fed.clients.node.sessions import SecureNode
    from fed.clients.node.training_process import TrainingProcess
    from fed.config.node_data import NodeData
    from fed.identity.credentials import NodeCredentials

__all__ = ["client", "server"]


@obeys_signals(say_stopped)
def server(
    file: FileUnlessResumed = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address at which nodes dial in.")
    ] = "127.0.0.1:8443",
    credentials: Credentials = None,
    insecure: Insecure = False,
    min_nodes: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Number of nodes to wait for before the first round; the cohort unless given."
        ),
    ] = None,
    device: Device = None,
    settings: Settings = None,
    output: Output = None,
    overwrite: Overwrite = False,
    resume: Resume = None,
    report: Report = False,
    json: Json = False,
) -> int:
    """Coordinate an experiment over real nodes, which dial in with fed client."""
    options = RunOptions(
        file=file, settings=settings, output=output, overwrite=overwrite, resume=resume, report=report, json=json
    )
    experiment = to_run("server", options)
    if experiment is None:
        if resume is not None:
            _dismiss_nodes(resume, listen=listen, credentials=credentials, insecure=insecure)
        return 0
    pool_freed_memory()  # before threads start, which it concerns
    from fed.identity.credentials import ServerCredentials
    from fed.server.grpc.deploy import serve

    hold_to_certificates(listen, credentials=credentials, insecure=insecure, option="--listen")
    cohort = getattr(experiment.rounds.make(), "cohort", None)
    # Some members of a resumed run may not come back, and its rounds wait by themselves.
    least = cohort if isinstance(cohort, int) and resume is None else 1
    loaded = ServerCredentials.load(credentials) if credentials is not None else None
    host = listen.rpartition(":")[0]
    with running("server", experiment.name, options) as (shown, directory):
        run = serve(
            experiment,
            listen=listen,
            output=directory,
            credentials=loaded,
            min_nodes=min_nodes or least,
            overwrite=overwrite,
            resume=resume is not None,
            device=device or "auto",
            # The port may be one that the system chose.
            on_listen=lambda port: shown.say(f"listening on {host}:{port}"),
            observers=[RoundLines(shown, partial(_round_text, experiment.rounds.make().count))],
        )
    tell(directory, run.summary, options)
    return 0


def _dismiss_nodes(folder: Path, listen: str, credentials: Path | None, insecure: bool) -> None:
    """Tell nodes that a run is over, if its server was killed before it had told them.

    Args:
        folder: folder of the finished run.
        listen: address to serve at, HOST:PORT.
        credentials: folder of the server's keys.
        insecure: True to go without certificates.
    """
    from fed.storage.run_folder import RunFolder

    if not RunFolder.existing(folder).spool.exists():  # which a server removes when it has told them
        return
    hold_to_certificates(listen, credentials=credentials, insecure=insecure, option="--listen")
    from fed.identity.credentials import ServerCredentials
    from fed.server.grpc.deploy import dismiss_nodes

    loaded = ServerCredentials.load(credentials) if credentials is not None else None
    display().say("the run is over, and nodes may not know it yet: telling those that dial")
    dismiss_nodes(folder, listen=listen, credentials=loaded)


def _round_text(rounds: int, line: Mapping[str, Any]) -> str:
    score = score_in_words(line)
    parts = [f"round {line['round']}/{rounds}", f"{line['replied']} of {line['selected']} answered"]
    parts += [score] if score else []
    parts += [f"{bytes_text(line['bytes_up'])} up", f"{bytes_text(line['bytes_down'])} down"]
    return ", ".join(parts)


def _say_stopped_before_tasks(options: Mapping[str, Any]) -> int:
    """Say that a node was stopped before it had connected; returns its exit code."""
    if options["dry_run"]:
        return say_stopped(options)
    return _say_end(display(), "stopped", tasks_done=0)


def _say_end(shown: Lines, reason: str, tasks_done: int) -> int:
    were = "was" if tasks_done == 1 else "were"
    shown.say(f"{reason}; {counted(tasks_done, 'task')} {were} done")
    return 0


@obeys_signals(_say_stopped_before_tasks)
def client(
    data: Annotated[
        Path | None, typer.Option(metavar="DATA.yaml", help="File on the data of this node, which stay here.")
    ] = None,
    server: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Address of the server.")] = None,
    credentials: Credentials = None,
    insecure: Insecure = False,
    name: Name = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="python:…", help="Code on this node that an experiment may name. Repeatable; none unless given."
        ),
    ] = None,
    app: Annotated[
        str | None,
        typer.Option(metavar="MODULE:NAME", help="Code of this node's own client, in the place of data."),
    ] = None,
    node_config: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Fact of this node that its app is told. Repeatable."),
    ] = None,
    state: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the node's state; beside DATA.yaml unless given.")
    ] = None,
    secure: Annotated[
        bool, typer.Option("--secure", help="Take part under secure aggregation alone; tell no number of samples.")
    ] = False,
    minimum_cohort: Annotated[
        int | None,
        typer.Option(min=2, metavar="N", help="With --secure: the smallest number of clients in a sum; 5."),
    ] = None,
    corrupt: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=0.99, metavar="SHARE", help="With --secure: the share of colluders that runs allow for; 0.1."
        ),
    ] = None,
    threshold: Annotated[
        int | None,
        typer.Option(min=1, metavar="T", help="With --secure: the smallest number of shares that recover a secret."),
    ] = None,
    allow_state: Annotated[
        bool,
        typer.Option(
            "--allow-state",
            help="With --secure: keep something between tasks, as scaffold and error feedback do, at some risk.",
        ),
    ] = False,
    new_record: Annotated[
        bool,
        typer.Option(
            "--new-record",
            help="With --secure, at the first start: begin the record of the rounds that this node has revealed.",
        ),
    ] = False,
    device: Device = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would leave this node, and end.")] = False,
) -> int:
    """Train on this node what a server asks for; its data never leave it."""
    from fed.clients.node.training_process import TrainingProcess
    from fed.identity.credentials import NodeCredentials
    from fed.processes.child_processes import load_for_children
    from fed.wire.messages import client_id_of

    if server is None and not dry_run:
        raise InvalidInput("fed client needs to know where its server is, got nothing: give --server HOST:PORT")
    limits = {"minimum_cohort": minimum_cohort, "corrupt": corrupt, "threshold": threshold}
    # Limits has the defaults: None stands for an option that was not given.
    given_limits = {key: value for key, value in limits.items() if value is not None}
    if not secure and (given_limits or new_record or allow_state):
        # To ignore them would leave the owner with less protection than was asked for.
        raise InvalidInput(
            "--minimum-cohort, --corrupt, --threshold, --allow-state and --new-record go with --secure, which is not "
            "given: add it"
        )
    load_for_children("fed.clients.node.training_process")
    os.umask(0o077)  # what it keeps is for its user alone
    if server is not None:
        hold_to_certificates(server, credentials=credentials, insecure=insecure, option="--server")
    loaded = NodeCredentials.load(credentials) if credentials is not None else None
    name = name_of("node", name=name, credentials=credentials, certified=loaded.name if loaded else None)
    # The name is part of the folder's, so that several nodes may share one DATA.yaml.
    own = _described(data, app, node_config or ()).on(device)
    place = state or (Path() if data is None else data.parent) / f".fed-{name}"
    training = TrainingProcess(client_id_of(name), own, place / "kept")
    if dry_run:
        say_what_would_leave(training, name, secure=secure, is_app=own.app is not None)
        return 0
    assert server is not None
    sessions = None
    if secure:
        sessions = partial(_sessions, loaded, place, given_limits, allows_state=allow_state, begins_record=new_record)
    return _attend(server, loaded, name, training, place, allow=allow or (), own=own, sessions=sessions)


def _described(file: Path | None, app: str | None, node_config: Sequence[str]) -> "NodeData":
    """The node's data, or its app, from a file or from options."""
    from fed.config.node_data import NodeData

    if (file is None) == (app is None):
        got = "neither" if file is None else "both"
        raise InvalidInput(
            f"a node needs data or an app, got {got}: give one of --data DATA.yaml and --app MODULE:NAME"
        )
    if app is None:
        if node_config:
            raise InvalidInput("--node-config goes with --app, got --data: write node_config into that file")
        assert file is not None
        return NodeData.load(file)
    kind = app if app.startswith("python:") else f"python:{app}"
    return NodeData(app=kind, node_config=changes(node_config, "--node-config"))


def _attend(
    server: str,
    credentials: "NodeCredentials | None",
    name: str,
    training: "TrainingProcess",
    folder: Path,
    *,
    allow: Sequence[str],
    own: "NodeData",
    sessions: "Callable[[], SecureNode] | None",
) -> int:
    """Do a server's tasks until it says farewell, or a signal comes.

    Args:
        server: address of the server, HOST:PORT.
        credentials: key and certificate of the node; None: no encryption.
        name: name of the node.
        training: process that trains.
        folder: folder of the node's state.
        allow: modules whose ``python:`` kinds the server may name.
        own: node's data or app, and its owner's limits on privacy.
        sessions: function that makes the node's sessions under secure aggregation; None: it takes part without it.
    """
    from fed.clients.node.edge_node import EdgeNode
    from fed.clients.node.privacy import PrivateNode
    from fed.storage.atomic_files import held
    from fed.wire.messages import client_id_of

    shown = display()
    say_all(shown)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        # An event, not an exception: the node ends its stream and its training process in order.
        signal.signal(number, lambda *_: stopped.set())
    channel = credentials.for_dialling() if credentials else None
    # Two nodes in one folder would overwrite each other's states.
    with held(folder, "give another --state"):
        folder.chmod(0o700)  # it may be there from an earlier version
        secure = sessions() if sessions else None  # only now: its record is in the folder that is held
        authority_pem = credentials.authority_pem if credentials else None
        private = PrivateNode(name, folder, authority_pem=authority_pem, limits=own.privacy)
        node = EdgeNode(
            server,
            channel,
            name,
            client_id_of(name),
            training,
            folder / "files",
            allow,
            app=own.app,
            secure=secure,
            private=private,
        )
        try:
            farewell = node.run(stopped=stopped)
        finally:
            training.close()
            node.clear_folder()
            private.close()
    return _say_end(shown, farewell or "stopped", node.tasks_done)


def _sessions(
    credentials: "NodeCredentials | None",
    folder: Path,
    limits: Mapping[str, Any],
    *,
    allows_state: bool,
    begins_record: bool,
) -> "SecureNode":
    """The node's sessions under secure aggregation, with its owner's limits where some are given."""
    from fed.clients.node.sessions import Limits, SecureNode

    if credentials is None:
        raise InvalidInput("--secure needs the node's key and the others' identities: give --credentials")
    return SecureNode(credentials, folder, Limits(**limits, allows_state=allows_state), begins_record=begins_record)
