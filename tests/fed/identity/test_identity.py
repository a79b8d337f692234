"""Who is admitted by whom: certificates, rosters and folders, over real connections with mutual TLS."""

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest

from fed.errors import InvalidCredentials, OutputExists
from fed.identity.authority import Authority
from fed.identity.certificates import Pair, Role, fingerprint, issue, now, public_key_of
from fed.identity.credentials import NodeCredentials, PeerCredentials, ServerCredentials, peer_of
from fed.identity.hosts import default_hosts
from fed.identity.identities import SignedIdentities
from fed.identity.roster import Roster, keep
from fed.storage.atomic_files import write_atomically

HOST = "127.0.0.1"
PATIENCE_S = 20.0


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "keys")


def node(authority: Authority, name: str = "ann") -> NodeCredentials:
    return NodeCredentials.load(authority.issue(name))


def server(authority: Authority) -> ServerCredentials:
    return ServerCredentials.load(authority.folder)


def at(time: datetime) -> Callable[[], datetime]:
    return lambda: time


@contextmanager
def serving(credentials: grpc.ServerCredentials, roster: Roster, host: str = HOST) -> Iterator[str]:
    """A server that answers each call with the caller's name if the roster admits it; yields its address."""

    def answer(_: bytes, context: grpc.ServicerContext) -> bytes:
        peer = peer_of(context)
        assert peer is not None
        reason = roster.admits(*peer)
        if reason is not None:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)
        return peer[0].encode()

    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(answer)
    running = grpc.server(ThreadPoolExecutor(2))
    running.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Who", {"AmI": handler}),))
    port = running.add_secure_port(f"{host}:0", credentials)
    running.start()
    try:
        yield f"{host}:{port}"
    finally:
        running.stop(None).wait()


def asked(address: str, credentials: grpc.ChannelCredentials) -> str:
    """What a server answers to one call."""
    with grpc.secure_channel(address, credentials) as channel:
        return ask(channel)


def ask(channel: grpc.Channel) -> str:
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/test.Who/AmI")
    return call(b"", timeout=PATIENCE_S).decode()


def refused(address: str, credentials: grpc.ChannelCredentials) -> str:
    """Why a connection does not come about; a server that refuses a client's certificate just closes it."""
    with pytest.raises(grpc.RpcError) as error:
        asked(address, credentials)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    return str(error.value.details())


def test_a_node_is_admitted_in_the_name_of_its_certificate(authority: Authority) -> None:
    theirs, ours = node(authority, "clinic-7.example_b"), server(authority)
    with serving(ours.for_listening(), ours.roster) as address:
        assert asked(address, theirs.for_dialling()) == theirs.name == "clinic-7.example_b"
        assert asked(address.replace(HOST, "localhost"), theirs.for_dialling()) == theirs.name


def test_caller_without_a_node_certificate_is_refused(authority: Authority, tmp_path: Path) -> None:
    theirs, ours = node(authority), server(authority)
    stranger = node(Authority.create(tmp_path / "others"))
    posing = grpc.ssl_channel_credentials(theirs.authority_pem, stranger.key_pem, stranger.certificate_pem)
    as_server = grpc.ssl_channel_credentials(theirs.authority_pem, ours.key_pem, ours.certificate_pem)
    without = grpc.ssl_channel_credentials(theirs.authority_pem)
    with serving(ours.for_listening(), ours.roster) as address:
        assert "Socket closed" in refused(address, posing)
        assert "Socket closed" in refused(address, as_server)
        assert "Socket closed" in refused(address, without)
        assert "CERTIFICATE_VERIFY_FAILED" in refused(address, stranger.for_dialling())
        assert asked(address, theirs.for_dialling()) == "ann"


@pytest.mark.parametrize("name", ["mallory", "localhost", "127.0.0.1"])
def test_a_node_cannot_pose_as_the_server(authority: Authority, name: str) -> None:
    theirs, mallory = node(authority), node(authority, name)
    posing = grpc.ssl_server_credentials([(mallory.key_pem, mallory.certificate_pem)])
    with serving(posing, authority.roster) as address:
        for place in (address, address.replace(HOST, "localhost")):
            assert "unsupported certificate purpose" in refused(place, theirs.for_dialling())


