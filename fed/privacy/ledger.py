"""The ledger of privacy: what has been released, written down before it is released, so that no restore lowers it.

It is kept twice. The ledger itself lies in a folder of the user's state, where no run and no restored copy of a run
reaches it; beside the run lies a copy that people can read. Whichever of the two has been cut, removed or put back, the
longer one counts, and two that contradict each other are refused.
"""

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from platformdirs import user_state_path

from fed.errors import InvalidLedger, LedgerFailed, os_errors_as
from fed.privacy.entries import Cost, Head, LedgerChain, LedgerEntry, releases_together, uncontained
from fed.privacy.ledger_files import MAKE_ROOM, Found, add_line, found_at, say_of_copy, whole
from fed.privacy.releases import Release
from fed.storage.atomic_files import held, write_atomically

__all__ = ["LEDGER_FILE", "STATE_VARIABLE", "Ledger", "federation_of", "ledger_folder"]

LEDGER_FILE = "ledger.jsonl"
"""Name of the file, in its own folder and in a run's."""

STATE_VARIABLE = "FED_STATE"
"""Environment variable that names another folder of the user's state."""

_log = logging.getLogger(__name__)

_Made = TypeVar("_Made")


def ledger_folder(identity: str) -> Path:
    """Folder of the ledger that has this name.

    Args:
        identity: name of the ledger, a kind and a hash, such as ``federation 8f0c…``.
    """
    named = os.environ.get(STATE_VARIABLE)
    return (Path(named) if named else user_state_path("fed")) / "privacy" / identity.replace(" ", "-")


def federation_of(authority_pem: bytes | None) -> str:
    """Name of the ledger that all runs of a federation share.

    Args:
        authority_pem: certificate of the authority that all its nodes trust; None: there is none, and all runs of this
            user without one share a ledger.
    """
    if authority_pem is None:
        return "federation without-authority"
    return f"federation {hashlib.sha256(authority_pem.strip()).hexdigest()}"


