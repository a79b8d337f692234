"""What ``fed.server.fleet.Fleet`` promises, held against every fleet there is; and that a run over each ends alike."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import fed
from fed.config import yaml
from fed.config.experiment import Experiment
from fed.server.flower.app import server_app, write_app
from fed.server.grpc.deploy import serve
from fed.storage.checkpoints import Checkpoints
from fed.wire.messages import Answer, TrainedModel, Update
from tests.flower_stand_ins import Federation, ServerApp, install, partitions
from tests.server.stages import BOUND_S, CLIENTS, KINDS, REAL, SLOW, Stage, nodes_at
from tests.thinned import thinned

Open = Callable[..., Any]
QUICK = [client for client in range(CLIENTS) if client != SLOW]
SCAFFOLD = {"kind": "scaffold"}
every_fleet = pytest.mark.parametrize("kind", KINDS)
real_fleets = pytest.mark.parametrize("kind", REAL)


def experiment(**changed: Any) -> Experiment:
    keys = {
        "data": {"kind": "digits", "clients": CLIENTS, "partition": {"kind": "dirichlet", "alpha": 1.0}},
        "model": {"kind": "mlp", "hidden": [8]},
        "local": {"lr": 0.1, "batch_size": 16, "epochs": 1},
        "rounds": {"count": 3},
        "simulation": {"batching": "off"},
    }
    return Experiment(**{**keys, **changed})


@pytest.fixture(autouse=True)
def _flower(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Open]:
    """Opens stages, and closes them after the test."""
    stages: list[Stage] = []

    def opened(kind: str, *, visits: bool = False, **changed: Any) -> Stage:
        folder = tmp_path / str(len(stages))
        stages.append(KINDS[kind](experiment(**changed), folder, visits=visits))
        stages[-1].begin()
        return stages[-1]

    yield opened
    for one in stages:
        one.close()


def answered(answers: list[Answer]) -> list[int]:
    """The tasks, in order."""
    return sorted(task for answer in answers for task in answer.tasks)


def update_of(answer: Answer) -> Tensor:
    """The client's message, whether it came as one or as a trained model."""
    return counted(answer).update_M.double()


def counted(answer: Answer) -> Update:
    """The update and its weight."""
    assert isinstance(answer.content, Update | TrainedModel)
    return answer.content.update() if isinstance(answer.content, TrainedModel) else answer.content


def bits(answer: Answer) -> tuple[Any, ...]:
    """All that counts of an answer to one task, the bytes on its way among it."""
    said = answer.tasks, answer.round, answer.clients, answer.samples, answer.train_losses, answer.size_bytes
    return (update_of(answer).numpy().tobytes(), answer.integers_I.numpy().tobytes(), counted(answer).weight, *said)


def await_free(made: Stage, client: int) -> None:
    """Wait as a coordinator does, until a client can take a task."""
    limit_s = made.fleet.clock + made.patience_s
    while client not in made.fleet.available():
        assert made.fleet.wait(limit_s)


@every_fleet
def test_registered_clients_are_ordered_and_idle_ones_available(kind: str, stage: Open) -> None:
    made = stage(kind)
    fleet = made.fleet
    assert list(fleet.registered()) == list(fleet.available()) == [0, 1, 2]
    assert [fleet.size_of(client) for client in fleet.registered()] == made.sizes()
    fleet.dispatch([made.task(0, 1), made.task(1, SLOW)])
    assert list(fleet.available()) == [0]
    assert answered(list(fleet.collect(enough=1))) == [0]
    assert list(fleet.available()) == [0, 1]
    made.release()
    assert answered(list(fleet.collect())) == [1]
    assert list(fleet.registered()) == list(fleet.available()) == [0, 1, 2]


@every_fleet
def test_a_task_has_the_same_answer_from_every_fleet(kind: str, stage: Open) -> None:
    """To the bit and the byte, with another step size and number of steps than usual."""
    found = []
    for one in ("simulated", kind):
        made = stage(one, algorithm=SCAFFOLD)
        tasks = [made.task(5 + client, client, lr=0.05, steps=3, repeats=1) for client in range(CLIENTS)]
        made.fleet.dispatch(iter(tasks))
        made.release()
        answers = {answer.tasks[0]: answer for answer in made.fleet.collect()}
        found.append([bits(answers[task.id]) for task in tasks])
    assert found[0] == found[1]


