"""Progress of a run on standard error: a bar on a terminal, elsewhere a line about every tenth of the way."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fed.quantities import bytes_text, counted, duration_text, mean_text
from fed.storage.scores import metrics_of, score_of, words_of

if TYPE_CHECKING:
    from fed.config.comparison import Repetition
    from fed.server.observer import Event, Expectation, Kinds

__all__ = [
    "Bar",
    "ComparisonProgress",
    "Lines",
    "RoundLines",
    "SimulationProgress",
    "display",
    "say_all",
    "saying_long_steps",
    "score_in_words",
]

_LONG_STEPS = "fed.clients.training.private_costs"
"""Logger of what may take seconds before a run begins."""

_LONG_S = 10.0
"""Seconds; a run that is expected to take longer is announced."""


class Lines:
    """Place where progress is shown: eleven lines at most, whatever the number of steps."""

    def __init__(self) -> None:
        self._tenths = 0

    def running(self) -> contextlib.AbstractContextManager[object]:
        """Block within which progress is shown."""
        return contextlib.nullcontext()

    def say(self, text: str) -> None:
        """Show a line that stays."""
        # A run does not fail because its progress has no reader any more.
        with contextlib.suppress(BrokenPipeError):
            typer.echo(text, err=True)

    def doing(self, text: str) -> None:
        """Show what is done before there is progress to show; only where a line can be taken back."""

    def show(self, done: float, total: float, text: str) -> None:
        """Print a line if a tenth of the way has passed since the last one.

        Args:
            done: amount done.
            total: whole amount, > 0.
            text: text to write beside it.
        """
        tenths = int(10 * done / total + 1e-6)  # a sum of floats may end just short of a tenth
        # A log that is kept must not have a line for each of thousands of rounds.
        if tenths > self._tenths:
            self._tenths = tenths
            self.say(text)


class Bar(Lines):
    """One line that changes in place, and is removed at the end."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._progress = Progress(
            BarColumn(bar_width=24),
            TextColumn("{task.description}", markup=False),
            console=Console(stderr=True),
            transient=True,
            # A user's own prints go above the bar, but stay in the file that standard output may be.
            redirect_stdout=sys.stdout.isatty(),
        )
        self._task = self._progress.add_task("", total=None)

    def running(self) -> contextlib.AbstractContextManager[object]:
        """Block within which the line is there."""
        return self._progress

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        # A client's name may look like markup.
        self._progress.console.print(text, markup=False, highlight=False)

    def doing(self, text: str) -> None:
        """Change the line, with a bar that only moves."""
        self._progress.update(self._task, total=None, description=text)

    def show(self, done: float, total: float, text: str) -> None:
        """Change the line."""
        self._progress.update(self._task, completed=done, total=total, description=text)


def display() -> Lines:
    """A bar where standard error is a terminal that can show one, lines elsewhere."""
    from rich.console import Console

    # A dumb terminal, as editors have, shows the codes of a bar as text.
    return Bar() if sys.stderr.isatty() and not Console(stderr=True).is_dumb_terminal else Lines()


class _Said(logging.Handler):
    def __init__(self, shown: Lines) -> None:
        super().__init__()
        self._shown = shown

    def emit(self, record: logging.LogRecord) -> None:
        self._shown.say(self.format(record))


def say_all(shown: Lines) -> None:
    """Show all that is logged, between the progress of a run."""
    logger = logging.getLogger("fed")
    logger.setLevel(logging.INFO)
    logger.addHandler(_Said(shown))
    logger.propagate = False  # else handlers of the root logger print it again


@contextlib.contextmanager
def saying_long_steps(shown: Lines) -> Iterator[None]:
    """Block within which is shown what takes long before a run begins."""
    logger = logging.getLogger(_LONG_STEPS)
    if logging.getLogger("fed").level == logging.INFO:  # it is shown with all that is logged
        yield
        return
    handler = _Said(shown)
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def score_in_words(line: Mapping[str, Any]) -> str:
    """The first metric of a round, such as ``accuracy 0.912``, or its loss; empty where neither was measured."""
    score = score_of(line)
    return "" if score is None else f"{words_of(score[0])} {mean_text(score[1], None)}"