def test_a_server_is_believed_under_its_own_hosts_alone(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "keys", hosts=["localhost"])
    theirs, ours = node(authority), server(authority)
    with serving(ours.for_listening(), ours.roster) as address:
        assert asked(address.replace(HOST, "localhost"), theirs.for_dialling()) == "ann"
        assert "Hostname Verification Check failed" in refused(address, theirs.for_dialling())
    authority.issue_server(hosts=["localhost", HOST])
    ours = server(authority)
    with serving(ours.for_listening(), ours.roster) as address:
        assert asked(address, theirs.for_dialling()) == "ann"


def test_a_certificate_that_has_expired_is_refused_by_tls_itself(authority: Authority) -> None:
    earlier = Authority.load(authority.folder, clock=at(now() - timedelta(days=20)))
    place = earlier.issue("ann", days=10)
    theirs = NodeCredentials.load(place, clock=earlier.clock)
    ours = server(authority)
    with serving(ours.for_listening(), ours.roster) as address:
        assert "Socket closed" in refused(address, theirs.for_dialling())


def test_revoking_ends_connections_and_old_certificates(
    authority: Authority,
) -> None:
    before, other, ours = node(authority), node(authority, "bob"), server(authority)
    with (
        serving(ours.for_listening(), ours.roster) as address,
        grpc.secure_channel(address, before.for_dialling()) as channel,
    ):
        assert ask(channel) == "ann"
        authority.revoke("ann")
        with pytest.raises(grpc.RpcError, match=r"'ann' was revoked on \d{4}-\d\d-\d\d"):
            ask(channel)
        after = node(authority)
        with pytest.raises(grpc.RpcError, match="another certificate than the one that it was issued"):
            ask(channel)
        assert asked(address, after.for_dialling()) == "ann"
        assert asked(address, other.for_dialling()) == "bob"


def test_a_roster_says_why(authority: Authority) -> None:
    ann, roster = node(authority), authority.roster
    assert roster.admits("ann", ann.certificate_pem) is None
    later = Roster(roster.path, clock=at(now() + timedelta(days=400)))
    assert "expired on" in str(later.admits("ann", ann.certificate_pem))
    assert "is not on the roster" in str(roster.admits("bob", ann.certificate_pem))
    assert "another certificate" in str(roster.admits("ann", node(authority, "bob").certificate_pem))
    assert "another certificate" in str(roster.admits("ann", b"nonsense \xff"))
    authority.revoke("ann")
    assert "revoked" in str(roster.admits("ann", ann.certificate_pem))


def test_unreadable_roster_admits_no_node_until_restored(authority: Authority) -> None:
    ann, roster = node(authority), authority.roster
    good = roster.path.read_bytes()
    for content in (b"{", b"[]", b'{"ann": 3}', b'{"ann": {"sha256": "00"}}', b"\xff", b"[" * 100_000):
        roster.path.write_bytes(content)
        reason = roster.admits("ann", ann.certificate_pem)
        assert reason is not None
        assert str(roster.path) in reason
        with pytest.raises(InvalidCredentials, match="must be a roster"):
            Roster(roster.path)
    roster.path.unlink()
    assert "No such file" in str(roster.admits("ann", ann.certificate_pem))
    write_atomically(roster.path, good)
    assert roster.admits("ann", ann.certificate_pem) is None


def test_times_written_by_hand_are_dates_and_never_numbers(authority: Authority) -> None:
    ann, roster = node(authority), authority.roster
    values = json.loads(roster.path.read_bytes())["ann"]

    def admitted(**own: object) -> str | None:
        write_atomically(roster.path, json.dumps({"ann": values | own}).encode())
        return roster.admits("ann", ann.certificate_pem)

    for expires in ("2999-01-31", "29990131", "2999-01-31T12:00+02:00"):
        assert admitted(expires=expires) is None
    for own in ({"expires": 32503680000}, {"expires": "2999"}, {"revoked": 0}):
        assert "must be a roster as fed keys writes it" in str(admitted(**own))