@every_fleet
def test_every_task_is_answered_once(kind: str, stage: Open) -> None:
    made = stage(kind)
    fleet = made.fleet
    fleet.dispatch([])
    fleet.dispatch(made.task(number, number) for number in QUICK)
    fleet.dispatch([made.task(7, SLOW)])
    before_s = fleet.clock
    assert list(fleet.collect(enough=0)) == []
    some = list(fleet.collect(enough=1))
    assert set(answered(some)) <= {*QUICK}
    some += fleet.collect(enough=len(QUICK) - len(some)) if len(some) < len(QUICK) else []
    assert answered(some) == QUICK
    made.release()
    assert answered(list(fleet.collect())) == [7]
    assert list(fleet.collect()) == []
    now_s = fleet.clock
    assert now_s > before_s
    assert list(fleet.collect(until=now_s + 1000)) == []
    assert fleet.clock < now_s + 1000


@every_fleet
def test_collecting_stops_at_the_clock_and_goes_on_later(kind: str, stage: Open) -> None:
    made = stage(kind)
    fleet = made.fleet
    fleet.dispatch([made.task(0, SLOW)])
    until_s = fleet.clock + made.soon_s
    assert list(fleet.collect(until=until_s)) == []
    now_s = fleet.clock
    assert now_s >= until_s
    assert list(fleet.collect(until=until_s - made.soon_s)) == []
    assert fleet.clock >= now_s
    made.release()
    assert answered(list(fleet.collect())) == [0]


@every_fleet
def test_waiting_ends_at_the_clock_and_turns_it_never_back(kind: str, stage: Open) -> None:
    fleet = stage(kind).fleet
    fleet.available()
    until_s = fleet.clock + 0.05
    assert not fleet.wait(until_s)
    now_s = fleet.clock
    assert now_s >= until_s
    assert not fleet.wait(until_s / 2)
    assert fleet.clock >= now_s


@every_fleet
def test_an_answer_that_is_there_is_not_waited_over(kind: str, stage: Open) -> None:
    made = stage(kind)
    fleet = made.fleet
    fleet.dispatch([made.task(0, 0)])
    made.await_answers(1)
    assert 0 not in fleet.available()
    assert not fleet.wait(fleet.clock + 1000)
    assert fleet.clock < 1000
    assert answered(list(fleet.collect())) == [0]


@every_fleet
def test_cancelled_task_is_never_answered_and_frees_its_client(kind: str, stage: Open) -> None:
    made = stage(kind)
    fleet = made.fleet
    fleet.dispatch([made.task(number, number) for number in range(CLIENTS)])
    assert answered(list(fleet.collect(enough=2))) == QUICK
    fleet.cancel([SLOW, 0, 99])
    assert list(fleet.collect(until=fleet.clock)) == []
    assert list(fleet.collect()) == []
    fleet.dispatch([made.task(7, 0)])
    assert answered(list(fleet.collect())) == [7]
    made.release()
    await_free(made, SLOW)
    fleet.dispatch([made.task(8, SLOW)])
    (answer,) = fleet.collect()
    assert answer.tasks == (8,)
    assert list(fleet.collect()) == []


@real_fleets
def test_arrived_answers_are_collected_despite_clock_and_cancellation(kind: str, stage: Open) -> None:
    """Simulated ones are there in the instant in which they are given."""
    made = stage(kind)
    fleet = made.fleet
    for called_off in (False, True):
        fleet.dispatch([made.task(10 * called_off + number, number) for number in QUICK])
        made.await_answers(2 + 2 * called_off)
        some = list(fleet.collect(until=fleet.clock, enough=1))
        assert len(some) == 1
        fleet.cancel([10 * called_off + number for number in QUICK] if called_off else [])
        assert answered([*some, *fleet.collect(until=0.0)]) == [10 * called_off + number for number in QUICK]


@every_fleet
def test_who_comes_and_goes_is_told(kind: str, stage: Open) -> None:
    made = stage(kind, visits=True)
    fleet = made.fleet
    assert SLOW in fleet.available()
    made.leave()
    assert fleet.wait(fleet.clock + 1000)
    assert list(fleet.available()) == QUICK
    assert list(fleet.registered()) == [0, 1, 2]
    made.come()
    assert fleet.wait(fleet.clock + 1000)
    await_free(made, SLOW)
    fleet.dispatch([made.task(3, SLOW)])
    made.release()
    assert answered(list(fleet.collect())) == [3]


@real_fleets
def test_a_task_waits_for_its_client(kind: str, stage: Open) -> None:
    made = stage(kind)
    made.leave()
    while SLOW in made.fleet.available():
        assert made.fleet.wait(made.fleet.clock + BOUND_S)
    made.fleet.dispatch([made.task(0, SLOW)])
    made.come()
    made.release()
    (answer,) = made.fleet.collect()
    assert not answer.problem


