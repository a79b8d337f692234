"""Crash report of a worker process: its cause of death, and the line of the user's code that ran."""

import re
import signal
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

__all__ = ["words_of_error", "words_of_exit"]

_HOUSE = Path(__file__).resolve().parents[2]
_NOT_THE_USERS = (
    "<frozen",
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *(str(_HOUSE / room) for room in ("fed", "aggregators", "clients", "server", "simulations")),
)


def words_of_exit(code: int | None, fault: str) -> str:
    """Description of the end of a process that reported nothing itself.

    Args:
        code: its exit code, as :mod:`multiprocessing` has it; None where it is unknown.
        fault: what :mod:`faulthandler` wrote when it crashed, if it did.

    Example:
        >>> words_of_exit(7, "")
        'ended with exit code 7'
    """
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in list(signal.Signals) else "unknown"
    if -code == getattr(signal, "SIGKILL", None):
        return f"killed by signal {-code} ({name}): the system may have run out of memory"
    crashed = fault.partition("Current thread")[2]  # which names the innermost frame first
    frame = _innermost(re.findall(r'File "(.*)", line (\d+) in (.*)', crashed)[::-1])
    return ", ".join(filter(None, [f"ended by signal {-code} ({name})", *fault.splitlines()[:1], frame]))


def words_of_error(error: BaseException) -> tuple[str, str]:
    """Description of what the work raised, and where; and the whole traceback. Both are cut to a slot's size."""
    frames = [(frame.filename, frame.lineno or 0, frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    text = "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()[0]
    return f"{text} ({_innermost(frames)})"[:10_000], "".join(traceback.format_exception(error))[-100_000:]


def _innermost(frames: Sequence[tuple[str, int | str, str]]) -> str:
    """Innermost (file, line, function) that is the user's code, or else the innermost of all."""
    users = [frame for frame in frames if not frame[0].startswith(_NOT_THE_USERS)] or frames
    return "{}:{} in {}".format(*users[-1]) if users else ""
