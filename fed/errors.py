"""Errors of the product as one tree; a message holds the invariant, the values and the remedy.

::

    FedError
    ├── InvalidInput            what the user gave cannot be used; the command line exits with 2
    │   ├── InvalidExperiment   a key of an experiment or a comparison: file, key, value, what is allowed
    │   │   └── ValueRange      a hyper-parameter outside its range
    │   ├── InvalidData         samples, labels, files or a partition of them
    │   │   └── InvalidCell     a cell of a table: file, row, column, value
    │   ├── InvalidModel        a module, its output or its loss
    │   ├── InvalidCheckpoint   a state that cannot be kept, or checkpoints of which none can be read
    │   ├── InvalidCredentials  keys, certificates or a roster that cannot be used, made or kept
    │   ├── InvalidLedger       a ledger of privacy that was cut, changed or replaced
    │   └── OutputExists        a folder that would be overwritten
    ├── InvalidPayload          what came over the wire is not what was said or asked for
    │   └── DamagedPayload      its bytes are not those that were sent, which may be sent again
    ├── AppFailed               a client's own code failed in a task, which fails, while the run goes on
    ├── RunFailed               a run that had begun could not go on; the command line exits with 1
    │   ├── CheckpointFailed    a checkpoint cannot be written: a full disk, a folder without permission
    │   ├── DeviceFailed        one of the several devices that train a client failed
    │   ├── LedgerFailed        an entry of the ledger of privacy cannot be written, and nothing was released
    │   └── Diverged            a client's loss or update is no longer finite
    └── SessionFailed           a session of secure aggregation that has ended without a sum
"""

import sys
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import ClassVar

__all__ = [
    "AppFailed",
    "BudgetSpent",
    "CheckpointFailed",
    "DamagedPayload",
    "DeviceFailed",
    "Diverged",
    "FedError",
    "InvalidCell",
    "InvalidCheckpoint",
    "InvalidCredentials",
    "InvalidData",
    "InvalidExperiment",
    "InvalidInput",
    "InvalidLedger",
    "InvalidModel",
    "InvalidPayload",
    "LedgerFailed",
    "OutputExists",
    "RunFailed",
    "SessionFailed",
    "ValueRange",
    "cause_of",
    "error_with_line",
    "first_line",
    "in_one_sentence",
    "is_interrupt",
    "located",
    "os_errors_as",
    "place_of",
    "users_error_in_words",
    "users_errors_as",
    "users_line",
]


class FedError(Exception):
    """The root of the tree: its message is written for the user."""

    exit_code: ClassVar[int] = 1


class InvalidInput(FedError, ValueError):
    """Input of the user's that cannot be used."""

    exit_code = 2


class InvalidExperiment(InvalidInput):
    """A key of an experiment or a comparison cannot be used."""


class ValueRange(InvalidExperiment):
    """A hyper-parameter is of the wrong type or outside its range."""


class InvalidData(InvalidInput):
    """Samples, labels, files or a partition of them cannot be used."""


class InvalidCell(InvalidData):
    """A cell of a table cannot be used.

    Args:
        message: sentence for the table's owner, with the cell.
        told: same sentence without the cell, for others; one that tells nothing of the table unless given.
    """

    def __init__(self, message: str, told: str = "a cell of the table cannot be used") -> None:
        super().__init__(message, told)
        self.told = told

    def __str__(self) -> str:
        """The sentence for the table's owner."""
        return str(self.args[0])


class InvalidModel(InvalidInput):
    """A module, its output or its loss cannot be used."""


class InvalidCheckpoint(InvalidInput):
    """A state cannot be kept, or there is no checkpoint that a run can be resumed from."""


class InvalidCredentials(InvalidInput):
    """Keys, certificates or a roster cannot be used, made or kept."""


class InvalidLedger(InvalidInput):
    """A ledger of privacy has been cut, changed or replaced, so that it would count too little."""


class OutputExists(InvalidInput):
    """A folder that would be overwritten."""


class InvalidPayload(FedError):
    """A payload is not what was announced or asked for."""


class DamagedPayload(InvalidPayload):
    """A payload's bytes differ from those that were sent; it may be sent again."""


class AppFailed(FedError):
    """Failure of a client's own code in one task; the message names the client."""


class RunFailed(FedError):
    """A run that had begun could not go on."""


class BudgetSpent(FedError):
    """A round was not begun, for it would have cost more privacy than the budget allows."""


class SessionFailed(FedError):
    """A session of secure aggregation has ended without a sum; nothing of a client was revealed."""


class CheckpointFailed(RunFailed):
    """A checkpoint cannot be written; those before it are as they were."""


class DeviceFailed(RunFailed):
    """One of the several devices that train a client failed, with its last words and a remedy."""


class LedgerFailed(RunFailed):
    """An entry of the ledger of privacy cannot be written; what it would have recorded was not released."""


class Diverged(RunFailed):
    """A client's loss or update is no longer finite."""

    @classmethod
    def of(cls, round_number: int, client: int | str, reason: str) -> "Diverged":
        """Error that names the round and the client, and the remedy.

        Args:
            round_number: number of the round, from 1.
            client: number or name of the client.
            reason: clause on the number that is not finite.
        """
        return cls(
            f"round {round_number}, client {client!r}: {reason}; the last good model is kept: "
            "lower local.lr, or clean that client's data"
        )


