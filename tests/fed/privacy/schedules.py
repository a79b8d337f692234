"""Schedules of kills, restores, renames and resumes, over a toy of a coordinator, with a model of what was released."""

import hashlib
import json
import random
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from fed.errors import InvalidLedger
from fed.privacy import ledger_files
from fed.privacy.entries import Cost, Head
from fed.privacy.ledger import LEDGER_FILE, Ledger
from fed.privacy.releases import Release
from fed.storage import atomic_files

_Files: TypeAlias = dict[str, dict[str, bytes]]
"""Folder → name → content."""

IDENTITY = "federation 8f0c"
_COST = [Cost(releases={Release(noise_multiplier=1.0): 1})]
_ROUNDS = 6
_CHECKPOINT = "checkpoint.json"


class Killed(BaseException):
    """End of the process in the middle of something."""


class World:
    """A coordinator's disk, the memory of its nodes, and all that was ever released.

    Args:
        root: folder of the disk.
        seed: seed of the schedule.
        is_real: True for fresh noise, False for the repeated noise of a simulation.
        loses_state: True if the user's state is among what may be put back, and the memory of nodes is not.
    """

    def __init__(self, root: Path, seed: int, *, is_real: bool, loses_state: bool) -> None:
        self.root = root
        self.draw = random.Random(seed)
        self.is_real = is_real
        self.loses_state = loses_state
        self.run = "run 0"
        self.code = 0  # of which a simulation's sums depend
        self.published: list[tuple[str, int, str]] = []
        self.sums: set[tuple[int, int]] = set()  # (round, code) of those that a simulation has released
        self.noise: dict[str, str] = {}
        self.refused = 0
        self.killed = 0
        self.most = 0
        self.steps_left: int | None = None
        self.snapshots: list[_Files] = []
        self.newest: dict[str, bytes] = {}  # of the user's state
        for name in ("state", "run", "nodes"):
            (root / "now" / name).mkdir(parents=True)

    @property
    def state(self) -> Path:
        """Folder of the ledger itself."""
        return self.root / "now" / "state"

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return self.root / "now" / "run"

    @property
    def nodes(self) -> Path:
        """File of what nodes remember."""
        return self.root / "now" / "nodes" / "head.json"

    def step(self) -> None:
        """Pass a point at which the process may be killed."""
        if self.steps_left is None:
            return
        self.steps_left -= 1
        if self.steps_left < 0:
            raise Killed

    def go(self) -> None:
        """Run until the last round or a kill, as a coordinator does that resumes."""
        checkpoint = self.folder / _CHECKPOINT
        found: dict[str, Any] = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"round": 0}
        with Ledger.open(
            self.state,
            IDENTITY,
            run=self.run,
            copy=self.folder / LEDGER_FILE,
            is_resumed=checkpoint.exists(),
            repeats_noise=not self.is_real,
        ) as ledger:
            if "head" in found:
                ledger.check(Head(*found["head"]), "the checkpoint")
            self.told(ledger)
            self.check(ledger)
            for number in range(found["round"] + 1, _ROUNDS + 1):
                self.step()
                content = ledger.record(number, _COST, partial(self.make, number))
                self.step()
                self.told(ledger)  # with the round's tasks, before anything of it is there
                self.step()
                self.published.append((self.run, number, content))
                self.sums.add((number, self.code))
                self.step()
                kept = {"round": number, "head": [ledger.head.count, ledger.head.sha256]}
                atomic_files.write_atomically(checkpoint, json.dumps(kept).encode())
                self.step()
            self.check(ledger)

    def make(self, number: int, attempt: int) -> tuple[str, str]:
        """What a round releases: noise, and a sum that depends on the code."""
        if self.is_real:
            content = hashlib.sha256(secrets.token_bytes(16)).hexdigest()
            return content, content
        noise = f"round {number}, attempt {attempt}"
        content = hashlib.sha256(f"{noise}, code {self.code}".encode()).hexdigest()
        self.noise[content] = noise
        return content, content

    def told(self, ledger: Ledger) -> None:
        """Tell nodes the head, which refuse an older one."""
        head = ledger.head
        if self.nodes.exists():
            seen = Head(*json.loads(self.nodes.read_text()))
            if seen.count > head.count or not ledger.holds(seen):
                raise InvalidLedger("nodes remember another ledger")
        self.nodes.write_text(json.dumps([head.count, head.sha256]))

    def check(self, ledger: Ledger) -> None:
        """Hold the ledger to the model."""
        total = ledger.releases().total()
        assert total >= self.most, "ε fell"
        self.most = total
        contents = Counter(entry.content for entry in ledger.entries)
        released = Counter(content for _, _, content in self.published)
        if self.is_real:
            assert max(released.values(), default=1) == 1, "noise was drawn twice"
            assert released <= contents
        else:
            assert max(contents.values(), default=1) == 1, "a repeated release was counted twice"
            assert set(released) <= set(contents)
            assert len(set(released)) == len(self.sums), "a redone round had other noise"
            by_noise = Counter(self.noise[content] for content in released)
            assert max(by_noise.values(), default=1) == 1, "two sums had the same noise"
        # What is not released, but counted, was about to be at a kill: at most one a kill.
        assert len(contents) - len(released) <= self.killed

    def snapshot(self) -> None:
        """Keep a copy of the disk as it is now."""
        self.snapshots.append({name: _files(self.root / "now" / name) for name in ("state", "run", "nodes")})

    def event(self) -> None:
        """Do one thing that may happen to a coordinator."""
        kinds: list[Callable[[], None]] = [self.attend] * 4 + [self.restore] * 3 + [self.rename, self.tamper]
        self.draw.choice(kinds)()
        self.snapshot()

    def attend(self, *, is_last: bool = False) -> None:
        """Run on; after a refusal the owner puts back the newest ledger, as the sentence says.

        Args:
            is_last: True if nothing kills the process this time.
        """
        self.steps_left = None if is_last else self.draw.choice([None, *range(16)])
        try:
            self.go()
        except Killed:
            self.killed += 1
        except InvalidLedger:
            self.refused += 1
            _replace(self.state, self.newest)
            (self.folder / LEDGER_FILE).unlink(missing_ok=True)
        self.steps_left = None
        found = _files(self.state)
        if _lines(found) >= _lines(self.newest):  # a kill may have come before an older one was refused
            self.newest = found

    def restore(self) -> None:
        """Put back an older run folder, checkpoint, or memory; or the user's state."""
        if not self.snapshots:
            return
        places = ["run", "checkpoint", "copy", "nothing"] + ["state" if self.loses_state else "nodes"] * 2
        place = self.draw.choice(places)
        older = self.draw.choice(self.snapshots)
        if place in ("run", "state", "nodes"):
            _replace(self.root / "now" / place, older[place])
        elif place == "nothing":
            _replace(self.folder, {})
        else:
            name = _CHECKPOINT if place == "checkpoint" else LEDGER_FILE
            if name in older["run"]:
                (self.folder / name).write_bytes(older["run"][name])

    def rename(self) -> None:
        """Begin again under another name, in another folder, or with other code."""
        if self.is_real:
            self.run = f"run {self.draw.randrange(3)}"
        else:
            self.code = self.draw.randrange(3)
        if self.draw.random() < 0.5:
            _replace(self.folder, {})
        else:
            (self.folder / _CHECKPOINT).unlink(missing_ok=True)

    def tamper(self) -> None:
        """Harm the copy beside the run, as somebody who writes to that folder can."""
        path = self.folder / LEDGER_FILE
        if not path.exists():
            return
        content = path.read_bytes()
        harmed = [b"", content[: self.draw.randrange(len(content) + 1)], content.replace(b"1.0", b"9.0"), None]
        chosen = self.draw.choice(harmed)
        path.unlink() if chosen is None else path.write_bytes(chosen)


