"""Services of peers over real connections: groups that form, exchanges, and what others may not do."""

import asyncio
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from fed.errors import InvalidPayload
from fed.protocol import protocol_pb2 as pb
from fed.server.peer.gossip.copies import Differences, hash_of
from fed.server.peer.gossip.exchange import ExchangeKey, GossipExchange
from fed.server.peer.gossip.gossip_service import GossipService
from fed.server.peer.members.link import Link
from fed.server.peer.members.links import written
from fed.wire.payloads import TensorSpec, joined
from tests.server.deployed import free_port
from tests.server.peer.services import (
    SPEC,
    Stranger,
    await_that,
    exchanged,
    has_come_to_nothing,
    hello,
    listening,
    made,
    port_of,
)


async def form(folder: Path, seed: int) -> None:
    """Start eight peers in random order, and wait until all see all.

    How many beats that takes is held by the tests of the membership, whose network has a clock of its own.
    """
    draws = random.Random(seed)
    ports = [free_port(), free_port(), *[0] * 6]
    # all know the first two, or each knows one of them alone
    introducers = [f"127.0.0.1:{port}" for port in ports[:2]]
    services = [
        made(folder, str(number), introducers if seed % 2 else [introducers[0 if number < 2 else draws.randrange(2)]])
        for number in range(8)
    ]
    order = draws.sample(range(8), 8)
    async with listening(*[services[number] for number in order], ports=[ports[number] for number in order]):

        def are_one() -> bool:
            standings = [service.standing() for service in services]
            return (
                all(len(standing.present) == 8 for standing in standings) and len({one.view for one in standings}) == 1
            )

        await await_that(are_one)


@pytest.mark.parametrize("seed", range(4))
def test_peers_form_one_group_whatever_the_order(seed: int, tmp_path: Path) -> None:
    asyncio.run(form(tmp_path, seed))


@pytest.mark.long
def test_two_hundred_starts_form_one_group_each(tmp_path: Path) -> None:
    for seed in range(200):
        asyncio.run(form(tmp_path / str(seed), seed))


# Exchanges.

ONE, OTHER, STRANGER = frozenset(["0"]), frozenset(["1"]), frozenset(["stranger"])
X, Y = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])


async def pair(folder: Path) -> tuple[GossipService, GossipService]:
    """Two peers that are to know each other."""
    address = f"127.0.0.1:{free_port()}"
    services = made(folder, "0", [address]), made(folder, "1", [address])
    for service, port in zip(services, (int(address.rpartition(":")[2]), 0), strict=True):
        await service.start(f"127.0.0.1:{port}", None)
    await await_that(lambda: all(len(service.standing().present) == 2 for service in services))
    await await_that(lambda: all(service.links.all() for service in services))
    return services


async def stop(*services: GossipService) -> None:
    await asyncio.gather(*(service.stop("the test is over") for service in services))


def test_two_peers_count_each_other_or_neither_does(tmp_path: Path) -> None:
    async def run() -> None:
        one, other = await pair(tmp_path)
        view = one.standing().view
        for service in (one, other):
            service.begin(1, 0)
        first, second = await asyncio.gather(
            exchanged(one, ExchangeKey(1, 0), [X], view, OTHER, OTHER, 5.0),
            exchanged(other, ExchangeKey(1, 0), [Y], view, ONE, ONE, 5.0),
        )
        assert torch.equal(first.received["1"][0], Y)
        assert torch.equal(second.received["0"][0], X)
        assert (first.reached, second.reached) == (OTHER, ONE)
        # of two views, neither counts the other
        first, second = await asyncio.gather(
            exchanged(one, ExchangeKey(1, 1), [X], view, OTHER, OTHER, 5.0),
            exchanged(other, ExchangeKey(1, 1), [Y], "other", ONE, ONE, 5.0),
        )
        assert all(map(has_come_to_nothing, (first, second)))
        # a late one is told, and counts no neighbour
        for service in (one, other):
            service.begin(2, 1)
        alone = await exchanged(one, ExchangeKey(2, 0), [X], view, OTHER, OTHER, 0.3)
        late = await exchanged(other, ExchangeKey(2, 0), [Y], view, ONE, ONE, 5.0)
        assert all(map(has_come_to_nothing, (alone, late)))
        await stop(one, other)

    asyncio.run(run())


