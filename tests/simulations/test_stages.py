"""Stages of the way out: one class and one registered line act wherever clients train, with the same bits."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import fed
from fed.clients.data import load
from fed.clients.node.plans import as_experiment, code_of_nodes, part_of_nodes
from fed.compression.codec import Draw
from fed.compression.stage import Stage
from fed.config import registry
from fed.errors import Diverged, InvalidExperiment
from fed.server.grpc.deploy import serve
from fed.server.peer.real_peer import _hash
from fed.server.resume import run_fingerprint
from fed.simulations.attacks import Attack, Knowledge
from fed.simulations.simulate import simulate
from fed.simulations.simulation import Simulation
from fed.storage.checkpoints import Checkpoints
from fed.vectors.randomness import Streams
from tests.flower_stand_ins import install, run_app
from tests.server.flower.test_app import assert_same
from tests.server.grpc.threaded import ThreadedNode, nodes_of
from tests.server.peer.processes import processes
from tests.simulations import users_parts as parts
from tests.thinned import thinned

pytestmark = pytest.mark.usefixtures("device")

CLIENTS = 3
STAGES = ["halves", "shakes", "drifts"]
AT_PEERS = [f"python:tests.trial_stages:{name}" for name in ("Halves", "Shakes")]  # processes know no trial kinds


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Halves", "Shakes", "Drifts"):
        monkeypatch.setitem(registry.STAGES.builtin, name.lower(), f"tests.trial_stages:{name}")
    monkeypatch.setitem(registry.ADVERSARIES.builtin, "faithful", f"{__name__}:Faithful")


@dataclass(frozen=True, kw_only=True)
class Faithful(Attack):
    """Attackers that send what they have trained."""

    looks_at_others: ClassVar[bool] = False

    def forge(self, known: Knowledge) -> Tensor:
        return known.own_AP.clone()


def experiment(**changed: Any) -> fed.Experiment:
    """Three clients with unequal parts of the digits."""
    keys: dict[str, Any] = {
        "data": {"kind": "digits", "clients": CLIENTS, "partition": {"kind": "dirichlet", "alpha": 1.0}},
        "model": {"kind": "mlp", "hidden": [8]},
        "local": {"lr": 0.1, "batch_size": 16},
        "rounds": {"count": 2},
        "stages": STAGES,
        "evaluation": "coordinator",
        "simulation": {"batching": "off", "workers": 0},
    }
    return fed.Experiment(**{**keys, **changed})


def moved(algorithm: str, stages: Sequence[str] | None) -> Tensor:
    """Movement of the model in one round, in float64."""
    given = fed.Experiment(algorithm=algorithm, stages=stages, rounds={"count": 1}, local={"batch_size": 4})
    data = parts.unequal(torch.float64)
    simulation = Simulation(given, data, parts.double)
    first_V, _ = simulation.layout.pack(simulation.recipe.module)
    last_V, _ = simulation.layout.pack(simulate(given, data=data, model=parts.double).model)
    return last_V - first_V


def over_grpc(given: fed.Experiment, folder: Path) -> None:
    assert given.data is not None
    data, nodes = load(given.data, Streams(given.seed)), list[ThreadedNode]()

    def begin(port: int) -> None:
        nodes.extend(nodes_of(data, port, folder))

    serve(given, listen="127.0.0.1:0", output=folder / "run", min_nodes=CLIENTS, on_listen=begin)
    for node in nodes:
        node.end()


def over_flower(given: fed.Experiment, folder: Path) -> None:
    run_app(given, folder, CLIENTS)


@pytest.mark.parametrize("algorithm", thinned(["fedavg", "median", "bmuf", "dpsgd", "allreduce"], quick=3))
def test_half_updates_move_the_model_half_as_far(algorithm: str) -> None:
    """But for the rounding of the model: all that is between is exact, or linear."""
    torch.testing.assert_close(2 * moved(algorithm, ["halves"]), moved(algorithm, None), rtol=1e-10, atol=1e-14)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("algorithm", "batching", "stages"),
    [("scaffold", "on", STAGES), ("gradient_tracking", "off", STAGES[:2])],
    ids=["clients", "peers"],
)
def test_workers_have_the_bits_of_one_process(algorithm: str, batching: str, stages: list[str]) -> None:
    simulation = {"batching": batching, "group": 2, "workers": 0}
    given = experiment(algorithm=algorithm, stages=stages, data=None, model=None, simulation=simulation)
    in_workers = given.override({"simulation.workers": 2})
    one, two = (simulate(run, data=parts.unequal(), model=parts.small) for run in (given, in_workers))
    assert parts.outcome(one) == parts.outcome(two)


DRAWN: list[tuple[object, float]] = []
"""Client, or the mean, of each draw of :class:`Noted`, and its first number."""


@dataclass(frozen=True, kw_only=True)
class Noted(Stage):
    """Changes nothing, and notes what it could draw."""

    def change_updates(self, update_KM: Tensor, draw: Draw) -> Tensor:
        DRAWN.extend((client, draw.own(row).normal()) for row, client in enumerate(draw.clients))
        return update_KM

    def change_mean(self, mean_M: Tensor, clients: int, draw: Draw) -> Tensor:
        DRAWN.append(("mean", draw.own(0).normal()))
        DRAWN.append(("mean", draw.common(0).normal()))
        return mean_M


@pytest.mark.parametrize("adversaries", [None, {"kind": "faithful", "fraction": 0.4}], ids=["honest", "attacked"])
@pytest.mark.parametrize(
    "rounds",
    [
        {"kind": "buffered", "count": 2, "concurrency": 3, "buffer": 3},
        {"kind": "bounded_staleness", "count": 3, "bound": 1},
    ],
    ids=["buffered", "bounded staleness"],
)
def test_no_two_messages_or_means_share_their_noise(rounds: dict[str, Any], adversaries: dict[str, Any] | None) -> None:
    """Clients may train twice in a round, and the model may move more than once: equal noise could be taken away."""
    devices = {"kind": "lognormal", "sigma": 2.0}  # a quick client is asked again while others train
    stages = [f"python:{__name__}:Noted"]
    given = experiment(rounds=rounds, adversaries=adversaries, stages=stages, devices=devices)
    DRAWN.clear()
    Simulation(given)
    checked = len(DRAWN)  # draws of the stage's check
    run = simulate(given)
    drawn = DRAWN[2 * checked :]
    assert len(drawn) >= sum(line["replied"] for line in run.metrics) + 2 * len(run.metrics)
    assert len({number for _, number in drawn}) == len(drawn)


@pytest.mark.parametrize("algorithm", ["fedavg", "afl", "easgd", "feddyn", "scaffold"])
def test_a_stage_moves_the_model_where_nobody_replies(algorithm: str) -> None:
    devices = {"kind": "uniform", "failure": 0.999}
    runs = [
        simulate(experiment(algorithm=algorithm, devices=devices, stages=stages, rounds={"count": 1}))
        for stages in (None, ["drifts"])
    ]
    still, moved = (torch.cat([part.flatten() for part in run.model.state_dict().values()]) for run in runs)
    assert runs[1].metrics[0]["replied"] == 0
    assert 0.9 < (moved - still).std() < 1.1, "by its noise, of variance 1"


@pytest.mark.parametrize("uplink", [[], [{"kind": "topk", "fraction": 0.1}]], ids=["plain", "coded"])
def test_attackers_messages_take_the_rest_of_the_way(uplink: list[Any]) -> None:
    """Those that report what they have trained have the bits of honest clients."""
    feedback = "ef" if uplink else "none"
    given = experiment(uplink=uplink, error_feedback=feedback)
    attacked = given.override({"adversaries": {"kind": "faithful", "fraction": 0.4}})
    honest, faithful = (simulate(one).model.state_dict() for one in (given, attacked))
    assert all(torch.equal(honest[name], part) for name, part in faithful.items())


@pytest.mark.processes
@pytest.mark.parametrize("deployed", [over_grpc, over_flower], ids=["grpc", "flower"])
@pytest.mark.parametrize(
    ("uplink", "feedback"), [([], "none"), ([{"kind": "topk", "fraction": 0.1}], "ef")], ids=["plain", "coded"]
)
def test_nodes_have_the_bits_of_the_simulation(
    deployed: Any, uplink: list[Any], feedback: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    given = experiment(uplink=uplink, error_feedback=feedback)
    deployed(given, tmp_path)
    assert_same(tmp_path / "run", simulate(given))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("algorithm", "topology"), [("gradient_tracking", "ring"), ("allreduce", None)], ids=["mix", "replicas"]
)
def test_peers_have_the_bits_of_the_simulation(algorithm: str, topology: str | None, tmp_path: Path) -> None:
    rounds = {"count": 2, "deadline_s": 60.0}
    keys = experiment(algorithm=algorithm, topology=topology, stages=AT_PEERS, rounds=rounds).given_keys()
    simulated = simulate(fed.Experiment(**keys))
    with processes(tmp_path, keys, CLIENTS) as peers:
        peers.start(*range(CLIENTS))
        peers.await_end()
        for peer, found in peers.models().items():
            expected = simulated.models[peer] if topology else simulated.model
            for name, part in expected.state_dict().items():
                assert torch.equal(part, found[name]), (peer, name, peers.said())


def test_masked_lanes_are_of_changed_updates() -> None:
    """Masked for real, and summed without masks."""
    secure = {"minimum_cohort": 2, "corrupt": 0.0, "max_drop_out": 0.0, "max_weight": 2000}
    runs = [
        simulate(experiment(secure_aggregation={**secure, "mode": mode}, rounds={"count": 1}, stages=stages))
        for mode, stages in (("emulated", STAGES), ("real", STAGES), ("real", None))
    ]
    emulated, real, plain = (run.model.state_dict() for run in runs)
    assert all(torch.equal(emulated[name], part) for name, part in real.items())
    assert not any(torch.equal(plain[name], part) for name, part in real.items())


def test_stages_that_do_nothing_cost_nothing() -> None:
    """Clients send trained models, whose mean takes half the time, also where stages change the mean alone."""
    for stages in (None, ["drifts"]):
        simulation = Simulation(experiment(stages=stages))
        assert simulation.way_out is not None
        assert simulation.way_out.message.sends_models
        assert not simulation.way_out.stages
    assert simulation.prepared.stages


@dataclass(frozen=True, kw_only=True)
class Explodes(Stage):
    """Updates that are not finite, of one client in round 2."""

    def change_updates(self, update_KM: Tensor, draw: Draw) -> Tensor:
        scales = [float("inf") if key == (2, 1) else 1.0 for key in zip(draw.rounds, draw.clients, strict=True)]
        return update_KM * torch.tensor(scales, dtype=torch.float64)[:, None]


@pytest.mark.parametrize("algorithm", ["fedavg", "median", "dpsgd"])
def test_an_update_that_a_stage_breaks_is_refused(algorithm: str) -> None:
    given = experiment(algorithm=algorithm, stages=[f"python:{__name__}:Explodes"])
    with pytest.raises(Diverged, match=r"round 2, client 1: what stages make of its update is not finite"):
        simulate(given)


@dataclass(frozen=True, kw_only=True)
class Narrow(Stage):
    """Float32."""

    def change_updates(self, update_KM: Tensor, draw: Draw) -> Tensor:
        return update_KM.float()


@dataclass(frozen=True, kw_only=True)
class Summed(Stage):
    """A number."""

    def change_mean(self, mean_M: Tensor, clients: int, draw: Draw) -> Tensor:
        return mean_M.sum()


@dataclass(frozen=True, kw_only=True)
class Divides(Stage):
    """A part of each client's, of whom there are none."""

    acts_alone: ClassVar[bool] = True

    def change_mean(self, mean_M: Tensor, clients: int, draw: Draw) -> Tensor:
        return mean_M + 1 / clients


