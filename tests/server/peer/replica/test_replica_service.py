"""A replica's service: hostile messages change nothing, and what cannot be written down is not said."""

import asyncio
import time
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fed.errors import RunFailed
from fed.processes.clock import SYSTEM_CLOCK
from fed.protocol import protocol_pb2 as pb
from fed.server.observer import Essential, NodeCame, NodeWent
from fed.server.peer.members.link import Refused
from fed.server.peer.members.member import Member
from fed.server.peer.members.membership import Timing
from fed.server.peer.replica.ballots import Ballot, BallotTiming, Record, RunRing, Value
from fed.server.peer.replica.replica import ReplicatedFleet
from fed.server.peer.replica.replica_files import ReplicaFiles
from fed.server.peer.replica.replica_service import Decision, ReplicaService
from fed.server.peer.replica.ring import Contribution, Ring, RoundSum
from fed.server.peer.replica.ring_transport import RingTransport
from fed.server.telling import Observers
from fed.vectors.reduction import WeightedMean
from fed.wire.format import Format
from fed.wire.messages import GlobalModel, Task
from fed.wire.payloads import joined
from fed.wire.rate_limits import Refusals
from tests.clocks import HandClock
from tests.observing import Trial
from tests.server.peer.services import Stranger, await_that

NUMBERS = 3


def alone(folder: Path, gone_after_s: float = 3.0) -> ReplicaService:
    """A replica that founds a group by itself."""
    return ReplicaService(
        own=Member("0", "", time.time_ns(), samples=5, is_ready=True),
        experiment="one",
        introducers=(),
        folder=folder / "0",
        credentials=None,
        timing=Timing(suspect_after_s=min(2.5, gone_after_s), gone_after_s=gone_after_s),
        silence_s=5.0,
        refusals=Refusals(SYSTEM_CLOCK),
        clock=SYSTEM_CLOCK,
        message=Format(torch.float32, (NUMBERS,), parameters=NUMBERS),
        ballots=BallotTiming(resend_s=0.1, takeover_s=0.5, deadline_s=5.0),
        min_peers=1,
        rounds=100,
        snapshot=lambda: None,
    )


def own_sum(name: str = "0") -> RoundSum:
    total = WeightedMean(NUMBERS)
    total.add(torch.ones(NUMBERS), 2)
    lanes = total.packed().view(-1, NUMBERS)
    return RoundSum(lanes, torch.empty(0, dtype=torch.int64), (Contribution(name, 2, Fraction(2), 0.5),))


def decree(**said: Any) -> pb.PeerMessage:
    return pb.PeerMessage(decree=pb.Decree(**said))


ballot = pb.Ballot(number=1, proposer="stranger")
payload, _ = joined(own_sum().tensors())
REFUSED = [
    decree(kind="nonsense", round=1),
    decree(kind="prepare", round=2**60, ballot=ballot),
    decree(kind="ring", round=1, ballot=ballot, names=["no name!"]),
    decree(kind="decided", round=1, vote=pb.Vote(sum_sha256="x", members=["stranger"])),
    pb.PeerMessage(ring_part=pb.RingPart(round=1, ballot=ballot, payload=payload)),
    pb.PeerMessage(vectors=pb.Vectors(round=1, payload=payload)),
    pb.PeerMessage(verdict=pb.Verdict(round=1)),
]
ghosts = [pb.Member(name="5", address="127.0.0.1:9", start=1, beat=beat, is_ready=True) for beat in (1, 2)]
IGNORED = [
    *[pb.PeerMessage(members=pb.Members(members=[ghost])) for ghost in ghosts],
    decree(kind="prepare", round=1, ballot=pb.Ballot(number=9, proposer="stranger")),
    decree(kind="propose", round=1, ballot=pb.Ballot(number=9, proposer="0")),
    pb.PeerMessage(founding=pb.Founding(members=["stranger"], is_founded=True, round=7)),
    pb.PeerMessage(sum=pb.Sum(payload=payload)),
    pb.PeerMessage(copy=pb.Copy(round=9, payload=payload)),
    pb.PeerMessage(sum_wanted=pb.SumWanted(sha256="../record")),
]


def test_hostile_messages_change_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        service = alone(tmp_path)
        port = await service.start("127.0.0.1:0", None)
        assert await service.founded() == ("0",)
        async with Stranger(port or 0) as stranger:
            await stranger.say(*IGNORED, *REFUSED)
            await await_that(lambda: service.refusals.count == len(REFUSED))
            service.begin(1, 0)
            service.contribute(1, own_sum())
            async with asyncio.timeout(20.0):
                decision = await service.decision(1)
            assert isinstance(decision, Decision)
            assert decision.value.contributors == decision.value.members == ("0",)
            assert decision.total.mean().finish().tolist() == [1.0] * NUMBERS
        service.apply(1)
        assert len([*(tmp_path / "0").glob("*.sum")]) == 1
        await service.stop("the test is over")

    asyncio.run(run())


def test_a_replica_ends_once_no_other_can_serve_the_end(tmp_path: Path) -> None:
    """All others have ended and left, and nobody says otherwise."""
    (tmp_path / "0").mkdir()
    ReplicaFiles(tmp_path / "0", NUMBERS).persist(Record(7, ("0", "1", "2")), ("0", "1", "2"))

    async def run() -> None:
        service = alone(tmp_path, gone_after_s=0.3)
        service.restore(6)
        service.members.remember([Member(name, "", 1, 1, is_ready=True, has_ended=True) for name in ("1", "2")])
        await service.start("127.0.0.1:0", None)
        with pytest.raises(RunFailed, match=r"1 of its 3 members are there, .* and all others have ended and left: "):
            await service.decision(7)
        await service.stop("the test is over")

    asyncio.run(run())


