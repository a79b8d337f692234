"""Algorithms whose clients have something of their own, against loops by hand and what follows from their equations."""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fed
from fed.aggregators.base import Phase
from fed.aggregators.fedavg import FedAvg
from fed.aggregators.fedbn import FedBN
from fed.aggregators.fedper import FedPer
from fed.aggregators.fedrep import FedRep
from fed.clients.data import held_out
from fed.clients.training.devices import devices_of
from fed.clients.training.executor import InProcess
from fed.clients.training.worker import Work
from fed.errors import InvalidExperiment, InvalidModel
from fed.simulations.simulate import simulate
from fed.simulations.simulation import Simulation
from fed.vectors.randomness import Streams
from tests.thinned import thinned

pytestmark = pytest.mark.usefixtures("device")

CLIENTS, COHORT, ROUNDS = 6, 3, 4
HEAD = {"3.weight", "3.bias"}
NORM = {"1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "plain": lambda parameters: torch.optim.SGD(parameters, 0.2),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.05),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.05, weight_decay=0.1),
}
SECTIONS: dict[str, dict[str, Any]] = {
    "plain": {"lr": 0.2},
    "momentum": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05},
    "adamw": {"lr": 0.05, "optimizer": "adamw", "weight_decay": 0.1},
}


class DrawnFedPer(FedPer):
    """With FedProx's correction, which sees the body alone."""

    mu = 0.8

    def correct(self, gradient_P: Tensor, x_P: Tensor, anchor_P: Tensor, *beside: Any) -> Tensor:
        assert gradient_P.shape[-1] == x_P.shape[-1] == anchor_P.shape[-1]
        return gradient_P + self.mu * (x_P - anchor_P)


def module(norm: bool = False) -> nn.Module:
    torch.manual_seed(3)
    middle = nn.BatchNorm1d(5) if norm else nn.Identity()
    return nn.Sequential(nn.Linear(4, 5), middle, nn.Tanh(), nn.Linear(5, 3)).double()


def data() -> fed.FederatedData:
    generator = torch.Generator().manual_seed(0)
    return fed.FederatedData(
        {
            client: (
                torch.randn(samples, 4, generator=generator, dtype=torch.float64) + client / 3,
                torch.randint(0, 3, (samples,), generator=generator),
            )
            for client, samples in ((client, 5 + 2 * client) for client in range(CLIENTS))
        },
        classes=3,
    )


TRAIN = held_out.for_each(data(), 0.2, Streams(0))[0].train
SAMPLES = {client: len(targets) for client, (_, targets) in TRAIN.items()}


def experiment(kind: str, optimizer: str, **keys: Any) -> fed.Experiment:
    """Three steps a task, each on all of a client's samples, so that their order means nothing."""
    return fed.Experiment(
        algorithm={"kind": kind, **keys.pop("algorithm", {})},
        local={"steps": 3, "batch_size": 100, **SECTIONS[optimizer]},
        rounds={"count": ROUNDS, "cohort": COHORT},
        **keys,
    )


def steps(
    model: nn.Module, on: tuple[Tensor, Tensor], count: int, optimizer: str, names: Iterable[str], pull: Any = None
) -> None:
    """Full-batch steps of the parameters of these names, by PyTorch's own optimizer."""
    parameters = [part for name, part in model.named_parameters() if name in set(names)]
    by = OPTIMIZERS[optimizer](parameters)
    model.train()
    for _ in range(count):
        by.zero_grad()
        torch.autograd.backward(cross_entropy(model(on[0]), on[1]))
        if pull is not None:
            strength, towards, pulled = pull
            for name in pulled:
                part = model.get_parameter(name)
                assert part.grad is not None
                part.grad += strength * (part.detach() - towards[name])
        by.step()


State = dict[str, Tensor]


def averaged(states: Mapping[int, State], names: Iterable[str]) -> State:
    """The mean of their models, weighted by samples; of integers the largest."""
    total = sum(SAMPLES[client] for client in states)
    return {
        name: sum((SAMPLES[client] / total * state[name] for client, state in states.items()), torch.zeros(()))
        if states[next(iter(states))][name].is_floating_point()
        else max(state[name] for state in states.values())
        for name in names
    }


