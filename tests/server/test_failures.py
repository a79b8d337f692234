"""What happens to servers and nodes: with real processes and real signals, every run comes to its end as it should."""

import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fed
from fed.config.experiment import Experiment
from tests.server.deployed import Deployment, Program, relayed, wait_for

_Start = Callable[..., Deployment]
DROPS = "python:tests.simulations.users_parts:digits_with_dropout"


@pytest.fixture
def deployed(tmp_path: Path) -> Iterator[_Start]:
    """Makes deployments, of which no process is left behind."""
    made: list[Deployment] = []

    def make(*, clients: int = 2, options: dict[str, Any] | None = None, **keys: Any) -> Deployment:
        made.append(Deployment(tmp_path, _keys(clients, **keys), clients, **(options or {})))
        return made[-1]

    yield make
    for deployment in made:
        deployment.close()


def _keys(clients: int, *, rounds: Any = (), hidden: int = 32, epochs: int = 5, **others: Any) -> dict[str, Any]:
    return {
        "name": "failures",
        "data": {"kind": "digits", "clients": clients},
        "model": {"kind": "mlp", "hidden": [hidden]},
        "local": {"epochs": epochs, "batch_size": 64},
        "rounds": rounds if "kind" in rounds else {"count": 4, "cohort": clients, **dict(rounds)},
        "checkpoints": {"every": 1},
        "simulation": {"batching": "off", "workers": 0},
        **others,
    }


def _hold_to_simulation(deployment: Deployment, tmp_path: Path) -> None:
    """Every client's update once in every round, and so the simulator's bits."""
    fed.simulate(Experiment(**deployment.keys), output=tmp_path / "simulated")
    assert [line["replied"] for line in deployment.metrics()] == [
        deployment.clients
    ] * deployment.experiment.rounds.make().count
    assert deployment.model() == (tmp_path / "simulated" / "model.safetensors").read_bytes()
    _hold_tidy(deployment)


def _hold_tidy(deployment: Deployment) -> None:
    """The run is over for everybody, and no file on its way is left."""
    assert deployment.summary()["status"] == "finished"
    assert not deployment.spool().exists()
    for program in deployment.programs:
        if program.process.poll() is None:
            assert program.end(30) == 0, program.said
        assert "Traceback" not in program.said
    for client in range(deployment.clients):
        assert list((deployment.folder / f"state-{client}" / "files").iterdir()) == []


def _files(deployment: Deployment, client: int) -> list[Path]:
    folder = deployment.folder / f"state-{client}" / "files"
    return list(folder.iterdir()) if folder.is_dir() else []


def _wait_until_it_trains(deployment: Deployment, client: int) -> None:
    wait_for(lambda: any(path.stat().st_size for path in _files(deployment, client)), f"client {client} to train")


@pytest.mark.long
def test_client_killed_in_training_and_restarted_changes_no_bit(deployed: _Start, tmp_path: Path) -> None:
    deployment = deployed(epochs=40, rounds={"count": 2}, options={"insecure": False})
    server, (victim, _) = deployment.server(), deployment.all_clients()
    _wait_until_it_trains(deployment, 0)
    victim.kill()
    server.wait_to_say("client 0 is gone")
    deployment.client(0)
    assert server.end() == 0, server.said
    _hold_to_simulation(deployment, tmp_path)


def test_server_killed_in_a_round_and_resumed_changes_no_bit(deployed: _Start, tmp_path: Path) -> None:
    deployment = deployed(clients=1, epochs=20)
    server, _ = deployment.server(), deployment.all_clients()
    deployment.wait_for_round(2)
    _wait_until_it_trains(deployment, 0)
    server.kill()
    again = deployment.server(resume=True)
    assert again.end() == 0, again.said
    _hold_to_simulation(deployment, tmp_path)


@pytest.mark.long
def test_server_killed_after_its_last_round_tells_nodes(deployed: _Start) -> None:
    deployment = deployed(clients=2, rounds={"count": 1})
    server, _ = deployment.server(), deployment.all_clients()
    assert server.end() == 0, server.said
    outcome = deployment.summary()
    deployment.spool().mkdir()  # as if it had been killed before it told the nodes
    again, nodes = deployment.server(resume=True), deployment.all_clients()
    for node in nodes:
        assert node.end() == 0, node.said
        assert node.said.endswith("the run is over; 0 tasks were done\n")
    assert again.end() == 0, again.said
    assert "nodes may not know it yet" in again.said
    assert deployment.summary() == outcome
    _hold_tidy(deployment)


@pytest.mark.long
def test_nodes_draw_the_masks_of_the_simulation(deployed: _Start, tmp_path: Path) -> None:
    deployment = deployed(clients=2, model=DROPS)
    server, _ = deployment.server(), deployment.all_clients()
    assert server.end() == 0, server.said
    _hold_to_simulation(deployment, tmp_path)