def test_differences_count_where_their_copy_is_held(tmp_path: Path) -> None:
    """A peer that holds another copy refuses the message, so that neither counts; with the vector itself both do."""
    whole_P = torch.tensor([7.0, 8.0, 9.0], dtype=torch.float64)
    right, wrong = hash_of(whole_P), "0" * 64

    async def run() -> None:
        one, other = await pair(tmp_path)
        view = one.standing().view
        one.specs = other.specs = [(SPEC, TensorSpec(torch.float64, 3, True))]

        async def round_of(number: int, before: str, known_by: frozenset[str], held: str) -> list[GossipExchange]:
            for service in (one, other):
                service.begin(number, 0)
            key = ExchangeKey(number, 0)
            first, second = (
                Differences(before, whole_P, known_by, {"1": right}),
                Differences(right, whole_P, ONE, {"0": held}),
            )
            both = await asyncio.gather(
                exchanged(one, key, [X], view, OTHER, OTHER, 5.0, first),
                exchanged(other, key, [Y], view, ONE, ONE, 5.0, second),
            )
            return [*both]

        first, second = await round_of(1, right, OTHER, right)
        assert torch.equal(second.received["0"][0], X)
        assert not second.received["0"][1].numel()
        assert first.reached == OTHER
        assert all(map(has_come_to_nothing, await round_of(2, right, OTHER, wrong)))
        _, second = await round_of(3, right, frozenset(), wrong)
        assert torch.equal(second.received["0"][1], whole_P)
        # hostile ones: a vector of another hash, and differences to nothing
        assert all(map(has_come_to_nothing, await round_of(4, wrong, frozenset(), right)))
        assert all(map(has_come_to_nothing, await round_of(5, "", OTHER, right)))
        await stop(one, other)

    asyncio.run(run())


def test_a_neighbour_that_is_left_out_waits_no_longer(tmp_path: Path) -> None:
    async def run() -> None:
        one, other = await pair(tmp_path)
        for service in (one, other):
            service.begin(1, 0)
        one._send = lambda message, name: None  # type: ignore[method-assign]  # it closes before its message has gone
        async with asyncio.timeout(20.0):
            alone, late = await asyncio.gather(
                exchanged(one, ExchangeKey(1, 0), [X], "its own", OTHER, OTHER, 60.0),
                exchanged(other, ExchangeKey(1, 0), [Y], "another", ONE, ONE, 60.0),
            )
        assert all(map(has_come_to_nothing, (alone, late)))
        await stop(one, other)

    asyncio.run(run())


def test_messages_are_kept_until_their_round_is_durable(tmp_path: Path) -> None:
    async def run() -> None:
        one, other = await pair(tmp_path)
        view = one.standing().view
        for number in (1, 2):
            for service in (one, other):
                service.begin(number, 0)
            await asyncio.gather(
                exchanged(one, ExchangeKey(number, 0), [X * number], view, OTHER, OTHER, 5.0),
                exchanged(other, ExchangeKey(number, 0), [Y], view, ONE, ONE, 5.0),
            )
        await stop(other)  # as if it had been killed after round 1 was on disk
        await await_that(lambda: one.links.link("1") is None)
        again = made(tmp_path, "1", [one.members.own.address])
        again.restore(1, {ExchangeKey(1, 0): ONE})
        await again.start("127.0.0.1:0", None)
        await await_that(lambda: len(again.standing().present) == 2)
        again.begin(2, 1)
        outcome = await exchanged(again, ExchangeKey(2, 0), [Y], view, ONE, ONE, 5.0)
        assert torch.equal(outcome.received["0"][0], 2 * X)
        assert outcome.reached == ONE
        assert [*(tmp_path / "0").glob("*.out")]
        again.begin(3, 2)
        await await_that(lambda: not [*(tmp_path / "0").glob("*.out")])
        await stop(one, again)

    asyncio.run(run())