def cohorts() -> list[list[int]]:
    """Whom rounds ask: the draws of the run's own stream."""
    draws = [Streams(0).generator("cohort", number).choice(CLIENTS, COHORT, replace=False) for number in range(1, 5)]
    return [sorted(draw.tolist()) for draw in draws]


def by_hand(kind: str, optimizer: str, private: set[str], **keys: Any) -> tuple[State, dict[int, State]]:
    """The server's state, and the model with which each client would predict."""
    working, on = module(norm=kind == "fedbn"), TRAIN
    names = [name for name, _ in working.named_parameters()]
    body = [name for name in names if name not in private]
    server = copy.deepcopy(working.state_dict())
    own: dict[int, State] = {client: copy.deepcopy({name: server[name] for name in private}) for client in SAMPLES}
    models: dict[int, State] = {}
    for cohort in cohorts():
        trained = {}
        for client in cohort:
            working.load_state_dict({**server, **own[client]})
            if kind == "fedrep":
                steps(working, on[client], keys["head_epochs"], optimizer, private)
                steps(working, on[client], 3, optimizer, body)
            else:
                pull = (DrawnFedPer.mu, {**server, **own[client]}, body) if kind.endswith("DrawnFedPer") else None
                steps(working, on[client], 3, optimizer, names, pull)
            trained[client] = copy.deepcopy(working.state_dict())
            own[client] = {name: trained[client][name] for name in private}
            if kind == "ditto":
                working.load_state_dict(models.get(client, server))
                steps(working, on[client], keys["personal_epochs"], optimizer, names, (keys["strength"], server, names))
                models[client] = copy.deepcopy(working.state_dict())
        server = {**server, **averaged(trained, server.keys() - private)}
    if kind == "ditto":
        return server, {client: models.get(client, server) for client in SAMPLES}
    return server, {client: {**server, **own[client]} for client in SAMPLES}


CASES: list[tuple[str, set[str], dict[str, Any]]] = [
    ("fedper", HEAD, {}),
    (f"python:{__name__}:DrawnFedPer", HEAD, {}),
    ("fedrep", HEAD, {"head_epochs": 2}),
    ("fedbn", NORM, {}),
    ("ditto", set(), {"strength": 0.7, "personal_epochs": 2}),
]


@pytest.mark.parametrize("batching", ["on", "off"])
@pytest.mark.parametrize("optimizer", thinned(OPTIMIZERS, quick=1))
@pytest.mark.parametrize(("kind", "private", "keys"), CASES, ids=[f"{kind} {keys}" for kind, _, keys in CASES])
def test_a_run_is_a_loop_by_hand(
    kind: str, private: set[str], keys: dict[str, Any], optimizer: str, batching: str
) -> None:
    """Rounds in which half of the clients take part; who is never asked included."""
    if kind == "fedbn" and batching == "on":
        batching = "auto"  # which finds that it cannot be
    described = experiment(kind, optimizer, algorithm=keys, simulation={"batching": batching})
    run = simulate(described, data=data(), model=module(norm=kind == "fedbn"), loss=cross_entropy)
    server, models = by_hand(kind, optimizer, private, **keys)
    assert {client for cohort in cohorts() for client in cohort} < set(SAMPLES), "somebody is never asked"
    assert set(run.models) == set(SAMPLES)
    for client, expected in models.items():
        state = run.models[client].state_dict()
        assert state.keys() == expected.keys()
        for name, part in expected.items():
            torch.testing.assert_close(state[name], part, rtol=1e-9, atol=1e-10)
    for name, part in server.items():
        torch.testing.assert_close(run.model.state_dict()[name], part, rtol=1e-9, atol=1e-10)


def states_of(models: Mapping[Any, nn.Module]) -> dict[Any, bytes]:
    return {
        client: b"".join(part.numpy().tobytes() for part in own.state_dict().values()) for client, own in models.items()
    }


STOCHASTIC: dict[str, Any] = {"local": {"lr": 0.3, "epochs": 2, "batch_size": 4, "momentum": 0.5}}


