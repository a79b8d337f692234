"""The training loop: one round after another, with metrics, checkpoints and the model written down."""

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from fed.config.experiment import Experiment
from fed.errors import BudgetSpent, is_interrupt
from fed.processes.clock import Clock
from fed.reports.population import Confusion
from fed.server.federation import Federation, State
from fed.server.observer import ModelScored, RoundBegan, RoundEnded, RunBegan, RunEnded
from fed.server.recording import RunFiles, RunLog, Tally
from fed.server.round_stats import RoundStats
from fed.server.telling import Observers
from fed.storage.checkpoints import Checkpoints, Tree
from fed.storage.measured import as_measured
from fed.storage.run import Run, RunOnDisk
from fed.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from fed.vectors.tensors import nn

__all__ = ["Scores", "Scoring", "TrainingLoop"]

_log = logging.getLogger(__name__)


class Scores(NamedTuple):
    """Scores of one round's models.

    Args:
        line: part of the round's metrics.
        clients: id, samples, loss and metrics of each client that was scored.
    """

    line: dict[str, Any]
    clients: Sequence[Mapping[str, Any]] = ()


Scoring: TypeAlias = Callable[[], Scores]
"""Function that returns the scores of one round's models, as they were when the scoring began."""


class _Round(NamedTuple):
    """A round that is done, and perhaps not scored yet."""

    line: dict[str, Any]
    stats: RoundStats
    scoring: Scoring | None
    states: tuple[State, Mapping[int | str, State]]