# What others may not do.


def test_a_member_that_lives_refutes_that_it_has_ended(tmp_path: Path) -> None:
    async def run() -> None:
        victim = made(tmp_path, "victim")
        async with listening(victim):
            honest = made(tmp_path, "honest", [victim.members.own.address])
            async with listening(honest), Stranger(port_of(victim)) as stranger:
                await await_that(lambda: len(victim.standing().present) == 2)
                own = victim.members.table("honest")[1]
                claim = pb.Member(**own._replace(beat=own.beat + 100, left=True, has_ended=True)._asdict())
                await stranger.say(pb.PeerMessage(members=pb.Members(members=[claim])))
                await await_that(lambda: victim.ended() == {"honest"})
                assert not victim.have_ended(["honest"])
                await await_that(lambda: not victim.ended())
                assert "honest" in [member.name for member in victim.standing().present]
                assert not victim.have_ended(["honest"])

    asyncio.run(run())


@pytest.mark.parametrize(
    ("greeting", "words"),
    [
        (pb.PeerMessage(progress=pb.Progress()), "must begin with the peer's greeting"),
        (pb.PeerMessage(greeting=hello(protocol=99)), "peers must speak protocol"),
        (pb.PeerMessage(greeting=hello("a name!")), "a peer's name must be"),
        (pb.PeerMessage(greeting=hello("0")), "it has our own name"),
        (pb.PeerMessage(greeting=hello(start=2**62 + 1)), "a peer's start must be up to 2^62"),
        (pb.PeerMessage(greeting=hello(experiment="another")), "it runs another experiment"),
    ],
)
def test_a_stranger_is_turned_away(greeting: pb.PeerMessage, words: str, tmp_path: Path) -> None:
    async def run() -> None:
        service = made(tmp_path, "0")
        async with listening(service), Stranger(port_of(service), greeting) as stranger:
            with pytest.raises((AssertionError, grpc.aio.AioRpcError)):
                await stranger.hear("verdict")
            assert words in (await stranger.call.details() or "")
            assert service.refusals.count == 1
            assert not service.links.all()

    asyncio.run(run())


def own_record(beat: int = 1, **said: Any) -> pb.PeerMessage:
    """A table with the stranger alone."""
    return pb.PeerMessage(members=pb.Members(members=[pb.Member(name="stranger", start=1, beat=beat, **said)]))


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ({"round_": 1, "tensor": X[:2]}, "the tensors must be"),
        ({"round_": 1, "tensor": X.double()}, "the tensors must be"),
        ({"round_": 1, "tensor": X / 0}, "must be finite"),
        ({"round_": 1, "tensor": Y}, "this is no such vector"),
        ({"round_": 1, "tensor": X * torch.nan}, "must be finite"),
        ({"round_": 1, "tensor": X, "size_bytes": 1 << 60}, "the tensors take 12 bytes"),
        ({"round_": 1, "tensor": X, "exchange": 2}, "a round has 2 exchanges"),
        ({"round_": 9, "tensor": X}, "this peer is in round 1"),
        ({"round_": 0, "tensor": X}, "this exchange is over"),
        ({"round_": 1, "tensor": X, "view": "same"}, "not a neighbour in this round"),
    ],
)
def test_vectors_that_are_not_in_order_are_refused(sent: dict[str, Any], words: str, tmp_path: Path) -> None:
    async def run() -> None:
        service = made(tmp_path, "0", check=no_y)
        async with listening(service), Stranger(port_of(service)) as stranger:
            await stranger.say(own_record(is_ready=True))
            await await_that(lambda: len(service.standing().present) == 2)
            service.begin(1, 0)
            senders = frozenset[str]() if "view" in sent else frozenset(["stranger"])
            # it waits for the stranger's verdict where it has no vectors of it to wait for
            mixing = asyncio.create_task(exchanged(service, ExchangeKey(1, 0), [X], "same", senders, STRANGER, 1.0))
            verdict = await stranger.send(**{"view": "same", **sent})
            assert not verdict.taken
            assert words in verdict.reason
            assert (await mixing).received == {}

    asyncio.run(run())


