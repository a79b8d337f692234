"""``fed keys``: what it prints, and the code it exits with."""

from datetime import timedelta
from pathlib import Path

import pytest

from fed.identity.authority import Authority
from fed.identity.certificates import fingerprint, now
from fed.identity.credentials import NodeCredentials, ServerCredentials
from tests.fed.cli.commands import Run, runner


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(tmp_path, monkeypatch, capsys, "keys")


def in_days(days: int) -> str:
    return f"{now() + timedelta(days=days):%Y-%m-%d}"


def test_an_authority_a_node_and_its_end(run: Run) -> None:
    server = f"keys/server: for the server alone, valid until {in_days(365)}, reached as fed.example.org, 10.0.0.7"
    assert run("init", "keys", "--host", "fed.example.org", "--host", "10.0.0.7") == (
        0,
        f"keys: an authority, valid until {in_days(3650)}: keep it to yourself\n{server}\n",
        "",
    )
    assert run("issue", "keys", "ann").out == f"keys/nodes/ann: for the node ann alone, valid until {in_days(365)}\n"
    assert run("issue", "keys", "bob", "--days", "7").out.endswith(f"valid until {in_days(7)}\n")
    assert run("revoke", "keys", "ann") == (0, f"ann: revoked on {in_days(0)}\n", "")
    code, out, err = run("list", "keys")
    authority, of_server, *table, of_identities = (line.split() for line in out.splitlines() if line.strip())
    assert (code, err) == (0, "")
    assert (" ".join(authority), " ".join(of_server)) == (f"authority: valid until {in_days(3650)}", server)
    assert table[0] == ["node", "status", "issued", "expires", "revoked", "sha256"]
    assert [row[:5] for row in table[2:]] == [
        ["ann", "revoked", in_days(0), in_days(365), in_days(0)],
        ["bob", "valid", in_days(0), in_days(7), "–"],
    ]
    assert " ".join(of_identities) == "identities.json: version 4, of 1 nodes"  # 1: of nobody
    bob = NodeCredentials.load(Path("keys/nodes/bob"))
    assert fingerprint(bob.certificate_pem).startswith(table[3][5].rstrip("…"))


def test_server_certificate_is_renewed_for_same_or_other_hosts(run: Run) -> None:
    run("init", "keys", "--host", "old.example.org", "--days", "20")
    first = ServerCredentials.load(Path("keys"))
    run("issue", "keys", "ann")
    assert run("server", "keys", "--days", "10").out.endswith(f"{in_days(10)}, reached as old.example.org\n")
    assert run("server", "keys", "--host", "new.example.org").out.endswith(
        f"{in_days(20)}, reached as new.example.org\n"
    )
    second = ServerCredentials.load(Path("keys"))
    assert second.certificate_pem != first.certificate_pem
    assert list(second.roster.entries()) == ["ann"]


def test_a_list_of_nobody_says_how_to_begin(run: Run) -> None:
    run("init", "keys")
    assert run("list", "keys").out.splitlines()[-1] == "no nodes: fed keys issue keys NAME adds one"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["init", "keys"], "keys exists and is not an empty folder: give another, or move it away"),
        (["init", "new", "--host", "a:443"], "a host must be a name or an IP address, without a port, got 'a:443'"),
        (["init", "new", "--days", "0"], "Invalid value for '--days'"),
        (["init", "keys/server/key.pem/new"], "keys/server/key.pem/new cannot be written to (Not a directory)"),
        (["init"], "Missing argument 'DIR'"),
        (["issue", "keys", "../up"], "a node's name must be up to 64 letters"),
        (["issue", "keys", "ann"], "ann has a certificate that is valid until"),
        (["issue", "keys"], "Missing argument 'NAME'"),
        (["issue", "none", "bob"], "none must be an authority's folder, got none: make one with fed keys init"),
        (["issue", "keys/server", "bob"], "keys/server must be an authority's folder"),
        (["issue", "keys", "bob", "--days", "40000"], "Invalid value for '--days'"),
        (["revoke", "keys", "bob"], "'bob' is not on the roster of keys: fed keys list keys shows who is"),
        (["list", "none"], "none must be an authority's folder"),
        (["server", "none"], "none must be an authority's folder"),
        (["remove", "keys"], "No such command 'remove'"),
    ],
)
def test_mistakes_are_one_line_and_change_nothing(run: Run, arguments: list[str], message: str) -> None:
    run("init", "keys")
    run("issue", "keys", "ann")
    before = {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")}
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert len(err.splitlines()) == 1
    assert {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")} == before


@pytest.mark.parametrize("command", ["list", "issue", "revoke"])
@pytest.mark.parametrize("file", ["authority/certificate.pem", "server/roster.json", "authority/key.pem"])
def test_a_damaged_authority_is_one_line(run: Run, command: str, file: str) -> None:
    run("init", "keys")
    run("issue", "keys", "ann")
    Path("keys", file).write_bytes(b"nonsense")
    code, _, err = run(command, "keys", *(["bob"] if command == "issue" else ["ann"] if command == "revoke" else []))
    is_needed = {"list": "key.pem" not in file, "issue": True, "revoke": "roster" in file}[command]
    assert code == (2 if is_needed else 0)
    assert len(err.splitlines()) == (1 if is_needed else 0)
    assert (f"keys/{file}" in err) is is_needed


def test_without_a_command_it_shows_what_there_is(run: Run) -> None:
    code, out, err = run()
    assert (code, err) == (0, "")
    assert "Usage: fed keys" in out


def test_what_the_command_made_is_what_python_loads(run: Run) -> None:
    run("init", "keys")
    assert run("issue", "keys", "ann").code == 0
    ann = NodeCredentials.load(Path("keys/nodes/ann"))
    assert Authority.load(Path("keys")).roster.admits(ann.name, ann.certificate_pem) is None