def test_roster_is_read_again_only_when_it_changes(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    ann, roster = node(authority), authority.roster
    reads = []
    original = Path.open

    def counted(path: Path, mode: str = "r") -> object:
        reads.append(path)
        return original(path, mode)

    monkeypatch.setattr(Path, "open", counted)
    for _ in range(5):
        assert roster.admits("ann", ann.certificate_pem) is None
    assert reads == []
    write_atomically(roster.path, roster.path.read_bytes().replace(b"null", b'"2026-01-01"'))
    reads.clear()
    assert [roster.admits("ann", ann.certificate_pem) for _ in range(3)] == ["'ann' was revoked on 2026-01-01"] * 3
    assert reads == [roster.path]


def test_a_roster_can_be_read_by_people(authority: Authority) -> None:
    ann = node(authority)
    (name, values), *others = json.loads(authority.roster.path.read_text()).items()
    assert (name, others) == ("ann", [])
    assert values == {
        "sha256": fingerprint(ann.certificate_pem),
        "issued": (ann.facts.expires - timedelta(days=365)).isoformat(),
        "expires": ann.facts.expires.isoformat(),
        "revoked": None,
    }


@pytest.fixture
def generous() -> Iterator[None]:
    """A process whose new files are for everybody, unless it says otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("generous")
def test_node_folder_is_complete_minimal_and_private_to_its_owner(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "keys")
    place = authority.issue("ann")
    common = ["authority.pem", "certificate.pem", "identities.json", "key.pem"]
    assert sorted(path.name for path in place.iterdir()) == common
    assert sorted(path.name for path in authority.issue("bob", is_peer=True).iterdir()) == [*common, "revocations.json"]
    of_server = sorted(path.name for path in (authority.folder / "server").iterdir())
    assert of_server == [*common, "revocations.json", "roster.json"]
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [authority.folder, *authority.folder.rglob("*")]}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}
    key = (authority.folder / "authority/key.pem").read_bytes()
    assert [path for path in modes if path.is_file() and key in path.read_bytes()] == [
        authority.folder / "authority/key.pem"
    ]
    for path in modes:
        assert b"PRIVATE KEY" not in (path.read_bytes() if path.is_file() and path.name != "key.pem" else b"")


def test_keys_do_not_stand_in_what_is_printed(authority: Authority) -> None:
    assert "PRIVATE" not in f"{node(authority)!r} {server(authority)!r}"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../up", "a/b", "-rf", ".hidden", "a b", "a\n", "ä", "a" * 65, "a\0", "a,CN=b"]
)
def test_no_name_leads_out_of_the_folder_or_is_another(authority: Authority, name: str) -> None:
    before = sorted(authority.folder.rglob("*"))
    with pytest.raises(InvalidCredentials, match="a node's name must be"):
        authority.issue(name)
    assert sorted(authority.folder.rglob("*")) == before


@pytest.mark.parametrize(
    "host", ["", "a:3", "a b", "*", "ä", "-a", "1.2.3", "1.2.3.4.5", "[::1]", "fe80::1%eth0", "a..b"]
)
def test_what_is_no_host_is_refused_and_leaves_nothing(tmp_path: Path, host: str) -> None:
    with pytest.raises(InvalidCredentials, match="a host must be"):
        Authority.create(tmp_path / "keys", hosts=[host])
    assert [*tmp_path.iterdir()] == []


def test_hosts_are_those_of_this_machine_unless_given(tmp_path: Path) -> None:
    assert Authority.create(tmp_path / "a").server_facts.hosts == default_hosts()
    assert default_hosts()[:3] == ("localhost", "127.0.0.1", "::1")
    given_hosts = ("fed.example.org", "10.0.0.7", "::1")
    authority = Authority.create(tmp_path / "b", hosts=given_hosts)
    authority.issue_server()
    assert authority.server_facts.hosts == given_hosts


@pytest.mark.parametrize("days", [0, -1, 36_501, 10**12])
def test_lifetimes_have_bounds(tmp_path: Path, authority: Authority, days: int) -> None:
    with pytest.raises(InvalidCredentials, match=f"days must be from 1 to 36500, got {days}"):
        authority.issue("ann", days=days)
    with pytest.raises(InvalidCredentials, match=f"days must be from 1 to 36500, got {days}"):
        Authority.create(tmp_path / "other", days=days)
    assert authority.roster.entries() == {}
    assert not (tmp_path / "other").exists()


def test_nothing_outlives_its_authority(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "keys", days=30)
    assert node(authority).facts.expires == authority.server_facts.expires == authority.facts.expires
    later = Authority.load(tmp_path / "keys", clock=at(now() + timedelta(days=31)))
    with pytest.raises(InvalidCredentials, match="own certificate expired on"):
        later.issue("bob")
    with pytest.raises(InvalidCredentials, match="own certificate expired on"):
        later.issue_server()
    later.revoke("ann")


def test_nothing_is_overwritten_silently(authority: Authority, tmp_path: Path) -> None:
    authority.issue("ann")
    (authority.folder / "nodes/bob").mkdir()
    before = {path: path.read_bytes() for path in authority.folder.rglob("*") if path.is_file()}
    with pytest.raises(OutputExists, match="ann has a certificate that is valid until"):
        authority.issue("ann")
    with pytest.raises(InvalidCredentials, match="Ann must differ from ann"):
        authority.issue("Ann")
    with pytest.raises(OutputExists, match="bob exists, and bob is not on the roster"):
        authority.issue("bob")
    with pytest.raises(OutputExists, match="is not an empty folder"):
        Authority.create(authority.folder)
    (tmp_path / "file").touch()
    with pytest.raises(OutputExists, match="is not an empty folder"):
        Authority.create(tmp_path / "file")
    assert {path: path.read_bytes() for path in authority.folder.rglob("*") if path.is_file()} == before


def test_one_that_expired_gets_another_without_being_revoked(authority: Authority) -> None:
    earlier = Authority.load(authority.folder, clock=at(now() - timedelta(days=20)))
    expired = fingerprint((earlier.issue("ann", days=10) / "certificate.pem").read_bytes())
    assert fingerprint(node(authority).certificate_pem) != expired


def test_revoking_twice_keeps_the_first_date(authority: Authority) -> None:
    authority.issue("ann")
    first = authority.revoke("ann")
    later = Authority.load(authority.folder, clock=at(now() + timedelta(days=3)))
    assert later.revoke("ann") == first
    with pytest.raises(InvalidCredentials, match="'bob' is not on the roster of"):
        authority.revoke("bob")


def test_certificate_revoked_without_the_key_stays_revoked_after_another(authority: Authority) -> None:
    former = (authority.issue("ann", is_peer=True) / "certificate.pem").read_bytes()
    ben = authority.issue("ben", is_peer=True)
    key, away = authority.folder / "authority/key.pem", authority.folder.parent / "key.pem"
    key.rename(away)
    authority.revoke("ann")
    away.rename(key)
    own = (authority.issue("ann", is_peer=True) / "certificate.pem").read_bytes()
    admits = PeerCredentials.load(ben).admits
    assert "has revoked" in (admits("ann", former) or "")
    assert admits("ann", own) is None


def test_revoking_needs_no_authority_key(authority: Authority) -> None:
    authority.issue("ann")
    (authority.folder / "authority/key.pem").unlink()
    assert Authority.load(authority.folder).revoke("ann").revoked is not None
    with pytest.raises(InvalidCredentials, match=r"authority/key\.pem: no such file"):
        authority.sign_identities()
    with pytest.raises(InvalidCredentials, match=r"authority/key\.pem: no such file"):
        authority.issue("bob")


def test_identities_are_signed_again_once_the_key_is_back(authority: Authority) -> None:
    for name in ("ann", "bob"):
        authority.issue(name)
    key = authority.folder / "authority" / "key.pem"
    away = key.rename(key.with_name("away"))
    authority.revoke("ann")
    credentials = ServerCredentials.load(authority.folder)
    assert [*credentials.identities().points] == ["ann", "bob"]
    away.rename(key)
    before = credentials.identities().version
    authority.sign_identities()
    assert [*credentials.identities().points] == ["bob"]
    assert credentials.identities().version == before + 1


def test_identities_survive_folders_that_were_moved_away(authority: Authority) -> None:
    place = authority.issue("ann")
    key = public_key_of((place / "certificate.pem").read_bytes())
    shutil.rmtree(place)
    authority.issue("bob")
    assert ServerCredentials.load(authority.folder).identities().known().keys["ann"] == key


@pytest.mark.long
def test_many_that_issue_at_once_lose_nobody(authority: Authority) -> None:
    code = "import sys; from pathlib import Path; from fed.identity.authority import Authority\n"
    code += "for name in sys.argv[2:]: Authority.load(Path(sys.argv[1])).issue(name)"
    names = [[f"node-{process}-{index}" for index in range(8)] for process in range(4)]
    command = [sys.executable, "-c", code, str(authority.folder)]
    running = [subprocess.Popen([*command, *some]) for some in names]
    assert [process.wait(timeout=60) for process in running] == [0] * 4
    assert sorted(name for some in names for name in some) == list(authority.roster.entries())


def error_with_full_disk(act: Callable[[], object], step: int) -> str | None:
    """What is said if the disk is full the given time that something is to reach it; None if nothing more was."""
    fsync, steps, is_hit = os.fsync, iter(range(1000)), False

    def fail(place: int) -> None:
        nonlocal is_hit
        if next(steps) == step:
            is_hit = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        try:
            act()
        except InvalidCredentials as error:
            return str(error)
    assert not is_hit
    return None


FULL = "keys cannot be written to (No space left on device): make room, or give a folder that can be"


def test_a_full_disk_leaves_nothing_of_an_authority(tmp_path: Path) -> None:
    step = 0
    while error := error_with_full_disk(lambda: Authority.create(tmp_path / "keys"), step):
        assert error == f"{tmp_path}/{FULL}"
        assert [*tmp_path.iterdir()] == []
        step += 1
    assert step >= 12  # six files, each synced with its folder
    Authority.load(tmp_path / "keys")


def test_full_disk_leaves_no_partial_node_and_others_unchanged(authority: Authority) -> None:
    bob = node(authority, "bob")
    step = 0
    while error := error_with_full_disk(lambda: authority.issue("ann"), step):
        assert error.endswith(FULL)
        assert authority.roster.admits("bob", bob.certificate_pem) is None
        assert not (authority.folder / "nodes/ann").exists()
        if "ann" in authority.roster.entries():  # the disk failed after the roster was written
            others = {name: entry for name, entry in authority.roster.entries().items() if name != "ann"}
            keep(authority.roster.path, others)
        step += 1
    assert step >= 8  # four files, each synced with its folder
    assert authority.roster.admits("ann", (authority.folder / "nodes/ann/certificate.pem").read_bytes()) is None


def test_a_full_disk_does_not_revoke_and_says_so(authority: Authority) -> None:
    ann = node(authority)
    error = error_with_full_disk(lambda: authority.revoke("ann"), 0)
    assert error is not None
    assert error.endswith(FULL)
    assert authority.roster.admits("ann", ann.certificate_pem) is None


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidCredentials, match=r"file/keys cannot be written to \(Not a directory\)"):
        Authority.create(tmp_path / "file" / "keys")
    with pytest.raises(InvalidCredentials, match="none must be an authority's folder, got none"):
        Authority.load(tmp_path / "none")


def test_an_existing_empty_folder_is_used_and_made_private(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir(mode=0o755)
    Authority.create(tmp_path / "keys")
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700


def damaged(authority: Authority, what: str) -> Path:
    """The folder of the node ann, with something wrong."""
    place = authority.issue("ann")
    other = authority.issue("bob")
    match what:
        case "readable":
            (place / "key.pem").chmod(0o644)
        case "no key" | "no certificate" | "no authority":
            (place / f"{what.split()[1]}.pem").unlink()
        case "other key":
            shutil.copy(other / "key.pem", place / "key.pem")
        case "damaged key":
            (place / "key.pem").write_bytes(b"-----BEGIN PRIVATE KEY-----\n")
        case "damaged certificate":
            (place / "certificate.pem").write_bytes(b"\x00")
        case "other authority":
            stranger = Authority.create(authority.folder.with_name("others"))
            shutil.copy(stranger.folder / "authority/certificate.pem", place / "authority.pem")
        case "no authority's":
            shutil.copy(place / "certificate.pem", place / "authority.pem")
    return place


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("readable", "ann/key.pem must be for its owner alone, got mode 0644: chmod 600 "),
        ("no key", "ann/key.pem: no such file: restore the whole folder"),
        ("no certificate", "ann/certificate.pem: no such file"),
        ("no authority", "ann/authority.pem: no such file"),
        ("other key", "ann/key.pem does not belong to "),
        ("damaged key", "ann/key.pem: must be a private key as PEM"),
        ("damaged certificate", "ann/certificate.pem: must be a certificate as PEM"),
        ("other authority", "ann/certificate.pem must be signed by the authority in "),
        ("no authority's", "ann/certificate.pem must be signed by the authority in "),
    ],
)
def test_what_is_wrong_with_a_folder_is_said(authority: Authority, what: str, message: str) -> None:
    with pytest.raises(InvalidCredentials, match=message.replace("(", r"\(")):
        NodeCredentials.load(damaged(authority, what))


def test_each_is_told_when_it_is_given_anothers_folder(authority: Authority, tmp_path: Path) -> None:
    place = authority.issue("ann")
    with pytest.raises(InvalidCredentials, match="ann holds a node's certificate: give the server's own"):
        ServerCredentials.load(place)
    with pytest.raises(InvalidCredentials, match="server holds the server's certificate: give the node's own"):
        NodeCredentials.load(authority.folder / "server")
    with pytest.raises(InvalidCredentials, match="keys is the authority's folder: give the node's own"):
        NodeCredentials.load(authority.folder)
    with pytest.raises(InvalidCredentials, match="none: no such folder: give the node's own"):
        NodeCredentials.load(tmp_path / "none")
    (authority.folder / "server/roster.json").unlink()
    with pytest.raises(InvalidCredentials, match=r"roster\.json cannot be read"):
        ServerCredentials.load(authority.folder)


def test_a_server_needs_its_own_folder_alone(authority: Authority, tmp_path: Path) -> None:
    theirs = node(authority)
    shutil.copytree(authority.folder / "server", tmp_path / "elsewhere")
    shutil.rmtree(authority.folder)
    ours = ServerCredentials.load(tmp_path / "elsewhere")
    with serving(ours.for_listening(), ours.roster) as address:
        assert asked(address, theirs.for_dialling()) == "ann"


def test_expired_certificate_error_names_the_remedy(authority: Authority) -> None:
    place = authority.issue("ann")
    for load, folder, remedy in (
        (NodeCredentials.load, place, r"ann/certificate.pem expired on .*: issue another with fed keys issue"),
        (ServerCredentials.load, authority.folder, r"server/certificate.pem expired on .* with fed keys server"),
    ):
        with pytest.raises(InvalidCredentials, match=remedy):
            load(folder, clock=at(now() + timedelta(days=366)))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="compares with openssl")
def test_openssl_agrees_about_who_may_do_what(authority: Authority) -> None:
    place = authority.issue("ann")

    def agrees(purpose: str, certificate: Path) -> bool:
        command = ["openssl", "verify", "-x509_strict", "-purpose", purpose, "-CAfile", str(place / "authority.pem")]
        return subprocess.run([*command, str(certificate)], capture_output=True, check=False).returncode == 0

    own, servers = place / "certificate.pem", authority.folder / "server/certificate.pem"
    verdicts = [agrees(purpose, path) for path in (own, servers) for purpose in ("sslclient", "sslserver")]
    assert verdicts == [True, False, False, True]
    shown = subprocess.run(
        ["openssl", "x509", "-in", own, "-noout", "-fingerprint", "-sha256"], capture_output=True, text=True, check=True
    ).stdout
    assert shown.strip().partition("=")[2].replace(":", "").lower() == fingerprint(own.read_bytes())


def test_a_node_cannot_sign_for_others(authority: Authority) -> None:
    mallory, ours = node(authority, "mallory"), server(authority)
    forged = issue(
        Role.NODE,
        "ann",
        issued=now(),
        expires=datetime(2100, 1, 1, tzinfo=UTC),
        by=Pair(mallory.certificate_pem, mallory.key_pem),
    )
    chain = forged.certificate_pem + mallory.certificate_pem
    with serving(ours.for_listening(), ours.roster) as address:
        posing = grpc.ssl_channel_credentials(mallory.authority_pem, forged.key_pem, chain)
        assert "Socket closed" in refused(address, posing)


def test_identities_that_the_authority_has_not_signed_are_refused(authority: Authority, tmp_path: Path) -> None:
    authority.issue("ann")
    own = (authority.folder / "authority" / "certificate.pem").read_bytes()
    content = (authority.folder / "server" / "identities.json").read_bytes()
    line, signature = content.split(b"\n")
    assert SignedIdentities.read(content, own).points
    stranger = Authority.create(tmp_path / "stranger", hosts=["127.0.0.1"])
    theirs = (stranger.folder / "authority" / "certificate.pem").read_bytes()
    forged = line.replace(b"ann", b"eve"), signature
    for bad in (b"\n".join(forged), line + b"\n", line, line + b"\n" + signature[:-2]):
        with pytest.raises(InvalidCredentials, match="must be signed by this node's authority"):
            SignedIdentities.read(bad, own)
    with pytest.raises(InvalidCredentials, match="must be signed by this node's authority"):
        SignedIdentities.read(content, theirs)


def test_identities_longer_than_their_limit_are_refused(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    authority.issue("ann")
    own = (authority.folder / "authority" / "certificate.pem").read_bytes()
    content = (authority.folder / "server" / "identities.json").read_bytes()
    monkeypatch.setattr("fed.identity.identities._MOST_BYTES", len(content))
    assert SignedIdentities.read(content, own).points
    monkeypatch.setattr("fed.identity.identities._MOST_BYTES", len(content) - 1)
    with pytest.raises(InvalidCredentials, match="must be signed by this node's authority"):
        SignedIdentities.read(content, own)


def test_of_identities_the_latest_version_counts() -> None:
    earlier, later = (SignedIdentities(version, {}, b"") for version in (3, 12))
    assert SignedIdentities.newest(later, None, earlier) is SignedIdentities.newest(earlier, later) is later
    assert SignedIdentities.newest(None) is None
