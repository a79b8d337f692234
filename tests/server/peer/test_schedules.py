"""Fifty schedules of kills, freezes and cuts, drawn from seeds: every peer that lives comes to an end.

A peer ends with its model, or with the sentence that says for whom it has waited in vain and what to do. Replicas that
end with a model have the same bits.
"""

import random
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from fed.identity.authority import Authority
from fed.storage.run_reader import summary_of
from tests.server.peer.namespaces import Cables, cables
from tests.server.peer.processes import PATIENCE_S, Home, Processes, processes
from tests.server.peer.replica.test_replicas import keys as replicas
from tests.server.peer.test_real_peers import keys as gossip

if TYPE_CHECKING:
    from collections.abc import Callable

DEADLINE_S, PEERS = 2.0, 4
LOCAL = {"lr": 0.1, "steps": 20, "batch_size": 16}
SHORT = (0, 1)  # they have no cuts, which need rights, and last for seconds; the first is run with every change


class Event(NamedTuple):
    """Disturbance of a peer: once the furthest is in this round, for so long."""

    round: int
    kind: str
    peer: int
    away_s: float


class Schedule:
    """Disturbances of a run, half of them within its last rounds."""

    def __init__(self, seed: int) -> None:
        self._draws = random.Random(seed)
        self.is_replicated = bool(seed % 2)
        is_short = seed in SHORT
        self._rounds = 12 if is_short else 24
        self._longest_s = DEADLINE_S if is_short else 3 * DEADLINE_S
        self._kinds = ["kill", "freeze"] if is_short else ["kill", "leave", "freeze", "cut"]
        make = replicas if self.is_replicated else gossip
        every = self._draws.choice([1, 3, 8])
        self.keys: dict[str, Any] = make(self._rounds, DEADLINE_S, PEERS, local=LOCAL, checkpoints={"every": every})
        self.events = sorted(self._event() for _ in range(self._draws.choice([1, 2, 3])))

    def _event(self) -> Event:
        is_near_end = self._draws.random() < 0.5
        first, last = (self._rounds - 3, self._rounds) if is_near_end else (2, self._rounds - 4)
        number = self._draws.randint(first, last)
        kind = self._draws.choice(self._kinds)
        return Event(number, kind, self._draws.randrange(PEERS), self._draws.uniform(0.5, self._longest_s))

    def __str__(self) -> str:
        said = [f"{kind} {peer} at round {number} for {away_s:.1f} s" for number, kind, peer, away_s in self.events]
        return ", ".join(["replicas" if self.is_replicated else "gossip", *said])


class Disturbed:
    """A run under a schedule: each disturbance ends once its time has come."""

    def __init__(self, peers: Processes, wires: Cables | None, schedule: Schedule) -> None:
        self._peers = peers
        self._wires = wires
        self._events = list(schedule.events)
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._away: set[int] = set()

    def is_over(self) -> bool:
        """Go on with the schedule; true once no peer lives, and none will come back."""
        now_s = time.monotonic()
        due = [undo for until_s, undo in self._later if until_s <= now_s]
        self._later = [(until_s, undo) for until_s, undo in self._later if until_s > now_s]
        for undo in due:
            undo()
        while self._events and self._furthest() >= self._events[0].round:
            self._disturb(self._events.pop(0))
        return not self._later and all(one.exitcode is not None for one in self._peers.running.values())

    def _furthest(self) -> int:
        return max(len(self._peers.lines(peer)) for peer in range(PEERS))

    def _disturb(self, event: Event) -> None:
        peers, peer = self._peers, event.peer
        if peer in self._away or peers.running[peer].exitcode is not None:
            return
        self._away.add(peer)
        match event.kind:
            case "kill" | "leave":
                peers.kill(peer)
            case "freeze":
                peers.signal(peer, signal.SIGSTOP)
            case "cut":
                assert self._wires is not None
                self._wires.cut(peer)
        if event.kind != "leave":  # for good
            self._later.append((time.monotonic() + event.away_s, lambda: self._undo(event)))

    def _undo(self, event: Event) -> None:
        peers, peer = self._peers, event.peer
        self._away.discard(peer)
        match event.kind:
            case "kill" if not peers.has_ended(peer):
                peers.start(peer, resume=True)
            case "freeze":
                peers.signal(peer, signal.SIGCONT)
            case "cut":
                assert self._wires is not None
                self._wires.heal(peer)


SEEDS = [pytest.param(seed, marks=[] if seed == SHORT[0] else pytest.mark.long) for seed in range(50)]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_living_peer_comes_to_an_end(seed: int, tmp_path: Path) -> None:
    schedule = Schedule(seed)
    print(f"seed {seed}: {schedule}")  # pytest shows it where the test fails
    with ExitStack() as stack:
        wires, homes = None, [Home()] * PEERS
        if any(event.kind == "cut" for event in schedule.events):
            wires = stack.enter_context(cables(PEERS))
            authority = Authority.create(tmp_path / "keys")
            for peer in range(PEERS):
                authority.issue(str(peer), is_peer=True)
            homes = [Home(wires.hosts[peer], wires.namespaces[peer], authority.folder) for peer in range(PEERS)]
        peers = stack.enter_context(processes(tmp_path, schedule.keys, homes, serves_end_s=12.0, patience_s=10.0))
        peers.start(*range(PEERS))
        peers.await_round(1)
        peers.await_that(Disturbed(peers, wires, schedule).is_over, 4 * PATIENCE_S)
        codes = {peer: process.exitcode for peer, process in peers.running.items()}
        assert set(codes.values()) <= {0, 1}, peers.said()
        for peer, code in codes.items():
            if code == 0:
                summary = summary_of(peers.output(peer)) or {}
                assert summary["status"] == "finished", peers.said()
            else:  # one that has met nobody leaves no summary
                assert "let one of them serve its end" in peers.log(peer), peers.said()
                del peers.running[peer]
        left = {event.peer for event in schedule.events if event.kind == "leave"}
        if 2 * len(left) < PEERS:  # half of the replicas rightly end with the sentence
            assert 0 in codes.values(), peers.said()
        if schedule.is_replicated and peers.running:
            peers.assert_equal_models()
