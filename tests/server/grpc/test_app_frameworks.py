"""Apps of scikit-learn, Keras, JAX and XGBoost: in one process, in workers and at three nodes with the same bits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import fed
from fed.clients.apps.arrays import AppModel, Array
from fed.config import yaml
from tests.programs import started
from tests.server.deployed import Program, free_port

pytestmark = pytest.mark.long  # Keras, JAX and XGBoost are of the extra all-tests

LR = {"sklearn": 0.01, "keras": 0.3, "jax": 0.3, "xgboost": 0.5}
CLIENTS = 3


def asked(framework: str, **changed: Any) -> fed.Experiment:
    keys: dict[str, Any] = {
        "app": {"kind": f"python:examples.apps.digits_{framework}:Client", "clients": CLIENTS},
        "local": {"lr": LR[framework], "epochs": 2},
        "rounds": {"count": 3},
    }
    return fed.Experiment(**{**keys, **changed})


def lines(run: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{**line, "virtual_s": 0, "wall_s": 0} for line in found]


@pytest.mark.parametrize("framework", LR)
def test_frameworks_have_the_same_bits_in_workers_and_at_nodes(
    framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All in processes of their own, since these frameworks leave threads behind in the one that loads them."""
    monkeypatch.delenv("OMP_NUM_THREADS")  # as users' processes have it
    file = tmp_path / "experiment.yaml"
    file.write_text(yaml.dump(asked(framework).dump()))
    address = f"127.0.0.1:{free_port()}"
    where = ["--insecure", "--app", f"examples.apps.digits_{framework}:Client"]
    commands = {
        "alone": ["simulate", str(file), "--set", "simulation.workers=0"],
        "workers": ["simulate", str(file), "--set", "simulation.workers=2"],
        "nodes": ["server", str(file), "--listen", address, "--insecure", "--min-nodes", str(CLIENTS)],
    }
    for name, command in commands.items():
        programs = [[*command, "--output", str(tmp_path / name)]]
        if name == "nodes":
            programs += [["client", "--server", address, "--name", str(node), *where] for node in range(CLIENTS)]
            programs[1:] = [[*one, "--state", str(tmp_path / one[4])] for one in programs[1:]]
        logs = [tmp_path / f"{name}-{number}.log" for number in range(len(programs))]
        running = [Program(started(one, log), log) for one, log in zip(programs, logs, strict=True)]
        ended = [program.end(within_s=900) for program in running]
        assert ended == [0] * len(running), running[0].said
    first = load_file(tmp_path / "alone" / "model.safetensors")
    assert lines(tmp_path / "alone")[-1]["test_accuracy"] > 0.75
    assert all(line["replied"] == CLIENTS for line in lines(tmp_path / "alone"))
    for other in ("workers", "nodes"):
        found = load_file(tmp_path / other / "model.safetensors")
        assert found.keys() == first.keys()
        assert all(np.array_equal(found[name], first[name]) for name in first), other
        assert lines(tmp_path / other) == lines(tmp_path / "alone"), other


def trained(**changed: Any) -> tuple[dict[str, Array], float]:
    run = fed.simulate(asked("sklearn", simulation={"workers": 0}, **changed))
    assert isinstance(run.model, AppModel)
    return run.model.arrays(), run.metrics[-1]["test_accuracy"]


def test_rules_codecs_and_secure_sums_go_with_scikit_learn() -> None:
    app = {**asked("sklearn").dump()["app"], "clients": 10}
    plain, accuracy = trained(app=app)
    assert accuracy > 0.85
    rule, _ = trained(app=app, algorithm={"kind": "fedavgm", "momentum": 0.0})
    assert all(np.array_equal(rule[name], plain[name]) for name in plain)
    _, accuracy = trained(app=app, algorithm={"kind": "fedadam", "server_lr": 0.1})
    assert accuracy > 0.8
    largest = max(abs(part).max() for part in plain.values())
    for changed in ({"uplink": ["int8"]}, {"secure_aggregation": {"kind": "masks", "max_weight": 200}}):
        found, _ = trained(app=app, **changed)
        # A step of int8 is at most 2/255 of the largest number of an update, and each of three rounds rounds once.
        gaps = [abs(found[name] - plain[name]).max() for name in plain]
        assert 0 < max(gaps) < 3 * 2 / 255 * 2 * largest
