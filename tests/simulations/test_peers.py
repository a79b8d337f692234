"""Simulated peers' time, absences, buffers and bytes, against what happens peer by peer."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fed
from fed.aggregators.dpsgd import DPSGD, State
from fed.aggregators.peer_rule import Descend, Mix
from fed.clients.training.devices import devices_of
from fed.clients.training.executor import InProcess
from fed.clients.training.worker import Work
from fed.errors import InvalidExperiment, RunFailed
from fed.server.mixing.neighbourhood import EncodedRows
from fed.server.mixing.peers import Peers
from fed.simulations.simulation import Simulation
from fed.topology import mixing_matrix
from fed.topology.graphs import ring
from fed.vectors.randomness import Streams

from .conftest import Point, mean_output

pytestmark = pytest.mark.usefixtures("device")

PEERS, LR, ROUNDS = 7, 0.1, 6
SAMPLES = (1, 3, 2, 5, 4, 1, 2)
SPEEDS, UP, DOWN = (1.0, 4.0, 0.5, 9.0, 2.0, 1.0, 3.0), (80.0, 16, 40, 64, 8, 160, 32), (64.0, 80, 16, 8, 32, 40, 160)
LATENCY_S = (0.5, 0.25, 0.0, 1.0, 0.125, 0.5, 0.75)
CENTRES = torch.arange(PEERS * 2, dtype=torch.float64).view(PEERS, 2).sin()


def data(samples: Sequence[int] = SAMPLES) -> fed.FederatedData:
    """f_i(x) = ½ |x − b_i|²."""
    ones = [torch.cat([torch.eye(2, dtype=torch.float64), centre_P[None]]) for centre_P in CENTRES]
    counts = zip(ones, samples, strict=True)
    return fed.FederatedData(
        {i: (one.expand(count, -1, -1).clone(), torch.zeros(count).double()) for i, (one, count) in enumerate(counts)}
    )


def table(path: Path, header: str, *rows: Sequence[object]) -> dict[str, Any]:
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return {"kind": "trace", "path": str(path)}


@pytest.fixture
def devices(tmp_path: Path) -> dict[str, Any]:
    rows = zip(range(PEERS), SPEEDS, DOWN, UP, LATENCY_S, strict=True)
    return table(tmp_path / "d.csv", "client,samples_per_s,down_bytes_per_s,up_bytes_per_s,latency_s", *rows)


def experiment(devices: dict[str, Any], **keys: Any) -> fed.Experiment:
    local = {"lr": LR, "batch_size": 1, **keys.pop("local", {})}
    return fed.Experiment(
        **{"algorithm": "dpsgd", "rounds": {"count": ROUNDS}, "local": local, "devices": devices, **keys}
    )


def model() -> nn.Module:
    return Point(torch.zeros(2, dtype=torch.float64))


def ready_s(one: fed.Experiment) -> tuple[list[float], list[float]]:
    """Every peer's clock after all rounds, and the run's after each."""
    simulation = Simulation(one, data(), model, mean_output)
    peers = simulation.federation(InProcess(partial(Work, simulation.recipe), devices_of(1)))
    assert isinstance(peers, Peers)
    clocks = []
    for number in range(1, ROUNDS + 1):
        peers.round(number)
        clocks.append(peers.clock)
    return peers.state()["neighbourhood"]["ready_s"], clocks


def test_a_peer_waits_for_its_neighbours_and_no_other(devices: dict[str, Any]) -> None:
    """By the definition: all that it sends and receives, message by message, from when the two ends had trained."""
    got, clocks = ready_s(experiment(devices))
    ready, expected = [0.0] * PEERS, []
    for _ in range(ROUNDS):
        trained = [ready[i] + SAMPLES[i] / SPEEDS[i] for i in range(PEERS)]
        ready = list(trained)
        for j in range(PEERS):
            for i in ((j - 1) % PEERS, (j + 1) % PEERS):  # 16 bytes, over half of what each end has
                arrives = trained[j] + max(LATENCY_S[i], LATENCY_S[j]) + 16 * max(2 / UP[j], 2 / DOWN[i])
                ready[i], ready[j] = max(ready[i], arrives), max(ready[j], arrives)
        expected.append(max(ready))
    np.testing.assert_allclose(got, ready, rtol=1e-12)
    np.testing.assert_allclose(clocks, expected, rtol=1e-12)
    assert len(set(got)) > 1  # no barrier


def test_a_slow_peer_delays_others_by_one_hop_a_round(tmp_path: Path) -> None:
    """On a path whose links take no time a clock is that of the slowest within as many hops as there were rounds."""
    clients, rounds, slow_s = 7, 4, 10.0
    traced = table(
        tmp_path / "slow.csv",
        "client,samples_per_s,down_bytes_per_s,up_bytes_per_s,latency_s",
        *((client, 1 / slow_s if client == 0 else 1.0, 1e18, 1e18, 0.0) for client in range(clients)),
    )
    one = experiment({"kind": "trace", **traced}, topology="path", rounds={"count": rounds})
    simulation = Simulation(one, data([1] * clients), model, mean_output)
    peers = simulation.federation(InProcess(partial(Work, simulation.recipe), devices_of(1)))
    for number in range(1, rounds + 1):
        peers.round(number)
        ready_s = peers.state()["neighbourhood"]["ready_s"]
        # the slow one's rounds, but for those that the news is on its way, of which the last hop costs nothing
        late_s = [number * slow_s, *(slow_s * (number - hops + 1) + hops - 1 for hops in range(1, clients))]
        expected = [max(waited_s, number) for waited_s in late_s]
        np.testing.assert_allclose(ready_s, expected, rtol=1e-12)
        assert peers.clock == max(ready_s)


def by_hand(one: fed.Run, takes_part: Sequence[Sequence[bool]], cut: dict[tuple[int, int], int]) -> None:
    """Hold a run's models to D-PSGD in which the absent keep what they had."""
    matrix = mixing_matrix(ring(PEERS)).to_dense().numpy()
    x = np.zeros((PEERS, 2))
    for number, there in enumerate(takes_part, start=1):
        trained = x.copy()
        for i in range(PEERS):
            steps = cut.get((i, number), SAMPLES[i]) if there[i] else 0
            trained[i] = CENTRES[i].numpy() + (1 - LR) ** steps * (x[i] - CENTRES[i].numpy())
        meets = matrix * np.outer(there, there)
        np.fill_diagonal(meets, 0)
        x = trained + meets @ trained - meets.sum(1, keepdims=True) * trained
    for client, module in one.models.items():
        assert isinstance(module, Point)
        np.testing.assert_allclose(module.x_D.detach().numpy(), x[int(client)], rtol=0, atol=1e-12)


