"""Test sets as the data bring them: one for the coordinator, one a client, or both."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fed
from fed.clients.data import Pair
from fed.clients.scoring.losses import cross_entropy
from fed.clients.scoring.metrics import accuracy
from fed.clients.training.evaluation import evaluate
from fed.errors import InvalidData, InvalidExperiment
from fed.server.evaluation import say_without_scores
from fed.simulations.estimate import expect
from fed.simulations.simulate import simulate
from fed.simulations.simulation import Simulation
from tests.simulations import users_parts as parts

pytestmark = pytest.mark.usefixtures("device")

LACKS = "c3"


def own_tests(count: int = 6) -> dict[Any, Pair]:
    """Test sets of all clients but one."""
    return {f"c{number}": parts.samples(count + number, 50 + number) for number in range(9) if f"c{number}" != LACKS}


def data(**changed: Any) -> fed.FederatedData:
    return replace(parts.unequal(), **{"client_tests": own_tests(), **changed})


def experiment(evaluation: str, algorithm: str = "fedavg", **keys: Any) -> fed.Experiment:
    rounds = {"count": 2, "cohort": "all" if algorithm in ("dpsgd", "local") else 5}
    topology = {"topology": "ring"} if algorithm == "dpsgd" else {}
    base = {"rounds": rounds, "simulation": {"workers": 0}, **topology, **keys}
    return fed.Experiment(algorithm=algorithm, evaluation=evaluation, **base)


def scored(line: Any, part: str) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key.startswith(part) and "test_samples" not in key}


@pytest.mark.parametrize(
    ("algorithm", "keys", "beside"),
    [
        ("fedavg", {"batching": "on"}, {}),
        pytest.param("fedavg", {"batching": "off"}, {"workers": 2}, marks=[pytest.mark.long, pytest.mark.processes]),
        ("dpsgd", {"batching": "off"}, {}),
        ("centralized", {}, {}),
        ("local", {}, {}),
    ],
)
def test_both_is_the_union_of_the_two(algorithm: str, keys: Any, beside: Any, tmp_path: Path) -> None:
    """Scores over clients' own models on the common test set, which the coordinator gives alone, are not in it."""
    runs = {}
    for kind, more in (("coordinator", {}), ("clients", {}), ("both", beside)):
        asked = experiment(kind, algorithm, simulation={"workers": 0, **keys, **more})
        runs[kind] = simulate(asked, data=data(), model=parts.small, output=tmp_path / kind)
    lines = (runs[kind].metrics for kind in ("both", "coordinator", "clients"))
    for both, coordinator, clients in zip(*lines, strict=True):
        assert scored(both, "test_") == scored(coordinator, "test_")
        assert scored(both, "client_") == scored(clients, "client_") != {}
        assert both["train_loss"] == coordinator["train_loss"] == clients["train_loss"]
    rows = [(tmp_path / kind / "clients.jsonl").read_text() for kind in ("both", "clients")]
    assert rows[0] == rows[1]


def test_each_client_scores_on_its_own_test_set(tmp_path: Path) -> None:
    run = simulate(experiment("clients"), data=data(), model=parts.small, output=tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "clients.jsonl").read_text().splitlines()]
    last = {row["client"]: row for row in rows if row["round"] == 2}
    assert set(last) == set(own_tests()), "who brings none is not scored"
    for client, pair in own_tests().items():
        score = evaluate(run.model, cross_entropy, {"accuracy": accuracy}, pair, torch.device("cpu"))
        assert (last[client]["samples"], last[client]["loss"]) == (len(pair[1]), score.loss)
        assert last[client]["accuracy"] == score.metrics[0]


def test_with_test_sets_of_their_own_clients_hold_nothing_out() -> None:
    held = Simulation(experiment("clients"), data(), parts.small)
    assert {client: held.data.size_of(client) for client in held.data.clients} == dict(parts.unequal().sizes)
    assert held.held_out == held.data.client_tests
    shares = Simulation(experiment("both"), parts.unequal(), parts.small)
    assert shares.data.size_of("c4") == 24, "where the data bring none, a fifth of thirty is held out"
    assert shares.recipe.test is not None


def test_clients_test_sets_together_replace_a_missing_one() -> None:
    tests = own_tests()
    pooled = tuple(torch.cat([pair[part] for pair in tests.values()]) for part in (0, 1))
    given, made = (
        simulate(experiment("coordinator"), data=data(**changed), model=parts.small)
        for changed in ({"test": pooled, "client_tests": None}, {"test": None})
    )
    assert parts.outcome(given) == parts.outcome(made)


