"""A replica's service: hostile messages change nothing, and what cannot be written down is not said."""

import asyncio
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from fed.errors import RunFailed
from fed.reduction import WeightedMean
from fed.server.peer.ballots import BallotTiming
from fed.server.peer.links import StreamPatience
from fed.server.peer.membership import Member, Timing
from fed.server.peer.replica_service import Decision, ReplicaService
from fed.server.peer.ring import Contribution, RoundSum
from fed.wire import protocol_pb2 as pb
from fed.wire.format import Format
from fed.wire.payloads import joined
from fed.wire.rate_limits import Refusals
from tests.server.peer.services import Stranger, await_that

NUMBERS = 3


def alone(folder: Path) -> ReplicaService:
    """A replica that founds a group by itself."""
    return ReplicaService(
        own=Member("0", "", time.time_ns(), samples=5, is_ready=True),
        experiment="one",
        introducers=(),
        folder=folder / "0",
        credentials=None,
        timing=Timing(suspect_after_s=2.5, gone_after_s=3.0),
        patience=StreamPatience(silence_s=5.0),
        refusals=Refusals(),
        message=Format(torch.float32, (NUMBERS,), parameters=NUMBERS),
        ballots=BallotTiming(resend_s=0.1, takeover_s=0.5, deadline_s=5.0),
        min_peers=1,
        rounds=100,
        snapshot=lambda: None,
    )


def own_sum() -> RoundSum:
    total = WeightedMean(NUMBERS)
    total.add(torch.ones(NUMBERS), 2)
    lanes = total.packed().view(-1, NUMBERS)
    return RoundSum(lanes, torch.empty(0, dtype=torch.int64), (Contribution("0", 2, Fraction(2), 0.5),))


def decree(**said: Any) -> pb.PeerMessage:
    return pb.PeerMessage(decree=pb.Decree(**said))


ballot = pb.Ballot(attempt=1, proposer="stranger")
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
IGNORED = [
    decree(kind="prepare", round=1, ballot=pb.Ballot(attempt=9, proposer="stranger")),
    decree(kind="propose", round=1, ballot=pb.Ballot(attempt=9, proposer="0")),
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