@pytest.mark.long
def test_server_logs_waiting_joining_leaving_and_beginning(deployed: _Start) -> None:
    deployment = deployed(rounds={"count": 2})
    server, first = deployment.server(), deployment.client(0)
    server.wait_to_say("1 of 2 nodes are there")
    first.kill()
    server.wait_to_say("client 0 is gone\n0 of 2 nodes are there\n")
    clients = deployment.all_clients()
    assert server.end() == 0, server.said
    said = "\n".join(line for line in server.said.splitlines() if not line.endswith("nodes are there"))
    joined = "client [01] has joined: it has 719 samples"
    lines = ["client 0 has joined: it has 719 samples", "client 0 is gone", joined, joined]
    lines += ["2 clients are there: round 1 begins", "round 1/2, 2 of 2 answered, .*", "round 2/2, 2 of 2 answered, .*"]
    assert re.search("\n".join(lines), said), said
    for client, node in enumerate(clients):
        assert node.end() == 0
        answered = "".join(rf"round {number}: answered, with a training loss of \S+\n" for number in (1, 2))
        connected = f"connected to 127.0.0.1:{deployment.port}, as {client}\n"
        assert re.search(rf"{connected}{answered}the run is over; 2 tasks were done\n", node.said), node.said


@pytest.mark.long
def test_run_and_node_folders_belong_to_one_process(deployed: _Start, tmp_path: Path) -> None:
    deployment = deployed(epochs=20)
    server, (_, frozen) = deployment.server(), deployment.all_clients()
    deployment.wait_for_round(1)
    frozen.freeze()
    for second, folder in ((deployment.server(resume=True), "run"), (deployment.client(0), "state-0")):
        assert second.end() == 2, second.said
        assert f"{folder} is in use by another process: wait until that has ended" in second.said
        assert "Traceback" not in second.said
    frozen.thaw()
    assert server.end() == 0, server.said
    _hold_to_simulation(deployment, tmp_path)


@pytest.mark.long
def test_client_that_lost_its_state_resumes_and_both_report(deployed: _Start) -> None:
    patience = {"lease_s": 600.0}
    deployment = deployed(epochs=20, rounds={"count": 3}, algorithm="scaffold", options={"patience": patience})
    server, (victim, _) = deployment.server(), deployment.all_clients()
    deployment.wait_for_round(1)
    victim.kill()
    shutil.rmtree(deployment.folder / "state-0" / "kept")
    server.wait_to_say("client 0 is gone")
    again = deployment.client(0)
    assert server.end() == 0, server.said
    assert again.end() == 0, again.said
    assert again.said.count("what this node kept between tasks is gone from its folder, or damaged") == 1
    assert server.said.count("client 0 has lost what it kept between tasks") == 1
    assert deployment.metrics()[-1]["replied"] == 2
    _hold_tidy(deployment)


@pytest.mark.long
def test_client_frozen_beyond_the_deadline_is_late_and_returns(deployed: _Start) -> None:
    patience = {"silence_s": 60.0, "stall_s": 60.0}
    deployment = deployed(
        hidden=4000,
        epochs=1,
        rounds={"count": 8, "deadline_s": 3.0},
        options={"patience": patience, "node_patience": {"silence_s": 60.0}},
    )
    server = deployment.server()
    with relayed((deployment.host, deployment.port), bytes_per_s=200e3) as relay:
        deployment.client(0)
        frozen = deployment.client(1, port=relay.port)
        wait_for(lambda: relay.sent_bytes > 100e3, "an answer that is under way")
        frozen.freeze()
        wait_for(lambda: any(line["late"] for line in deployment.metrics()), "a round to end without it")
        relay.bytes_per_s = None
        frozen.thaw()
        assert server.end() == 0, server.said
        metrics = deployment.metrics()
        assert all(line["replied"] + line["late"] + line["failed"] == line["selected"] for line in metrics)
        assert metrics[-1]["replied"] == 2
        assert "refused 1: task" in server.said
        assert deployment.summary()["refused"] >= 1
        _hold_tidy(deployment)


@pytest.mark.long
def test_client_frozen_beyond_its_lease_fails_and_returns(deployed: _Start) -> None:
    deployment = deployed(epochs=20, options={"patience": {"lease_s": 3.0, "silence_s": 2.0}})
    server = deployment.server()
    _, frozen = deployment.all_clients()
    deployment.wait_for_round(1)
    _wait_until_it_trains(deployment, 1)
    frozen.freeze()
    server.wait_to_say("it has sent no heartbeat for 3 s")
    server.wait_to_say("waits for 2 clients, of whom 1 can take a task")
    frozen.thaw()
    assert server.end() == 0, server.said
    metrics = deployment.metrics()
    assert [line["replied"] + line["failed"] for line in metrics] == [2] * 4
    assert sum(line["failed"] for line in metrics) == 1
    assert metrics[-1]["replied"] == 2
    _hold_tidy(deployment)