@dataclass(frozen=True, kw_only=True)
class Fails(Stage):
    """An error."""

    def change_updates(self, update_KM: Tensor, draw: Draw) -> Tensor:
        raise IndexError("no such row")


@pytest.mark.parametrize(
    ("stage", "reason"),
    [
        (Narrow, r"stages' Narrow must give the updates as float64 \[1, 610\], got float32 \[1, 610\]: correct Narrow"),
        (Summed, r"stages' Summed must give the mean as float64 \[610\], got float64 \[\]: correct Summed"),
        (Divides, r"stages' Divides must change 610 zeros, got ZeroDivisionError: division by zero: correct Divides"),
        (Fails, r"stages' Fails must change 610 zeros, got IndexError: no such row: correct Fails"),
    ],
)
def test_a_stage_that_breaks_its_contract_is_named(stage: type[Stage], reason: str) -> None:
    for algorithm in ("fedavg", "dpsgd") if not stage.changes_mean else ("fedavg",):
        with pytest.raises(InvalidExperiment, match=reason):
            Simulation(experiment(algorithm=algorithm, stages=[f"python:{__name__}:{stage.__name__}"]))


@pytest.mark.parametrize(
    ("algorithm", "stage", "feature"),
    [
        ("local", "halves", "clients that send what they have learned"),
        ("centralized", "halves", "clients that send what they have learned"),
        ("dpsgd", "drifts", "clients that report to a coordinator"),
    ],
)
def test_stages_need_updates_or_a_mean(algorithm: str, stage: str, feature: str) -> None:
    with pytest.raises(InvalidExperiment, match=f"stages {stage} needs {feature}, got algorithm {algorithm}"):
        experiment(algorithm=algorithm, stages=[stage])