def test_peers_that_fail_leave_the_weights_doubly_stochastic(devices: dict[str, Any]) -> None:
    one = experiment({**devices, "failure": 0.3, "interruption": 0.4})
    run = fed.simulate(one, data=data(), model=model, loss=mean_output)
    keys = itertools.product(range(PEERS), range(1, ROUNDS + 1))
    fates = {key: Streams(0).uniforms("fate", *key) for key in keys}
    there = [[fates[i, number][0] >= 0.3 for i in range(PEERS)] for number in range(1, ROUNDS + 1)]
    # One step a sample: a peer that is cut off takes 1 to all but one of them.
    cut = {
        key: 1 + int(after * (SAMPLES[key[0]] - 1))
        for key, (_, _, is_cut, after) in fates.items()
        if is_cut < 0.4 and SAMPLES[key[0]] > 1
    }
    by_hand(run, there, cut)
    links = [2 * sum(map(int, np.logical_and(row, np.roll(row, 1)))) for row in there]
    assert [line["bytes_up"] for line in run.metrics] == [16 * count for count in links]
    assert [line["replied"] for line in run.metrics] == [sum(row) for row in there]
    assert [line["failed"] for line in run.metrics] == [PEERS - sum(row) for row in there]
    assert not all(map(all, there))


def test_a_peer_that_is_away_is_not_waited_for(devices: dict[str, Any], tmp_path: Path) -> None:
    """Equal devices, 10 s a round and 0 s a message; peer 2 is away from 15 s to 35 s: it misses rounds 2, 3 and 4."""
    fast = {"latency_s": 0, "down_bytes_per_s": 1e300, "up_bytes_per_s": 1e300}
    equal = {"kind": "uniform", "samples_per_s": 0.1, **fast}
    spells = [(i, 0, 1e9) for i in range(PEERS) if i != 2]
    there = table(tmp_path / "a.csv", "client,begins_s,ends_s", *spells, (2, 0, 15), (2, 35, 1e9))
    one = experiment({**equal, "availability": there}, local={"steps": 1})
    run = fed.simulate(one, data=data(), model=model, loss=mean_output)
    assert [line["virtual_s"] for line in run.metrics] == pytest.approx([10, 20, 30, 40, 50, 60], abs=1e-9)
    takes_part = [[i != 2 or number not in (2, 3, 4) for i in range(PEERS)] for number in range(1, ROUNDS + 1)]
    assert [line["selected"] for line in run.metrics] == [7, 7, 6, 6, 7, 7]  # at 10 s it is there, but not for long
    assert [line["failed"] for line in run.metrics] == [0, 1, 0, 0, 0, 0]
    by_hand(run, takes_part, dict.fromkeys(((i, n) for i in range(PEERS) for n in range(1, ROUNDS + 1)), 1))