class _Clock:
    """Estimates the time left from the speed so far."""

    def __init__(self, done: float = 0.0) -> None:
        self._began_s = time.monotonic()
        self._before = done

    def left(self, done: float, total: float) -> str:
        # Rounds from before a resume took their time in another process.
        each_s = (time.monotonic() - self._began_s) / (done - self._before)
        # A run may take longer than was expected.
        return f"{duration_text(each_s * max(0.0, total - done))} left"


class SimulationProgress:
    """Progress of one simulation: its rounds, first metric, bytes and the time left.

    Args:
        display: place where progress is shown.
        folder: folder of the run, whose metrics tell the rounds that were done before it was resumed.
    """

    def __init__(self, display: Lines, folder: Path | None = None) -> None:
        self._display = display
        self._folder = folder
        self._rounds = 0
        self._size_bytes = 0
        self._score = ""
        self._clock = _Clock()
        self.has_begun = False
        self.rounds_done = 0
        self._expectation: Expectation | None = None

    @property
    def kinds(self) -> "Kinds":
        """The expectation, the run's beginning, and the ends of rounds."""
        from fed.server.observer import Expectation, RoundEnded, RunBegan

        return Expectation, RunBegan, RoundEnded

    def observe(self, event: "Event") -> None:
        """Announce the run, or show a finished round."""
        from fed.server.observer import Expectation, RoundEnded, RunBegan

        if isinstance(event, Expectation):
            self._expectation = event
        elif isinstance(event, RunBegan) and self._expectation is not None:
            self.begin(self._expectation, event.rounds_done)
        elif isinstance(event, RoundEnded):
            self.round(event.line)

    def begin(self, expectation: "Expectation", earlier: int) -> None:
        """Announce the run, if it is long.

        Args:
            expectation: expectation of the whole run.
            earlier: number of rounds that were done before a resume; the folder may have later ones by now.
        """
        from fed.storage.run_reader import metrics_lines

        self._rounds = expectation.rounds
        for line, _ in metrics_lines(self._folder) if self._folder and earlier else ():
            if line["round"] <= earlier:
                self._count(line)
        self._clock = _Clock(self.rounds_done)
        self.has_begun = True
        to_do = expectation.after(self.rounds_done)
        if to_do.wall_s > _LONG_S:
            up = bytes_text(to_do.bytes_up)
            down = bytes_text(to_do.bytes_down)
            rounds = counted(to_do.rounds, "more round" if self.rounds_done else "round")
            proviso = f", {to_do.proviso}" if to_do.proviso else ""
            self._display.say(f"about {duration_text(to_do.wall_s)}, {up} up and {down} down for {rounds}{proviso}")

    def round(self, line: Mapping[str, Any]) -> None:
        """Show a finished round."""
        self._count(line)
        parts = [f"round {self.rounds_done}/{self._rounds}"]
        parts += [self._score] if self._score else []
        parts += [bytes_text(self._size_bytes), self._clock.left(self.rounds_done, self._rounds)]
        self._display.show(self.rounds_done, self._rounds, ", ".join(parts))

    def _count(self, line: Mapping[str, Any]) -> None:
        self.rounds_done = line["round"]
        self._size_bytes += line["bytes_up"] + line["bytes_down"]
        # Not each round is evaluated: the last score stays in view.
        self._score = score_in_words(line) or self._score

    def done(self) -> str:
        """Rounds done so far, in words."""
        return counted(self.rounds_done, "round")


class RoundLines:
    """Line on standard error for each round of a server, or of a peer.

    Args:
        display: display that shows it.
        text_of: a round's line of the metrics → the text.
    """

    def __init__(self, display: Lines, text_of: Callable[[Mapping[str, Any]], str]) -> None:
        self._display = display
        self._text_of = text_of

    @property
    def kinds(self) -> "Kinds":
        """The ends of rounds."""
        from fed.server.observer import RoundEnded

        return (RoundEnded,)

    def observe(self, event: "Event") -> None:
        """Show a finished round."""
        from fed.server.observer import RoundEnded

        if isinstance(event, RoundEnded):
            self._display.say(self._text_of(event.line))