def test_plans_without_stages_are_those_of_older_versions() -> None:
    plain, staged = (part_of_nodes(experiment(stages=stages)) for stages in (None, ["halves"]))
    assert "stages" not in plain
    assert staged["stages"] == [{"kind": "halves"}]


def test_a_node_takes_stages_that_it_knows_alone() -> None:
    plan = json.dumps(part_of_nodes(experiment(stages=AT_PEERS)))
    with pytest.raises(InvalidExperiment, match=r"runs only code that --allow names, got python:tests\.trial_stages"):
        as_experiment(plan, [])
    assert as_experiment(plan, AT_PEERS).stages == fed.Experiment(stages=AT_PEERS).stages


def test_nodes_need_all_code_but_their_own_app() -> None:
    with_app = experiment(stages=AT_PEERS, data=None, model=None, app={"kind": "python:nowhere:App", "clients": 2})
    assert code_of_nodes(with_app) == code_of_nodes(experiment(stages=AT_PEERS)) == AT_PEERS
    assert code_of_nodes(experiment()) == []


def test_runs_from_before_stages_go_on(tmp_path: Path) -> None:
    """Neither their checkpoints nor their files have the key."""
    given = experiment(stages=None, rounds={"count": 3}, checkpoints={"every": 2})
    whole = simulate(given, output=tmp_path / "run")
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", 1)
    found = checkpoints.newest()
    assert found is not None
    number, state = found
    del state["fingerprint"]["experiment"]["stages"]
    checkpoints.write(number, state)
    file = tmp_path / "run" / "experiment.yaml"
    file.write_text(file.read_text().replace("stages: null\n", ""))
    resumed = simulate(given, output=tmp_path / "run", resume=True)
    assert number == 2
    assert "stages" not in file.read_text()
    assert parts.outcome(whole) == parts.outcome(resumed)
    with pytest.raises(InvalidExperiment, match="a run is resumed as it began, but stages is None"):
        simulate(given.override({"stages": ["halves"]}), output=tmp_path / "run", resume=True)


def test_peers_agree_on_stages() -> None:
    """Peers of other stages, or of none, do not meet."""
    layout = Simulation(experiment(algorithm="dpsgd", stages=None)).prepared.layout
    hashes = {
        _hash(run_fingerprint(experiment(algorithm="dpsgd", stages=stages), layout, None), ())
        for stages in (None, ["halves"], ["shakes"], ["halves", "shakes"])
    }
    assert len(hashes) == 4