class Ledger:
    """All that has been released, of one federation or of one simulated experiment.

    Attributes:
        run: name of the run that writes.
        unit: unit of privacy of that run, all data of a client or one sample.
        repeats_noise: True if a round that is done again has the noise that it had before.

    Args:
        chain: lines of the ledger.
        run: name of the run that writes.
        path: file of the ledger; None: it is in memory alone.
        copy: file of the copy beside the run; None: there is none.
        repeats_noise: True if a round that is done again has the noise that it had before, as in a simulation: what it
            releases again is then the same, and not releases_together twice.
    """

    def __init__(
        self,
        chain: LedgerChain,
        *,
        run: str = "",
        path: Path | None = None,
        copy: Path | None = None,
        repeats_noise: bool = False,
    ) -> None:
        self.run = run
        self._chain = chain
        self._path = path
        self._copy = copy
        self.repeats_noise = repeats_noise
        self.unit = "client"
        self._is_writable = True
        self._has_copy = False  # as this process has left it
        self._of_round: dict[tuple[str, int], list[LedgerEntry]] = {}
        self._by_content: dict[Hashable, LedgerEntry] = {}
        self._entries_borne = 0  # number of entries that these count
        self._of_all: Counter[Release] = Counter()
        self._of_client: dict[int | str, Counter[Release]] = {}
        for entry in chain.entries:
            self._count(entry)

    @classmethod
    def in_memory(cls, identity: str, *, run: str = "", repeats_noise: bool = False) -> "Ledger":
        """A ledger that begins, and that ends with the process, for simulations that write nothing.

        Args:
            identity: name of the ledger.
            run: name of the run that writes.
            repeats_noise: True if a round that is done again has the noise that it had before.
        """
        return cls(LedgerChain(identity), run=run, repeats_noise=repeats_noise)

    @classmethod
    @contextmanager
    def open(
        cls,
        folder: Path,
        identity: str,
        *,
        run: str,
        copy: Path | None = None,
        is_resumed: bool = False,
        repeats_noise: bool = False,
    ) -> "Iterator[Ledger]":
        """Open a ledger for one writer, and begin it where there is none.

        Args:
            folder: folder of the ledger.
            identity: name of the ledger.
            run: name of the run that writes.
            copy: file of the copy beside the run; None: there is none.
            is_resumed: True if the run has begun before, so that there should be a copy.
            repeats_noise: True if a round that is done again has the noise that it had before.

        Raises:
            InvalidLedger: if the ledger has been cut or changed, and its copy does not have what is missing.
            InvalidInput: if it cannot be written to, or another process writes it; where noise is repeated it waits
                for that process.
        """
        # Variants of a comparison may share one, and go on one after the other.
        with held(folder, "let one run at a time release what is private", waits=repeats_noise):
            with os_errors_as(InvalidLedger, f"{folder} cannot be written to", "make room there"):
                folder.chmod(0o700)
            path = folder / LEDGER_FILE
            own = found_at(path)
            beside = Found() if copy is None else found_at(copy)
            chain = whole(path, own, copy, beside) or LedgerChain(identity)
            if chain.identity != identity:
                raise InvalidLedger(
                    f"{path if own.chain else copy} is the ledger of {chain.identity!r}, and must be that of "
                    f"{identity!r}: put the right one back"
                )
            if own.is_torn and own.chain is chain:
                _log.warning(
                    "%s: the last line was not whole, and is left out: what it would have recorded was never released",
                    path,
                )
            if own.is_torn or own.chain is not chain:
                with os_errors_as(LedgerFailed, f"{folder} cannot be written to", MAKE_ROOM):
                    write_atomically(path, chain.content, mode=0o600)
            ledger = cls(chain, run=run, path=path, copy=copy, repeats_noise=repeats_noise)
            if copy is not None:
                say_of_copy(copy, beside, chain, run=run, is_resumed=is_resumed)
                if is_resumed:  # a run that begins writes it with its first entry, once its folder is its own
                    ledger._write_copy()
            try:
                yield ledger
            finally:
                ledger._is_writable = False  # another process may write it from here on

    @classmethod
    def read(cls, path: Path) -> "Ledger":
        """A ledger to look at, from its file or from a copy; nothing is written.

        Args:
            path: the file.

        Raises:
            InvalidLedger: if it is not there, or has been cut or changed.
        """
        found = found_at(path)
        if found.chain is None:
            raise InvalidLedger(f"{path} {found.problem or 'is not there'}: put a whole copy back")
        ledger = cls(found.chain)
        ledger._is_writable = False
        return ledger

    @property
    def head(self) -> Head:
        """The number of entries, and the hash of the last line."""
        return self._chain.head

    @property
    def identity(self) -> str:
        """The name of the ledger."""
        return self._chain.identity

    @property
    def entries(self) -> Sequence[LedgerEntry]:
        """All entries, in their order."""
        return self._chain.entries

    def holds(self, head: Head) -> bool:
        """True if this ledger once had that head, and so has all that it had then."""
        return self._chain.holds(head)

    def hash_at(self, count: int) -> str | None:
        """Hash of the last line when the ledger had so many entries; None where it never had."""
        return self._chain.hashes[count] if 0 <= count < len(self._chain.hashes) else None

    def check(self, head: Head, where: str) -> None:
        """Refuse a ledger that is older than something that was written beside it.

        Args:
            head: head of the ledger at that time.
            where: name of what was written, such as ``the checkpoint of round 3``.

        Raises:
            InvalidLedger: if this ledger never had that head.
        """
        if not self.holds(head):
            raise InvalidLedger(
                f"the ledger of privacy has {self.head.count} entries, and {where} is of another one with {head.count}:"
                " put the newest ledger back, for without it what has been released would be releases_together too low"
            )

    def releases(self, *, run: str | None = None, last_round: int | None = None) -> Counter[Release]:
        """All releases together, as a client that bears each of them.

        Args:
            run: name of a run, for its releases alone; None: of all runs.
            last_round: number of the last round that counts, in each run; None: all.
        """
        total: Counter[Release] = Counter()
        for entry in self._chain.entries:
            if (run is None or entry.run == run) and (last_round is None or entry.round <= last_round):
                total.update(releases_together(entry.costs))
        return total

    def for_client(self, client: int | str) -> Counter[Release]:
        """Releases that one client bears, of all runs."""
        of_all, of_client = self._bearers()
        return of_all + of_client.get(client, Counter())

    def clients(self) -> Sequence[int | str]:
        """Clients that some cost names; all others bear what every client bears."""
        _, of_client = self._bearers()
        return [*of_client]

    def largest(self) -> Sequence[Counter[Release]]:
        """Releases of the clients that bear most: none of them is contained in another's.

        The largest ε of a client is the largest of these.
        """
        of_all, of_client = self._bearers()
        return [of_all + own for own in uncontained(of_client.values())] or [Counter(of_all)]

    def _bearers(self) -> tuple[Counter[Release], dict[int | str, Counter[Release]]]:
        """Releases that every client bears, and those that a client bears beside them."""
        entries = self._chain.entries[self._entries_borne :]
        self._entries_borne += len(entries)
        for entry in entries:
            for cost in entry.costs:
                if cost.clients is None:
                    self._of_all.update(cost.releases)
                    continue
                for client in cost.clients:
                    self._of_client.setdefault(client, Counter()).update(cost.releases)
        return self._of_all, self._of_client

    def begin_unit(self, unit: str) -> None:
        """Let a run write releases of a unit of privacy.

        Args:
            unit: all data of a client, ``client``, or one ``sample``.

        Raises:
            InvalidLedger: if the unit is all data of a client, and earlier releases bound what a sample shows alone.
        """
        if unit == "client" and any(entry.unit == "sample" for entry in self._chain.entries):
            raise InvalidLedger(
                f"the ledger of {self.identity!r} has releases with privacy.unit sample, which bound what one sample "
                "shows and not what all data of a client show: write unit: sample, or let an authority of their own "
                "certify the clients of this run"
            )
        self.unit = unit

    @property
    def is_kept(self) -> bool:
        """True if it outlives the process."""
        return self._path is not None

    def attempts(self, number: int) -> int:
        """Number of entries of a round of this run."""
        return len(self.of_round(number))

    def of_round(self, number: int) -> Sequence[LedgerEntry]:
        """Entries of a round of this run, in their order."""
        return self._of_round.get((self.run, number), ())

    def append(
        self,
        number: int,
        costs: Sequence[Cost],
        content: str | None = None,
        *,
        told: Mapping[str, Any] | None = None,
    ) -> LedgerEntry:
        """Write down what a round is about to release.

        It is on the disk when this returns; where noise is repeated, as in simulations, perhaps in a cache alone.

        Args:
            number: number of the round, from 1.
            costs: costs of the round.
            content: SHA-256 of what will be released, in hexadecimal digits, where noise is repeated; else None.
            told: facts that a node was told with the task, which JSON can hold; None at a coordinator.

        Returns:
            The entry. Where noise is repeated and the round has released the same before, it is the entry of then.

        Raises:
            LedgerFailed: if it cannot be written down; then nothing may be released.
        """
        if not self._is_writable:
            raise LedgerFailed("this ledger is open for reading alone: open it with Ledger.open")
        if self.repeats_noise and content is not None and (earlier := self._again(number, costs, content)):
            return earlier
        entry = LedgerEntry(
            run=self.run,
            round=number,
            attempt=self.attempts(number),
            costs=tuple(costs),
            content=content,
            told=told,
            unit=self.unit,
        )
        if self._path is not None:
            # Noise that is repeated protects nothing: a simulation need not wait for the disk.
            line = self._chain.line_of(entry)
            add_line(self._path, line, size_bytes=self._chain.size_bytes, syncs=not self.repeats_noise)
        self._chain.add(entry)
        self._count(entry)
        if self._copy is not None:
            self._append_to_copy(self._chain.lines[-1])
        return entry

    def record(
        self,
        number: int,
        costs: Sequence[Cost],
        make: Callable[[int], tuple[_Made, str | None]],
        *,
        costs_again: Sequence[Cost] | None = None,
    ) -> _Made:
        """Make what a round releases, and write it down before anybody has it.

        Where noise is repeated, a round that was released before is made again: with the noise of an earlier attempt if
        it then is the same to the bit, and else as a new attempt, with noise of its own. Two sums with one noise would
        show their difference.

        Args:
            number: number of the round, from 1.
            costs: costs of the round.
            make: function from the number of the attempt, from 0, to what is released and its SHA-256 in hexadecimal
                digits, which may be None where noise is not repeated.
            costs_again: costs of an attempt that is not the first; ``costs`` unless given.

        Returns:
            The release, which is written down.

        Raises:
            LedgerFailed: if it cannot be written down; then nothing may be released.
        """
        attempts = self.attempts(number)
        later = costs if costs_again is None else costs_again
        if not self.repeats_noise:
            made, content = make(attempts)
            self.append(number, later if attempts else costs, content)
            return made
        for attempt in range(attempts + 1):
            made, content = make(attempt)
            cost = later if attempt else costs
            entry = self.append(number, cost, content) if attempt == attempts else self._again(number, cost, content)
            if entry is not None:
                return made
        raise AssertionError("the last attempt is always written down")

    def _again(self, number: int, costs: Sequence[Cost], content: str | None) -> LedgerEntry | None:
        """The entry of an earlier attempt that has released the same."""
        found = self._by_content.get(_what_is_released(self.run, number, costs, content))
        if found is not None and self._copy is not None and not self._has_copy:
            self._write_copy()
        return found

    def _count(self, entry: LedgerEntry) -> None:
        self._of_round.setdefault((entry.run, entry.round), []).append(entry)
        if entry.content is not None:
            key = _what_is_released(entry.run, entry.round, entry.costs, entry.content)
            self._by_content.setdefault(key, entry)

    def _append_to_copy(self, line: bytes) -> None:
        assert self._copy is not None
        size_bytes = self._chain.size_bytes - len(line)
        if not self._has_copy or not self._copy.exists() or self._copy.stat().st_size != size_bytes:
            if self._has_copy:
                _log.warning("%s was removed or changed while the run went on: it is written anew", self._copy)
            self._write_copy()
            return
        with os_errors_as(LedgerFailed, f"{self._copy} cannot be written to", MAKE_ROOM), self._copy.open("ab") as file:
            file.write(line)  # it needs no fsync: the ledger itself is on the disk

    def _write_copy(self) -> None:
        assert self._copy is not None
        with os_errors_as(LedgerFailed, f"{self._copy} cannot be written to", MAKE_ROOM):
            write_atomically(self._copy, self._chain.content, mode=0o600)
        self._has_copy = True


def _what_is_released(run: str, number: int, costs: Sequence[Cost], content: str | None) -> Hashable:
    """A key that two entries share if they release the same.

    Args:
        run: name of the run.
        number: number of the round.
        costs: costs of the round.
        content: SHA-256 of what is released.
    """
    of_costs = tuple(
        (frozenset(cost.releases.items()), None if cost.clients is None else frozenset(cost.clients)) for cost in costs
    )
    return run, number, of_costs, content