@pytest.mark.parametrize("kind", ["fedper", "fedrep", "ditto"])
def test_batched_clients_keep_what_single_ones_keep(kind: str) -> None:
    """Through shuffled batches, each phase with an order of its own."""
    runs = [
        simulate(
            fed.Experiment(
                algorithm={"kind": kind},
                rounds={"count": 3, "cohort": 4},
                simulation={"batching": batching, "group": 3},
                **STOCHASTIC,
            ),
            data=data(),
            model=module(),
        )
        for batching in ("on", "off")
    ]
    for client in SAMPLES:
        states = [run.models[client].state_dict() for run in runs]
        for name, part in states[0].items():
            torch.testing.assert_close(part, states[1][name], rtol=1e-10, atol=1e-12)
    losses = [[line["train_loss"] for line in run.metrics] for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)


@pytest.mark.parametrize(("kind", "numbers"), [("fedper", 4 * 5 + 5), ("fedrep", 4 * 5 + 5), ("fedbn", 25 + 18)])
def test_what_is_private_does_not_travel(kind: str, numbers: int) -> None:
    run = simulate(experiment(kind, "plain"), data=data(), model=module(norm=kind == "fedbn"))
    assert run.summary["bytes_up"] == run.summary["bytes_down"] == 8 * numbers * COHORT * ROUNDS
    first = module(norm=kind == "fedbn").state_dict()
    private = NORM if kind == "fedbn" else HEAD
    still = {name for name, part in run.model.state_dict().items() if torch.equal(part, first[name])}
    assert private <= still < first.keys()


@pytest.mark.long
def test_each_phase_takes_its_time() -> None:
    """Ditto trains twice; FedRep its head for so many epochs before the body's one."""

    def seconds(kind: str, **keys: Any) -> float:
        described = fed.Experiment(
            algorithm={"kind": kind, **keys}, rounds={"count": 1}, local={"batch_size": 4}, evaluation="clients"
        )
        (line,) = simulate(described, data=data(), model=module()).metrics
        return float(line["virtual_s"])

    fedper = seconds("fedper")  # exchanges of both are alike, and so cancel
    assert seconds("fedrep", head_epochs=4) - fedper == pytest.approx(4 * (seconds("fedrep", head_epochs=1) - fedper))
    assert seconds("ditto", personal_epochs=3) - seconds("ditto", personal_epochs=1) == pytest.approx(
        2 * (seconds("ditto") - seconds("fedavg"))
    )


def test_requested_steps_leave_phases_with_epochs_unchanged() -> None:
    """The head's two epochs of full batches are two steps; the body takes the algorithm's number."""
    seen = {}
    for count in (1, 4):
        run = simulate(
            fed.Experiment(
                algorithm={"kind": f"python:{__name__}:Stepping", "count": count, "head_epochs": 2},
                local={"batch_size": 100},
                rounds={"count": 1},
            ),
            data=data(),
            model=module(),
        )
        seen[count] = run.metrics[0]["virtual_s"], run.models[0][3].bias.detach()  # type: ignore[index]
    assert torch.equal(seen[1][1], seen[4][1])
    assert seen[4][0] > seen[1][0]


class Own(FedAvg):
    """Says what is private and what is trained as a test wants it."""

    names: tuple[str, ...] = ()
    of: tuple[Phase, ...] = (Phase(),)

    def private(self, module: nn.Module) -> tuple[str, ...]:
        return self.names

    def phases(self) -> tuple[Phase, ...]:
        return self.of


@dataclass(frozen=True, kw_only=True)
class Stepping(FedRep):
    """Asks for so many steps."""

    count: int = 1

    def steps(self, state: Any) -> int:
        return self.count


class Misspelt(Own):
    names = ("3.weihgt",)


class Everything(Own):
    names = ("0.weight", "0.bias", "3.weight", "3.bias")


class Silent(Own):
    of = (Phase(is_personal=True),)


class Both(Own):
    names = ("3.weight",)
    of = (Phase(), Phase(is_personal=True))


