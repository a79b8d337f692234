"""``fed.simulate``: one experiment, run on this machine."""

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fed.clients.data import FederatedData
from fed.clients.data.describe import partition_of
from fed.clients.data.holdings import in_order
from fed.clients.fingerprint import data_sha256
from fed.clients.first_exchange import as_begun
from fed.clients.scoring.measures import Loss, Metric, Metrics
from fed.clients.training.executor import Executor
from fed.compression.timing import facts_of
from fed.config.experiment import Experiment, check_given_once
from fed.errors import InvalidExperiment, InvalidInput
from fed.privacy.ledger import LEDGER_FILE, Ledger, ledger_folder
from fed.privacy.noise import SeededNoise
from fed.processes.clock import SYSTEM_CLOCK
from fed.processes.machine import frozen_objects, keep_freed_memory
from fed.secure_aggregation.settings import settings_of
from fed.server.assembly import assembled
from fed.server.evaluation import say_without_scores
from fed.server.observer import Essential, Expectation, Observer
from fed.server.resume import Parts, check_given_parts, newest_checkpoint, run_fingerprint
from fed.server.rounds.coordinated import Coordinated
from fed.server.telling import Observers
from fed.server.tracking import tracked
from fed.server.training_loop import TrainingLoop
from fed.simulations.choice import hired, leave_rerun
from fed.simulations.estimate import Estimate
from fed.simulations.resolved import as_chosen, chooses_alike
from fed.simulations.scoring import begin_scoring
from fed.simulations.simulation import Simulation
from fed.simulations.standardization import standardized
from fed.storage.run import Run
from fed.storage.run_folder import RunFolder
from fed.vectors.computing_device import computing_on
from fed.vectors.torch_settings import one_thread

if TYPE_CHECKING:
    from fed.vectors.tensors import nn

__all__ = ["simulate"]


_log = logging.getLogger(__name__)
_HOW = "fed.Experiment.load(path) or fed.Experiment(**keys)"


def simulate(
    experiment: Experiment,
    *,
    data: FederatedData | Mapping[Any, Any] | None = None,
    model: "Callable[[], nn.Module] | None" = None,
    loss: Loss | None = None,
    metric: Metric | Metrics | None = None,
    app: object = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    observers: Iterable[Observer | Essential] = (),
) -> Run:
    """Run an experiment on this machine, on its GPUs where there are any.

    Args:
        experiment: description of the run.
        data: training data by client, where the experiment names none; or, with a section ``table``, frames by client.
        model: factory of modules, or a module to copy, where the experiment names none. A module of float64 stays so.
        loss: (output, target) → scalar, where the experiment names none. Targets may then have any type and shape.
        metric: (output, target) → number, reported as accuracy; or a mapping of names to several, the first of which
            results are compared by, where the experiment names none; with a ``loss`` and no ``metric`` only those that
            the experiment names are measured. Evaluation calls loss and metrics once, with all outputs and targets of
            the test set, or of one client's held-out samples. A function with the attribute ``mean_over_samples =
            True`` is called with batches instead, and its values are averaged. Of a metric with ``higher_is_better =
            False`` low values are better.
        app: code of the clients' own, in any framework, where ``app.kind`` is null: a class of a client, or a function
            that makes one of its id, with ``fit`` and maybe ``evaluate``; or what was written for Flower. Data, model,
            loss and metrics are then the app's.
        output: folder of the run; None: nothing is written.
        overwrite: True if a run that the folder holds is replaced.
        resume: True if the run that the folder holds continues, from its newest whole checkpoint, or from the beginning
            if it ended before its first one. It ends with the same bits as a run that was never interrupted. Data,
            model, loss and metric that were given to it must be given again. The experiment must be the same, but for
            ``privacy.budget_epsilon`` with ``unit: client``.
        observers: listeners to the run's events (:mod:`fed.server.observer`), each in a thread of its own, so that a
            slow or failing one costs nothing; one that is wrapped as ``Essential`` is called in line.

    Returns:
        The run: metrics by round, summary, trained model.

    Raises:
        InvalidInput: if experiment, data, model and loss do not fit each other, the folder holds something, or the
            run to resume is another experiment's, or began with other data or code.
        RunFailed: if the folder cannot be written to any more; the run can be resumed from its newest checkpoint.
        Diverged: if a loss or a model is no longer finite. The folder then holds the last good model and all metrics
            until then, as after an interruption.

    Note:
        A process trains one group of clients after another with one module. Parameters and buffers are each client's
        own; other Python attributes that a forward pass changes go from client to client, in each process its own. What
        a module draws from PyTorch's generators is a function of seed, client and round; Python's and NumPy's global
        generators are left alone. The process keeps up to 256 MiB of freed memory from then on, which GNU's C library
        would give back to the system and ask for again in each step. Until the run ends, Python's garbage collector
        leaves out what was there before.

        With ``simulation.workers`` the program is run again up to ``if __name__ == "__main__":`` in each worker, so a
        script must call this below that line.

    Example:
        >>> run = simulate(Experiment(rounds={"count": 3, "cohort": 10}, data={"clients": 20}))
        >>> run.summary["status"], run.summary["rounds"], run.directory
        ('finished', 3, None)
    """
    if not isinstance(experiment, Experiment):
        raise InvalidExperiment(f"experiment must be a fed.Experiment, got {type(experiment).__name__}: use {_HOW}")
    leave_rerun()  # without a main guard every worker runs this line
    keep_freed_memory()
    with contextlib.ExitStack() as stack:
        stack.enter_context(one_thread())
        stack.enter_context(frozen_objects())
        folder = _folder(output, overwrite, resume)
        given_parts = {"data": data, "model": model, "loss": loss, "metric": metric, "app": app}
        given = [name for name, part in given_parts.items() if part is not None]
        check_given_once(experiment, given)
        begun = None
        if folder is not None and resume:
            check_given_parts(given, folder)
            begun = folder.experiment(experiment.objects())
            experiment = as_begun(experiment, begun)
        # Before the folder is touched, so that bad input costs no earlier run.
        experiment, held = standardized(experiment, data)
        simulation = Simulation(experiment, held, model, loss, metric, app)
        if begun is not None and not chooses_alike(simulation.experiment, begun):
            simulation = Simulation(as_chosen(experiment, begun), held, model, loss, metric, app)
        _log.info("training: %s", simulation.batching)
        if simulation.batching.note:
            _log.warning("local.precision %s: clients train %s", experiment.local.precision, simulation.batching.note)
        if simulation.prepared.casting:
            _log.info("%s", simulation.prepared.casting)
        if simulation.held_out is None and simulation.recipe.test is None:
            say_without_scores()
        fingerprint = run_fingerprint(simulation.experiment, simulation.layout, simulation.population)
        parts = None
        kept = None
        if folder is not None:
            parts = Parts(simulation.prepared, data_sha256(simulation.data, simulation.held_out))
            if resume:
                kept = newest_checkpoint(fingerprint, folder, experiment.objects(), parts)
        told = Observers(tracked(observers, experiment, None if folder is None else folder.path))
        # The estimate takes a trial: it is made only where an observer listens.
        estimate = Estimate(simulation)
        expectation = estimate.expectation if told.want(Expectation) else None
        if folder is not None:
            # Before workers start, which take seconds: a second run in this folder ends at once.
            stack.enter_context(folder.held())
            if (opened := _ledger(simulation, folder, resume=resume)) is not None:
                simulation.prepared.ledger = stack.enter_context(opened)
        executor = stack.enter_context(hired(simulation, estimate))
        loop = _loop(simulation, executor, fingerprint, folder, told)
        if kept is not None:
            assert folder is not None
            assert begun is not None
            _note_budget(folder, begun, experiment)
            loop.restore(*kept)
        elif folder is not None and parts is not None:
            folder.begin(simulation.experiment, given, parts.kept())
        if expectation is not None:
            told.tell(expectation)
        stack.enter_context(computing_on(simulation.device))
        return loop.run()