@pytest.mark.long
def test_a_client_may_join_late_leave_and_come_back(deployed: _Start) -> None:
    silence = {"silence_s": 60.0}
    deployment = deployed(
        clients=3,
        epochs=20,
        rounds={"count": 30, "cohort": "all"},
        options={"patience": silence, "node_patience": silence},
    )
    server = deployment.server(min_nodes=2)
    pacemaker = deployment.client(0)
    deployment.client(1)

    def take_part(replies: int) -> None:
        """Let the round that is under way end, and wait for one with so many replies."""
        rounds = len(deployment.metrics()) + 1
        pacemaker.thaw()
        wait_for(
            lambda: any(line["replied"] == replies for line in deployment.metrics()[rounds:]), f"{replies} replies"
        )

    def join(again: bool) -> Program:
        """While a round is under way, in the next of which it takes part."""
        _wait_until_it_trains(deployment, 0)
        pacemaker.freeze()
        node = deployment.client(2)
        server.wait_to_say("(?s)client 2 has joined.*client 2 has joined" if again else "client 2 has joined")
        take_part(3)
        return node

    def leave(node: Program) -> None:
        """While a round is under way, of which it has done its part."""
        _wait_until_it_trains(deployment, 0)
        pacemaker.freeze()
        for _ in range(2):  # the line of the round before may not be written yet
            time.sleep(0.5)
            wait_for(lambda: f"round {len(deployment.metrics()) + 1}: answered" in node.said, "client 2 to answer")
        assert node.terminate() == 0, node.said
        server.wait_to_say("client 2 is gone")
        take_part(2)

    deployment.wait_for_round(1)
    leave(join(again=False))
    join(again=True)
    assert server.end() == 0, server.said
    assert all(line["replied"] == line["selected"] for line in deployment.metrics())
    assert {line["replied"] for line in deployment.metrics()} == {2, 3}
    _hold_tidy(deployment)


@pytest.mark.long
@pytest.mark.parametrize(
    "keys",
    [
        {"algorithm": "fedavg"},
        {"algorithm": "scaffold"},
        {"algorithm": "afl"},
        {"uplink": ["topk", "int8"], "error_feedback": "ef", "downlink": ["topk"]},
        {"uplink": ["sign"], "error_feedback": "ef21", "downlink": ["int8"]},
    ],
    ids=["fedavg", "scaffold", "afl", "ef", "ef21"],
)
def test_a_server_killed_anywhere_and_resumed_changes_no_bit(
    deployed: _Start, tmp_path: Path, keys: dict[str, Any]
) -> None:
    points = random.Random(7)
    rounds = {"count": 8, "cohort": "all"}
    deployment = deployed(clients=3, epochs=10, rounds=rounds, checkpoints={"every": 2}, **keys)
    server, _ = deployment.server(), deployment.all_clients()
    for _ in range(4):
        deployment.wait_for_round(min(len(deployment.metrics()) + 1, 7))
        try:
            server.process.wait(points.uniform(0.0, 1.5))
        except subprocess.TimeoutExpired:
            server.kill()
            server = deployment.server(resume=True)
            server.wait_to_say("listening on|test accuracy")  # killed after its last round, it tells the outcome
    assert server.end() == 0, server.said
    _hold_to_simulation(deployment, tmp_path)


@pytest.mark.long
def test_resumed_asynchronous_server_dispatches_open_tasks_again(deployed: _Start) -> None:
    rounds = {"kind": "buffered", "buffer": 2, "concurrency": 3, "count": 10}
    deployment = deployed(clients=3, epochs=20, rounds=rounds)
    server, _ = deployment.server(), deployment.all_clients()
    deployment.wait_for_round(3)
    server.kill()
    server = deployment.server(resume=True)
    assert server.end() == 0, server.said
    assert all(line["replied"] >= 2 for line in deployment.metrics())
    assert [line["round"] for line in deployment.metrics()] == list(range(1, 11))
    _hold_tidy(deployment)


@pytest.mark.long
@pytest.mark.parametrize("cut", ["stall", "drop"])
def test_a_network_that_is_cut_and_healed_changes_no_bit(deployed: _Start, tmp_path: Path, cut: str) -> None:
    deployment = deployed(hidden=4000, epochs=1, rounds={"count": 3})
    server = deployment.server()
    with relayed((deployment.host, deployment.port), bytes_per_s=400e3) as relay:
        deployment.client(0, port=relay.port)
        deployment.client(1)
        wait_for(lambda: relay.sent_bytes > 300e3, "an answer that is under way")
        getattr(relay, cut)()
        server.wait_to_say("client 0 is gone")
        relay.heal()
        relay.bytes_per_s = None
        assert server.end() == 0, server.said
        _hold_to_simulation(deployment, tmp_path)


