"""Runs that the code of 25 November 2026 began and today's goes on with: their parts, and how their folders were made.

All numbers of training are dyadic and short, so that no sum is rounded: the bits are the same on every processor.
The sources of :class:`Linear` and of :func:`halved` are hashed in the folders; a change of one is a change of the run.

A folder of another state of the repository is made there by ``python -m tests.simulations.earlier_runs FOLDER``.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fed

FOLDERS = Path(__file__).parent / "data" / "earlier_runs"
END = "end.json"
ROUNDS = 4
BROKEN_OFF = 2  # the last round that the earlier code did

BASE: dict[str, Any] = {
    "name": "earlier",
    "data": None,
    "model": None,
    "loss": "mse",
    "local": {"lr": 0.5, "batch_size": 2, "epochs": 1},
    "checkpoints": {"every": 1, "keep": ROUNDS},
    "simulation": {"workers": 0, "batching": "off"},
}
CASES: dict[str, dict[str, Any]] = {
    "fedavg": {"rounds": {"kind": "synchronous"}},
    "users_loss": {"loss": None, "metrics": None},
    "secure": {
        "secure_aggregation": {"clip": 8.0, "max_weight": 2, "minimum_cohort": 3},
        "rounds": {"kind": "synchronous"},
    },
    "scaffold_buffered": {
        "algorithm": "scaffold",
        "rounds": {"kind": "buffered", "buffer": 2, "concurrency": 4, "staleness": "constant"},
    },
    "ditto": {"algorithm": {"kind": "ditto", "strength": 0.5}},
    "feedback": {"uplink": [{"kind": "topk", "fraction": 0.5}], "error_feedback": "ef"},
    "gossip": {"algorithm": "gradient_tracking", "topology": "random_matching"},
}


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight_F = nn.Parameter(torch.zeros(4))

    def forward(self, inputs_BF: Tensor) -> Tensor:
        return inputs_BF @ self.weight_F


def halved(inner: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def half(output: Tensor, target: Tensor) -> Tensor:
        return inner(output, target) / 2

    return half


def data() -> fed.FederatedData:
    """Four clients of two samples each, which are its test set too, and a test set of two, whose sum has no order."""
    inputs_EF = torch.tensor(
        [
            [1, 0, 0, 0],
            [0, 1, 0, 1],
            [0, 0, 1, 0],
            [1, 0, 0, -1],
            [0, 1, 0, 0],
            [0, 0, 1, 1],
            [1, -1, 0, 0],
            [0, 0, 0, 1],
        ],
        dtype=torch.float32,
    )
    targets_E = torch.tensor([1.0, -2.0, 3.0, 2.0, 0.0, 1.0, -1.0, 2.0])
    train = {client: (inputs_EF[2 * client :][:2], targets_E[2 * client :][:2]) for client in range(4)}
    return fed.FederatedData(train, (inputs_EF[::4], targets_E[::4] + 1), client_tests=train)


def parts(case: str) -> dict[str, Any]:
    """Parts given in Python beside a case's experiment: data, a model, and a loss and a metric where it names none."""
    given: dict[str, Any] = {"data": data(), "model": Linear}
    if case == "users_loss":
        built_in = fed.Experiment(loss="mse").loss
        assert built_in is not None
        given |= {"loss": halved(built_in.make()), "metric": {"half": halved(built_in.make())}}
    return given


def experiment(case: str) -> fed.Experiment:
    """The experiment of a case."""
    keys = {**BASE, **CASES[case]}
    return fed.Experiment(**{**keys, "rounds": {**keys.get("rounds", {}), "count": ROUNDS}})


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """A run's metrics, but for the time that it took."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in line.items() if key != "wall_s"} for line in lines]


def model_sha256(folder: Path) -> str:
    """The SHA-256 of the bytes of a run's final model."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def write(folder: Path, case: str) -> None:
    """Run a case, keep its end apart, and leave the folder as a kill after ``BROKEN_OFF`` rounds would."""
    fed.simulate(experiment(case), output=folder, **parts(case))
    end = {"model": model_sha256(folder), "metrics": lines_of(folder)}
    (folder / END).write_text(json.dumps(end, indent=1) + "\n", encoding="utf-8")
    for path in folder.glob("*.jsonl"):
        kept = [
            line for line in path.read_text(encoding="utf-8").splitlines() if json.loads(line)["round"] <= BROKEN_OFF
        ]
        path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    for path in (folder / "checkpoints").iterdir():
        if f"{BROKEN_OFF:06d}" not in path.name:
            path.unlink()
    for name in ("summary.json", "population.json", "model.safetensors", "models.safetensors"):
        (folder / name).unlink(missing_ok=True)
    # what tells of the machine is left out
    environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    told = {key: environment[key] for key in ("fed", "given", "inputs", "sha256")}
    (folder / "environment.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for each in CASES:
        write(Path(sys.argv[1]) / each, each)