@every_fleet
def test_who_goes_away_for_long_has_failed_its_task(kind: str, stage: Open) -> None:
    made = stage(kind, visits=True)
    fleet = made.fleet
    fleet.dispatch([made.task(number, number) for number in range(CLIENTS)])
    assert answered(list(fleet.collect(enough=2))) == QUICK
    made.leave()
    (failure,) = fleet.collect(enough=1)
    assert (failure.tasks, failure.round, failure.clients, failure.has_diverged) == ((SLOW,), 1, (SLOW,), False)
    assert failure.problem
    assert failure.problem.isprintable()
    assert SLOW not in fleet.available()


@every_fleet
def test_infinite_numbers_are_a_failure_and_never_end_runs(kind: str, stage: Open) -> None:
    made = stage(kind)
    fleet = made.fleet
    huge_V = torch.full_like(made.model()[0], 1e30)
    fleet.dispatch([made.task(0, 0, huge_V)])
    (failure,) = fleet.collect()
    assert failure.problem
    assert (failure.tasks, failure.round, failure.clients) == ((0,), 1, (0,))
    assert failure.has_diverged == (kind == "simulated")
    assert ("diverged" in failure.problem) == (kind != "simulated")
    assert 0 in fleet.available()


@real_fleets
def test_failures_are_no_replies(kind: str, stage: Open) -> None:
    made = stage(kind)
    fleet = made.fleet
    huge_V = torch.full_like(made.model()[0], 1e30)
    fleet.dispatch([made.task(0, 0, huge_V), made.task(1, 1, huge_V)])
    failures = list(fleet.collect(enough=1))
    assert answered(failures) == [0, 1]
    assert all(failure.problem for failure in failures)


FORGERIES: dict[str, Callable[[Tensor], Tensor]] = {
    "no number": lambda vector: torch.full_like(vector, torch.nan),
    "too short": lambda vector: vector[:-1],
    "another type": lambda vector: vector.half(),
}


@real_fleets
@pytest.mark.parametrize("forgery", FORGERIES)
def test_refused_answer_is_a_counted_failure_without_effect(kind: str, forgery: str, stage: Open) -> None:
    made = stage(kind, algorithm=SCAFFOLD)
    fleet = made.fleet
    kept = fleet.state()["kept"]["after"]
    made.forge(0, lambda tensors: [FORGERIES[forgery](tensors[0]), *tensors[1:]])
    fleet.dispatch([made.task(number, number) for number in QUICK])
    failure, reply = sorted(fleet.collect(), key=lambda answer: not answer.problem)
    assert (failure.tasks, failure.clients, failure.has_diverged) == ((0,), (0,), False)
    assert "refused" in failure.problem
    assert not reply.problem
    assert fleet.counts.refused == 1
    fleet.settle({0: 1.0, 1: 1.0})
    assert fleet.state()["kept"]["after"].keys() - kept.keys() == {1}


@every_fleet
def test_restored_fleet_has_collected_answers_and_nothing_else(kind: str, stage: Open, tmp_path: Path) -> None:
    """An answer that was there but had not been collected is made once more, from what its client kept before it."""
    undisturbed, made = stage("simulated", algorithm=SCAFFOLD), stage(kind, algorithm=SCAFFOLD)
    tasks = [made.task(number, number) for number in QUICK]
    more = [made.task(10 + number, number) for number in QUICK]
    wanted: dict[int, Answer] = {}
    for batch in (tasks, more):
        undisturbed.fleet.dispatch(batch)
        wanted |= {answer.tasks[0]: answer for answer in undisturbed.fleet.collect()}
        undisturbed.fleet.settle({task.id: 1.0 for task in batch})
    made.fleet.dispatch(tasks)
    made.await_answers(2)
    (first,) = made.fleet.collect(enough=1)
    made.fleet.settle({first.tasks[0]: 1.0})
    clock_s = made.fleet.clock
    Checkpoints(tmp_path / "checkpoints", 1).write(1, made.fleet.state())
    (second,) = made.fleet.collect()
    made.fleet.settle({second.tasks[0]: 1.0})
    newest = Checkpoints(tmp_path / "checkpoints", 1).newest()
    assert newest is not None
    open_tasks = [task for task in tasks if task.id not in first.tasks]
    again = made.restored(newest[1], open_tasks)
    try:
        assert again.fleet.clock >= clock_s
        assert list(again.fleet.registered()) == [0, 1, 2]
        found = {first.tasks[0]: first} | {answer.tasks[0]: answer for answer in again.fleet.collect()}
        again.fleet.settle({task.id: 1.0 for task in open_tasks})
        again.fleet.dispatch(more)
        found |= {answer.tasks[0]: answer for answer in again.fleet.collect()}
    finally:
        again.close()
    assert found.keys() == wanted.keys()
    for task in (*tasks, *more):
        assert bits(found[task.id]) == bits(wanted[task.id]), task.id