def _folder(output: str | Path | None, overwrite: bool, resume: bool) -> RunFolder | None:
    if output is None:
        if resume:
            raise InvalidInput("resume needs the folder of a run, got none: give fed.simulate(…, output=…)")
        return None
    return RunFolder.existing(Path(output)) if resume else RunFolder(Path(output), overwrite=overwrite)


def _note_budget(folder: RunFolder, begun: Experiment, experiment: Experiment) -> None:
    """Write the budget with which a run goes on into its folder, if it is another one than it began with."""
    if experiment.privacy is None or begun.privacy is None:
        return
    budget = experiment.privacy.make().budget_epsilon
    if budget != begun.privacy.make().budget_epsilon:
        folder.keep_experiment(begun.override({"privacy.budget_epsilon": budget}))


def _ledger(
    simulation: Simulation, folder: RunFolder, *, resume: bool
) -> contextlib.AbstractContextManager[Ledger] | None:
    """The ledger that all runs of a private experiment share, whatever their names; None where it is not private."""
    noise = simulation.prepared.noise
    if not isinstance(noise, SeededNoise):
        return None
    identity = f"simulation {noise.experiment_sha256}"
    return Ledger.open(
        ledger_folder(identity),
        identity,
        run=noise.experiment_sha256,
        copy=folder.path / LEDGER_FILE,
        is_resumed=resume,
        repeats_noise=True,
    )


def _loop(
    simulation: Simulation,
    executor: Executor,
    fingerprint: Mapping[str, Any],
    folder: RunFolder | None,
    observers: Observers,
) -> TrainingLoop:
    federation = simulation.federation(executor, observers)
    graph = simulation.topology.graph(1) if simulation.topology else None

    def facts() -> dict[str, Any]:
        attackers = simulation.attackers
        adversaries = {"adversaries": in_order(attackers.clients)} if attackers else {}
        counts = {"clients": simulation.population, "parameters": simulation.layout.parameters}
        message = simulation.message
        secure = settings_of(simulation.experiment)
        codecs = facts_of(message.encoder) if message else {}
        sessions: dict[str, Any] = {}
        if secure and message and message.fixed:
            sessions["secure_aggregation"] = secure.facts(message.fixed)
        most_together = simulation.groups.most_together
        in_parts = f"; in parts of at most {most_together}, for want of memory" if most_together else ""
        uncaptured = simulation.groups.uncaptured
        without_graphs = f"; steps without CUDA graphs, for {uncaptured}" if uncaptured else ""
        training = {"training": f"{simulation.batching}{in_parts}{without_graphs}"}
        account = federation.coordinator.account if isinstance(federation, Coordinated) else None
        spent = account.summary() if account is not None else {}
        return {**counts, **training, **federation.occupation(), **adversaries, **codecs, **sessions, **spent}

    return assembled(
        simulation.experiment,
        simulation.prepared,
        federation,
        executor,
        begin_scoring=lambda number, is_last: begin_scoring(
            simulation, federation, executor, round_number=number, is_last=is_last
        ),
        is_scored_by_clients=simulation.held_out is not None,
        facts=facts,
        fingerprint=fingerprint,
        clock=SYSTEM_CLOCK,
        observers=observers,
        folder=folder,
        graph=lambda: graph,
        partition=lambda: partition_of(simulation.data),
        load_module=simulation.load_module,
        # Where clients learn alone each one's model is scored, and their mean is none.
        has_one_model=simulation.algorithm.primitive is not None,
        is_simulated=True,
    )