def absent(tmp_path: Path, alone: str, *spells: tuple[float, float]) -> fed.Run:
    """A run of peers each of which is there for one spell."""
    rows = [(i, *spell) for i, spell in enumerate(spells)]
    there = table(tmp_path / "a.csv", "client,begins_s,ends_s", *rows)
    devices = {"kind": "uniform", "availability": there}
    one = experiment(devices, rounds={"count": ROUNDS, "alone": alone})
    return fed.simulate(one, data=data(), model=model, loss=mean_output)


@pytest.mark.parametrize(("alone", "fewest"), [("go_on", 1), ("wait", 2)])
def test_time_passes_until_as_many_peers_return_as_needed(alone: str, fewest: int, tmp_path: Path) -> None:
    first = absent(tmp_path, alone, *((100 + i, 1e9) for i in range(PEERS))).metrics[0]
    assert first["replied"] == fewest
    assert 99 + fewest < first["virtual_s"] < 100 + fewest
    assert first["alone"] == (1 if alone == "go_on" else 0)
    with pytest.raises(RunFailed, match="round 2 needs a peer, and none will ever be there again: let peers come more"):
        absent(tmp_path, "go_on", *[(100, 100.001)] * PEERS)


def test_a_peer_alone_goes_on_only_where_it_may(tmp_path: Path) -> None:
    left = [(0, 1e9), *[(0, 0.001)] * (PEERS - 1)]
    with pytest.raises(RunFailed, match=r"round 2 needs another peer, because a peer alone waits.*rounds.alone: go_on"):
        absent(tmp_path, "wait", *left)
    summary = absent(tmp_path, "go_on", *left).summary
    assert summary["rounds"] == ROUNDS
    assert summary["rounds_alone"] == ROUNDS  # the others leave within the first


def test_going_on_alone_needs_an_algorithm_over_mix(devices: dict[str, Any]) -> None:
    for algorithm in ("fedavg", {"kind": "allreduce", "rule": "fedavg"}, "local"):
        with pytest.raises(InvalidExperiment, match=r"rounds.alone go_on needs clients that exchange models"):
            experiment(devices, algorithm=algorithm, rounds={"count": 1, "alone": "go_on"})


@dataclass(frozen=True, kw_only=True)
class Twice(DPSGD):
    """D-PSGD that mixes twice; it notes the sums of step sizes."""

    sums: ClassVar[list[Any]] = []

    def step(self, state: State, descend: Descend, mix: Mix) -> State:
        self.sums.append(descend.lr)
        return State(mix(mix(descend(state.model_NP))))


def test_step_sizes_add_up_over_the_local_steps(devices: dict[str, Any]) -> None:
    for local in ({}, {"steps": 3}):
        one = experiment(devices, algorithm=f"python:{__name__}:Twice", local=local, rounds={"count": 1})
        fed.simulate(one, data=data(), model=model, loss=mean_output)
    _, each_N1, _, of_all = Twice.sums  # before each run, a trial that counts bytes
    assert torch.equal(each_N1, LR * torch.tensor(SAMPLES, dtype=torch.float64)[:, None])
    assert of_all == pytest.approx(3 * LR)