def cause_of(error: BaseException) -> str:
    """Type and first line of an error, and the line of the user's own code that it came through.

    An error of this package has a sentence of its own, without its type.

    Example:
        >>> cause_of(ValueError("no such thing"))
        'ValueError: no such thing'
    """
    kind = "" if isinstance(error, FedError) else f"{type(error).__name__}: "
    line = users_line(error)
    place = f", at {line}" if line is not None and "site-packages" not in line else ""
    return f"{kind}{first_line(error)}{place}"


def first_line(error: BaseException) -> str:
    r"""First line of an error's message, or its type where it has none.

    Example:
        >>> first_line(ValueError("no such thing\nat all")), first_line(KeyError())
        ('no such thing', 'KeyError')
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def is_interrupt(error: BaseException) -> bool:
    """True if an error is an interrupt, or one that a library has raised from it, as pydantic does while it serializes.

    Example:
        >>> try:
        ...     raise RuntimeError("while it serializes") from KeyboardInterrupt()
        ... except RuntimeError as error:
        ...     is_interrupt(error)
        True
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__cause__
    return cause is not None


@contextmanager
def located(place: object) -> Iterator[None]:
    """Begin each line of a user's mistake that the block finds with its place: a file, a key, a variant.

    Example:
        >>> with located("experiment.yaml"):
        ...     raise InvalidExperiment("rounds.count: missing key")
        Traceback (most recent call last):
        fed.errors.InvalidExperiment: experiment.yaml: rounds.count: missing key
    """
    try:
        yield
    except InvalidInput as error:
        kind = next(kind for kind in type(error).__mro__ if kind.__module__ == __name__)  # a user's may take more
        raise kind("\n".join(f"{place}: {line}" for line in str(error).splitlines())) from None


@contextmanager
def os_errors_as(kind: type[FedError], problem: str, remedy: str) -> Iterator[None]:
    """Raise what the system refuses within the block as an error for the user, with the system's reason.

    Args:
        kind: class of the error.
        problem: clause that names the file, such as ``roster.json cannot be read``.
        remedy: imperative clause on the way out.

    Example:
        >>> with os_errors_as(InvalidInput, "data.csv cannot be read", "make it readable"):
        ...     raise PermissionError(13, "Permission denied")
        Traceback (most recent call last):
        fed.errors.InvalidInput: data.csv cannot be read (Permission denied): make it readable
    """
    try:
        yield
    except OSError as error:
        raise kind(f"{problem} ({error.strerror or error}): {remedy}") from None


@contextmanager
def users_errors_as(kind: type[FedError], what: str) -> Iterator[None]:
    """Raise what the user's own code raises within the block as one sentence, with its place; errors of ours pass.

    Args:
        kind: class of the error.
        what: name of that code, such as ``the model's factory``.

    Example:
        >>> try:
        ...     with users_errors_as(InvalidModel, "the model's factory"):
        ...         raise KeyError("width")
        ... except InvalidModel as error:
        ...     str(error).partition(", at ")[0]
        "the model's factory raised KeyError: 'width'"
    """
    try:
        yield
    except FedError:
        raise
    except Exception as error:
        raise kind(users_error_in_words(error, what)) from error


def in_one_sentence(error: FedError) -> FedError:
    """The error; a program that ends with it prints its sentence, with the user's line, and no traceback.

    For mistakes in which the way through this package says nothing. All other errors are printed as ever.

    Args:
        error: the error, not raised yet.
    """
    shown_otherwise = sys.excepthook
    kept = weakref.ref(error)  # the traceback of an error holds all that its functions held

    def show(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if raised is not kept():
            shown_otherwise(kind, raised, trace)
            return
        line = users_line(raised)
        sys.stderr.write(f"{line}: {raised}\n" if line else f"{raised}\n")

    sys.excepthook = show
    return error


def users_error_in_words(error: Exception, what: str) -> str:
    """The sentence on an error of the user's own code, with its place.

    Args:
        error: the error, as it was raised.
        what: name of that code, such as ``the model's factory``.
    """
    # Downloads of all libraries fail with errors of the system, or with ones derived from them.
    remedy = "see that the file or the network is there, and try again" if isinstance(error, OSError) else "correct it"
    said = f": {first_line(error)}" if str(error).strip() else ""
    return f"{what} raised {type(error).__name__}{said}, at {place_of(error)}: {remedy}"


def error_with_line(error: Exception) -> str:
    """Type and message of an error, with the line of the user's code where it came through some.

    Example:
        >>> error_with_line(KeyError("width"))
        "KeyError: 'width'"
    """
    line = users_line(error)
    return f"{type(error).__name__}: {error}" + (f", at {line}" if line else "")


def place_of(error: Exception) -> str:
    """File and line at which an error left the user's own code, or where it was raised."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    if line := users_line(error):
        return line
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"


def users_line(error: BaseException) -> str | None:
    """File and line of the last call that an error came through outside this package, PyTorch and Python itself.

    The user's own files come before installed packages. None where there is no such call, as in a model of PyTorch's
    layers alone.

    Example:
        >>> forward = compile("raise RuntimeError", "my_model.py", "exec")
        >>> try:
        ...     exec(forward, {"__name__": "my_model"})
        ... except RuntimeError as error:
        ...     users_line(error)
        'my_model.py:1'
    """
    calls = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package not in _NOT_THE_USERS:
            calls.append(f"{frame.f_code.co_filename}:{line}")
    own = [call for call in calls if "site-packages" not in call]
    found = own or calls
    return found[-1] if found else None


_NOT_THE_USERS = {"fed", "torch", *sys.stdlib_module_names} - {"__main__"}
