"""Compare a server and its nodes on this machine with a simulation of the same experiment: the bits must be equal.

The program makes keys, simulates, starts ``fed server`` and a ``fed client`` for each client of the experiment as
processes that use gRPC with mutual TLS over loopback, and compares the models. All files are in ``runs/edge``. All
processes are ended in any case.

    python examples/edge/run.py --output runs/edge
    python examples/edge/run.py --experiment examples/edge/secure.yaml --output runs/secure-edge
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
PATIENCE_S = 600.0
FED = (sys.executable, "-m", "fed")


def fed(*arguments: object) -> None:
    """Run one command to its end.

    Raises:
        SystemExit: if it fails.
    """
    if code := subprocess.run([*FED, *map(str, arguments)], check=False).returncode:
        sys.exit(f"fed {arguments[0]} ended with status {code}")


@contextlib.contextmanager
def started(log: Path, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """A running command, whose processes are ended on exit."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*FED, *map(str, arguments)], stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its training process too
            process.wait()


def port_of(server: subprocess.Popen[bytes], log: Path) -> int:
    """The port on which a server, or a peer, listens, once it does."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s and server.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("listening on "):
                return int(line.split()[2].rpartition(":")[2])
        time.sleep(0.05)
    sys.exit(f"nothing listens; {log} says:\n{log.read_text()}")


def deploy(experiment: Path, output: Path) -> None:
    """Keys, a server and a node for each client, until the run is over.

    Raises:
        SystemExit: if it fails.
    """
    keys = output / "keys"
    logs = output / "logs"
    given = yaml.safe_load(experiment.read_text(encoding="utf-8"))
    nodes = [str(client) for client in range(given["data"]["clients"])]
    secure = ["--secure", "--new-record"] if "secure_aggregation" in given else []
    for old in (keys, logs, output / "state"):
        shutil.rmtree(old, ignore_errors=True)
    logs.mkdir(parents=True)
    fed("keys", "init", keys, "--host", "127.0.0.1")
    for name in nodes:
        fed("keys", "issue", keys, name)
    with contextlib.ExitStack() as processes:
        serving = ["server", experiment, "--listen", "127.0.0.1:0", "--credentials", keys, "--min-nodes", len(nodes)]
        serving += ["--output", output / "grpc", "--overwrite"]
        server = processes.enter_context(started(logs / "server.log", *serving))
        port = port_of(server, logs / "server.log")
        for name in nodes:
            data = keys / "nodes" / name / "data.yaml"  # in this example a client of the experiment's data
            data.write_text(yaml.safe_dump({"data": given["data"], "client": int(name), "seed": given["seed"]}))
            command = ["client", "--server", f"127.0.0.1:{port}", "--credentials", keys / "nodes" / name]
            command += ["--data", data, "--state", output / "state" / name, *secure]
            processes.enter_context(started(logs / f"node-{name}.log", *command))
        try:
            code = server.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            sys.exit(f"the server is not done after {PATIENCE_S:g} s: see {logs}")
    text = (logs / "server.log").read_text()
    print(text, end="")
    if code:
        sys.exit(f"the server ended with status {code}; what nodes say is in {logs}")


def main() -> int:
    """Simulate, deploy and compare; 1 where the models differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/edge"))
    parser.add_argument("--experiment", type=Path, default=HERE / "experiment.yaml")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    fed("simulate", given.experiment, "--output", given.output / "simulated", "--overwrite")
    deploy(given.experiment, given.output)
    simulated, deployed = (given.output / name for name in ("simulated", "grpc"))
    accuracy = json.loads((deployed / "summary.json").read_text())["final_test_accuracy"]
    are_same = (simulated / "model.safetensors").read_bytes() == (deployed / "model.safetensors").read_bytes()
    print(
        f"test accuracy {accuracy:.3f}; simulated and deployed models {'have the same bits' if are_same else 'differ'}"
    )
    return 0 if are_same else 1


if __name__ == "__main__":
    sys.exit(main())