def no_y(key: ExchangeKey, name: str, tensors: Sequence[torch.Tensor]) -> None:
    if torch.equal(tensors[0], Y):
        raise InvalidPayload("this is no such vector")


def test_neighbours_are_taken_once_their_view_is_the_same(tmp_path: Path) -> None:
    """One that only sends would lose what it gives, if it were told sooner."""

    async def run() -> None:
        service = made(tmp_path, "0")
        async with listening(service), Stranger(port_of(service)) as stranger:
            await stranger.say(own_record(is_ready=True))
            await await_that(lambda: len(service.standing().present) == 2)
            service.begin(1, 0)
            for number, view in enumerate(("same", "another")):
                sent = asyncio.create_task(stranger.send(1, X, view, number))
                await asyncio.sleep(0.3)
                assert not sent.done()
                mixing = exchanged(service, ExchangeKey(1, number), [X], "same", STRANGER, frozenset(), 1.0)
                outcome, verdict = await asyncio.gather(mixing, sent)
                assert verdict.taken == (view == "same") == bool(outcome.received)

    asyncio.run(run())


def test_view_has_all_that_neighbours_are_found_from(tmp_path: Path) -> None:
    async def run() -> None:
        service = made(tmp_path, "0")
        async with listening(service), Stranger(port_of(service)) as stranger:
            views = set[str]()
            for said in ({}, {"is_ready": True}, {"is_ready": True, "address": "127.0.0.1:9"}):
                before = service.members.table()[1:]
                await stranger.say(own_record(len(views) + 1, **said))
                while service.members.table()[1:] == before:
                    await service.next_change(1.0)
                views.add(service.standing().view)
            assert len(views) == 3

    asyncio.run(run())


def test_progress_counts_over_any_stream(tmp_path: Path) -> None:
    async def run() -> None:
        service = made(tmp_path, "0")
        async with listening(service), Stranger(port_of(service)) as first, Stranger(port_of(service)) as newest:
            await newest.hear("progress")
            await newest.say(own_record(), pb.PeerMessage(progress=pb.Progress(round=4)))
            await await_that(lambda: service.standing().rounds == {"stranger": 4})
            await first.say(pb.PeerMessage(progress=pb.Progress(round=6)))
            await await_that(lambda: service.standing().rounds == {"stranger": 6})
            await newest.say(pb.PeerMessage(progress=pb.Progress(round=102)))  # of 100
            await await_that(lambda: service.refusals.count == 1)
            assert service.standing().rounds == {"stranger": 6}
        assert service.reached == {}

    asyncio.run(run())


def test_files_of_a_stream_end_with_it(tmp_path: Path) -> None:
    async def run() -> None:
        service = made(tmp_path, "0")
        files = tmp_path / "0"
        payload, data = joined([X])
        header = pb.PeerMessage(vectors=pb.Vectors(round=1, payload=payload))
        damaged = pb.PeerMessage(chunk=pb.Chunk(data=data, crc32=1))
        async with listening(service):
            service.begin(1, 0)
            async with Stranger(port_of(service)) as stranger:
                await stranger.say(header, damaged, header, header)
                await await_that(lambda: service.refusals.count == 1 and len([*files.iterdir()]) == 1)
            await await_that(lambda: not [*files.iterdir()])

    asyncio.run(run())


