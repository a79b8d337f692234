"""``fed peer``: an experiment without a coordinator, at one of the real peers that mix with each other."""

from collections.abc import Mapping, Sequence
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
from fed.cli.options import FileUnlessResumed, Json, Output, Overwrite, Report, Resume, RunOptions, Settings
from fed.cli.progress import Lines, RoundLines, score_in_words
from fed.cli.runs import tell, to_run
from fed.errors import InvalidInput
from fed.processes.machine import pool_freed_memory
from fed.quantities import bytes_text

if TYPE_CHECKING:
    from fed.config.node_data import NodeData
    from fed.server.peer.deploy import PeerSetup

__all__ = ["peer"]

_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104  # are compared with, and nothing listens there


@obeys_signals(say_stopped)
def peer(
    data: Annotated[Path, typer.Option(metavar="DATA.yaml", help="File on the data of this peer, which stay here.")],
    file: FileUnlessResumed = None,
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Address at which other peers dial in; without it this one only dials."),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Address at which others reach it, if that is not where it listens."),
    ] = None,
    join: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT", help="Another peer, which introduces the others. Repeatable."),
    ] = None,
    credentials: Credentials = None,
    insecure: Insecure = False,
    name: Name = None,
    min_peers: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of peers to wait for before the first round, this one too.")
    ] = 2,
    patience: Annotated[
        float,
        typer.Option(min=1.0, metavar="SECONDS", help="Seconds to wait for others without whom it cannot go on."),
    ] = 3600.0,
    serve_end: Annotated[
        float,
        typer.Option(min=0.0, metavar="SECONDS", help="Seconds to stay at the end for members that are still away."),
    ] = 60.0,
    device: Device = None,
    settings: Settings = None,
    output: Output = None,
    overwrite: Overwrite = False,
    resume: Resume = None,
    report: Report = False,
    json: Json = False,
) -> int:
    """Train with other peers, each of which runs the same experiment on data of its own, without a coordinator."""
    options = RunOptions(
        file=file, settings=settings, output=output, overwrite=overwrite, resume=resume, report=report, json=json
    )
    experiment = to_run("peer", options)
    pool_freed_memory()  # before threads start, which it concerns
    from fed.config.node_data import NodeData
    from fed.identity.credentials import PeerCredentials
    from fed.server.peer.deploy import PeerSetup, end_is_kept, take_part

    # The end of a finished run is served once more where members had not come to it.
    if experiment is None and (resume is None or not end_is_kept(resume)):
        return 0

    own = NodeData.load(data).on(device)
    if own.data is None:
        raise InvalidInput(f"a peer trains on data, got an app in {data}: an app's clients go with fed server")
    addresses = {"--join": join or []}
    addresses["--listen"] = [] if listen is None else [listen]
    addresses["--advertise"] = [] if advertise is None else [advertise]
    _check_addresses(addresses, credentials=credentials, insecure=insecure)
    loaded = PeerCredentials.load(credentials) if credentials is not None else None
    setup = PeerSetup(
        name=name_of("peer", name=name, credentials=credentials, certified=loaded.name if loaded else None),
        listen=listen,
        join=join or [],
        credentials=loaded,
        advertise=advertise,
        min_peers=min_peers,
        patience_s=patience,
        serves_end_s=serve_end,
    )
    if experiment is None:
        _serve_end(own, setup, options)
        return 0
    with running("peer", experiment.name, options) as (shown, directory):
        run = take_part(
            experiment,
            own,
            setup,
            output=directory,
            overwrite=overwrite,
            resume=resume is not None,
            on_listen=partial(_say_port, shown, listen),
            observers=[RoundLines(shown, partial(_round_text, experiment.rounds.make().count))],
        )
    tell(directory, run.summary, options)
    return 0


def _check_addresses(given: Mapping[str, Sequence[str]], credentials: Path | None, insecure: bool) -> None:
    """Check the addresses of this peer and of those that it joins.

    Args:
        given: option → the addresses that it gave.
        credentials: folder of the peer's keys.
        insecure: True to go without certificates.

    Raises:
        InvalidInput: if one cannot be used, or they do not go together.
    """
    if not given["--listen"] and not given["--join"]:
        raise InvalidInput(
            "a peer must listen or join others, got neither: give --listen HOST:PORT or --join HOST:PORT"
        )
    # Also for addresses that are dialled: this peer sends its vectors there.
    for option, addresses in given.items():
        for address in addresses:
            hold_to_certificates(address, credentials=credentials, insecure=insecure, option=option)
    for address in given["--listen"]:
        if not given["--advertise"] and address.rpartition(":")[0].strip("[]") in _EVERYWHERE:
            raise InvalidInput(
                f"--listen {address} is an address that others cannot dial: give --advertise HOST:PORT, too"
            )


def _serve_end(own: "NodeData", setup: "PeerSetup", options: RunOptions) -> None:
    """Serve the end of a finished run to members that had not come to it.

    Args:
        own: data that this peer trained on.
        setup: addresses, credentials and waits of this peer.
        options: options of the command, with the folder of that run.
    """
    from fed.server.peer.deploy import serve_end
    from fed.storage.run_folder import RunFolder

    assert options.resume is not None
    experiment = RunFolder.existing(options.resume).experiment()
    with running("peer", experiment.name, options) as (shown, folder):
        shown.say(f"the run is over, and others may not know it yet: serving its end for {setup.serves_end_s:g} s")
        serve_end(experiment, own, setup, output=folder, on_listen=partial(_say_port, shown, setup.listen))


def _say_port(shown: Lines, listen: str | None, port: int | None) -> None:
    # The host as it was given, and the port that the system may have chosen.
    if listen is not None:
        shown.say(f"listening on {listen.rpartition(':')[0]}:{port}")


def _round_text(rounds: int, line: Mapping[str, Any]) -> str:
    score = score_in_words(line)
    parts = [f"round {line['round']}/{rounds}"]
    parts += [] if line["replied"] else ["not taken part in"]
    parts += [score] if score else []
    parts += [f"{bytes_text(line['bytes_up'])} sent, {bytes_text(line['bytes_down'])} received"]
    return ", ".join(parts)