def test_what_cannot_be_written_down_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        service = alone(tmp_path)
        await service.start("127.0.0.1:0", None)
        await service.founded()

        def full(*_: object) -> None:
            raise RunFailed("the folder cannot be written to")

        monkeypatch.setattr(service._disk, "persist", full)
        service.contribute(1, own_sum())
        with pytest.raises(RunFailed, match="cannot be written to"):
            async with asyncio.timeout(20.0):
                await service.decision(1)
        await service.stop("the test is over")

    asyncio.run(run())


def test_parts_of_two_rings_are_held_at_most(tmp_path: Path) -> None:
    async def run() -> None:
        service = alone(tmp_path)
        await service.start(None, None)
        await service.founded()
        record = Record(1, ("0", "1"))
        part = pb.RingPart(round=1, ballot=pb.Ballot(number=1, proposer="0"), payload=payload)
        assert service._rings.wants("1", part, record)
        part.payload.size_bytes = 1 << 40
        with pytest.raises(Refused, match="more parts than two rings"):
            service._rings.wants("1", part, record)
        await service.stop("the test is over")

    asyncio.run(run())


class _Others:
    """A service whose only other member is heard of later, and the outcome of its rings."""

    def __init__(self, folder: Path, heard_after_s: float) -> None:
        self.folder, self.clock = folder, HandClock()
        self.heard_s = self.clock.monotonic_s() + heard_after_s
        self.own = SimpleNamespace(name="0")
        self.members, self.links = self, self
        self.outcome: list[Any] = []
        self.files = 0

    def present(self, now_s: float) -> list[Any]:
        return [SimpleNamespace(name="1")] if now_s > self.heard_s else []

    def link(self, name: str) -> Any:
        return SimpleNamespace(send=lambda header, path: None) if self.present(self.clock.monotonic_s()) else None

    def admitted(self, names: Sequence[str]) -> Sequence[str]:
        return names

    def reach(self, names: frozenset[str]) -> None:
        pass

    async def next_change(self, limit_s: float) -> None:
        await asyncio.sleep(0)
        self.clock.move(limit_s)

    def new_file(self) -> Path:
        self.files += 1
        return self.folder / f"{self.files}"

    def summed(self, ring: RunRing, path: Path, payload: pb.Payload) -> None:
        self.outcome.append(path)

    def broken(self, ring: RunRing, unreachable: tuple[str, ...]) -> None:
        self.outcome.append(unreachable)

    def fail(self, error: Exception) -> None:
        raise error


@pytest.mark.parametrize("is_heard_of", [True, False])
def test_ring_waits_for_a_member_not_heard_of_yet(is_heard_of: bool, tmp_path: Path) -> None:
    async def run() -> None:
        others: Any = _Others(tmp_path, 0.4 if is_heard_of else 60.0)
        rings = RingTransport(others, ReplicaFiles(tmp_path, NUMBERS), others, lambda members: 1 << 20, 30.0, 1.0)
        ring = RunRing(1, Ballot(1, "0"), ("0", "1"))
        rings.start(ring, own_sum())
        other = Ring(1, ring.members, own_sum("1"))
        own = Ring(0, ring.members, own_sum())
        for step in range(other.messages):
            said, told = other.message(step), own.message(step)
            said_payload, data = joined(said)
            (tmp_path / "part").write_bytes(data)
            header = pb.RingPart(round=1, ballot=pb.Ballot(number=1, proposer="0"), step=step, payload=said_payload)
            incoming: Any = SimpleNamespace(path=tmp_path / "part", payload=said_payload)
            if is_heard_of:
                rings.arrived("1", header, incoming)
            other.take(told)
            own.take(said)
        await await_that(lambda: len(others.outcome) == 1)
        assert is_heard_of == isinstance(others.outcome[0], Path)
        assert is_heard_of or others.outcome == [("1",)]

    asyncio.run(run())


def test_sum_of_others_than_were_agreed_on_ends_the_run() -> None:
    """Which a member that lies may make, once a majority has voted for it."""
    fleet = ReplicatedFleet.__new__(ReplicatedFleet)
    task = Task(1, 1, 0, GlobalModel(0, torch.zeros(NUMBERS), torch.empty(0, dtype=torch.int64)))
    for contributors in (("0",), ("0", "1")):
        decision = Decision(Value("ab", contributors, ("0",)), own_sum())
        if contributors == ("0",):
            assert fleet._merged(decision, {0: task}).clients == (0,)
        else:
            with pytest.raises(RunFailed, match="of the members agreed on, got others"):
                fleet._merged(decision, {0: task})


def test_observers_hear_of_members_of_the_group() -> None:
    trial = Trial()
    fleet = ReplicatedFleet.__new__(ReplicatedFleet)
    fleet._members, fleet._known, fleet.observers = (), set(), Observers([Essential(trial)])
    for names in (["0", "b"], ["0", "b"], ["b", "2"]):
        fleet.set_members(names)
    assert trial.events == [NodeCame(0), NodeCame("b"), NodeCame(2), NodeWent(0)]
