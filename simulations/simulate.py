"""``fed.simulate``: one experiment, run on this machine."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from fed.checkpoints import Checkpoints, Tree
from fed.clients.data import ClientId, FederatedData
from fed.clients.evaluation import Metric
from fed.clients.losses import Loss
from fed.errors import InvalidExperiment, InvalidInput, RunFailed
from fed.experiment import Experiment
from fed.run import Run, RunFolder
from fed.server.gathering import Exchange
from fed.simulations.executor import Executor
from fed.simulations.expectation import Expectation, expect
from fed.simulations.federation import State
from fed.simulations.hiring import hired, leave_rerun
from fed.simulations.report import run_report
from fed.simulations.resuming import begun_as, hold_given, last_kept
from fed.simulations.scoring import Scoring, begin_scoring
from fed.simulations.simulation import Simulation

__all__ = ["Observer", "simulate"]


_log = logging.getLogger(__name__)
_HOW = "fed.Experiment.load(path) or fed.Experiment(**keys)"


class Observer(Protocol):
    """Is told how a run goes on."""

    def begin(self, expectation: Expectation) -> None:
        """Before the first round."""
        ...

    def round(self, line: Mapping[str, Any]) -> None:
        """After a round, with its line of the metrics."""
        ...


def simulate(
    experiment: Experiment,
    *,
    data: FederatedData | None = None,
    model: Callable[[], nn.Module] | None = None,
    loss: Loss | None = None,
    metric: Metric | None = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    observer: Observer | None = None,
) -> Run:
    """Run an experiment on this machine, on its GPUs where there are any.

    Args:
        experiment: what to run.
        data: training data by client, in place of the experiment's.
        model: a factory of modules, or a module to copy, in place of the experiment's. A module of float64 stays so.
        loss: (output, target) → scalar, in place of cross-entropy. Targets may then have any type and shape.
        metric: (output, target) → number, reported as accuracy. With a ``loss`` and no ``metric`` accuracies are None.
        output: the run's folder; nothing is written without one.
        overwrite: take the place of a run that the folder holds.
        resume: go on with the run that the folder holds, from its last checkpoint, or from the beginning where it has
            none: it ends with the same bits as if it had never been interrupted. Data, model, loss and metric that were
            given to it must be given again.
        observer: is told how the run goes on.

    Returns:
        The run: metrics by round, summary, trained model.

    Raises:
        InvalidInput: if experiment, data, model and loss do not fit each other, the folder holds something, or what is
            to be gone on with is another experiment.
        RunFailed: if the folder cannot be written to any more; it then holds what was last kept, to be gone on with.
        Diverged: if a loss or a model is no longer finite. The folder then holds the last good model, and all metrics
            until then; so it does after an interruption.

    Note:
        A process trains one group of clients after another with one module. Parameters and buffers are each client's
        own; other Python attributes that a forward pass changes go from client to client, in each process its own. What
        a module draws from PyTorch's generators is a function of seed, client and round; Python's and NumPy's global
        generators are left alone.

        With ``simulation.workers`` the program is run again up to ``if __name__ == "__main__":`` in each worker, so a
        script must call this below that line.

    Example:
        >>> run = simulate(Experiment(rounds={"count": 3, "cohort": 10}, data={"clients": 20}))
        >>> run.summary["status"], run.summary["rounds"], run.directory
        ('finished', 3, None)
    """
    if not isinstance(experiment, Experiment):
        raise InvalidExperiment(f"experiment must be a fed.Experiment, got {type(experiment).__name__}: use {_HOW}")
    leave_rerun()
    with _one_thread():
        folder = _folder(output, overwrite, resume)
        parts = {"data": data, "model": model, "loss": loss, "metric": metric}
        given = [name for name, part in parts.items() if part is not None]
        if folder is not None and resume:
            hold_given(given, folder)
        simulation = Simulation(experiment, data, model, loss, metric)
        kept = last_kept(simulation, folder) if folder is not None and resume else None
        expectation = expect(simulation) if observer is not None else None
        with hired(simulation, expectation) as executor:
            recording = _Recording(simulation, executor, folder, observer)
            if folder is not None and kept is None:
                folder.begin(simulation.experiment, given)
            elif folder is not None and kept is not None:
                recording.restore(*kept)
            if observer is not None and expectation is not None:
                observer.begin(expectation)
            return recording.run()


def _folder(output: str | Path | None, overwrite: bool, resume: bool) -> RunFolder | None:
    if output is None:
        if resume:
            raise InvalidInput("resume needs the folder of a run, got none: give fed.simulate(…, output=…)")
        return None
    return RunFolder.existing(Path(output)) if resume else RunFolder(Path(output), overwrite=overwrite)


class _Recording:
    """Runs the rounds and keeps what they measure."""

    def __init__(
        self, simulation: Simulation, executor: Executor, folder: RunFolder | None, observer: Observer | None
    ) -> None:
        self._simulation = simulation
        self._executor = executor
        self._federation = simulation.federation(executor)
        self._folder = folder
        self._observer = observer
        self._metrics: list[dict[str, Any]] = []
        self._states = self._federation.model(), self._federation.models()
        self._pending: _Round | None = None
        self._first = 1
        self._began = time.perf_counter()
        section = simulation.experiment.checkpoints
        self._every = section.every
        self._checkpoints = Checkpoints(folder.checkpoints, section.keep) if folder and section.every else None
        self._begun = begun_as(simulation) if self._checkpoints else {}

    def restore(self, number: int, state: Tree) -> None:
        """Go on after a round, with the state of its checkpoint."""
        assert self._folder is not None
        self._metrics = [self._as_measured(line) for line in self._folder.resume(number)]
        self._federation.restore(state["federation"])
        self._states = self._federation.model(), self._federation.models()
        self._first = number + 1
        self._began -= state["wall_s"]

    def _as_measured(self, line: dict[str, Any]) -> dict[str, Any]:
        """A line of the metrics with the losses that were not finite, which JSON has no numbers for."""
        has_samples = self._simulation.held_out is not None or self._simulation.data.test is not None
        if line["test_loss"] is None and has_samples and self._simulation.policy.evaluates(line["round"]):
            return {**line, "test_loss": math.nan}
        return line

    def run(self) -> Run:
        try:
            for number in range(self._first, self._simulation.policy.count + 1):
                self._round(number)
                self._keep(number)
            self._record_pending()
        except BaseException as error:
            reason = None
            if isinstance(error, Exception):
                reason = str(error)
                with contextlib.suppress(Exception):  # the error that counts is on its way
                    self._record_pending()
            self._give_up("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", reason)
            raise
        return self._finish("finished", None)

    def _give_up(self, status: str, reason: str | None) -> None:
        """Keep what was done."""
        try:
            self._finish(status, reason)
        except RunFailed as error:  # the error that counts is on its way
            if str(error) != reason:
                _log.warning("%s", error)

    def _round(self, number: int) -> None:
        """Train; then record the round before, which was scored meanwhile, or this one, if nobody else scores it."""
        exchange = self._federation.round(number)
        line = {"round": number, "virtual_s": self._federation.clock, "wall_s": time.perf_counter() - self._began}
        self._record_pending()
        evaluates = self._simulation.policy.evaluates(number)
        scoring = begin_scoring(self._simulation, self._federation, self._executor) if evaluates else None
        self._pending = _Round(line, exchange, scoring, (self._federation.model(), self._federation.models()))
        if not self._executor.is_parallel:
            self._record_pending()

    def _keep(self, number: int) -> None:
        """A checkpoint, if it is time for one."""
        if self._checkpoints is None or self._every is None or number % self._every:
            return
        assert self._folder is not None
        self._record_pending()
        self._folder.sync()
        wall_s = time.perf_counter() - self._began
        state = {"begun": self._begun, "wall_s": wall_s, "federation": self._federation.state()}
        self._checkpoints.write(number, state)

    def _record_pending(self) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        scores = pending.scoring.line() if pending.scoring else {"test_accuracy": None, "test_loss": None}
        line = {**pending.line, **scores, **pending.exchange._asdict()}
        # Together: an interruption within the next round finds the model that the last line measured.
        self._states = pending.states
        self._metrics.append(line)
        if self._folder is not None:
            self._folder.append(line)
        if self._observer is not None:
            self._observer.round(line)

    def _finish(self, status: str, reason: str | None) -> Run:
        simulation = self._simulation
        model = simulation.module_of(self._states[0])
        models = {client: simulation.module_of(state) for client, state in self._states[1].items()}
        directory = self._folder.path if self._folder else None
        run = Run(simulation.experiment, self._metrics, self._summary(status, reason), model, models, directory)
        if self._folder is not None:
            self._folder.keep(model)  # first, so that no failure to draw costs the work
            self._folder.finish(run.summary, run_report(run, simulation.data))
        return run

    def _summary(self, status: str, reason: str | None) -> dict[str, Any]:
        simulation, metrics = self._simulation, self._metrics
        evaluated = [line for line in metrics if line["test_loss"] is not None]
        last = evaluated[-1] if evaluated else {"test_accuracy": None, "test_loss": None}
        summary = {
            "experiment": simulation.experiment.name,
            "algorithm": simulation.experiment.algorithm.kind,
            "status": status,
            "rounds": len(metrics),
            "final_test_accuracy": last["test_accuracy"],
            "final_test_loss": last["test_loss"],
            "bytes_up": sum(line["bytes_up"] for line in metrics),
            "bytes_down": sum(line["bytes_down"] for line in metrics),
            "wall_s": time.perf_counter() - self._began,
            "virtual_s": metrics[-1]["virtual_s"] if metrics else 0.0,
            "clients": simulation.population,
            "parameters": simulation.layout.parameters,
            "seed": simulation.experiment.seed,
        }
        own = {f"final_{name}": value for name, value in last.items() if name.startswith("client_")}
        adversaries = {"adversaries": simulation.attackers} if simulation.attackers else {}
        occupation = self._federation.occupation()
        return {**summary, **own, **occupation, **adversaries, **({"reason": reason} if reason else {})}


class _Round(NamedTuple):
    """A round that is done, but perhaps not scored yet."""

    line: dict[str, Any]
    exchange: Exchange
    scoring: Scoring | None
    states: tuple[State, Mapping[ClientId, State]]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread: the same bits however many processes share the machine, and faster for small models."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
