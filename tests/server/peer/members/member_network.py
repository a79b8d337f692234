"""A simulated network of members that exchange tables: delays, losses, cuts, crashes and freezes, by one seed."""

import heapq
import random
from collections.abc import Callable, Sequence

from fed.server.peer.members.member import Member
from fed.server.peer.members.membership import MembershipList, Timing

TIMING = Timing(beat_s=0.2, suspect_after_s=2.5, gone_after_s=5.0)


class Peer:
    """A process: its membership while it runs, and what reached it while it was frozen."""

    def __init__(self, name: str, address: str, introducers: Sequence[str]) -> None:
        self.name = name
        self.address = address
        self.introducers = introducers
        self.list: MembershipList | None = None
        self.is_frozen = False
        self.waiting: list[Callable[[], None]] = []
        self.life = 0


class Network:
    """Peers, the time, and what goes wrong between them.

    Every beat dials the targets; the other side merges the table and answers with its own, as one call does.
    """

    def __init__(self, seed: int, *, loss: float = 0.0, delay_s: float = 0.02, timing: Timing = TIMING) -> None:
        self.draws = random.Random(seed)
        self.loss, self.delay_s, self.timing = loss, delay_s, timing
        self.now_s = 0.0
        self.peers: dict[str, Peer] = {}
        self.blocked: Callable[[str, str], bool] = lambda dialler, listener: False
        self.calls = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, time_s: float, event: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (time_s, self._number, event))

    def run(self, until_s: float, done: Callable[[], bool] = lambda: False) -> float:
        """Go on until then, or until it is done; the time."""
        while not done():
            if not self._events or self._events[0][0] > until_s:
                self.now_s = until_s
                break
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        return self.now_s

    def start(self, name: str, introducers: Sequence[str] = (), *, listens: bool = True, samples: int = 0) -> None:
        """Start a process, or start it anew."""
        address = f"{name}.example:1" if listens else ""
        peer = self.peers.setdefault(name, Peer(name, address, introducers))
        peer.life, peer.is_frozen, peer.waiting = peer.life + 1, False, []
        own = Member(name, peer.address, int(self.now_s * 1e9) + peer.life, samples=samples)
        peer.list = MembershipList(own, peer.introducers, self.timing, random.Random(self.draws.random()))
        self.at(self.now_s, lambda life=peer.life: self._beat(peer, life))  # type: ignore[misc]

    def kill(self, name: str) -> None:
        self.peers[name].list = None

    def freeze(self, name: str) -> None:
        self.peers[name].is_frozen = True

    def resume(self, name: str) -> None:
        peer = self.peers[name]
        peer.is_frozen = False
        waiting, peer.waiting = peer.waiting, []
        for event in waiting:
            event()

    def split(self, *sides: Sequence[str]) -> None:
        """Cut every connection between two sides; without sides all is healed."""
        side_of = {name: number for number, side in enumerate(sides) for name in side}
        self.blocked = lambda one, other: side_of.get(one) != side_of.get(other)

    @property
    def running(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.list is not None and not peer.is_frozen]

    def view(self, name: str) -> set[str]:
        members = self.peers[name].list
        assert members is not None
        return {member.name for member in members.present(self.now_s)}

    def agrees(self, *names: str) -> bool:
        """True if each of these sees exactly these."""
        return all(self.view(name) == set(names) for name in names)

    def is_one_group(self) -> bool:
        return self.agrees(*[peer.name for peer in self.running])

    def _beat(self, peer: Peer, life: int) -> None:
        if peer.list is None or peer.life != life:
            return
        if peer.is_frozen:
            peer.waiting.append(lambda: self._beat(peer, life))
            return
        for target in peer.list.beat(self.now_s):
            self._call(peer, life, target.address, peer.list.table(target.name))
        jitter = self.draws.uniform(0.9, 1.1)
        self.at(self.now_s + self.timing.beat_s * jitter, lambda: self._beat(peer, life))

    def _call(self, peer: Peer, life: int, address: str, table: Sequence[Member]) -> None:
        self.calls += 1
        listener = next((other for other in self.peers.values() if other.address == address), None)
        if listener is None:
            return

        def answer() -> None:
            if listener.list is None:
                return
            listener.list.merge(table, self.now_s, peer.name)
            reply = listener.list.table(peer.name)
            self._deliver(listener.name, peer, life, lambda members: members.merge(reply, self.now_s, listener.name))

        if not self.blocked(peer.name, listener.name):
            self._deliver(peer.name, listener, listener.life, lambda _: answer())

    def _deliver(self, sender: str, to: Peer, life: int, event: Callable[[MembershipList], object]) -> None:
        if self.draws.random() < self.loss:
            return

        def arrive() -> None:
            if to.list is None or to.life != life:
                return
            if to.is_frozen:
                to.waiting.append(arrive)
            else:
                event(to.list)

        self.at(self.now_s + self.draws.uniform(0, 2 * self.delay_s), arrive)
