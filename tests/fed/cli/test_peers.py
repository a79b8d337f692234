"""``fed peer``: mistakes are one sentence each, before anything is sent."""

import socket
from contextlib import closing
from pathlib import Path

import pytest

from fed.cli.main import main

EXPERIMENT = """
data: {kind: digits, clients: 4}
algorithm: dpsgd
rounds: {count: 1}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "ring.yaml").write_text(EXPERIMENT)
    (tmp_path / "star.yaml").write_text(EXPERIMENT.replace("dpsgd", "fedavg"))
    (tmp_path / "data.yaml").write_text("data: {kind: digits, clients: 4}\nclient: 0\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ring.yaml", "--insecure", "--name", "0"], "a peer must listen or join others, got neither"),
        (["ring.yaml", "--listen", "127.0.0.1:0"], "got no credentials: give --credentials DIR"),
        (["ring.yaml", "--listen", "127.0.0.1:0", "--insecure"], "without credentials a peer needs a name, got none"),
        (
            ["ring.yaml", "--listen", "10.1.1.1:1", "--insecure", "--name", "0"],
            "--insecure allows loopback addresses alone",
        ),
        (["ring.yaml", "--join", "nowhere", "--insecure", "--name", "0"], "--join must be HOST:PORT"),
        (
            ["star.yaml", "--listen", "127.0.0.1:0", "--insecure", "--name", "0"],
            "needs an algorithm over mix, or allreduce, got fedavg",
        ),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_mistake_is_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peer", *words, "--data", "data.yaml", "--output", "run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.usefixtures("here")
def test_a_port_that_is_taken_is_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        words = ["ring.yaml", "--listen", f"127.0.0.1:{port}", "--insecure", "--name", "0", "--data", "data.yaml"]
        assert main(["peer", *words, "--output", "run"]) == 2
    assert f"this peer cannot listen on 127.0.0.1:{port}: is another program there" in capfd.readouterr().err
