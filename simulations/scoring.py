"""Scoring of a simulation's models: by the coordinator, by the clients, or by both."""

from collections.abc import Mapping, Sequence

from fed.clients.data import ClientId, Held
from fed.clients.training.executor import Executor
from fed.server.evaluation import ScoringByClients, ScoringByCoordinator, scores_of_both
from fed.server.federation import Federation
from fed.server.training_loop import Scoring
from fed.simulations.simulation import Simulation

__all__ = ["begin_scoring", "begin_scoring_by_coordinator"]


def begin_scoring(
    simulation: Simulation, federation: Federation, executor: Executor, *, round_number: int = 1, is_last: bool = False
) -> Scoring:
    """Score the federation's model and the clients' own, where they keep some, as they are now.

    Args:
        simulation: simulation, which holds the samples to score on.
        federation: federation of the models that are scored.
        executor: executor of the work, which begins at once if the executor is idle.
        round_number: number of the round, from 1, which an app's clients are told.
        is_last: True if no round follows: all models are then scored on the whole test set.
    """
    held_out = simulation.held_out
    if simulation.recipe.test is None and held_out is not None:
        return _by_clients(simulation, held_out, federation, executor, round_number)
    by_coordinator = begin_scoring_by_coordinator(simulation, federation, executor, is_last=is_last)
    if held_out is None:
        return by_coordinator
    by_clients = _by_clients(simulation, held_out, federation, executor, round_number)
    return lambda: scores_of_both(by_coordinator(), by_clients())


def begin_scoring_by_coordinator(
    simulation: Simulation, federation: Federation, executor: Executor, *, is_last: bool = False
) -> Scoring:
    """Score the federation's model on the test set, and the clients' own where they do not score them themselves.

    Args:
        simulation: simulation, which holds the test set.
        federation: federation of the models that are scored.
        executor: executor of the work, which begins at once if the executor is idle.
        is_last: True if no round follows: all models are then scored on the whole test set.
    """
    own: Sequence[ClientId] | None = None
    sample: Sequence[int] = ()
    test = simulation.recipe.test
    only_own = simulation.algorithm.primitive is None
    if simulation.held_out is not None and not only_own:
        own = ()  # clients score their own models
    elif simulation.has_peers and not only_own:
        own = simulation.evaluation.scored(simulation.honest_peers, simulation.streams)
    # The last scores go into the summary: they are on all samples.
    if simulation.held_out is None and test is not None and not is_last:
        sample = simulation.evaluation.sample(simulation.recipe.test_size, simulation.streams)
    scoring = ScoringByCoordinator(simulation.recipe, federation, executor, only_own=only_own, own=own, sample=sample)
    return scoring.scores


def _by_clients(
    simulation: Simulation,
    held_out: Mapping[ClientId, Held],
    federation: Federation,
    executor: Executor,
    round_number: int,
) -> Scoring:
    if simulation.has_peers and simulation.attackers is not None:
        # An attacker's model says nothing of how the honest peers fare.
        held_out = {client: held_out[client] for client in simulation.honest_peers if client in held_out}
    metrics = simulation.recipe.metrics
    is_of_app = simulation.prepared.app is not None
    scoring = ScoringByClients(
        held_out,
        metrics,
        federation,
        executor,
        is_of_app=is_of_app,
        round_number=round_number,
        said=simulation.said,
    )
    return scoring.scores