def test_that_nobody_scores_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    say_without_scores.cache_clear()
    unscored = data(test=None, client_tests=None)
    for given, evaluation in ((data(), "coordinator"), (unscored, "clients")):
        simulate(experiment(evaluation), data=given, model=parts.small)
    assert "nobody scores the model" not in caplog.text
    for _ in range(2):
        run = simulate(experiment("coordinator"), data=unscored, model=parts.small)
    assert run.summary["final_test_accuracy"] is None
    (line,) = [record.message for record in caplog.records if "nobody scores the model" in record.message]
    assert "FederatedData(…, test=…)" in line
    assert "evaluation: clients" in line


@pytest.mark.parametrize("kind", ["coordinator", "clients", "both"])
def test_on_demand_and_in_memory_are_one_run(kind: str) -> None:
    train = fed.ClientsOnDemand(range(12), lambda client: parts.samples(1 + client, client))
    tests = fed.ClientsOnDemand(range(2, 12), lambda client: parts.samples(3 + client, 50 + client))
    on_demand, in_memory = (
        simulate(
            experiment(kind),
            data=fed.FederatedData(make(train), None, 3, client_tests=make(tests)),
            model=parts.small,
        )
        for make in (lambda clients: clients, dict)
    )
    assert parts.outcome(on_demand) == parts.outcome(in_memory)


def test_attackers_score_on_the_true_labels_of_their_test_sets() -> None:
    keys = experiment("clients", adversaries={"kind": "label_flip", "fraction": 0.5})
    simulation = Simulation(keys, data(), parts.small)
    assert simulation.held_out is not None
    for client, (_, targets) in own_tests().items():
        assert torch.equal(simulation.held_out[client][1], targets)
    assert simulation.data.client_tests == simulation.held_out


def test_honest_peers_without_a_test_set_are_left_out() -> None:
    keys = experiment("clients", "dpsgd", adversaries={"kind": "sign_flip", "fraction": 0.2})
    assert simulate(keys, data=data(), model=parts.small).metrics[-1]["client_accuracy_mean"] is not None


def table(folder: Path, source: fed.FederatedData) -> dict[str, Any]:
    """The same samples as a table, with the section that reads it; real numbers in full, so that they come back."""
    tests = source.client_tests or {}
    rows = ["a,b,c,d,who,fold,label"]
    for fold, pairs in (("train", source.train), ("test", tests)):
        for client, (inputs, labels) in pairs.items():
            for values, label in zip(inputs.double().tolist(), labels.tolist(), strict=True):
                rows.append(",".join([*map(repr, values), str(client), fold, str(label)]))
    (folder / "table.csv").write_text("\n".join(rows), encoding="utf-8")
    return {"kind": "csv", "path": str(folder / "table.csv"), "client": "who", "split": "fold"}


@pytest.mark.parametrize("kind", ["coordinator", "clients", "both"])
def test_a_split_table_is_the_data_given_in_python(kind: str, tmp_path: Path) -> None:
    given = data(test=None)
    keys = experiment(kind, data=table(tmp_path, given), model="logistic")
    read = simulate(keys)
    same = simulate(keys.override({"data": None}), data=given)
    assert parts.outcome(read) == parts.outcome(same)


def test_the_estimate_covers_both_scorings() -> None:
    assert expect(Simulation(experiment("both"), data(), parts.small)).wall_s > 0


def test_what_has_no_meaning_is_refused_in_a_sentence() -> None:
    with pytest.raises(InvalidData, match=r"evaluation: both needs a test set .* write evaluation: clients$"):
        simulate(experiment("both"), data=parts.unequal(test=0), model=parts.small)
    with pytest.raises(InvalidData, match="got none among 9"):
        simulate(experiment("clients"), data=data(client_tests={}), model=parts.small)
    with pytest.raises(InvalidExperiment, match=r"evaluation both needs a global model .*write evaluation: clients"):
        experiment("both", "ditto")
    inputs, labels = parts.samples(4, 0)
    wrong = data(classes=None, client_tests={"c0": (inputs, labels + 3)})
    with pytest.raises(InvalidData, match="targets of the test set of client 'c0' must be in 0 … 2, for the model"):
        simulate(experiment("both"), data=wrong, model=parts.small)