def test_buffers_are_mixed_with_the_model_and_integers_stay() -> None:
    """After one round the buffers are W times those of peers that trained alone, whatever the number of exchanges."""
    inputs = torch.randn(PEERS, 9, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sizes = [4 + i % 3 * 2 for i in range(PEERS)]
    held = fed.FederatedData({i: (inputs[i, :size], torch.arange(size) % 2) for i, size in enumerate(sizes)})

    def normalised() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()

    params, buffers = 16 + 8 + 10, 8
    messages = {"local": 0, "dpsgd": params + buffers, f"python:{__name__}:Twice": 2 * params + buffers}
    runs = {}
    for algorithm, numbers in messages.items():
        keys: dict[str, Any] = {"algorithm": algorithm, "rounds": {"count": 1}, "local": {"batch_size": 2}}
        one = fed.simulate(fed.Experiment(**keys), data=held, model=normalised)
        runs[algorithm] = [dict(module.named_buffers()) for module in one.models.values()]
        assert one.summary["bytes_up"] == 2 * PEERS * 8 * numbers
    matrix_NN = mixing_matrix(ring(PEERS)).to_dense()
    for name in ("1.running_mean", "1.running_var"):
        alone_NR, *mixed = (torch.stack([one[name] for one in run]) for run in runs.values())
        for got_NR in mixed:
            torch.testing.assert_close(got_NR, matrix_NN @ alone_NR, rtol=0, atol=1e-14)
    batches = [[int(one["1.num_batches_tracked"]) for one in run] for run in runs.values()]
    assert batches[0] == batches[1] == batches[2]
    assert len(set(batches[0])) > 1


def test_a_rule_without_topology_that_mixes_is_refused() -> None:
    one = fed.Experiment(algorithm=f"python:{__name__}:Lonely", rounds={"count": 1})
    with pytest.raises(InvalidExperiment, match='the rule called mix, but its primitive is not "mix"'):
        fed.simulate(one, data=data(), model=model, loss=mean_output)


@dataclass(frozen=True, kw_only=True)
class Lonely(DPSGD):
    """A rule that is said not to mix, and does."""

    primitive: ClassVar[None] = None


def test_local_steps_in_float32_move_a_state_of_float64() -> None:
    """Steps start from the model rounded to its type, and what they add is added to the state."""
    state: dict[str, Tensor] = {}

    class Watching(DPSGD):
        def step(self, state_NP: Any, descend: Descend, mix: Mix) -> State:
            x_NP = state_NP.model_NP + 1e-9
            state["x"], state["y"], state["rounded"] = x_NP, descend(x_NP), descend(x_NP.float().double())
            return State(x_NP)

    keys: dict[str, Any] = {"rounds": {"count": 1}, "local": {"batch_size": 4}}
    simulation = Simulation(fed.Experiment(algorithm="dpsgd", **keys))
    simulation.algorithm = Watching()
    simulation.federation(InProcess(partial(Work, simulation.recipe), devices_of(1))).round(1)
    left = state["x"] - state["x"].float().double()
    torch.testing.assert_close(state["y"], state["rounded"] + left, rtol=0, atol=1e-15)
    assert float(left.abs().max()) > 0


def test_peers_that_were_away_are_sent_what_they_missed(devices: dict[str, Any], tmp_path: Path) -> None:
    """Peer 2 is away in rounds 2 to 4: then it gets what its two neighbours have sent, or their sums if these are less.

    Sums of 6 numbers of 8 bytes; messages of 5 bytes, and of 20.
    """
    equal = {
        "kind": "uniform",
        "samples_per_s": 0.1,
        "latency_s": 0,
        "down_bytes_per_s": 1e300,
        "up_bytes_per_s": 1e300,
    }
    spells = [(i, 0, 1e9) for i in range(PEERS) if i != 2]
    there = table(tmp_path / "a.csv", "client,begins_s,ends_s", *spells, (2, 0, 15), (2, 35, 1e9))
    one = experiment({**equal, "availability": there}, local={"steps": 1})
    for message_bytes, of_missed in ((5, 2 * 4 * 5), (20, 2 * 48)):
        simulation = Simulation(one, data(), model, mean_output)
        peers = simulation.federation(InProcess(partial(Work, simulation.recipe), devices_of(1)))
        assert isinstance(peers, Peers)
        neighbourhood, sent = peers.neighbourhood, []
        for number in range(1, ROUNDS + 1):
            rows_S = neighbourhood.begin(number).rows_S
            neighbourhood.train([1] * len(rows_S))
            messages = [torch.zeros(message_bytes, dtype=torch.uint8)] * len(rows_S)
            sums_SP = torch.zeros(len(rows_S), 6, dtype=torch.float64)
            encoded = EncodedRows(messages, sums_SP, sums_SP, not_here, message_bytes, message_bytes)
            neighbourhood.exchange(encoded=encoded)
            neighbourhood.end()
            sent.append(neighbourhood.bytes_sent)
            neighbourhood.restore(neighbourhood.state())
        whole, without = 14 * message_bytes, 10 * message_bytes
        assert sent == [whole, without, without, without, 12 * message_bytes + of_missed, whole]


@pytest.mark.parametrize(
    ("topology", "got"), [("random_matching", "one that changes with the round"), ("directed_ring", "a directed one")]
)
def test_choco_needs_a_fixed_graph(topology: str, got: str) -> None:
    one = fed.Experiment(algorithm="choco", topology=topology, rounds={"count": 1})
    with pytest.raises(
        InvalidExperiment, match=f"CHOCO needs a fixed graph .* got {got}: choose a topology such as ring"
    ):
        fed.simulate(one, data=data(), model=model, loss=mean_output)
    again = one.override({"algorithm": "deepsqueeze"})
    assert fed.simulate(again, data=data(), model=model, loss=mean_output).summary["status"] == "finished"


def not_here(messages: Sequence[Tensor], senders: Sequence[int | str], number: int) -> Tensor:
    raise AssertionError("all senders are here, and have what they sent")


def test_late_neighbours_are_left_out_at_both_ends(devices: dict[str, Any]) -> None:
    """By the definition: each waits for the deadline at most, and both ends keep what they would have given."""
    deadline_s, matrix = 4.0, mixing_matrix(ring(PEERS)).to_dense().numpy()
    one = experiment(devices, rounds={"count": ROUNDS, "deadline_s": deadline_s})
    run = fed.simulate(one, data=data(), model=model, loss=mean_output)
    got, _ = ready_s(one)
    ready, x, late_in_round = [0.0] * PEERS, np.zeros((PEERS, 2)), []
    for _ in range(ROUNDS):
        begun = [ready[i] + SAMPLES[i] / SPEEDS[i] for i in range(PEERS)]
        ready, late = list(begun), set()
        pairs = [(i, j) for j in range(PEERS) for i in ((j - 1) % PEERS, (j + 1) % PEERS)]
        arrives = {
            (i, j): begun[j] + max(LATENCY_S[i], LATENCY_S[j]) + 16 * max(2 / UP[j], 2 / DOWN[i]) for i, j in pairs
        }
        late = {(i, j) for i, j in pairs if arrives[i, j] > begun[i] + deadline_s}
        for i, j in pairs:
            if (i, j) in late:
                ready[i] = max(ready[i], begun[i] + deadline_s)
            elif (j, i) not in late:
                ready[i], ready[j] = max(ready[i], arrives[i, j]), max(ready[j], arrives[i, j])
        trained = x.copy()
        for i in range(PEERS):
            trained[i] = CENTRES[i].numpy() + (1 - LR) ** SAMPLES[i] * (x[i] - CENTRES[i].numpy())
        x = trained.copy()
        for i, j in pairs:
            if not {(i, j), (j, i)} & late:
                x[i] += matrix[i, j] * (trained[j] - trained[i])
        late_in_round.append(len({j for _, j in late}))
    np.testing.assert_allclose(got, ready, rtol=1e-12)
    for client, module in run.models.items():
        assert isinstance(module, Point)
        np.testing.assert_allclose(module.x_D.detach().numpy(), x[int(client)], rtol=0, atol=1e-12)
    assert [line["late"] for line in run.metrics] == late_in_round
    assert 0 < late_in_round[0] < PEERS


def test_a_deadline_that_all_meet_changes_nothing(devices: dict[str, Any]) -> None:
    without, with_one = experiment(devices), experiment(devices, rounds={"count": ROUNDS, "deadline_s": 1e6})
    assert ready_s(without) == ready_s(with_one)


def test_a_deadline_on_a_directed_ring_needs_push_sum(devices: dict[str, Any]) -> None:
    keys: dict[str, Any] = {"topology": "directed_ring", "rounds": {"count": 2, "deadline_s": 4.0}}
    with pytest.raises(
        InvalidExperiment, match=r"got topology directed_ring with rounds\.deadline_s: choose algorithm"
    ):
        fed.simulate(experiment(devices, **keys), data=data(), model=model, loss=mean_output)
    run = fed.simulate(experiment(devices, algorithm="sgp", **keys), data=data(), model=model, loss=mean_output)
    assert run.metrics[0]["late"]
