"""Mutual TLS among peers: whoever answers is the one that was dialled, and a roster admits."""

import asyncio
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from fed.errors import InvalidCredentials
from fed.identity.authority import Authority
from fed.identity.credentials import NodeCredentials, PeerCredentials, ServerCredentials
from fed.server.peer.gossip.gossip_service import GossipService
from fed.server.peer.members.member import MOST_BEAT, MOST_START, Member
from tests.server.peer.services import await_that, made, port_of


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority with two peers and a node, beside another authority's peer."""
    folder = tmp_path_factory.mktemp("keys")
    authority = Authority.create(folder / "ours")
    for name in ("ann", "bob", "eve"):
        authority.issue(name, is_peer=True)
    authority.issue("node")
    Authority.create(folder / "theirs").issue("eve", is_peer=True)
    return folder


def peer(folder: Path, keys: Path, name: str, *addresses: str, whose: str = "ours", called: str = "") -> GossipService:
    credentials = PeerCredentials.load(keys / whose / "nodes" / name)
    return made(folder, called or name, addresses, credentials=credentials, gone_after_s=2.6)


async def met(*services: GossipService, seconds: float = 1.5) -> list[int]:
    """Let services run; returns how many members each sees."""
    with suppress(AssertionError):
        await await_that(lambda: all(len(one.standing().present) == len(services) for one in services), seconds)
    return [len(one.standing().present) for one in services]


def see(folder: Path, keys: Path, first: str, *others: tuple[str, str, str]) -> tuple[list[int], list[int]]:
    """How many members the first and others see, and how many refusals they count."""

    async def run() -> tuple[list[int], list[int]]:
        services = [peer(folder, keys, first)]
        await services[0].start("127.0.0.1:0", None)
        address = f"127.0.0.1:{port_of(services[0])}"
        for name, whose, called in others:
            services.append(peer(folder, keys, name, address, whose=whose, called=called))
            await services[-1].start("127.0.0.1:0", None)
        found = await met(*services)
        await asyncio.gather(*(one.stop("the test is over") for one in services))
        return found, [one.refusals.count for one in services]

    return asyncio.run(run())


def test_peers_of_one_authority_meet_at_any_address(keys: Path, tmp_path: Path) -> None:
    assert see(tmp_path, keys, "ann", ("bob", "ours", "")) == ([2, 2], [0, 0])


def test_a_peer_of_another_authority_is_refused(keys: Path, tmp_path: Path) -> None:
    found, refused = see(tmp_path, keys, "ann", ("eve", "theirs", ""))
    assert found == [1, 1]
    assert refused[1] > 0


def test_a_peer_cannot_take_another_name(keys: Path, tmp_path: Path) -> None:
    found, refused = see(tmp_path, keys, "ann", ("bob", "ours", "eve"))
    assert found == [1, 1]
    assert refused[0] > 0


def test_introducer_cannot_speak_for_another_member(keys: Path, tmp_path: Path) -> None:
    """It is dialled by its address alone, and says that a member which lives has left for good."""

    async def run() -> None:
        liar = peer(tmp_path, keys, "eve", called="ann")
        liar.members.own = Member("ann", "", MOST_START, MOST_BEAT, left=True, has_ended=True)
        await liar.start("127.0.0.1:0", None)
        bob = peer(tmp_path, keys, "bob", liar.members.own.address)
        await bob.start("127.0.0.1:0", None)
        await await_that(lambda: liar.members.own.address in bob.links._pauses)  # after a stream that has ended
        ann = peer(tmp_path / "own", keys, "ann", bob.members.own.address)
        await ann.start("127.0.0.1:0", None)
        services = (bob, ann)
        try:
            await await_that(lambda: [len(one.standing().present) for one in services] == [2, 2], 5.0)
        finally:
            await asyncio.gather(*(one.stop("the test is over") for one in (*services, liar)))

    asyncio.run(run())


def test_a_roster_beside_the_certificate_admits(keys: Path, tmp_path: Path) -> None:
    shutil.copytree(keys, tmp_path / "keys")
    authority = Authority.load(tmp_path / "keys" / "ours")
    authority.revoke("bob")
    shutil.copy(tmp_path / "keys/ours/server/roster.json", tmp_path / "keys/ours/nodes/ann/roster.json")
    found, refused = see(tmp_path, tmp_path / "keys", "ann", ("bob", "ours", ""))
    assert found == [1, 1]
    assert refused[0] > 0
    ann = PeerCredentials.load(tmp_path / "keys/ours/nodes/ann")
    assert ann.refusals(["ann", "bob", "nobody"]) == {
        "bob": "its authority has revoked the certificate of 'bob'",
        "nobody": "'nobody' is not there on the roster",
    }


def test_each_command_needs_certificates_of_its_own_role(keys: Path) -> None:
    nodes = keys / "ours" / "nodes"
    with pytest.raises(InvalidCredentials, match=r"holds a node's certificate: .* fed keys issue --peer"):
        PeerCredentials.load(nodes / "node")
    with pytest.raises(InvalidCredentials, match="holds a peer's certificate"):
        NodeCredentials.load(nodes / "ann")
    with pytest.raises(InvalidCredentials, match="holds a peer's certificate"):
        ServerCredentials.load(nodes / "ann")
    ann, node = PeerCredentials.load(nodes / "ann"), NodeCredentials.load(nodes / "node")
    assert ann.admits("ann", ann.certificate_pem) is None
    assert ann.admits("node", node.certificate_pem) == "'node' has a node's certificate, and is no peer"