class ComparisonProgress:
    """Progress of a comparison, whose runs may overlap; a round counts by the time that it is expected to take.

    Args:
        display: place where progress is shown.
        expect: function from the name of a variant to the expected time and bytes of one run of it; it is called when
            the comparison begins, for the variants that have runs to do.
        total: number of all runs, with those that an earlier comparison in the folder has finished.
        jobs: number of runs side by side.
    """

    def __init__(self, display: Lines, expect: "Callable[[str], Expectation]", total: int, jobs: int) -> None:
        self._display = display
        self._expect = expect
        self._expected: dict[str, Expectation] = {}
        self._total = total
        self._jobs = jobs
        self._whole_s = 0.0
        self._runs_done = 0
        self._left_s = dict[tuple[str, "Repetition"], float]()
        self._size_bytes = 0
        self._last = ""
        self._clock = _Clock()
        self.has_begun = False

    def begin(self, runs: "Sequence[tuple[str, Repetition]]") -> None:
        """Estimate the time of the runs, and announce a long comparison.

        Args:
            runs: names of the runs to do, by variant and seed, or (seed, fold).

        Raises:
            InvalidInput: if a variant cannot run.
        """
        names = list(dict.fromkeys(name for name, _ in runs))
        for number, name in enumerate(names, 1):
            self._display.doing(f"estimating the time of {name}, {number} of {len(names)} variants")
            self._expected[name] = self._expect(name)
        self._runs_done = self._total - len(runs)
        if self._runs_done:
            self._display.say(f"{self._runs_done} of {self._total} runs are done")
        self._left_s = {(name, repetition): self._expected[name].wall_s for name, repetition in runs}
        self._whole_s = sum(self._left_s.values())
        self._clock = _Clock()
        self.has_begun = True
        # With fewer runs than jobs some cores have nothing to do.
        whole_s = self._whole_s / max(1, min(self._jobs, len(runs)))
        if whole_s > _LONG_S:
            expected = [self._expected[name] for name, _ in runs]
            size_bytes = sum(run.bytes_up + run.bytes_down for run in expected)
            provisos = "".join(dict.fromkeys(f", {run.proviso}" for run in self._expected.values() if run.proviso))
            text = f"about {duration_text(whole_s)}, {bytes_text(size_bytes)} for {counted(len(runs), 'run')}{provisos}"
            self._display.say(text)

    def start(self, name: str, repetition: "Repetition") -> None:
        """Show a run that begins, until another one has something to show.

        Args:
            name: name of the variant.
            repetition: seed of the run; with folds (seed, fold).
        """
        if not self._last:
            self._last = f", {_run_text(name, repetition)} has begun"
            self._show()

    def round(self, name: str, repetition: "Repetition", line: Mapping[str, Any]) -> None:
        """Show a finished round of one run.

        Args:
            name: name of the variant.
            repetition: seed of the run; with folds (seed, fold).
            line: metrics of the round.
        """
        self._size_bytes += line["bytes_up"] + line["bytes_down"]
        expected = self._expected[name]
        # By time, not by number: rounds of a slow variant would make the estimate jump.
        self._left_s[name, repetition] -= expected.wall_s / expected.rounds
        self._show()

    def end(self, name: str, repetition: "Repetition", summary: Mapping[str, Any]) -> None:
        """Show a finished run, or one that failed before its end.

        Args:
            name: name of the variant.
            repetition: seed of the run; with folds (seed, fold).
            summary: summary of the run.
        """
        self._runs_done += 1
        metric = metrics_of(summary)[0]
        score = summary.get(metric.final)
        what = summary["status"] if score is None else f"{metric.words} {mean_text(score, None)}"
        self._last = f", {_run_text(name, repetition)}: {what}"
        # A run that failed has no rounds left, whatever was expected.
        self._left_s[name, repetition] = 0.0
        self._show()

    def done(self) -> str:
        """Runs done so far, in words."""
        return f"{self._runs_done} of {counted(self._total, 'run')}"

    def _show(self) -> None:
        done_s = self._whole_s - sum(self._left_s.values())
        text = f"{self._runs_done} of {counted(self._total, 'run')}{self._last}, {bytes_text(self._size_bytes)}"
        # Before the first round nothing tells how fast the runs are.
        left = f", {self._clock.left(done_s, self._whole_s)}" if done_s > 0 else ""
        self._display.show(done_s, self._whole_s, f"{text}{left}")


def _run_text(name: str, repetition: "Repetition") -> str:
    from fed.config.comparison import repetition_text

    return f"{name} seed {repetition_text(repetition, ' ')}"
