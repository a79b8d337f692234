"""First exchange of a simulated run whose tables are standardized over all clients."""

from fed.clients.data import FederatedData
from fed.clients.first_exchange import exchange_of, learned
from fed.config.experiment import Experiment
from fed.server.first_exchange import exchanged, say_found
from fed.server.rounds.coordinated import Coordinated
from fed.simulations.choice import hired
from fed.simulations.simulation import Simulation

__all__ = ["standardized"]


def standardized(experiment: Experiment, data: FederatedData | None) -> Experiment:
    """The experiment with the means and deviations that its clients find; as it is where its table seeks none.

    Args:
        experiment: description of the run.
        data: frames of a program by client, in place of the experiment's data.

    Raises:
        RunFailed: if no client answers.
    """
    is_sought = experiment.table is not None and bool(experiment.table.sought)
    clients = 0
    while experiment.table is not None and experiment.table.sought:
        simulation = Simulation(exchange_of(experiment), data=None if data is None else data.by(experiment.table))
        clients = simulation.population
        with hired(simulation) as executor:
            federation = simulation.federation(executor)
            assert isinstance(federation, Coordinated)
            experiment = learned(experiment, exchanged(federation))
    if is_sought and experiment.table is not None:
        say_found(experiment.table, clients)
    return experiment
