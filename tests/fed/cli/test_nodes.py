"""``fed server`` and ``fed client``: what they refuse, and what they say would leave a node."""

import copy
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from fed.cli.main import main
from fed.cli.runs import stopped_in_order
from fed.clients.node.edge_node import EdgeNode
from fed.config.experiment import Experiment
from fed.errors import InvalidInput
from fed.identity.credentials import hold_to_loopback
from fed.protocol import protocol_pb2
from fed.server.grpc.deploy import serve
from tests.programs import started
from tests.server.deployed import wait_for

EXPERIMENT = "{data: {kind: digits, clients: 2}, model: {kind: logistic}}"
ELSEWHERE = ["0.0.0.0:1", "[::]:1", "192.168.0.1:1", "example.org:1", "127.0.0.1.example.org:1", "unix:/tmp/x:1", "*:1"]


class Result(NamedTuple):
    code: int
    err: str


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiment.yaml").write_text(EXPERIMENT)
    np.savez(tmp_path / "scans.npz", inputs=np.zeros((6, 3), np.float32), label=np.arange(6) % 2)
    (tmp_path / "data.yaml").write_text("{data: {kind: npz, path: scans.npz}}")
    return tmp_path


@pytest.mark.parametrize("address", ELSEWHERE)
def test_without_certificates_nothing_leaves_this_machine(
    address: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (
        ["server", "experiment.yaml", "--listen", address, "--insecure"],
        ["client", "--server", address, "--insecure", "--name", "ann", "--data", "data.yaml"],
    ):
        assert main(command) == 2
        assert "loopback addresses alone" in capsys.readouterr().err
    with pytest.raises(InvalidInput, match="loopback addresses alone"):
        serve(Experiment(model={"kind": "logistic"}), listen=address, output=str(folder / "run"))
    with pytest.raises(InvalidInput, match="loopback addresses alone"):
        EdgeNode(address, None, "ann", "ann", None, folder)._channel()  # type: ignore[arg-type]


def test_dry_run_says_what_secure_nodes_send(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    client = ["client", "--name", "ann", "--data", "data.yaml", "--dry-run"]
    assert main(client) == 0
    plain = capsys.readouterr().out
    assert main([*client, "--secure"]) == 0
    secure = capsys.readouterr().out
    for words in ("6 samples", "mean training loss"):
        assert words in plain
        assert words not in secure
    assert "up to 2 classes" in plain  # as many as the node has seen, which is a number of its own
    assert "classes" not in secure.split("whether")[0].split("names of")[0]
    assert "a masked message" in secure
    assert main([*client, "--corrupt", "0.2"]) == 2
    assert "go with --secure" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:1", "[::1]:1", "127.1.2.3:1"])
def test_loopback_is_this_machine(address: str) -> None:
    other = "192.0.2.1:1"
    assert [one for one in (address, other) if is_refused(one)] == [other]


def is_refused(address: str) -> bool:
    try:
        hold_to_loopback(address)
    except InvalidInput:
        return True
    return False


def test_certificates_are_given_or_renounced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, reason in (([], "got no credentials"), (["--insecure", "--credentials", "keys"], "give one of")):
        assert main(["server", "experiment.yaml", "--listen", "127.0.0.1:0", *options]) == 2
        assert reason in capsys.readouterr().err
        assert main(["client", "--server", "127.0.0.1:1", "--data", "data.yaml", "--name", "ann", *options]) == 2
        assert reason in capsys.readouterr().err


def test_a_dry_run_counts_features_apart_from_targets(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "table.csv").write_text("a,b,label\n1,2,0\n3,4,1\n")
    (folder / "table.yaml").write_text("data: {kind: csv, path: table.csv}\n")
    assert main(["client", "--data", "table.yaml", "--name", "ann", "--dry-run"]) == 0
    assert "the names of 2 features, 1 target and 0 classes" in capsys.readouterr().out


@pytest.mark.parametrize("options", [[], ["--secure"]], ids=["plain", "secure"])
def test_a_dry_run_of_a_table_tells_all(options: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "table.csv").write_text("age,ward\n30,red\n31,white\n")
    (folder / "table.yaml").write_text("data: {kind: csv, path: table.csv}\n")
    assert main(["client", "--data", "table.yaml", "--name", "ann", "--dry-run", *options]) == 0
    said = capsys.readouterr().out
    assert "that its data are a table" in said
    assert ("how many samples it trains on" in said) is (not options)
    assert ("not how many samples it has" in said) is bool(options)
    assert ("a masked message" if options else "the trained model") in said
    assert "Nothing else leaves" in said


@pytest.mark.parametrize("name", ["own.csv", "Scans.NPZ"])
def test_samples_are_no_description_of_a_nodes_data(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["client", "--data", name, "--name", "ann", "--dry-run"]) == 2
    kind = name.lower()[-3:]
    assert (
        f"{name} holds samples, and a node's data file describes them: write `data: {{kind: {kind}, path: {name}}}`"
        in (capsys.readouterr().err)
    )


def test_a_dry_run_names_all_that_a_node_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dry = ["client", "--data", "data.yaml", "--name", "ann", "--dry-run"]
    app = ["client", "--app", "tests.clients.apps.arrays_only:Regression", "--name", "ann", "--dry-run"]
    assert (main(dry), main([*dry, "--secure"]), main(app)) == (0, 0, 0)
    said = capsys.readouterr().out
    words = {
        "Joining": {
            "protocol": "version of fed",
            "software": "version of fed",
            "name": "ann tells the server: its name",
            "samples": "trains on 6 samples of 3",
            "signature": "of 3 (float32)",
            "held": "ids of the tasks that it holds",
            "table_sha256": "whether its data are a table",
            "code_sha256": "names code of users (python:…): that the node accepts it",
            "ledger": "which state of the server's own ledger it was told last",
            "hides_numbers": "takes part under secure aggregation alone",
        },
        "Signature": {
            "input_shape": "of 3",
            "input_dtype": "float32",
            "classes": "up to 2 classes",
            "target_shape": "a number each",
            "target_dtype": "(int64)",
            "columns": "names of 0 features, 0 targets",
            "labels": "targets and 0 classes",
            "names_sha256": "the hash",
            "form": "names, shapes and types of a sample's tensors",
        },
        "FromSession": {
            "task": "For each task it sends: a masked message",
            "attempt": "For each task it sends: a masked message",
            "keys": "for its mask keys",
            "shares": "encrypted shares",
            "consent": "signatures",
            "unmasking": "shares of masks",
            "aborted": "the reason why it ends the session",
        },
        "Heartbeat": {"held": "ids of the tasks that it holds"},
        "Failed": {
            "task": "Where a task fails",
            "reason": "a sentence of why",
            "diverged": "a sentence of why",
            "lacks_model": "whether the model that differences are added to was lost",
            "lacks_fixed_part": "whether the fixed part of its model is another",
        },
        "Farewell": {
            "reason": "or it takes no part in a run: a sentence of why",
            "is_final": "takes no part in a run",
            "is_refusal": "",
        },
        "Scores": {
            "id": "evaluation by clients",
            "samples": "how many samples it holds out",
            "loss": "mean loss",
            "metrics": "metrics",
            "problem": "a sentence of why",
        },
        "Answer": {
            "task": "For each task it sends",
            "payload": "the trained model, or what the algorithm reports",
            "offset": "For each task it sends",
            "weight": "how many samples it was trained on",
            "samples": "how many samples it was trained on",
            "train_loss": "the mean training loss",
            "began_anew": "whether what it kept between tasks was lost",
            "metrics": "numbers among the metrics that its app returns",
        },
    }
    for name, fields in words.items():
        message = protocol_pb2.DESCRIPTOR.message_types_by_name[name]
        assert {field.name for field in message.fields} == fields.keys()
        assert [words for words in fields.values() if words not in said.replace("\n", " ")] == []
    kinds = [kind.message_type for kind in protocol_pb2.DESCRIPTOR.message_types_by_name["FromNode"].fields]
    assert {kind.name for kind in kinds if kind} == words.keys() - {"Signature", "Answer"} | {"TaskId"}


def test_a_server_whose_port_is_taken_leaves_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        assert main(["server", "experiment.yaml", "--listen", address, "--insecure", "--output", "run"]) == 2
    assert "is another program there" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "127.0.0.1:²", ":1"])
