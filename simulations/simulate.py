"""``fed.simulate``: one experiment, run on this machine."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from fed.clients.data import FederatedData
from fed.clients.evaluation import Metric
from fed.clients.training import Loss
from fed.errors import InvalidExperiment
from fed.experiment import Experiment
from fed.run import Run, RunFolder
from fed.simulations.expectation import Expectation, expect
from fed.simulations.report import run_report
from fed.simulations.simulation import Simulation

__all__ = ["Observer", "simulate"]


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
    observer: Observer | None = None,
) -> Run:
    """Run an experiment on this machine, on its GPU where there is one, else with one thread.

    Args:
        experiment: what to run.
        data: training data by client, in place of the experiment's.
        model: a factory of modules, or a module to copy, in place of the experiment's. A module of float64 stays so.
        loss: (output, target) → scalar, in place of cross-entropy. Targets may then have any type and shape.
        metric: (output, target) → number, reported as accuracy. With a ``loss`` and no ``metric`` accuracies are None.
        output: the run's folder; nothing is written without one.
        overwrite: take the place of a run that the folder holds.
        observer: is told how the run goes on.

    Returns:
        The run: metrics by round, summary, trained model.

    Raises:
        InvalidInput: if experiment, data, model and loss do not fit each other, or the folder holds something.
        Diverged: if a loss or a model is no longer finite. The folder then holds the last good model, and all metrics
            until then; so it does after an interruption.

    Note:
        Clients train one after another with one module. Parameters and buffers are each client's own; other Python
        attributes that a forward pass changes go from client to client. What a module draws from PyTorch's generators
        is a function of seed, client and round; Python's and NumPy's global generators are left alone.

    Example:
        >>> run = simulate(Experiment(rounds={"count": 3, "cohort": 10}, data={"clients": 20}))
        >>> run.summary["status"], run.summary["rounds"], run.directory
        ('finished', 3, None)
    """
    if not isinstance(experiment, Experiment):
        raise InvalidExperiment(f"experiment must be a fed.Experiment, got {type(experiment).__name__}: use {_HOW}")
    with _one_thread():
        folder = RunFolder(Path(output), overwrite=overwrite) if output is not None else None
        simulation = Simulation(experiment, data, model, loss, metric)
        expectation = expect(simulation) if observer is not None else None
        if folder is not None:
            folder.begin(simulation.experiment)
        if observer is not None and expectation is not None:
            observer.begin(expectation)
        return _Recording(simulation, folder, observer).run()


class _Recording:
    """Runs the rounds and keeps what they measure."""

    def __init__(self, simulation: Simulation, folder: RunFolder | None, observer: Observer | None) -> None:
        self._simulation = simulation
        self._folder = folder
        self._observer = observer
        self._metrics: list[dict[str, Any]] = []
        self._states = simulation.federation.model(), simulation.federation.models()
        self._began = time.perf_counter()

    def run(self) -> Run:
        status, reason = "failed", None
        try:
            for number in range(1, self._simulation.policy.count + 1):
                self._record(self._round(number))
            status = "finished"
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        except Exception as error:
            reason = str(error)
            raise
        finally:
            run = self._finish(status, reason)
        return run

    def _round(self, number: int) -> dict[str, Any]:
        simulation = self._simulation
        exchange = simulation.federation.round(number)
        evaluates = simulation.policy.evaluates(number)
        scores = simulation.evaluate() if evaluates else {"test_accuracy": None, "test_loss": None}
        return {
            "round": number,
            "virtual_s": simulation.federation.clock,
            "wall_s": time.perf_counter() - self._began,
            **scores,
            **vars(exchange),
        }

    def _record(self, line: dict[str, Any]) -> None:
        # Together: an interruption within the next round finds the model that the last line measured.
        self._states = self._simulation.federation.model(), self._simulation.federation.models()
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
        return {**summary, **own, **({"reason": reason} if reason else {})}


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread: the same bits however many processes share the machine, and faster for small models."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
