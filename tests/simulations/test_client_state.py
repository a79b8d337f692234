"""What clients keep moves as far as their updates moved the model, in every kind of rounds.

Shapes: N clients, D dimensions.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import fed
from fed.clients.training.devices import devices_of
from fed.clients.training.executor import InProcess
from fed.clients.training.worker import Work
from fed.errors import InvalidExperiment
from fed.server.round_stats import RoundStats
from fed.simulations.simulation import Simulation
from tests.thinned import thinned

from .conftest import Quadratics, mean_output

pytestmark = pytest.mark.usefixtures("device")

LR, STEPS = 0.1, 3
SLOW = {"kind": "lognormal", "samples_per_s": 10.0, "sigma": 1.0}
"""Tasks of 0.3 s to 5 s: the slowest client's update is a dozen versions old."""

ROUNDS: dict[str, dict[str, Any]] = {
    "all": {},
    "cohorts": {"cohort": 3},
    "deadlines": {"deadline_s": 0.8, "partial_work": "drop"},
    "partial work": {"deadline_s": 0.8},
    "over-selection": {"cohort": 3, "over_selection": 2.0},
    "backups": {"cohort": 5, "backup_after_s": 1.0},
    "buffers": {"kind": "buffered", "buffer": 2},
    "buffers, constant": {"kind": "buffered", "buffer": 2, "staleness": "constant"},
    "buffers, hinge": {"kind": "buffered", "buffer": 1, "staleness": {"kind": "hinge", "grace": 1}},
    "buffers, dropped": {"kind": "buffered", "buffer": 1, "most_stale": 2},
    "bounded": {"kind": "bounded_staleness", "bound": 1},
    "unbounded": {"kind": "bounded_staleness", "bound": "none"},
}
STALE = {name for name in ROUNDS if "buffers" in name or "bounded" in name}
LATE = {"deadlines", "partial work", "over-selection", "backups", "buffers, dropped"}
REFUSED = {("bounded", "feddyn"), ("unbounded", "feddyn")}
SUMS: dict[str, tuple[dict[str, Any], str]] = {
    "scaffold": ({}, "control_P"),
    "feddyn": ({"alpha": 2.0}, "gradient_P"),
}
"""Algorithms, and what a client keeps of which the coordinator keeps the mean."""


def quadratics(clients: int = 8, dimensions: int = 3) -> Quadratics:
    """Unlike curvature, centres and sample counts; eigenvalues in [0.5, 2]."""
    generator = np.random.default_rng(0)
    bases = [np.linalg.qr(generator.normal(size=(dimensions, dimensions)))[0] for _ in range(clients)]
    return Quadratics(
        np.stack([basis @ np.diag(generator.uniform(0.5, 2.0, dimensions)) @ basis.T for basis in bases]),
        generator.normal(size=(clients, dimensions)),
        1 + np.arange(clients) % 5,
        generator.normal(size=dimensions),
    )


def optimum(made: Quadratics) -> NDArray[np.float64]:
    """Of the mean of the clients' losses, each alike."""
    pulls_D = np.einsum("nij,nj->i", made.curvature_NDD, made.centre_ND)
    answer: NDArray[np.float64] = np.linalg.solve(made.curvature_NDD.sum(0), pulls_D)
    return answer


class After(NamedTuple):
    """What is known after a round.

    Args:
        model_D: the global model.
        mean_D: what the coordinator keeps.
        kept_ND: what each client keeps; zeros before its first task.
        stats: the round's counts.
        population: the number of clients that have ever registered.
    """

    model_D: Tensor
    mean_D: Tensor
    kept_ND: Tensor
    stats: RoundStats
    population: int


def rounds_of(made: Quadratics, algorithm: str, count: int, **keys: Any) -> Iterator[After]:
    """A run, round by round."""
    given, kept = SUMS[algorithm]
    of_all = {"local": {"lr": LR, "steps": STEPS, "batch_size": 100}, "devices": SLOW}
    experiment = fed.Experiment(**{"algorithm": {"kind": algorithm, **given}, **of_all, **keys})
    model = made.model()
    simulation = Simulation(experiment, made.data(), lambda: model, mean_output)
    with InProcess(partial(Work, simulation.recipe), devices_of(1)) as executor:
        federation = simulation.federation(executor)
        for number in range(1, count + 1):
            stats = federation.round(number)
            state = federation.state()
            model_D, mean_D = state["coordinator"]["aggregator"].values()
            before = {f"algorithm.{kept}": torch.zeros_like(model_D)}
            records = [state["fleet"]["clients"].get(client, before) for client in simulation.data.clients]
            population = state["coordinator"]["population"]
            yield After(model_D, mean_D, torch.stack([one[f"algorithm.{kept}"] for one in records]), stats, population)


