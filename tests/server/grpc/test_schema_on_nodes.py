"""A run's schema on real nodes: each finds its columns by name, and one whose table does not fit takes no part.

The tables are standardized over all clients, in a first exchange that has the bits of the simulation's.
"""

from pathlib import Path
from typing import Any

import pytest

from fed.config import yaml
from fed.identity.authority import Authority
from fed.secure_aggregation.reasons import Reason
from tests.clients.data.test_schema import wine
from tests.programs import Process, started
from tests.server.deployed import free_port

_LIMIT_S = 120.0


@pytest.mark.long
def test_wine_on_three_nodes_has_the_bits_of_its_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    keys: dict[str, Any] = {
        **wine(tmp_path / "wine", is_shuffled=True),
        "evaluation": "clients",
        "simulation": {"batching": "off", "workers": 0},
    }
    keys["table"]["standardize"] = "federated"
    bad = (tmp_path / "wine" / "a.csv").read_text().replace("barolo", "chianti", 1)
    (tmp_path / "bad.csv").write_text(bad)
    (tmp_path / "server.yaml").write_text(yaml.dump({**keys, "data": None}))
    (tmp_path / "simulated.yaml").write_text(yaml.dump({**keys, "data": {**keys["data"], "test_fraction": 0.0}}))
    address = f"127.0.0.1:{free_port()}"
    where = ["--insecure", "--listen", address, "--min-nodes", "3", "--output", f"{tmp_path}/deployed"]
    server = started(["server", f"{tmp_path}/server.yaml", *where], tmp_path / "server.log")
    nodes = [node(tmp_path, name, f"wine/{name}.csv", address) for name in "abc"]
    refused = node(tmp_path, "bad", "bad.csv", address)
    assert refused.wait(_LIMIT_S) == 1
    said = "column cultivar must be one of barolo, grignolino, barbera, got 'chianti'"
    assert said in (tmp_path / "bad.log").read_text()
    assert [process.wait(_LIMIT_S) for process in (server, *nodes)] == [0] * 4
    assert (tmp_path / "server.log").read_text().count("bad.csv") == 1
    simulated = ["simulate", f"{tmp_path}/simulated.yaml", "--output", f"{tmp_path}/simulated"]
    assert started(simulated, tmp_path / "simulated.log").wait(_LIMIT_S) == 0
    models = [(tmp_path / run / "model.safetensors").read_bytes() for run in ("deployed", "simulated")]
    assert models[0] == models[1]
    hold_to_one_exchange(tmp_path)


@pytest.mark.long
def test_secure_nodes_standardize_with_the_bits_of_their_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    keys: dict[str, Any] = {
        **wine(tmp_path / "wine", is_shuffled=True),
        "algorithm": "local_sgd",
        "secure_aggregation": {"minimum_cohort": 3, "max_drop_out": 0.0},
        "simulation": {"batching": "off", "workers": 0},
    }
    test = {"path": f"{tmp_path}/wine/c.csv"}
    features = {name: {"bounds": [0, 2000]} for name in keys["table"]["features"]}
    keys["table"] = {**keys["table"], "features": features, "standardize": "federated"}
    (tmp_path / "server.yaml").write_text(yaml.dump({**keys, "data": {"kind": "csv", "test": test}}))
    (tmp_path / "simulated.yaml").write_text(yaml.dump({**keys, "data": {**keys["data"], "test": test}}))
    authority = Authority.create(tmp_path / "keys", hosts=["127.0.0.1"])
    for name in ("a", "b", "c", "bad"):
        authority.issue(name)
    (tmp_path / "bad.csv").write_text((tmp_path / "wine" / "a.csv").read_text().replace("barolo", "chianti", 1))
    address = f"127.0.0.1:{free_port()}"
    where = ["--credentials", f"{tmp_path}/keys", "--listen", address, "--min-nodes", "3"]
    server = started(
        ["server", f"{tmp_path}/server.yaml", *where, "--output", f"{tmp_path}/deployed"], tmp_path / "server.log"
    )
    refused = node(tmp_path, "bad", "bad.csv", address, is_secure=True)
    nodes = [node(tmp_path, name, f"wine/{name}.csv", address, is_secure=True) for name in "abc"]
    assert refused.wait(_LIMIT_S) == 1
    said = "column cultivar must be one of barolo, grignolino, barbera, got 'chianti'"
    assert said in (tmp_path / "bad.log").read_text()
    assert [process.wait(_LIMIT_S) for process in (server, *nodes)] == [0] * 4
    log = (tmp_path / "server.log").read_text()
    assert f"client 'bad' takes no part: {Reason.CANNOT_FOLLOW}" in log
    assert "chianti" not in log
    simulated = ["simulate", f"{tmp_path}/simulated.yaml", "--output", f"{tmp_path}/simulated"]
    assert started(simulated, tmp_path / "simulated.log").wait(_LIMIT_S) == 0
    models = [(tmp_path / run / "model.safetensors").read_bytes() for run in ("deployed", "simulated")]
    assert models[0] == models[1]
    hold_to_one_exchange(tmp_path)


def hold_to_one_exchange(folder: Path) -> None:
    """Check that both runs keep the same numbers, and that the server says them once."""
    kept = [yaml.parse((folder / run / "experiment.yaml").read_text())["table"] for run in ("deployed", "simulated")]
    assert kept[0]["standardize"] == kept[1]["standardize"]
    assert set(kept[0]["standardize"]) == set(kept[0]["features"])
    assert (folder / "server.log").read_text().count("standardized over 3 clients, by mean and deviation: ") == 1
    assert " of 1 nodes are there" not in (folder / "server.log").read_text()
    for name in "abc":
        log = (folder / f"{name}.log").read_text()
        questions = [line for line in log.splitlines() if line.startswith("answered the question for")]
        assert [line.rpartition(" the ")[2] for line in questions] == [
            "mean of 13 columns",
            "standard deviation of 13 columns",
        ]
        assert "; 2 tasks were done" in log
        assert "schema" not in log


def node(folder: Path, name: str, table: str, address: str, *, is_secure: bool = False) -> Process:
    description = {"data": {"kind": "csv", "path": str(folder / table)}}
    (folder / f"{name}.yaml").write_text(yaml.dump(description))
    where = ["--server", address, "--data", f"{folder}/{name}.yaml"]
    credentials = ["--credentials", f"{folder}/keys/nodes/{name}", "--secure", "--new-record", "--minimum-cohort", "3"]
    who = credentials if is_secure else ["--insecure", "--name", name]
    return started(["client", *where, *who], folder / f"{name}.log")
