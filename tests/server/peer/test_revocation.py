"""Peers whose certificates are revoked while they run: nobody waits for them, and only the authority can revoke."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from fed.errors import InvalidCredentials, RunFailed
from fed.identity.authority import Authority
from fed.identity.credentials import PeerCredentials
from fed.identity.revocations import REVOCATIONS_FILE, RevocationFile, Revocations, signed_revocations
from fed.protocol import protocol_pb2 as pb
from fed.server.peer.gossip.gossip_service import GossipService
from tests.server.peer.processes import Home, processes
from tests.server.peer.replica.test_replicas import keys as replicas
from tests.server.peer.services import Stranger, await_that, hello, made, port_of
from tests.server.peer.test_real_peers import keys as gossip

ROUNDS, DEADLINE_S = 60, 4.0


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    made_one = Authority.create(tmp_path / "keys")
    for name in ("0", "1", "2", "3"):
        made_one.issue(name, is_peer=True)
    return made_one


def place(authority: Authority, name: str, *peers: str) -> None:
    """Copy a file of the server's folder to peers, whole or not at all."""
    for peer in peers:
        folder = authority.folder / "nodes" / peer
        shutil.copy(authority.folder / "server" / name, folder / "copied")
        (folder / "copied").replace(folder / name)


@pytest.mark.parametrize(
    ("given", "file", "to"),
    [
        (gossip(ROUNDS, DEADLINE_S, 4), REVOCATIONS_FILE, "0"),
        pytest.param(gossip(ROUNDS, DEADLINE_S, 4), "roster.json", "012", marks=pytest.mark.long),
        pytest.param(replicas(ROUNDS, DEADLINE_S, 4), REVOCATIONS_FILE, "0", marks=pytest.mark.long),
    ],
    ids=["list", "roster", "replicas"],
)
def test_nobody_waits_for_a_revoked_peer(
    given: dict[str, Any], file: str, to: str, authority: Authority, tmp_path: Path
) -> None:
    """A list at one peer reaches all; a roster is each peer's own."""
    if file == "roster.json":
        place(authority, file, *to)
    homes = [Home(keys=authority.folder)] * 4
    with processes(tmp_path, given, homes, patience_s=5.0) as peers:
        peers.start(*range(4))
        peers.await_round(5)
        authority.revoke("3")
        place(authority, file, *to)
        if file == REVOCATIONS_FILE:
            peers.await_failure(3)
            assert "the authority has revoked this peer's certificate" in peers.log(3)
        else:
            peers.await_failure(3)
        peers.await_end()
        for peer in range(3):
            assert "peer '3' is no member any more" in peers.log(peer)
            lines = peers.lines(peer)
            assert len(lines) == ROUNDS
            late = [line["round"] for line in lines if line["late"] or line["failed"]]
            assert len(late) <= 2, peers.said()
            assert peers.longest_round_s(peer) < DEADLINE_S, peers.said()


def peer(folder: Path, authority: Authority, name: str, *addresses: str) -> GossipService:
    return made(folder, name, addresses, credentials=PeerCredentials.load(authority.folder / "nodes" / name))