@pytest.mark.parametrize(
    ("rounds", "algorithm"),
    thinned([(rounds, algorithm) for rounds in ROUNDS for algorithm in SUMS if (rounds, algorithm) not in REFUSED], 4),
)
def test_the_coordinators_sum_is_the_mean_of_clients_states(rounds: str, algorithm: str) -> None:
    devices = {**SLOW, "failure": 0.1, "interruption": 0.1}
    seen = [*rounds_of(quadratics(), algorithm, 30, rounds=ROUNDS[rounds], devices=devices)]
    for after in seen:
        # Sums in float64 over rounds of eight: a rounding is at most 2⁻⁵³ of the largest number, and there are < 1000.
        largest = max(1.0, float(after.kept_ND.abs().max()))
        torch.testing.assert_close(after.mean_D, after.kept_ND.sum(0) / after.population, rtol=0, atol=1e-12 * largest)
    assert (seen[-1].kept_ND.abs().amax(1) > 0.01).sum() > 2
    is_stale = max(after.stats.staleness_mean for after in seen) > 1
    is_late = any(after.stats.late for after in seen)
    assert (is_stale, is_late) == (rounds in STALE, rounds in LATE)


@pytest.mark.parametrize("algorithm", SUMS)
@pytest.mark.parametrize("changes", [{"joining_s": 20.0}, {"joining_s": 10.0, "staying_s": 30.0}], ids=["come", "go"])
@pytest.mark.parametrize("rounds", thinned(["cohorts", "buffers"], quick=1))
def test_the_sum_holds_while_clients_register_and_leave(rounds: str, changes: dict[str, float], algorithm: str) -> None:
    *_, last = rounds_of(quadratics(), algorithm, 25, rounds=ROUNDS[rounds], devices={**SLOW, **changes})
    largest = max(1.0, float(last.kept_ND.abs().max()))
    assert (last.kept_ND.abs().amax(1) > 0.01).sum() > 2
    torch.testing.assert_close(last.mean_D, last.kept_ND.sum(0) / last.population, rtol=0, atol=1e-12 * largest)


def test_feddyn_is_refused_where_silent_clients_count_as_zeros() -> None:
    with pytest.raises(
        InvalidExperiment, match=r"feddyn needs a mean over the clients that answered, .*: choose scaffold"
    ):
        fed.Experiment(algorithm="feddyn", rounds="bounded_staleness")


@pytest.mark.parametrize("staleness", thinned(["polynomial", "constant"], quick=1))
@pytest.mark.parametrize("clients", [3, pytest.param(8, marks=pytest.mark.long)])
def test_scaffold_in_buffers_reaches_the_optimum(clients: int, staleness: str) -> None:
    """Three clients with targets 0, 1 and 5 have it at 2."""
    three = Quadratics(np.ones((3, 1, 1)), np.array([[0.0], [1.0], [5.0]]), np.ones(3, dtype=np.int64), np.zeros(1))
    made, buffer = (three, 1) if clients == 3 else (quadratics(), 4)
    rounds = {"kind": "buffered", "buffer": buffer, "staleness": staleness}
    *_, last = rounds_of(made, "scaffold", 250, rounds=rounds)
    # 25 rounds contract the error to a twentieth at the slowest: of 250 rounds 1e-13 of it is left.
    np.testing.assert_allclose(last.model_D.numpy(), optimum(made), rtol=0, atol=1e-10)


def test_a_buffer_that_no_client_can_fill_ends_its_round() -> None:
    """Of three clients that keep states one leaves for good: the others wait for the verdict on their answers."""
    experiment = fed.Experiment(
        data={"kind": "digits", "clients": 3},
        model="logistic",
        algorithm="scaffold",
        rounds={"kind": "buffered", "buffer": 3, "count": 4},
        devices={"staying_s": 10.0},
    )
    replied = [line["replied"] for line in fed.simulate(experiment).metrics]
    assert (replied[0], replied[-1]) == (3, 2)