VERDICTS: list[dict[int, float]] = [{0: 0.25}, {}, {2: 0.25}, {3: 1.0}]
LEFT = [0.75, 0.75, 0.75**2, 0.0]
"""Of the gradient, which one step is taken along, where the client's control has moved towards it so far."""


@every_fleet
def test_a_clients_state_moves_as_far_as_its_update_counted(kind: str, stage: Open) -> None:
    """With c at zero one step of SCAFFOLD is −η (g − c_i), and c_i⁺ is g, whatever c_i was."""
    made = stage(kind, algorithm=SCAFFOLD)

    def update(number: int, client: int) -> Tensor:
        made.fleet.dispatch([made.task(number, client, steps=1)])
        (answer,) = made.fleet.collect()
        return update_of(answer)[: made.model()[0].numel()]

    updates = []
    for number, verdict in enumerate(VERDICTS):
        updates.append(update(number, 0))
        made.fleet.settle(verdict)
    updates.append(update(9, 0))
    assert updates[0].abs().max() > 1e-3
    for found, left in zip(updates[1:], LEFT, strict=True):
        # Of parameters below 1 in float32 a trained one is off by 2⁻²⁴ at most, and by as much in the gradient's step.
        torch.testing.assert_close(found, left * updates[0], rtol=0, atol=3e-7)
    assert torch.equal(updates[1], updates[2])
    made.fleet.settle({})
    other = update(10, 1)
    made.fleet.settle({9: 1.0, 77: 1.0})
    assert torch.equal(update(11, 1), other)


@every_fleet
@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_who_keeps_a_state_takes_no_task_before_the_verdict(kind: str, algorithm: str, stage: Open) -> None:
    made = stage(kind, algorithm={"kind": algorithm})
    fleet, settled = made.fleet, [0, *([] if algorithm == "scaffold" else [1]), SLOW]
    fleet.dispatch([made.task(7, 1)])
    assert answered(list(fleet.collect())) == [7]
    assert list(fleet.available()) == settled
    fleet.settle({})
    assert list(fleet.available()) == list(fleet.registered()) == [0, 1, SLOW]


@real_fleets
def test_nodes_score_a_model_alike(kind: str, stage: Open) -> None:
    made = stage(kind, evaluation={"kind": "clients"})
    scores = made.fleet.scores(made.model(), BOUND_S).values()
    assert sorted(one.samples for one in scores) == sorted(made.held_out())
    assert all(math.isfinite(one.loss) and 0 <= one.metrics[0] <= 1 for one in scores)


ALGORITHMS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "scaffold": {"algorithm": {"kind": "scaffold"}},
    "ditto": {"algorithm": {"kind": "ditto"}},
    "afl": {"algorithm": {"kind": "afl"}},
    "scores by clients": {"evaluation": {"kind": "clients"}},
}


@pytest.mark.parametrize("name", thinned(ALGORITHMS, quick=3))
def test_what_is_simulated_is_what_real_nodes_train(name: str, tmp_path: Path) -> None:
    given = experiment(**ALGORITHMS[name])
    simulated = fed.simulate(given, output=tmp_path / "simulated")
    matrix = yaml.load(tmp_path / "simulated" / "population.json")["confusion"]
    runs = {"gRPC": over_grpc(given, tmp_path / "gRPC"), "Flower": over_flower(given, tmp_path / "Flower")}
    state = simulated.model.state_dict()
    for engine, output in runs.items():
        deployed = load_file(output / "model.safetensors")
        assert deployed.keys() == state.keys()
        assert all(torch.equal(deployed[part], tensor) for part, tensor in state.items()), engine
        summary = yaml.load(output / "summary.json")
        for key in ("status", "rounds", "final_test_accuracy", "final_test_loss", "clients"):
            assert summary[key] == pytest.approx(simulated.summary[key]), (engine, key)
        assert summary["refused"] == 0
        assert yaml.load(output / "population.json")["confusion"] == matrix
    assert (matrix is None) == ("final_client_accuracy_worst_decile" in simulated.summary)


def over_grpc(given: Experiment, folder: Path) -> Path:
    nodes: list[Any] = []
    serve(
        given,
        listen="127.0.0.1:0",
        output=folder / "run",
        min_nodes=CLIENTS,
        on_listen=lambda port: nodes.extend(nodes_at(port, given, folder)),
    )
    for node in nodes:
        node.join()
    return folder / "run"


def over_flower(given: Experiment, folder: Path) -> Path:
    write_app(given, folder / "app")
    (path,) = (folder / "app").glob("*/experiment.yaml")
    app = server_app(path)
    assert isinstance(app, ServerApp)
    context = SimpleNamespace(run_config={"min-nodes": CLIENTS, "output": str(folder / "run")}, run_id=7)
    app.run(Federation(path, partitions(CLIENTS, folder / "nodes")), context)
    return folder / "run"
