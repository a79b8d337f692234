"""A run's schema on real nodes: each finds its columns by name, and one whose table does not fit takes no part."""

from pathlib import Path
from typing import Any

import pytest

from fed.config import yaml
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
    assert "client 'bad' takes no part: " in (tmp_path / "server.log").read_text()
    simulated = ["simulate", f"{tmp_path}/simulated.yaml", "--output", f"{tmp_path}/simulated"]
    assert started(simulated, tmp_path / "simulated.log").wait(_LIMIT_S) == 0
    models = [(tmp_path / run / "model.safetensors").read_bytes() for run in ("deployed", "simulated")]
    assert models[0] == models[1]


def node(folder: Path, name: str, table: str, address: str) -> Process:
    description = {"data": {"kind": "csv", "path": str(folder / table)}}
    (folder / f"{name}.yaml").write_text(yaml.dump(description))
    where = ["--insecure", "--server", address, "--data", f"{folder}/{name}.yaml", "--name", name]
    return started(["client", *where], folder / f"{name}.log")