def _files(folder: Path) -> dict[str, bytes]:
    """Name → content of each file of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _lines(files: dict[str, bytes]) -> int:
    """Number of whole lines of the ledger among files."""
    return files.get(LEDGER_FILE, b"").count(b"\n")


def _replace(folder: Path, files: dict[str, bytes]) -> None:
    """Have a folder hold these files alone."""
    for path in folder.iterdir():
        if path.name not in files:
            path.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)


@contextmanager
def may_be_killed(monkeypatch: pytest.MonkeyPatch, world: list[World]) -> Iterator[None]:
    """Have every step on the disk be one at which the world may end; a line may be written in part.

    Args:
        monkeypatch: pytest's.
        world: list of the one world.
    """
    whole = ledger_files.add_line
    replaced = Path.replace

    def torn(path: Path, line: bytes, **given: Any) -> None:
        try:
            world[0].step()
        except Killed:
            with path.open("ab") as file:
                file.write(line[: world[0].draw.randrange(len(line))])
            raise
        whole(path, line, **given)
        world[0].step()

    def moved(source: Path, target: Path) -> Path:
        world[0].step()
        found = replaced(source, target)
        world[0].step()
        return found

    with monkeypatch.context() as patch:
        patch.setattr("fed.privacy.ledger.add_line", torn)
        patch.setattr(Path, "replace", moved)
        patch.setattr("os.fsync", lambda _: None)  # kills lose no caches, and the tests would take an hour
        yield
