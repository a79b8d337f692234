"""A seed of the data apart from the run's: each decides its own draws alone, and on nodes as in a simulation."""

import json
from typing import Any

import pytest
import torch

import fed
from fed.clients.data import FederatedData, load
from fed.clients.node.plans import as_experiment, part_of_nodes
from fed.clients.setup import Preparation

KEYS: dict[str, Any] = {
    "data": {"clients": 6, "partition": {"kind": "dirichlet", "alpha": 0.5}},
    "model": {"kind": "logistic"},
    "rounds": {"count": 2, "cohort": 3},
    "evaluation": {"kind": "clients", "fraction": 0.3},
}


def experiment(**keys: Any) -> fed.Experiment:
    return fed.Experiment(**{**KEYS, **keys})


def dealt(**keys: Any) -> FederatedData:
    made = experiment(**keys)
    assert made.data is not None
    return load(made.data, made.data_streams)


def are_same(ours: FederatedData, theirs: FederatedData) -> bool:
    assert ours.test is not None
    assert theirs.test is not None
    pairs = [*((ours.read(client), theirs.read(client)) for client in ours.clients), (ours.test, theirs.test)]
    return all(torch.equal(one, other) for pair in pairs for one, other in zip(*pair, strict=True))


def trained(**keys: Any) -> list[torch.Tensor]:
    return [value.detach() for value in fed.simulate(experiment(**keys)).model.state_dict().values()]


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_data_seed_alone_decides_who_holds_what() -> None:
    assert are_same(dealt(seed=3), dealt(seed=5, data_seed=3))
    assert not are_same(dealt(seed=3), dealt(seed=3, data_seed=5))


def test_without_data_seed_the_bits_are_those_of_seed() -> None:
    assert equal(trained(seed=3), trained(seed=3, data_seed=3))


def test_seed_decides_training_and_data_seed_data() -> None:
    ours = trained(seed=3, data_seed=3)
    assert not equal(ours, trained(seed=4, data_seed=3))
    assert not equal(ours, trained(seed=3, data_seed=4))


def test_first_model_is_that_of_seed() -> None:
    def first(**keys: Any) -> list[torch.Tensor]:
        made = experiment(**keys)
        module = Preparation(made, dealt(**keys)).module
        return [value.detach() for value in module.state_dict().values()]

    assert equal(first(seed=3), first(seed=3, data_seed=4))
    assert not equal(first(seed=3), first(seed=4, data_seed=3))


@pytest.mark.parametrize("seeds", [{"seed": 9, "data_seed": 3}, {"seed": 3}])
def test_data_seed_decides_which_samples_clients_hold_out(seeds: dict[str, int]) -> None:
    def held_out(**keys: Any) -> torch.Tensor:
        found = Preparation(experiment(**keys), dealt(data_seed=3)).held_out
        assert found is not None
        return torch.cat([found[client][0] for client in found])

    assert torch.equal(held_out(data_seed=3), held_out(**seeds))
    assert not torch.equal(held_out(data_seed=3), held_out(seed=3, data_seed=4))


def test_nodes_learn_the_data_seed_from_the_plan() -> None:
    made = experiment(seed=9, data_seed=3)
    assert as_experiment(json.dumps(part_of_nodes(made)), []).data_streams == made.data_streams