def test_copies_of_one_state_are_one_file(tmp_path: Path) -> None:
    states = [(1, [X])]

    async def run() -> None:
        service = made(tmp_path, "0", snapshot=lambda: states[-1])
        async with listening(service), Stranger(port_of(service)) as stranger:
            for number in (1, 1, 2):
                if number == 2:
                    states.append((2, [Y]))
                await stranger.say(pb.PeerMessage(copy_wanted=pb.CopyWanted()))
                assert (await stranger.hear("copy")).round == number
            assert len([*(tmp_path / "0").iterdir()]) == 1

    asyncio.run(run())


def test_one_that_takes_nothing_is_left() -> None:
    """Its stream ends, and what waits for it is forgotten; of tables of members the last one waits."""
    link = Link(hello(), is_introduction=False)
    for number in range(10_000):
        link.tell(pb.PeerMessage(members=pb.Members(is_answer=number % 2 == 0)))
    assert len(link._messages) == 1
    for _ in range(10_000):
        link.tell(pb.PeerMessage(verdict=pb.Verdict()))
    assert len(link._messages) <= 4096
    sent: list[bytes] = []

    async def write(data: bytes) -> None:
        sent.append(data)

    asyncio.run(link.speak(write))  # which ends
    assert len(sent) <= 4096


def test_noise_ends_a_stream_and_no_more(tmp_path: Path) -> None:
    async def run() -> None:
        service = made(tmp_path, "0")
        async with listening(service):
            for noise in (b"\xff\xff", b"x" * (3 << 20)):
                async with Stranger(port_of(service)) as stranger:
                    await stranger.say(noise)
                    with pytest.raises((AssertionError, grpc.aio.AioRpcError)):
                        await stranger.hear("verdict")
            async with Stranger(port_of(service)) as stranger:
                table = pb.Members(members=[pb.Member(name="no name!")])
                await stranger.say(
                    pb.PeerMessage(chunk=pb.Chunk(data=b"x")),
                    pb.PeerMessage(),
                    pb.PeerMessage(progress=pb.Progress(round=1 << 40)),
                    pb.PeerMessage(members=table),
                )
                await await_that(lambda: service.refusals.count >= 5)
                assert service.links.link("stranger") is not None
            assert [member.name for member in service.standing().present] == ["0"]

    asyncio.run(run())


def test_a_peer_that_catches_up_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Others that are ahead send their vectors of each round, which it does not take yet."""

    async def run() -> None:
        service = made(tmp_path, "0")
        async with listening(service), Stranger(port_of(service)) as stranger:
            await stranger.say(own_record(is_ready=True))
            service.begin(1, 0)
            for number in range(10, 50):
                verdict = await stranger.send(number, X, "same")
                assert verdict.reason == f"this peer is in round 1, got vectors of round {number}"
            service.begin(50, 49)
            await stranger.say(pb.PeerMessage(vectors=pb.Vectors(round=50, payload=joined([X])[0])))
            await await_that(lambda: "is not ahead any more" in caplog.text)

    with caplog.at_level(logging.INFO):
        asyncio.run(run())
    said = [line for line in caplog.messages if "stranger" in line and "ahead" in line]
    assert len(said) == 2
    assert said[0].startswith("'stranger' is ahead: its vectors of round 10 are not taken, for this peer is in round 1")
    assert said[1] == "'stranger' is not ahead any more: its vectors of 40 rounds were not taken"
    assert "refused" not in caplog.text


def test_a_call_that_has_ended_tells_why() -> None:
    """To write to it raises an error of gRPC's that does not."""

    async def turn_away(_: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "we do not know you")

    async def run() -> None:
        server = grpc.aio.server()
        handlers: Any = {"Meet": grpc.stream_stream_rpc_method_handler(turn_away)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("fed.v1.Neighbours", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call: Any = channel.stream_stream("/fed.v1.Neighbours/Meet")()
            assert await call.code() is grpc.StatusCode.PERMISSION_DENIED
            with pytest.raises(asyncio.InvalidStateError):
                await call.write(b"")
            with pytest.raises(grpc.aio.AioRpcError, match="we do not know you"):
                await written(call, b"")
        await server.stop(0)

    asyncio.run(run())