@dataclass
class TrainingLoop:
    """All rounds of a run.

    Args:
        experiment: experiment with every default resolved.
        federation: federation that trains.
        begin_scoring: function that begins to score the federation's models as they are now; its arguments are the
            round's number, and True if no round comes after it.
        has_scores: True if there are samples to score models on.
        scores_meanwhile: True if the scoring continues during the next round.
        is_simulated: True if the clients' own models are here and belong to the run's results, and all metrics stay in
            memory. Otherwise a run with a folder has them there alone, so that its memory does not grow with the
            rounds.
        load_module: function from a model's state to a module.
        metrics: name → "max" or "min", the metrics that models are scored by and the best of their values.
        facts: function that returns what the summary says beside the measurements; it is called at the end.
        confusion: function from the model's state to its confusion matrix, or None; it is called at the end of a run
            with a folder.
        population: function from that matrix, or None, to what the report draws, as ``population.json`` keeps it; it
            is called at the end of a run with a folder.
        fingerprint: experiment and shapes that its checkpoints belong to.
        clock: time, by which the run's wall time is measured.
        observers: observers that are told of rounds; they are closed when the run ends.
        folder: folder of the run; None: nothing is written.
    """

    experiment: Experiment
    federation: Federation
    _: KW_ONLY
    begin_scoring: Callable[[int, bool], Scoring]
    has_scores: bool
    scores_meanwhile: bool
    is_simulated: bool
    load_module: "Callable[[State], nn.Module]"
    metrics: Mapping[str, str]
    facts: Callable[[], Mapping[str, Any]]
    confusion: Callable[[State], Confusion | None]
    population: Callable[[Confusion | None], Mapping[str, Any]]
    fingerprint: Mapping[str, Any]
    clock: Clock
    observers: Observers
    folder: RunFolder | None = None

    def __post_init__(self) -> None:
        """Begin before the first round."""
        self._policy = self.experiment.rounds.make()
        self._tally = Tally(keeps_lines=self._is_in_memory)
        files = [] if self.folder is None else [RunFiles(self.folder)]
        # These observers come before the user's, which find the files whole when they hear of a round.
        self.observers.put_first(self._tally, *files, RunLog())
        self._states = self.federation.model(), self.federation.models()
        self._pending: _Round | None = None
        self._confusion: Confusion | None = None
        self._first = 1
        self._began_s = self.clock.monotonic_s()

    def restore(self, number: int, state: Tree) -> None:
        """Resume after a round, from the state of its checkpoint."""
        assert self.folder is not None
        self.folder.resume(number)
        for line in self._measured_lines():
            self._tally.count(line)
        self.federation.restore(state["federation"])
        self._states = self.federation.model(), self.federation.models()
        self._first = number + 1
        self._began_s -= state["wall_s"]  # the wall time goes on from where it stopped

    @property
    def _wall_s(self) -> float:
        """Seconds since the run began, without those between a stop and its resumption."""
        return self.clock.monotonic_s() - self._began_s

    @property
    def _is_in_memory(self) -> bool:
        return self.is_simulated or self.folder is None

    def _measured_lines(self) -> Iterable[dict[str, Any]]:
        """The metrics in the folder, with the scores that were not finite, for which JSON has no number."""
        assert self.folder is not None
        if not self.has_scores:
            return self.folder.lines()
        return as_measured(self.folder.lines(), self.metrics, self._policy.evaluates)

    def run(self) -> Run:
        """Run all remaining rounds.

        Raises:
            RunFailed: if the folder cannot be written to any more.
            Diverged: if a loss or a model is no longer finite. The rounds before are kept, as after an interruption.
        """
        try:
            return self._all_rounds()
        finally:
            self.observers.close()

    def _all_rounds(self) -> Run:
        """Run all remaining rounds, and leave results however they end."""
        try:
            folder = self.folder.path if self.folder else None
            clients = self.federation.clients() if self.observers.want(RunBegan) else ()
            began = RunBegan(self.experiment, rounds_done=self._first - 1, clients=tuple(clients), folder=folder)
            self.observers.tell(began)
            stopped = self._rounds()
            self._record_pending()
            if self.folder is not None:
                self._confusion = self.confusion(self._states[0])
        except BaseException as error:  # Ctrl-C too leaves results
            reason = None
            if isinstance(error, Exception) and not is_interrupt(error):
                reason = str(error)
                with contextlib.suppress(Exception):  # the error that counts is on its way
                    self._record_pending()
            status = "interrupted" if is_interrupt(error) else "failed"
            self._give_up(status, reason)
            raise
        totals = self._tally.totals
        if totals.rounds and not totals.replied:
            why = "is a deadline too short?" if totals.late else "all have failed"
            _log.warning("no client has ever answered, so the model has learned nothing: %s", why)
        return self._finish("finished", stopped)

    def _rounds(self) -> str | None:
        """Run all remaining rounds; the reason for stopping before the last one, or None."""
        for number in range(self._first, self._policy.count + 1):
            try:
                self._round(number)
            except BudgetSpent as error:
                _log.warning("the run ends here: %s", error)
                return str(error)
            self._keep(number)
        return None

    def _give_up(self, status: str, reason: str | None) -> None:
        """Write the results so far."""
        try:
            self._finish(status, reason)
        except Exception as error:  # the error that counts is on its way
            # The same full disk may have ended the run, and is told already.
            if str(error) != reason:
                _log.warning("%s", error)

    def _round(self, number: int) -> None:
        """Train, then record the round before, which was scored meanwhile; without workers, record this one too."""
        self.observers.tell(RoundBegan(number))
        stats = self.federation.round(number)
        # The time is read before the wait for the last round's scores, which is not this round's time.
        line = {"round": number, "virtual_s": self.federation.clock, "wall_s": self._wall_s}
        line |= self.federation.measures()
        self._record_pending()
        is_last = number == self._policy.count
        scoring = self.begin_scoring(number, is_last) if self._policy.evaluates(number) else None
        states = self.federation.model(), self.federation.models()
        self._pending = _Round(line=line, stats=stats, scoring=scoring, states=states)
        if not self.scores_meanwhile:
            self._record_pending()

    def _keep(self, number: int) -> None:
        """Write a checkpoint, if one is due."""
        section = self.experiment.checkpoints
        if self.folder is None or section.every is None or number % section.every:
            return
        self._record_pending()  # waits for this round's scores
        self.folder.sync()  # a checkpoint must not outlive the lines of its rounds
        state = {"fingerprint": self.fingerprint, "wall_s": self._wall_s, "federation": self.federation.state()}
        Checkpoints(self.folder.checkpoints, section.keep).write(number, state)

    def _record_pending(self) -> None:
        if self._pending is None:
            return
        pending = self._pending
        self._pending = None
        unscored = {"test_accuracy": None, "test_loss": None, **{f"test_{name}": None for name in self.metrics}}
        scores = pending.scoring() if pending.scoring else Scores(unscored)
        line = {**pending.line, **scores.line, **pending.stats.measured(is_of_app=self.experiment.app is not None)}
        # Model and line change together: after an interruption the model is the one that the last line measured.
        self._states = pending.states
        number = line["round"]
        if pending.scoring is not None:
            self.observers.tell(ModelScored(number, scores.line))
        ended = RoundEnded(number, line, participation=pending.stats.participation, clients=scores.clients)
        self.observers.tell(ended)

    def _finish(self, status: str, reason: str | None) -> Run:
        model = self.load_module(self._states[0])
        own = self._states[1] if self.is_simulated else {}
        models = {client: self.load_module(state) for client, state in own.items()}
        found: dict[str, Any] = {
            "experiment": self.experiment,
            "summary": self._summary(status, reason),
            "model": model,
            "models": models,
            "directory": self.folder.path if self.folder else None,
        }
        lines = self._tally.lines
        run = Run(metrics=lines, **found) if self._is_in_memory else RunOnDisk(self._measured_lines, **found)
        if self.folder is not None:
            self.folder.keep(model, models)
            self.folder.finish(run.summary, self.population(self._confusion))
        self.observers.tell(RunEnded(status, dict(run.summary)))  # a copy: the summary itself is the user's
        return run

    def _summary(self, status: str, reason: str | None) -> dict[str, Any]:
        summary = {"status": status, **self._tally.totals.summary(self.experiment, self.metrics), **self.facts()}
        # The time until now: the totals end with the last round's line, before its model was written.
        summary["wall_s"] = self._wall_s
        return {**summary, **({"reason": reason} if reason else {})}
