"""Files of a ledger: the ledger and its copy as they are found, which of them counts, and lines that are added."""

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fed.errors import InvalidLedger, LedgerFailed, os_errors_as
from fed.privacy.entries import DamagedChain, LedgerChain

__all__ = ["MAKE_ROOM", "Found", "add_line", "found_at", "say_of_copy", "whole"]

_log = logging.getLogger(__name__)

MAKE_ROOM = "make room there, and resume the run: nothing of this round was released"
"""Advice where an entry cannot be written."""


class Found(NamedTuple):
    """A file of the ledger, as it is on the disk.

    Args:
        chain: lines of the file; None where it is not there, or damaged.
        is_torn: True if its last line is not whole.
        problem: clause on its damage; empty where it is whole or not there.
        lines: number of lines, of a damaged one too.
    """

    chain: LedgerChain | None = None
    is_torn: bool = False
    problem: str = ""
    lines: int = 0


def found_at(path: Path) -> Found:
    """The file at this path, if it is there.

    Raises:
        InvalidLedger: if it cannot be read, is none, or is a link to a file that is not there.
    """
    with os_errors_as(InvalidLedger, f"{path} cannot be read", "make it readable"):
        if not path.exists():
            if path.is_symlink():  # perhaps onto a disk that is not mounted
                raise InvalidLedger(
                    f"{path} is a link to {path.readlink()}, which is not there: bring that back, for without it what "
                    "has been released would be counted too low"
                )
            return Found()
        if not path.is_file():
            raise InvalidLedger(f"{path} is no file: remove it, or put the ledger there")
        content = path.read_bytes()
    try:
        chain, is_torn = LedgerChain.read(content)
    except DamagedChain as damage:
        return Found(problem=f"has been damaged: {damage}", lines=damage.lines)
    return Found(chain, is_torn, lines=len(chain.lines))


def whole(path: Path, own: Found, copy: Path | None, beside: Found) -> LedgerChain | None:
    """The longer of the ledger and its copy; None where there is neither.

    Args:
        path: file of the ledger.
        own: file as it was found there.
        copy: file of the copy.
        beside: copy as it was found there.

    Raises:
        InvalidLedger: if the ledger is damaged and the copy cannot take its place, or they contradict each other.
    """
    if own.chain is None:
        if beside.chain is None or beside.lines < own.lines:
            if not own.problem and not beside.problem:
                return None
            damaged, problem = (path, own.problem) if own.problem else (copy, beside.problem)
            raise InvalidLedger(
                f"{damaged} {problem}, and there is no other copy that is whole: put one back, for without it what has "
                "been released would be counted too low"
            )
        _log.warning(
            "%s %s: it is written anew from %s, with %d entries",
            path,
            own.problem or "was not there",
            copy,
            len(beside.chain.entries),
        )
        return beside.chain
    if beside.problem and beside.lines > own.lines:
        raise InvalidLedger(
            f"{copy} {beside.problem}, and it has more lines than {path}, which may be an older copy: put the newest "
            "ledger back there, or remove the damaged copy if nothing has been put back"
        )
    if beside.chain is None or beside.chain.begins(own.chain):
        return own.chain
    if beside.chain.identity != own.chain.identity:
        raise InvalidLedger(
            f"{copy} is the ledger of {beside.chain.identity!r}, and that of this run is {own.chain.identity!r}: "
            "give an experiment that has changed another folder, or put the right ledger back"
        )
    if own.chain.begins(beside.chain):
        _log.warning(
            "%s had %d entries fewer than %s, which are taken from there: an older copy had been put back",
            path,
            len(beside.chain.entries) - len(own.chain.entries),
            copy,
        )
        return beside.chain
    pairs = zip(own.chain.hashes, beside.chain.hashes, strict=False)
    first = next(place for place, (one, other) in enumerate(pairs, start=1) if one != other)
    raise InvalidLedger(
        f"{copy} and {path} contradict each other from line {first} on: one of them has been changed, so put the true "
        "one in both places"
    )


def say_of_copy(copy: Path, beside: Found, chain: LedgerChain, *, run: str, is_resumed: bool) -> None:
    """Say that a copy lacks entries of its own run; entries of other runs come to the ledger alone.

    Args:
        copy: file of the copy.
        beside: copy as it was found there.
        chain: lines of the ledger.
        run: name of the run that the copy lies beside.
        is_resumed: True if the run has begun before.
    """
    if beside.problem:
        _log.warning("%s %s: it is written anew from the ledger itself", copy, beside.problem)
        return
    known = 0 if beside.chain is None else len(beside.chain.entries)
    lacking = sum(entry.run == run for entry in chain.entries[known:])
    if is_resumed and lacking:
        _log.warning("%s lacks the run's last %d entries: they are taken from the ledger itself", copy, lacking)


def add_line(path: Path, line: bytes, *, size_bytes: int, syncs: bool = True) -> None:
    """Write a line at the end of a ledger.

    Args:
        path: file of the ledger.
        line: the line.
        size_bytes: size of the file before.
        syncs: True if it waits for the disk.

    Raises:
        LedgerFailed: if it cannot be written, or the file is another one; it is then as it was before.
    """
    # Without a buffer: on a full disk its rest would be written when the file closes, behind the cut below.
    with os_errors_as(LedgerFailed, f"{path} cannot be written to", MAKE_ROOM), path.open("r+b", buffering=0) as file:
        if file.seek(0, os.SEEK_END) != size_bytes:
            raise LedgerFailed(
                f"{path} has been changed while the run went on, and nothing of this round was released: resume "
                "the run, which checks it"
            )
        try:
            left = memoryview(line)
            while left:
                left = left[file.write(left) :]
            if syncs:
                os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):  # if this fails, too, the next start leaves the torn line out
                os.truncate(path, size_bytes)
            raise