def test_an_address_is_a_host_and_a_port(address: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (
        ["server", "experiment.yaml", "--listen", address, "--insecure"],
        ["client", "--server", address, "--insecure", "--name", "ann", "--data", "data.yaml"],
    ):
        assert main(command) == 2
        assert "must be HOST:PORT, the port at most 65535, got" in capsys.readouterr().err


def test_a_node_goes_by_the_name_in_its_certificate(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "init", "keys"]) == main(["keys", "issue", "keys", "ann"]) == 0
    command = ["client", "--data", "data.yaml", "--credentials", "keys/nodes/ann", "--dry-run"]
    assert main([*command, "--name", "ben"]) == 2
    assert "says, got ben: leave --name out" in capsys.readouterr().err
    assert main([*command, "--name", "ann"]) == main(command) == 0


@pytest.mark.parametrize(
    "command",
    [
        ["server", "experiment.yaml", "--insecure", "--listen", "127.0.0.1:0"],
        ["client", "--data", "data.yaml", "--name", "ann", "--dry-run"],
        ["peer", "peers.yaml", "--data", "data.yaml", "--name", "ann", "--insecure", "--listen", "127.0.0.1:0"],
    ],
)
def test_a_device_that_is_missing_is_refused(
    command: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "peers.yaml").write_text("{data: null, algorithm: {kind: dpsgd}, model: {kind: logistic}}")
    assert main([*command, "--device", "cuda:9"]) == 2
    assert "device cuda:9 is not on this machine, which has cpu" in capsys.readouterr().err
    assert not (folder / "runs").exists()


