"""Schedules of kills, restores and resumes of whole simulations: ε is that of what was released."""

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fed
from fed.privacy import ledger_files
from fed.privacy.accounting import epsilon
from fed.privacy.ledger import LEDGER_FILE, Ledger
from fed.privacy.releases import Release
from fed.server.privacy_account import PrivacyAccount
from fed.server.way_in import WayIn
from fed.simulations.simulate import simulate
from tests.fed.privacy.schedules import Killed
from tests.simulations import users_parts as parts

_ROUNDS = 3
_RELEASE = Release(noise_multiplier=2.0)


def experiment(name: str) -> fed.Experiment:
    """Three rounds of central noise over the clients that a test gives."""
    return fed.Experiment(
        name=name,
        data=None,
        model=None,
        rounds={"count": _ROUNDS},
        privacy={"kind": "central", "noise_multiplier": 2.0},
        checkpoints={"every": 1},
        simulation={"workers": 0, "batching": "off"},
    )


class World:
    """A user who simulates one experiment again and again, and all that was ever released.

    Args:
        root: folder of the user's runs.
        state: folder of the user's state.
        seed: seed of the schedule.
    """

    def __init__(self, root: Path, state: Path, seed: int) -> None:
        self.root = root
        self.state = state
        self.draw = random.Random(seed)
        self.code = 0
        self.names = 0
        self.sum = b""  # of the round, before its noise
        self.released: dict[tuple[int, bytes], bytes] = {}  # (round, sum) → the sum with its noise
        self.steps_left: int | None = None
        self.kills = 0
        self.most = 0
        self.older: list[Path] = []

    def step(self) -> None:
        """Pass a point at which the process may be killed."""
        if self.steps_left is not None:
            self.steps_left -= 1
            if self.steps_left < 0:
                raise Killed

    def run(self, name: str) -> None:
        """Simulate, or resume where there is a run; it may be killed."""
        folder = self.root / name
        is_there = (folder / "environment.json").exists()
        is_begun = is_there and (folder / "experiment.yaml").exists()
        torch.manual_seed(0)
        try:
            found = simulate(
                experiment(name),
                data=parts.unequal(),
                model=torch.nn.Linear(4, 3),
                output=folder,
                overwrite=is_there and not is_begun,
                resume=is_begun,
            )
        except Killed:
            self.kills += 1
            return
        # Each different sum is a release, whichever run has released it; one may be written down before each kill.
        least = epsilon({_RELEASE: len(self.released)}, 1e-5)
        most = epsilon({_RELEASE: len(self.released) + self.kills}, 1e-5)
        assert 0.995 * least <= found.metrics[-1]["epsilon"] <= 1.005 * most

    def event(self) -> None:
        """Do one thing that may happen to a user's runs."""
        there = sorted(path.name for path in self.root.iterdir() if (path / "environment.json").exists())
        what = self.draw.choice(["resume", "resume", "begin", "restore", "tamper", "code"])
        self.steps_left = self.draw.choice([None, *range(20)])
        if what == "resume" and there:
            self.run(self.draw.choice(there))
        elif what == "restore" and self.older:
            place = self.draw.choice(self.older)
            target = self.root / place.name.partition(" ")[0]
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(place, target)
        elif what == "tamper" and there:
            path = self.root / self.draw.choice(there) / LEDGER_FILE
            if path.exists():
                path.write_bytes(self.draw.choice([b"", path.read_bytes()[:100]]))
        elif what == "code":
            self.code = self.draw.randrange(2)
        else:
            self.names += 1
            self.run(f"run{self.names}")
        self.check()
        for name in there:
            self.older.append(self.root.parent / "older" / f"{name} {len(self.older)}")
            shutil.copytree(self.root / name, self.older[-1])

    def check(self) -> None:
        """Hold the ledger to what was released."""
        for path in self.state.glob("privacy/*/ledger.jsonl"):
            ledger = Ledger.read(path)
            assert ledger.head.count >= self.most, "ε fell"
            self.most = ledger.head.count
            contents = [entry.content for entry in ledger.entries]
            assert len({*contents}) == len(contents)
            assert len(self.released) <= len(contents) <= len(self.released) + self.kills
        noise = [_difference(content, key[1]) for key, content in self.released.items()]
        assert len({*noise}) == len(noise), "noise was drawn twice"


def _difference(one: bytes, other: bytes) -> bytes:
    """Noise of a sum, to four digits."""
    first = torch.frombuffer(bytearray(one), dtype=torch.float64)
    second = torch.frombuffer(bytearray(other), dtype=torch.float64)
    return ((first - second) * 1e4).round().numpy().tobytes()


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch, world: World) -> Iterator[None]:
    """Note what is released, let sums depend on the world's code, and end it at one of the steps on the disk."""
    add_line, replace = ledger_files.add_line, Path.replace
    protected, release = WayIn._protected, PrivacyAccount.release

    def torn(path: Path, line: bytes, **given: Any) -> None:
        try:
            world.step()
        except Killed:
            with path.open("ab") as file:
                file.write(line[: world.draw.randrange(len(line))])
            raise
        add_line(path, line, **given)
        world.step()

    def moved(source: Path, target: Path) -> Path:
        world.step()
        found = replace(source, target)
        world.step()
        return found

    def changed(way_in: WayIn, mean_M: Tensor, clients: int, expected: float, number: int, attempt: int) -> Tensor:
        sum_M = mean_M + world.code * 2.0**-10
        world.sum = sum_M.numpy().tobytes()
        return protected(way_in, sum_M, clients, expected, number, attempt)

    def noted(account: PrivacyAccount, number: int, make: Any) -> Tensor:
        found = release(account, number, make)
        key = number, world.sum
        content = found.numpy().tobytes()
        assert world.released.setdefault(key, content) == content, "a redone round had other noise"
        return found

    with monkeypatch.context() as patch:
        patch.setattr("fed.privacy.ledger.add_line", torn)
        patch.setattr(Path, "replace", moved)
        patch.setattr("os.fsync", lambda _: None)
        patch.setattr(WayIn, "_protected", changed)
        patch.setattr(PrivacyAccount, "release", noted)
        yield


def held_to_schedules(root: Path, seeds: range, monkeypatch: pytest.MonkeyPatch) -> list[World]:
    """Run schedules; returns their worlds."""
    worlds = []
    for seed in seeds:
        state = root / str(seed) / "state"
        runs = root / str(seed) / "runs"
        runs.mkdir(parents=True)
        monkeypatch.setenv("FED_STATE", str(state))
        world = World(runs, state, seed)
        with watched(monkeypatch, world):
            for _ in range(8):
                world.event()
            world.steps_left = None
            world.run("last")
            world.check()
        worlds.append(world)
    return worlds


def test_epsilon_of_simulations_never_falls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (world,) = held_to_schedules(tmp_path, range(1), monkeypatch)
    assert world.released


@pytest.mark.long
def test_epsilon_of_simulations_never_falls_in_forty_schedules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = held_to_schedules(tmp_path, range(1, 41), monkeypatch)
    assert sum(world.kills for world in worlds) > 20
    assert sum(len(world.released) > _ROUNDS for world in worlds) > 5
