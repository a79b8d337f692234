"""Compare eight peers without a coordinator on this machine with a simulation of the same experiment, bit by bit.

The program makes keys, simulates, starts eight ``fed peer`` as processes that use gRPC with mutual TLS over loopback,
and compares each peer's model with the simulation's model of that peer. All files are in ``runs/gossip``. Every process
is ended, whatever happens.

    python -m examples.gossip.run --output runs/gossip
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
from collections.abc import Mapping
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

import fed
from examples.edge.run import PATIENCE_S, port_of, started
from examples.edge.run import fed as command

EXPERIMENT = Path(__file__).resolve().parent.parent / "gossip.yaml"
PEERS = 8
Model = Mapping[str, Tensor]


def describe_data(experiment: fed.Experiment, output: Path) -> None:
    """Write each peer's data file: in this example one client each of the experiment's data."""
    assert experiment.data is not None
    source = experiment.data.model_dump(mode="json", exclude_unset=True)
    for peer in range(PEERS):
        own = {"data": source, "client": peer, "seed": experiment.seed}
        (output / f"peer-{peer}.yaml").write_text(yaml.safe_dump(own, sort_keys=False))


def deploy(path: Path, output: Path) -> list[Model]:
    """Make keys, and run eight peers to their end; returns the peers' models.

    Raises:
        SystemExit: if it fails.
    """
    keys = output / "keys"
    logs = output / "logs"
    for old in (keys, logs, *output.glob("peer-?")):
        shutil.rmtree(old, ignore_errors=True)
    logs.mkdir()
    command("keys", "init", keys)
    for peer in range(PEERS):
        command("keys", "issue", keys, peer, "--peer")
    until_s = time.monotonic() + PATIENCE_S
    with contextlib.ExitStack() as processes:
        peers: list[subprocess.Popen[bytes]] = []
        first: list[str] = []
        for peer in range(PEERS):
            own = ["--credentials", keys / "nodes" / str(peer), "--data", output / f"peer-{peer}.yaml"]
            place = ["--listen", "127.0.0.1:0", *first, "--min-peers", PEERS, "--output", output / f"peer-{peer}"]
            log = logs / f"peer-{peer}.log"
            peers.append(processes.enter_context(started(log, "peer", path, *own, *place)))
            first = first or ["--join", f"127.0.0.1:{port_of(peers[0], log)}"]
        try:
            codes = [process.wait(max(0.0, until_s - time.monotonic())) for process in peers]
        except subprocess.TimeoutExpired:
            sys.exit(f"the peers are not done after {PATIENCE_S:g} s: see {logs}")
    print((logs / "peer-0.log").read_text(), end="")
    if any(codes):
        sys.exit(f"peers must end with status 0, got {codes}; what they say is in {logs}")
    return [load_file(output / f"peer-{peer}" / "model.safetensors") for peer in range(PEERS)]


def consensus_distance(models: list[Model]) -> float:
    """Root of the peers' mean squared distance from their mean."""
    rows = [torch.cat([tensor.double().flatten() for tensor in model.values()]) for model in models]
    return float(torch.stack(rows).var(0, correction=0).sum().sqrt())


def main() -> int:
    """Simulate, deploy and compare; 1 where the models differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/gossip"))
    parser.add_argument("--experiment", type=Path, default=EXPERIMENT)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    experiment = fed.Experiment.load(given.experiment)
    run = fed.simulate(experiment, output=given.output / "simulated", overwrite=True)
    simulated: list[Model] = [run.models[peer].state_dict() for peer in range(PEERS)]
    describe_data(experiment, given.output)
    deployed = deploy(given.experiment, given.output)
    same = [
        one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        for one, other in zip(simulated, deployed, strict=True)
    ]
    accuracies = [
        json.loads((given.output / f"peer-{peer}" / "summary.json").read_text())["final_test_accuracy"]
        for peer in range(PEERS)
    ]
    print(f"test accuracy {min(accuracies):.3f} to {max(accuracies):.3f}")
    distances = [f"{consensus_distance(models):.6g}" for models in (simulated, deployed)]
    print(f"consensus distance {distances[0]} simulated, {distances[1]} deployed")
    print(f"{sum(same)} of {PEERS} peers have the bits of the simulation: {given.output}/simulated/report.html")
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
