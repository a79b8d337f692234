"""The example of a loop of accelerate, on two processes for each client."""

import pytest

import fed

pytestmark = pytest.mark.long  # accelerate is of the extra all-tests


def test_a_loop_of_accelerate_is_a_client() -> None:
    run = fed.simulate(
        fed.Experiment(
            app={"kind": "python:examples.apps.digits_accelerate:Client", "clients": 2, "metrics": ["accuracy"]},
            local={"lr": 0.3, "epochs": 3},
            rounds={"count": 1},
            simulation={"workers": 0},
        )
    )
    assert run.metrics[-1]["test_accuracy"] > 0.5, "each process asserts that there are two"
