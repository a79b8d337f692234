"""Assembly of a run's training loop from its parts, the same for a simulation, a deployment and a real peer."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fed.clients.scoring.measures import directions
from fed.clients.setup import Preparation
from fed.clients.training.executor import Executor
from fed.config.experiment import Experiment
from fed.processes.clock import Clock
from fed.reports.population import Confusion, Partition, described
from fed.server.confusion import confusion_of
from fed.server.federation import Federation, State
from fed.server.telling import Observers
from fed.server.training_loop import Scoring, TrainingLoop
from fed.storage.run_folder import RunFolder

if TYPE_CHECKING:
    import networkx as nx

    from fed.vectors.tensors import nn

__all__ = ["assembled"]


def assembled(
    experiment: Experiment,
    prepared: Preparation,
    federation: Federation,
    executor: Executor,
    *,
    begin_scoring: Callable[[int, bool], Scoring],
    is_scored_by_clients: bool,
    facts: Callable[[], Mapping[str, Any]],
    fingerprint: Mapping[str, Any],
    clock: Clock,
    observers: Observers,
    folder: RunFolder | None,
    graph: "Callable[[], nx.Graph[Any] | None]" = lambda: None,
    partition: Callable[[], Partition | None] = lambda: None,
    load_module: "Callable[[State], nn.Module] | None" = None,
    has_one_model: bool = True,
    is_simulated: bool = False,
) -> TrainingLoop:
    """The training loop of a run.

    Args:
        experiment: experiment with every default resolved.
        prepared: algorithm, model and test set of the experiment.
        federation: federation that trains.
        executor: executor of the work that is done here: scores, confusion matrix.
        begin_scoring: function that begins to score the federation's models as they are now; its arguments are the
            round's number, and True if no round comes after it.
        is_scored_by_clients: True if clients score models on samples of their own.
        facts: function that returns what the summary says beside the measurements; it is called at the end.
        fingerprint: experiment and shapes that its checkpoints belong to.
        clock: clock by which the run's wall time is measured.
        observers: observers that are told of rounds.
        folder: folder of the run; None: nothing is written.
        graph: function that returns the graph of neighbours for the report; None: there is none.
        partition: function that returns the samples by client and class for the report; None: they are not known here.
        load_module: function from a model's state to a module; it fills the prepared module unless given.
        has_one_model: True if there is one model that a confusion matrix can be of.
        is_simulated: True if the clients' own models are here, and all metrics stay in memory.
    """

    def confusion(state: State) -> Confusion | None:
        if not has_one_model:
            return None
        return confusion_of(prepared.recipe, state, executor, prepared.data.names.labels)

    def loaded(state: State) -> "nn.Module":
        prepared.layout.unpack(*state, prepared.module)
        return prepared.module.eval()

    def all_facts() -> Mapping[str, Any]:
        fixed = sum(part.numel() for part in prepared.module.parameters() if not part.requires_grad)
        return {**facts(), **({"fixed_parameters": fixed} if fixed else {})}

    return TrainingLoop(
        experiment,
        federation,
        begin_scoring=begin_scoring,
        has_scores=is_scored_by_clients or prepared.recipe.test is not None,
        # An executor in this process would only delay the next round by the scores.
        scores_meanwhile=executor.is_parallel,
        is_simulated=is_simulated,
        load_module=load_module or loaded,
        metrics=directions(prepared.metrics),
        facts=all_facts,
        confusion=confusion,
        population=lambda found: described(partition(), graph(), found),
        fingerprint=fingerprint,
        clock=clock,
        observers=observers,
        folder=folder,
    )
