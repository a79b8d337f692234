"""Real peers of which one is killed for good, or comes back late, under every rule that relies on a sum."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

import fed
from fed.aggregators.peer_rule import PeerRule
from fed.clients.data import FederatedData, load
from fed.config.registry import ALGORITHMS
from tests.server.peer.processes import processes

PEERS, KILLED, ROUNDS, KILLED_IN = 4, 2, 400, 30
MADE = {kind: ALGORITHMS.make(kind).make() for kind in sorted(ALGORITHMS.builtin)}
RULES = [kind for kind, rule in MADE.items() if isinstance(rule, PeerRule) and rule.conserves_sum]
TOPOLOGIES: dict[str, Any] = {"d2": {"kind": "ring", "lazy": True}, "sgp": "directed_exponential"}


def keys(algorithm: str) -> dict[str, Any]:
    return {
        "name": "departure",
        "algorithm": algorithm,
        "topology": TOPOLOGIES.get(algorithm, "ring"),
        "local": {"lr": 0.3, "steps": 4, "batch_size": 16},
        "rounds": {"count": ROUNDS, "deadline_s": 2.0},
        "evaluation": "coordinator",
        "checkpoints": {"every": 10},
    }


def scores(models: Mapping[Any, Mapping[str, Tensor]], module: nn.Module, test: tuple[Tensor, Tensor]) -> Any:
    """Mean accuracy and loss over the models."""
    inputs, targets = test
    found = []
    for model in models.values():
        module.load_state_dict(model)
        output = module(inputs).detach()
        accuracy = (output.argmax(1) == targets).double().mean()
        found.append((float(accuracy), float(nn.functional.cross_entropy(output, targets))))
    return np.mean(found, axis=0)


def hold_to_simulation(algorithm: str, data: FederatedData, models: Mapping[int, Mapping[str, Tensor]]) -> None:
    """Hold peers' models to within a point of accuracy, and of loss, of a simulation of peers that all stay."""
    without = {peer: samples for peer, samples in data.train.items() if peer in models}
    run = fed.simulate(fed.Experiment(**keys(algorithm)), data=replace(data, train=without, test=None))
    module = deepcopy(next(iter(run.models.values())))
    simulated = {peer: model.state_dict() for peer, model in run.models.items()}
    assert data.test is not None
    expected_accuracy, expected_loss = scores(simulated, module, data.test)
    accuracy, loss = scores(models, module, data.test)
    assert accuracy > expected_accuracy - 0.01
    assert loss < expected_loss + 0.01


@pytest.mark.long
@pytest.mark.parametrize("returns", [None, "resumed", "anew"])
@pytest.mark.parametrize("algorithm", RULES)
def test_the_others_learn_as_if_it_had_never_been(algorithm: str, returns: str | None, tmp_path: Path) -> None:
    """One that comes back long after it was given up learns as one that was always there."""
    of_data = {"kind": "digits", "clients": PEERS, "partition": {"kind": "dirichlet", "alpha": 1.0}}
    given = {**keys(algorithm), "data": of_data}
    experiment = fed.Experiment(**given)
    assert experiment.data is not None
    data = load(experiment.data, experiment.data_streams).with_test_set()
    with processes(tmp_path, given, PEERS) as peers:
        peers.start(*range(PEERS))
        peers.await_round(KILLED_IN)
        peers.kill(KILLED)
        left = [peer for peer in range(PEERS) if peer != KILLED]
        peers.await_that(lambda: all(f"peer '{KILLED}' is gone" in peers.log(peer) for peer in left))
        if returns is not None:
            peers.await_round(2 * KILLED_IN)
            peers.start(KILLED, resume=returns == "resumed", overwrite=returns == "anew")
        peers.await_end()
        for peer in left:
            assert "this peer begins anew with the members that there are now" in peers.log(peer)
        assert {*peers.models()} == {*left, *([KILLED] if returns else [])}
        hold_to_simulation(algorithm, data, peers.models())
