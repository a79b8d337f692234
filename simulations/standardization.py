"""First exchange of a simulated run whose tables are standardized over all clients."""

from collections.abc import Mapping
from typing import Any

from fed.clients.data import FederatedData
from fed.clients.first_exchange import exchange_of, learned
from fed.config.experiment import Experiment
from fed.server.rounds.coordinated import Coordinated
from fed.server.rounds.first_exchange import exchanged, say_found
from fed.simulations.choice import hired
from fed.simulations.simulation import Simulation

__all__ = ["standardized"]


def standardized(experiment: Experiment, data: Any) -> tuple[Experiment, Any]:
    """The experiment with the means and deviations that its clients find, and its data as they are read by it.

    Args:
        experiment: description of the run.
        data: data that a program gives in place of the experiment's, perhaps frames by client; None for none.

    Returns:
        Experiment and data, as they are where there is no section ``table``.

    Raises:
        RunFailed: if no client answers.
    """
    table = experiment.table
    if table is None:
        return experiment, data
    given = FederatedData(dict(data), table=table) if isinstance(data, Mapping) else data
    is_sought = bool(table.sought)
    clients = 0
    while table.sought:
        simulation = Simulation(exchange_of(experiment), given)
        clients = simulation.population
        with hired(simulation) as executor:
            federation = simulation.federation(executor)
            assert isinstance(federation, Coordinated)
            experiment = learned(experiment, exchanged(federation))
        assert experiment.table is not None
        table = experiment.table
        given = None if given is None else given.by(table)
    if is_sought:
        say_found(table, clients)
    return experiment, given