def test_an_algorithm_that_needs_no_server_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["server", "experiment.yaml", "--insecure", "--set", "algorithm=dpsgd", "--output", "run"]) == 2
    assert "a deployment needs clients that report to a coordinator, got algorithm dpsgd" in capsys.readouterr().err


def test_grpc_writes_nothing_of_its_own_beside_our_sentences(folder: Path) -> None:
    program = """
import asyncio, socket
import fed
from fed.errors import InvalidInput
from fed.processes.clock import SYSTEM_CLOCK
from fed.wire.listening import Listening

other = socket.create_server(("127.0.0.1", 0))
address = f"127.0.0.1:{other.getsockname()[1]}"
handler = fed.wire.listening.grpc.method_handlers_generic_handler("of a test", {})
try:
    asyncio.run(Listening(SYSTEM_CLOCK).begin(address, handler, None, "the server"))
except InvalidInput as error:
    print(str(error)[:24])
"""
    unset = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=unset, capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("the server cannot listen\n", "")


INTERRUPTED = """
import os, signal, sys
from fed.__main__ import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # as at a terminal, wherever the tests run

moment, number, *arguments = sys.argv[1:]

class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == moment:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), int(number))

sys.meta_path.insert(0, Interrupter())
sys.argv[1:] = arguments
sys.exit(main())
"""
SERVER = ["server", "experiment.yaml", "--listen", "127.0.0.1:0", "--insecure", "--output", "run"]
CLIENT = ["client", "--server", "127.0.0.1:1", "--insecure", "--name", "ann", "--data", "data.yaml"]


@pytest.mark.parametrize(
    ("command", "moment", "number", "end"),
    [
        (SERVER, "typer", signal.SIGINT, (130, "")),
        (CLIENT, "fed.clients.node.training_process", signal.SIGTERM, (0, "stopped; 0 tasks were done\n")),
        pytest.param(SERVER, "torch", signal.SIGINT, (130, "stopped\n"), marks=pytest.mark.long),
        pytest.param(SERVER, "grpc", signal.SIGTERM, (130, "stopped\n"), marks=pytest.mark.long),
        pytest.param(CLIENT, "torch", signal.SIGINT, (0, "stopped; 0 tasks were done\n"), marks=pytest.mark.long),
        pytest.param([*CLIENT, "--dry-run"], "torch", signal.SIGINT, (130, "stopped\n"), marks=pytest.mark.long),
    ],
)
def test_a_signal_at_any_moment_of_start_is_obeyed(
    command: list[str], moment: str, number: int, end: tuple[int, str], folder: Path
) -> None:
    program = [sys.executable, "-c", INTERRUPTED, moment, str(int(number)), *command]
    done = subprocess.run(program, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == end


def test_an_interrupt_that_pydantic_has_wrapped_is_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    def serve(experiment: Experiment, **_: Any) -> None:
        monkeypatch.setattr("fed.config.components.Component.model_dump", interrupted)
        experiment.dump()

    monkeypatch.setattr("fed.server.grpc.deploy.serve", serve)
    assert main(SERVER) == 130
    assert capsys.readouterr().err == "stopped; fed server --resume run goes on\n"


def test_an_interrupt_while_an_object_is_copied_is_not_lost() -> None:
    """The first copy of a class's object writes to the class, and whatever goes wrong there is ignored by Python."""

    class Interrupting(type):
        def __setattr__(cls, name: str, value: object) -> None:
            assert name == "__slotnames__"
            os.kill(os.getpid(), signal.SIGINT)

    class Copied(metaclass=Interrupting):
        pass

    @stopped_in_order()
    def copied() -> None:
        copy.copy(Copied())
        time.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        copied()


def test_a_server_in_the_background_obeys_an_interrupt(folder: Path) -> None:
    log = folder / "log"
    command = ["server", str(folder / "experiment.yaml"), "--listen", "127.0.0.1:0", "--insecure"]
    server = started([*command, "--output", str(folder / "run")], log, {"is_in_background": True})
    try:
        wait_for(lambda: "listening" in log.read_text(), "the server")
        os.kill(server.pid, signal.SIGINT)
        assert server.wait(30) == 130, log.read_text()
    finally:
        server.kill()
    assert log.read_text().splitlines()[-1].startswith("stopped; fed server --resume")
