"""Parts that ``fed server``, ``fed client`` and ``fed peer`` share: credentials, names, and a run until its end."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer

from fed.cli.options import RunOptions
from fed.cli.progress import Lines, display, say_all
from fed.cli.runs import folder, stopped_in_order
from fed.errors import InvalidInput, is_interrupt

__all__ = [
    "Credentials",
    "Device",
    "Insecure",
    "Name",
    "hold_to_certificates",
    "name_of",
    "obeys_signals",
    "running",
    "say_stopped",
]

_Options = ParamSpec("_Options")
_LAST_PORT = 65535
Credentials = Annotated[Path | None, typer.Option(metavar="DIR", help="The folder of keys that fed keys made.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Go without certificates, on loopback alone.")]
Name = Annotated[
    str | None, typer.Option(metavar="NAME", help="Name of this node or peer, where it has no certificate.")
]

Device = Annotated[
    str | None,
    typer.Option(metavar="DEVICE", help="Device that computes: auto, cpu, cuda, a GPU such as cuda:1, or mps."),
]


def hold_to_certificates(address: str, credentials: Path | None, insecure: bool, option: str) -> None:
    """Refuse a connection without certificates, unless it was asked for and stays on this machine.

    Args:
        address: HOST:PORT to listen at or to dial.
        credentials: folder of keys.
        insecure: True to go without certificates.
        option: option that gave the address, for the error.

    Raises:
        InvalidInput: if the address is none, or must not be used so.
    """
    from fed.identity.credentials import hold_to_loopback

    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > _LAST_PORT:
        raise InvalidInput(f"{option} must be HOST:PORT, the port at most {_LAST_PORT}, got {address!r}")
    # To obey one of them silently would surprise a user who meant the other.
    if credentials is not None and insecure:
        raise InvalidInput("--insecure goes without credentials: give one of --credentials DIR and --insecure")
    if credentials is None and not insecure:
        raise InvalidInput(
            "both sides know each other by certificates, got no credentials: give --credentials DIR, which fed keys "
            "makes"
        )
    if insecure:
        hold_to_loopback(address)


def name_of(who: str, name: str | None, credentials: Path | None, certified: str | None) -> str:
    """Name of a node or a peer: that of its certificate, or where it has none the one it was given.

    Args:
        who: ``node`` or ``peer``.
        name: name from the option, or None.
        credentials: folder of keys.
        certified: name in the certificate of that folder, or None.

    Raises:
        InvalidInput: if option and certificate differ, or there is neither.
    """
    # The other side would refuse it too, but later and less plainly.
    if certified is not None and name not in {None, certified}:
        raise InvalidInput(
            f"--name must be {certified}, as the certificate in {credentials} says, got {name}: leave --name out"
        )
    if certified is None and name is None:
        raise InvalidInput(f"without credentials a {who} needs a name, got none: give --name NAME")
    return certified or name or ""


def say_stopped(options: Mapping[str, Any]) -> int:
    """Say that a command was stopped; returns its exit code."""
    display().say("stopped")
    return 130


def obeys_signals(
    stopped: Callable[[Mapping[str, Any]], int],
) -> Callable[[Callable[_Options, int]], Callable[_Options, int]]:
    """Decorator of a command that a service manager's stop ends as Ctrl-C does, from its first moment.

    Args:
        stopped: function that is called with the command's options where a signal has come before the command itself
            can say what it has done; it returns the exit code.
    """

    def decorated(command: Callable[_Options, int]) -> Callable[_Options, int]:
        @functools.wraps(command)
        def obeying(*arguments: _Options.args, **options: _Options.kwargs) -> int:
            with stopped_in_order():
                try:
                    return command(*arguments, **options)
                except BaseException as error:
                    if not is_interrupt(error):
                        raise
                    return stopped(options)

        return obeying

    return decorated


@contextlib.contextmanager
def running(command: str, name: str, options: RunOptions) -> Iterator[tuple[Lines, Path]]:
    """Place where a run says what it does, and its folder, until it ends or is broken off.

    Args:
        command: command that runs it.
        name: name of the experiment.
        options: options of the command.
    """
    shown = display()
    # A server or a peer runs for days without anyone at the terminal: its log is all there is to read.
    say_all(shown)
    with folder(name, options.resume or options.output, options.overwrite) as directory, shown.running():
        try:
            yield shown, directory
        except BaseException as error:
            if not is_interrupt(error):
                raise
            shown.say(f"stopped; fed {command} --resume {directory} goes on")
            raise typer.Abort from None
