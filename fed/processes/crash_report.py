"""Crash report of a child process: its cause of death, and the line of the user's code that ran."""

import logging
import pickle
import re
import signal
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

from fed import errors
from fed.errors import FedError

__all__ = ["portable", "words_of_error", "words_of_exit"]

_log = logging.getLogger(__name__)

_HOUSE = Path(__file__).resolve().parents[2]
_NOT_THE_USERS = (
    "<frozen",
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *(str(_HOUSE / room) for room in ("fed", "aggregators", "clients", "server", "simulations")),
)


def words_of_exit(code: int | None, fault: str) -> str:
    """Description of the end of a process that reported nothing itself.

    Args:
        code: exit code of the process, below 0 for a signal, as in :mod:`multiprocessing`; None if it is unknown.
        fault: text of :mod:`faulthandler` about a crash; empty if there was none.

    Example:
        >>> words_of_exit(7, "")
        'ended with exit code 7'
    """
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in list(signal.Signals) else "unknown"
    if -code == getattr(signal, "SIGKILL", None):
        return f"killed by signal {-code} ({name}): the system may have run out of memory"
    crashed = fault.partition("Current thread")[2]  # the report names the innermost frame first
    frame = _innermost(re.findall(r'File "(.*)", line (\d+) in (.*)', crashed)[::-1])
    return ", ".join(filter(None, [f"ended by signal {-code} ({name})", *fault.splitlines()[:1], frame]))


def words_of_error(error: BaseException) -> tuple[str, str]:
    """Description of an error of the work, with its place; and the whole traceback. Both are cut to fit into a slot."""
    frames = [(frame.filename, frame.lineno or 0, frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    text = "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()[0]
    description = f"{text} ({_innermost(frames)})"
    details = "".join(traceback.format_exception(error))
    # The end of a traceback has the error, and the beginning may repeat a recursion thousands of times.
    return description[:10_000], details[-100_000:]


def portable(error: FedError, most_bytes: int) -> FedError:
    """Error that can be sent to the parent: this one, or else one of its nearest class in :mod:`fed.errors`.

    Args:
        error: error that a child has raised.
        most_bytes: largest size of the pickled error.
    """
    try:
        pickled = pickle.dumps(error)
        # Some errors can be pickled, and then not be loaded, or only as another type.
        if type(pickle.loads(pickled)) is type(error) and len(pickled) < most_bytes:  # noqa: S301  # its own
            return error
    except Exception:
        _log.debug("cannot be pickled: %r", error, exc_info=True)
    nearest: type[FedError] = next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
    # A message without bounds would not fit into a slot.
    return nearest(str(error)[:10_000])


def _innermost(frames: Sequence[tuple[str, int | str, str]]) -> str:
    """Innermost (file, line, function) that is the user's code, or else the innermost of all."""
    # Users can mend their own code alone.
    users = [frame for frame in frames if not frame[0].startswith(_NOT_THE_USERS)] or frames
    return "{}:{} in {}".format(*users[-1]) if users else ""