def test_only_the_authority_can_revoke(authority: Authority, tmp_path: Path) -> None:
    """A hostile member that claims a revocation changes nothing; the same list with a signature does."""
    nodes = authority.folder / "nodes"
    theirs = Authority.create(tmp_path / "theirs")
    theirs.issue("1", is_peer=True)
    theirs.revoke("1")
    genuine = (authority.folder / "server" / REVOCATIONS_FILE).read_bytes()
    own_key = (nodes / "3" / "key.pem").read_bytes()
    claims = [
        (theirs.folder / "server" / REVOCATIONS_FILE).read_bytes(),
        signed_revocations(Revocations(version=8), [], ["1"], own_key),
        genuine.replace(b'"names": []', b'"names": ["1"]'),
        (authority.folder / "server" / "identities.json").read_bytes(),
        b"",
    ]

    async def run() -> None:
        victim = peer(tmp_path, authority, "0")
        await victim.start("127.0.0.1:0", None)
        honest = peer(tmp_path, authority, "1", f"127.0.0.1:{port_of(victim)}")
        await honest.start("127.0.0.1:0", None)
        await await_that(lambda: len(victim.standing().present) == 2)
        greeting = pb.PeerMessage(greeting=hello("3"))
        async with Stranger(port_of(victim), greeting, PeerCredentials.load(nodes / "3"), "0") as hostile:
            for number, claim in enumerate(claims, 1):
                await hostile.say(pb.PeerMessage(revocations=pb.Revocations(content=claim)))
                await await_that(lambda: victim.refusals.count >= number)  # noqa: B023  # awaited at once
            assert [member.name for member in victim.standing().present] == ["0", "1"]
            authority.revoke("1")
            newest = (authority.folder / "server" / REVOCATIONS_FILE).read_bytes()
            await hostile.say(pb.PeerMessage(revocations=pb.Revocations(content=newest)))
            await await_that(lambda: [member.name for member in victim.standing().present] == ["0"])
            await await_that(lambda: honest._failure is not None, 60.0)
            # an earlier list does not bring it back
            await hostile.say(pb.PeerMessage(revocations=pb.Revocations(content=genuine)))
            await hostile.say(pb.PeerMessage(revocations=pb.Revocations(content=b"?")))
            await await_that(lambda: victim.refusals.count > len(claims))
            assert [member.name for member in victim.standing().present] == ["0"]
        await asyncio.gather(victim.stop("the test is over"), honest.stop("the test is over"))

    asyncio.run(run())


def test_a_revoked_peer_hears_of_it_where_it_dials(authority: Authority, tmp_path: Path) -> None:
    """It comes when the others have the list already, and by an address whose name it does not know."""

    async def run() -> None:
        authority.revoke("1")
        other = peer(tmp_path, authority, "0")
        await other.start("127.0.0.1:0", None)
        revoked = peer(tmp_path, authority, "1", f"127.0.0.1:{port_of(other)}")
        assert not revoked.credentials or not revoked.credentials.is_revoked
        await revoked.start(None, None)
        with pytest.raises(RunFailed, match="the authority has revoked this peer's certificate"):
            await fails(revoked)
        await asyncio.gather(other.stop("the test is over"), revoked.stop("the test is over"))

    async def fails(service: GossipService) -> None:
        async with asyncio.timeout(60.0):
            while True:
                service.raise_failure()
                await service.next_change(0.1)

    asyncio.run(run())


def test_a_list_outlives_its_peer_and_names_are_issued_anew(authority: Authority) -> None:
    zero, two = (PeerCredentials.load(authority.folder / "nodes" / name) for name in "02")
    former = two.certificate_pem
    authority.revoke("2")
    content = (authority.folder / "server" / REVOCATIONS_FILE).read_bytes()
    (authority.folder / "nodes" / "0" / REVOCATIONS_FILE).unlink()
    zero.revocations.take(content)
    assert PeerCredentials.load(authority.folder / "nodes" / "0").refusals(["1", "2"]).keys() == {"2"}
    assert zero.admits("2", former) == "'2' has a certificate that its authority has revoked"
    anew = PeerCredentials.load(authority.issue("2", is_peer=True))
    place(authority, REVOCATIONS_FILE, "0")
    assert not zero.refusals(["1", "2"])
    assert zero.admits("2", anew.certificate_pem) is None
    assert zero.admits("2", former) == "'2' has a certificate that its authority has revoked"


def test_a_damaged_list_is_refused_at_the_start(authority: Authority) -> None:
    file = authority.folder / "nodes" / "0" / REVOCATIONS_FILE
    zero = PeerCredentials.load(file.parent)
    version = zero.revocations.latest().version
    file.write_bytes(b"{}")
    assert zero.revocations.latest().version == version  # of one that runs nothing changes
    with pytest.raises(InvalidCredentials, match="must be signed by this node's authority"):
        RevocationFile(file, zero.authority_pem)