@pytest.mark.long
def test_round_closes_by_quorum_when_half_the_clients_leave(deployed: _Start) -> None:
    rounds = {"count": 6, "cohort": "all", "deadline_s": 4.0, "quorum": 0.5}
    deployment = deployed(clients=4, epochs=40, rounds=rounds)
    server, clients = deployment.server(), deployment.all_clients()
    deployment.wait_for_round(1)
    for client in (0, 1):
        _wait_until_it_trains(deployment, client)
    for victim in clients[:2]:
        victim.kill()
    assert server.end() == 0, server.said
    metrics = deployment.metrics()
    assert all(line["replied"] + line["late"] + line["failed"] == line["selected"] for line in metrics)
    assert metrics[-1]["replied"] == metrics[-1]["selected"] == 2


@pytest.mark.long
def test_server_without_room_for_an_answer_reports_and_resumes(deployed: _Start, tmp_path: Path) -> None:
    deployment = deployed(hidden=4000, epochs=30, rounds={"count": 2})
    server, _ = deployment.server(), deployment.all_clients()
    for client in (0, 1):
        _wait_until_it_trains(deployment, client)
    _fill_disk(server.process.pid)
    server.wait_to_say(r"spool cannot be written to \(File too large\): make room there; nodes try again until then")
    _make_room(server.process.pid)
    assert server.end() == 0, server.said
    _hold_to_simulation(deployment, tmp_path)


@pytest.mark.long
def test_server_without_room_for_a_task_keeps_last_state(deployed: _Start, tmp_path: Path) -> None:
    deployment = deployed(hidden=4000, epochs=10)
    server, _ = deployment.server(), deployment.all_clients()
    deployment.wait_for_round(1)
    server.kill()
    server = deployment.server(resume=True, prefix=("prlimit", "--fsize=100000:unlimited"))
    assert server.end() == 1, server.said
    assert "error: " in server.said
    assert "then resume the run" in server.said
    assert "Traceback" not in server.said
    again = deployment.server(resume=True)
    assert again.end() == 0, again.said
    deployment.programs.remove(server)
    _hold_to_simulation(deployment, tmp_path)


@pytest.mark.long
def test_node_without_room_reports_it_and_returns_with_room(deployed: _Start) -> None:
    deployment = deployed(hidden=4000, epochs=10, rounds={"count": 30})
    server, (full, _) = deployment.server(), deployment.all_clients()
    deployment.wait_for_round(1)
    for pid in (full.process.pid, *full.children()):
        _fill_disk(pid)
    full.wait_to_say(r"the node cannot write to .*\(File too large\): make room there")
    for pid in (full.process.pid, *full.children()):
        _make_room(pid)
    assert server.end() == 0, server.said
    metrics = deployment.metrics()
    assert [line["replied"] + line["failed"] for line in metrics] == [2] * 30
    assert metrics[-1]["replied"] == 2
    _hold_tidy(deployment)


def _fill_disk(pid: int) -> None:
    """As a full disk: small files can be written, and no large ones."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))


def _make_room(pid: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.mark.long
def test_a_training_process_that_is_killed_costs_a_run_nothing(deployed: _Start, tmp_path: Path) -> None:
    deployment = deployed(epochs=40, rounds={"count": 3})
    server, (node, _) = deployment.server(), deployment.all_clients()
    _wait_until_it_trains(deployment, 0)
    for pid in node.children():
        os.kill(pid, signal.SIGKILL)
    node.wait_to_say(r"the training process has died \(exit code -9\); task \d+ begins anew")
    deployment.wait_for_round(1)
    for pid in node.children():
        os.kill(pid, signal.SIGKILL)
    assert server.end() == 0, server.said
    _hold_to_simulation(deployment, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("how", ["terminate", "interrupt"])
def test_server_and_nodes_stop_on_request(deployed: _Start, tmp_path: Path, how: str) -> None:
    deployment = deployed(epochs=20)
    server, (node, _) = deployment.server(), deployment.all_clients()
    deployment.wait_for_round(1)
    _wait_until_it_trains(deployment, 0)
    assert getattr(node, how)() == 0
    assert "stopped; " in node.said
    assert getattr(server, how)() == 130
    assert "goes on" in server.said
    deployment.client(0)
    again = deployment.server(resume=True)
    assert again.end() == 0, again.said
    _hold_to_simulation(deployment, tmp_path)
