"""A client's work is a function of seed, client and round, whoever does it beside what else."""

from dataclasses import replace
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import pytest
import torch
from torch import Tensor, nn

import fed
from fed.clients.scoring.losses import cross_entropy
from fed.clients.scoring.metrics import accuracy
from fed.clients.training.devices import device_of
from fed.clients.training.evaluation import evaluate
from fed.clients.training.work_items import Evaluate, Evaluated, Train, Trained, label_of
from fed.clients.training.worker import Work
from fed.simulations.simulate import simulate
from fed.simulations.simulation import Simulation
from tests.devices import Current
from tests.simulations import users_parts as parts

pytestmark = pytest.mark.usefixtures("device")

Wants: TypeAlias = Literal["models", "reported", "updates", "mean", "payload"]


def twins() -> fed.FederatedData:
    """Clients that hold the same samples."""
    return fed.FederatedData(dict.fromkeys("abcd", parts.samples(20, 1)), parts.samples(20, 2))


class Watching(nn.Module):
    """Notes the samples of each batch, or what it drew for it."""

    batches: ClassVar[list[list[float]]] = []

    def __init__(self, draws: bool = False) -> None:
        super().__init__()
        self.layers = parts.small()
        self._draws = draws

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            noted = torch.rand(3) if self._draws else inputs[:, 0]
            self.batches.append(noted.tolist())
        outputs: Tensor = self.layers(inputs)
        return outputs


@pytest.mark.parametrize("draws", [False, True], ids=["order", "draws"])
def test_every_client_round_and_seed_has_its_own_streams(draws: bool) -> None:
    keys = fed.Experiment(rounds={"count": 3}, local={"batch_size": 10}, simulation={"batching": "off", "workers": 0})
    seen = []
    for seed in (0, 0, 1):
        data = twins()
        simulation = Simulation(keys.override({"seed": seed}), data, lambda: Watching(draws))
        work, state = Work(simulation.recipe, device_of()), simulation.layout.pack(simulation.recipe.module)
        Watching.batches.clear()
        for number in (1, 2):
            for client in data.clients:
                work(Train((client,), number, wants="mean"), state)
        seen.append([str(batches) for batches in zip(Watching.batches[::2], Watching.batches[1::2], strict=True)])
    assert seen[0] == seen[1]
    every = seen[0] + seen[2]
    assert len(set(every)) == len(every) == 2 * 2 * 4


def test_identical_clients_differ_by_streams_alike_in_any_group() -> None:
    found = {}
    for group in (1, 3, 4):
        keys = fed.Experiment(
            algorithm={"kind": "local"}, rounds={"count": 2}, simulation={"batching": "on", "group": group}
        )
        run = simulate(keys, data=twins(), model=parts.small)
        found[group] = [torch.cat([part.flatten() for part in module.parameters()]) for module in run.models.values()]
    assert len({tuple(model.tolist()) for model in found[4]}) == 4
    for group in (1, 3):
        for one, other in zip(found[group], found[4], strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-6), "rounding of float32 over a few steps"


def test_work_does_what_it_is_asked_and_says_who_asked() -> None:
    simulation = Simulation(fed.Experiment(simulation={"batching": "on"}), parts.unequal(), parts.small)
    work, (start_V, integers_I) = Work(simulation.recipe, device_of()), simulation.layout.pack(simulation.recipe.module)
    trained, (update_V, _) = work(Train(("c3", "c4"), 1, wants="mean"), (start_V, integers_I))
    assert isinstance(trained, Trained)
    assert (trained.samples, trained.diverged, update_V.dtype) == ((1, 30), (), torch.float64)
    test = simulation.data.test
    assert test is not None
    score, tensors = work(Evaluate(0, len(test[1])), (start_V[None], integers_I[None]))
    expected = evaluate(simulation.recipe.module, cross_entropy, {"accuracy": accuracy}, test, torch.device("cpu"))
    assert (score, tensors) == (Evaluated((expected,), (40,)), ())
    assert label_of(Train((3,), 2, wants="mean")) == "client 3 of round 2"
    assert label_of(Train((3, "b", 1), 2, wants="mean")) == "clients 3, 'b' and 1 of round 2"
    assert label_of(Train(tuple(range(20)), 2, wants="mean")).endswith("6, 7 and 12 others of round 2")


def of_points(x: float) -> Any:
    return torch.full((3, 4), x), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize("batching", ["on", "off"])
@pytest.mark.parametrize("wants", get_args(Wants))
def test_divergence_is_an_answer_that_names_the_client(batching: str, wants: Wants) -> None:
    data = fed.FederatedData({"good": of_points(1.0), "bad": of_points(1e25), "worse": of_points(1e30)})
    keys = fed.Experiment(local={"steps": 3}, simulation={"batching": batching})
    simulation = Simulation(keys, data, lambda: nn.Linear(4, 3), parts.squared)
    work, state = Work(simulation.recipe, device_of()), simulation.layout.pack(simulation.recipe.module)
    trained, tensors = work(Train(("good", "bad", "worse"), 1, wants), state)
    assert isinstance(trained, Trained)
    assert [client for client, _ in trained.diverged] == ["bad", "worse"]
    assert all(reason.startswith("the training loss became ") for _, reason in trained.diverged)
    assert tensors == ()
    fine, tensors = work(Train(("good",), 1, wants), state)
    assert isinstance(fine, Trained)
    assert (fine.diverged, len(tensors)) == ((), 2)


@pytest.mark.parametrize("wants", ["mean", "reported", "updates", "payload"])
@pytest.mark.parametrize("batching", ["on", "off"])
def test_plain_report_has_the_same_bits_asked_or_known(batching: str, wants: Wants) -> None:
    keys = fed.Experiment(simulation={"batching": batching})
    simulation = Simulation(keys, parts.unequal(), parts.small)
    assert simulation.way_out is not None
    ways_out = [replace(simulation.way_out, is_fused=is_fused) for is_fused in (True, False)]
    recipes = [replace(simulation.recipe, way_out=way_out) for way_out in ways_out]
    state = simulation.layout.pack(simulation.recipe.module)
    known, asked = (Work(recipe, device_of())(Train(("c1", "c3", "c4"), 1, wants), state) for recipe in recipes)
    assert known[0] == asked[0]
    # A GPU adds up what is known, in an order of its own.
    tolerance = 1e-14 if wants == "mean" and Current.device.type != "cpu" else 0.0
    for ours, theirs in zip(known[1], asked[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)