@pytest.mark.parametrize(
    ("algorithm", "error", "words"),
    [
        ({"kind": "fedbn"}, InvalidModel, "batch_norm: true"),
        ({"kind": "fedper", "personal_layers": 2}, InvalidModel, "less than the model's 2 layers, got 2"),
        ({"kind": f"python:{__name__}:Misspelt"}, InvalidModel, "3.weihgt.*known: 0.weight"),
        ({"kind": f"python:{__name__}:Everything"}, InvalidModel, "parameters to share"),
        ({"kind": f"python:{__name__}:Silent"}, InvalidExperiment, "a model that they report"),
        ({"kind": f"python:{__name__}:Both"}, InvalidExperiment, "either private parts"),
    ],
)
def test_what_has_no_meaning_is_refused(algorithm: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        simulate(fed.Experiment(algorithm=algorithm, rounds={"count": 1}), data=data(), model=module())


class OwnBody(Own):
    """A body of each client's own under a head that they share."""

    names = ("0.weight", "0.bias")


@pytest.mark.parametrize("evaluation", ["clients", "coordinator"])
def test_what_is_private_may_be_the_first_layers(evaluation: str) -> None:
    """Batched or not: the same scores, of the same models."""
    tested = replace(data(), test=data().train[5])
    lines, states = [], []
    for batching in ("on", "off"):
        run = simulate(
            fed.Experiment(
                algorithm={"kind": f"python:{__name__}:OwnBody"},
                rounds={"count": 3, "cohort": COHORT},
                local={"batch_size": 100},
                evaluation=evaluation,
                simulation={"batching": batching},
            ),
            data=tested,
            model=module(),
        )
        lines.append([[line["test_loss"], line["client_accuracy_mean"]] for line in run.metrics])
        states.append(run.models)
    np.testing.assert_allclose(lines[0], lines[1], rtol=1e-10)
    for client, model in states[0].items():
        torch.testing.assert_close(dict(model.state_dict()), dict(states[1][client].state_dict()), rtol=1e-10, atol=0)


def test_diverged_personal_model_ends_the_run_and_is_named() -> None:
    described = fed.Experiment(algorithm={"kind": "ditto", "strength": 1e300}, local={"epochs": 5})
    with pytest.raises(fed.errors.Diverged, match="client 0"):
        simulate(described, data=data(), model=module())


@pytest.mark.parametrize("kind", ["ditto", "fedper"])
def test_diverged_round_leaves_personal_models_unchanged(kind: str) -> None:
    spoiled = data()
    spoiled.train[3][0].mul_(1e200)
    described = fed.Experiment(algorithm={"kind": kind}, local={"epochs": 4}, simulation={"batching": "off"})
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    simulation = Simulation(described, spoiled, lambda: model)
    federation = simulation.federation(InProcess(partial(Work, simulation.recipe), devices_of(1)))
    before = dict(federation.models())
    with pytest.raises(fed.errors.Diverged, match="client 3"):
        federation.round(1)
    for client, (vector_V, integers_I) in federation.models().items():
        assert torch.equal(vector_V, before[client][0])
        assert torch.equal(integers_I, before[client][1])


def test_private_layers_are_last_and_keep_tied_weights_together() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.middle, self.read = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5)
            self.read.weight = self.embed.weight

    assert set(FedPer().private(Tied())) == {"embed.weight", "read.bias"}
    assert set(FedPer(personal_layers=2).private(Tied())) == {
        "embed.weight",
        "read.bias",
        "middle.weight",
        "middle.bias",
    }
    assert set(FedBN().private(nn.Sequential(nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2)))) == {
        "0.running_mean",
        "0.running_var",
        "0.num_batches_tracked",
    }


def test_each_phase_shuffles_in_an_order_of_its_own() -> None:
    """Where one client takes part, Ditto's two models without a tie are one training, but for the order of samples."""
    run = simulate(
        fed.Experiment(
            algorithm={"kind": "ditto", "strength": 0}, rounds={"count": 1, "cohort": 1}, local={"batch_size": 2}
        ),
        data=data(),
        model=module(),
    )
    client = int(Streams(0).uniforms("cohort", 1)[0] * CLIENTS)
    shared, own, first = (one.state_dict()["0.weight"] for one in (run.model, run.models[client], module()))
    apart, moved = (shared - own).abs().max(), (shared - first).abs().max()
    assert 1e-4 * moved < apart < moved
