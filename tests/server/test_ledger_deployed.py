"""A real deployment whose server is killed and put back: its nodes and its ledger know what was released."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fed.privacy.accounting import epsilon
from fed.privacy.ledger import Ledger
from fed.privacy.mechanisms import BandedNoise
from fed.privacy.participation import ParticipationRule
from fed.privacy.releases import Release
from tests.server.deployed import Deployment, wait_for

pytestmark = pytest.mark.long
RELEASE = Release(noise_multiplier=1.0)
KEYS: dict[str, Any] = {
    "data": {"kind": "digits", "clients": 3},
    "model": {"kind": "mlp", "hidden": [8]},
    "rounds": {"count": 12},
    "privacy": {"kind": "central", "noise_multiplier": 1.0, "clip": 0.3},
    "checkpoints": {"every": 1, "keep": 12},
}


@pytest.fixture
def deployed(tmp_path: Path) -> Iterator[Deployment]:
    """Three nodes with certificates."""
    found = Deployment(tmp_path / "deployed", KEYS, insecure=False)
    yield found
    found.close()


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's state, of the server and of its nodes."""
    monkeypatch.setenv("FED_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


def spent(state: Path) -> Ledger:
    """The federation's ledger, whole."""
    (path,) = state.glob("privacy/federation-*/ledger.jsonl")
    return Ledger.read(path)


def rounds_of(run: Path) -> int:
    """Rounds of a run that its folder has metrics of; its newest checkpoint may be of one less."""
    return len((run / "metrics.jsonl").read_text().splitlines())


def test_killed_and_restored_server_forgets_no_release(deployed: Deployment, state: Path) -> None:
    server = deployed.server()
    clients = deployed.all_clients()
    most = 0
    older = deployed.folder / "older"
    for number in (2, 5):
        deployed.wait_for_round(number)
        server.kill()
        count = spent(state).head.count
        assert count >= max(most, number)
        most = count
        if number == 2:
            shutil.copytree(deployed.output, older)
        else:  # an older copy of the whole run
            shutil.rmtree(deployed.output)
            shutil.copytree(older, deployed.output)
        server = deployed.server(resume=True)
    assert server.end() == 0
    assert [client.end() for client in clients] == [0, 0, 0]
    ledger = spent(state)
    asked = Counter(entry.round for entry in ledger.entries)
    # The older copy had some rounds still to come, which were released twice; a round that was cut off counts too.
    assert {*asked} == {*range(1, 13)}
    kept = rounds_of(older)
    assert kept < 5
    assert all(asked[number] >= 2 for number in range(kept + 1, 6))
    assert ledger.head.count - most in (12 - kept, 13 - kept)
    line = deployed.metrics()[-1]
    assert line["epsilon"] == pytest.approx(epsilon({RELEASE: ledger.head.count}, 1e-5), rel=0.005)
    assert (deployed.output / "ledger.jsonl").read_text() == "".join(
        path.read_text() for path in state.glob("privacy/federation-*/ledger.jsonl")
    )
    for client in range(3):
        own = Ledger.read(deployed.folder / f"state-{client}" / "privacy" / "ledger.jsonl")
        assert own.releases() == {RELEASE: own.head.count}
        assert 12 <= own.head.count <= ledger.head.count
        last = own.entries[-1].told
        assert last is not None
        assert ledger.hash_at(last["count"]) == last["sha256"]


def test_another_run_of_the_federation_adds_up(deployed: Deployment, state: Path) -> None:
    for name in ("one", "two"):
        deployed.output = deployed.folder / name
        server = deployed.server()
        clients = deployed.all_clients()
        assert server.end() == 0
        assert [client.end() for client in clients] == [0, 0, 0]
    assert spent(state).releases() == {RELEASE: 24}
    assert deployed.metrics()[-1]["epsilon"] == pytest.approx(epsilon({RELEASE: 24}, 1e-5), rel=0.005)


def test_nodes_refuse_a_server_whose_whole_state_is_older(deployed: Deployment, state: Path) -> None:
    server = deployed.server()
    clients = deployed.all_clients()
    deployed.wait_for_round(2)
    server.kill()
    kept = {
        "run": deployed.output,
        "federation": next(state.glob("privacy/federation-*")),
    }
    for name, place in kept.items():
        shutil.copytree(place, deployed.folder / "older" / name)
    server = deployed.server(resume=True)
    deployed.wait_for_round(5)
    server.kill()
    for name, place in kept.items():
        shutil.rmtree(place)
        shutil.copytree(deployed.folder / "older" / name, place)
    server = deployed.server(resume=True)
    for client in clients:
        client.wait_to_say("put the newest ledger back at the server")
        assert client.end() == 1
    before = len(json.dumps(deployed.metrics()))
    wait_for(lambda: "refuse" in server.said or True, "the server to have heard them")
    assert len(json.dumps(deployed.metrics())) == before


@pytest.mark.parametrize("is_secure", [False, True], ids=["open", "masked"])
def test_killed_server_keeps_to_the_rule_of_correlated_noise(is_secure: bool, tmp_path: Path, state: Path) -> None:
    """No client is asked within its separation, and ε is that of all rows that were released, lost ones too."""
    clients = 6 if is_secure else 4
    privacy = {"kind": "dp_ftrl", "noise_multiplier": 2.0, "clip": 0.3, "mechanism": {"kind": "banded", "bands": 2}}
    keys: dict[str, Any] = {
        **KEYS,
        "data": {"kind": "digits", "clients": clients},
        "rounds": {"count": 8, "cohort": clients // 2},
        "privacy": privacy,
    }
    if is_secure:
        keys["secure_aggregation"] = {"minimum_cohort": 3, "max_drop_out": 0.0}
    deployed = Deployment(tmp_path / "deployed", keys, clients=clients, insecure=False, secure=is_secure)
    try:
        server = deployed.server()
        nodes = deployed.all_clients()
        for number in (2, 5):
            deployed.wait_for_round(number)
            server.kill()
            if number == 2:
                shutil.copytree(deployed.output, deployed.folder / "older")
            else:
                shutil.rmtree(deployed.output)
                shutil.copytree(deployed.folder / "older", deployed.output)
            server = deployed.server(resume=True)
        assert server.end() == 0, server.said
        assert [node.end() for node in nodes] == [0] * clients
    finally:
        deployed.close()
    asked: dict[str, list[int]] = {}
    for line in (deployed.output / "participation.jsonl").read_text().splitlines():
        for client in json.loads(line)["asked"]:
            asked.setdefault(client, []).append(json.loads(line)["round"])
    assert len(asked) == clients
    assert all(sorted({*rounds}) == [*range(rounds[0], 9, 2)] for rounds in asked.values())
    rule = ParticipationRule(rounds=8, min_separation=2)
    mechanism = BandedNoise(bands=2).mechanism(rule)
    before: set[int] = set()
    squares = 0.0
    for entry in spent(state).entries:
        release = mechanism.release(2.0, rule, entry.round, is_repeated=entry.round in before)
        assert release is not None
        assert [cost.releases for cost in entry.costs] == [{release: 1}]
        before.add(entry.round)
        squares += release.noise_multiplier**-2
    assert before == {*range(1, 9)}
    assert len(spent(state).entries) > 8  # for the older copy had some rounds still to come
    found = deployed.metrics()[-1]["epsilon"]
    assert found == pytest.approx(epsilon({Release(noise_multiplier=squares**-0.5): 1}, 1e-5), rel=0.005)
    assert squares > mechanism.sensitivities(rule)[-1] ** 2 / 4.0
