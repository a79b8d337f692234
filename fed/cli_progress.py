"""How far a run is, on standard error: a bar on a terminal, elsewhere a line about every tenth of the way."""

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

import typer

from fed.quantities import bytes_text, duration_text

if TYPE_CHECKING:
    from fed.comparison import Comparison
    from fed.simulations.simulate import Expectation

__all__ = ["Bar", "Display", "Lines", "OfComparison", "OfSimulation", "display"]

LONG_S = 10.0
"""A run expected to take longer is announced."""


class Display(Protocol):
    """Where progress is shown, between ``with`` and its end."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *ending: object) -> None: ...
    def say(self, text: str) -> None:
        """Show a line that stays."""

    def show(self, done: int, total: int, text: str) -> None:
        """Show how much is done, and what there is to say of it."""


class Lines:
    """At most eleven lines, whatever the number of steps."""

    def __init__(self) -> None:
        self._tenths = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ending: object) -> None:
        pass

    def say(self, text: str) -> None:
        """Print it."""
        # A run does not fail because nobody reads its progress any more.
        with contextlib.suppress(BrokenPipeError):
            typer.echo(text, err=True)

    def show(self, done: int, total: int, text: str) -> None:
        """Print it, if a tenth of the way has been passed since the last line."""
        tenths = 10 * done // total
        if tenths > self._tenths:
            self._tenths = tenths
            self.say(text)


class Bar:
    """One line that changes in place, and is gone in the end."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (BarColumn(bar_width=24), TextColumn("{task.description}", markup=False))
        console = Console(stderr=True)
        # What a user's own code prints goes above the bar, but stays in the file that standard output may be.
        redirect = sys.stdout.isatty()
        self._progress = Progress(*columns, console=console, transient=True, redirect_stdout=redirect)
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *ending: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Print it above the bar."""
        self._progress.console.print(text, markup=False, highlight=False)

    def show(self, done: int, total: int, text: str) -> None:
        """Change the line."""
        self._progress.update(self._task, completed=done, total=total, description=text)


def display() -> Display:
    """A bar where standard error is a terminal that can show one, lines elsewhere."""
    from rich.console import Console

    return Bar() if sys.stderr.isatty() and not Console(stderr=True).is_dumb_terminal else Lines()


class _Clock:
    def __init__(self) -> None:
        self._began_s = time.monotonic()

    def left(self, done: int, total: int) -> str:
        return f"{duration_text((time.monotonic() - self._began_s) / done * (total - done))} left"


class OfSimulation:
    """Watches one simulation: its rounds, accuracy, bytes and the time left."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._rounds = 0
        self._size_bytes = 0
        self._accuracy: float | None = None
        self._clock = _Clock()
        self.has_begun = False
        self.rounds_done = 0

    def begin(self, expectation: "Expectation") -> None:
        """Announce a long run."""
        self._rounds = expectation.rounds
        self._clock = _Clock()
        self.has_begun = True
        if expectation.wall_s > LONG_S:
            self._display.say(f"about {_expected(expectation)} for {expectation.rounds} rounds")

    def round(self, line: Mapping[str, Any]) -> None:
        """Show a finished round."""
        self.rounds_done = line["round"]
        self._size_bytes += line["bytes_up"] + line["bytes_down"]
        accuracy = line.get("test_accuracy")
        self._accuracy = self._accuracy if accuracy is None else accuracy
        parts = [f"round {self.rounds_done}/{self._rounds}"]
        parts += [f"accuracy {self._accuracy:.3f}"] if self._accuracy is not None else []
        parts += [bytes_text(self._size_bytes), self._clock.left(self.rounds_done, self._rounds)]
        self._display.show(self.rounds_done, self._rounds, ", ".join(parts))


class OfComparison:
    """Watches the runs of a comparison, which may overlap."""

    def __init__(self, display: Display, comparison: "Comparison", jobs: int) -> None:
        self._display = display
        self._jobs = jobs
        counts = [getattr(experiment.rounds, "count", 1) for experiment in comparison.variants().values()]
        self._rounds = sum(counts) * len(comparison.seeds)
        self._runs = 0
        self._runs_done = 0
        self.has_begun = False
        self.rounds_done = 0
        self._size_bytes = 0
        self._last = ""
        self._clock = _Clock()
        self._is_announced = False

    def begin(self, runs: Sequence[tuple[str, int]]) -> None:
        """Count the runs."""
        self._runs = len(runs)
        self._clock = _Clock()
        self.has_begun = True

    def expect(self, name: str, seed: int, expectation: "Expectation") -> None:
        """Announce a long comparison, by the first run's expectation."""
        whole_s = expectation.wall_s * self._runs / min(self._jobs, self._runs)
        if not self._is_announced and whole_s > LONG_S:
            size = bytes_text((expectation.bytes_up + expectation.bytes_down) * self._runs)
            told = f"about {duration_text(whole_s)} and {size} for {self._runs} runs, by the first of them, {name}"
            self._display.say(told)
        self._is_announced = True

    def round(self, name: str, seed: int, line: Mapping[str, Any]) -> None:
        """Show a finished round of one run."""
        self.rounds_done += 1
        self._size_bytes += line["bytes_up"] + line["bytes_down"]
        self._show()

    def end(self, name: str, seed: int, summary: Mapping[str, Any]) -> None:
        """Show a finished run."""
        self._runs_done += 1
        accuracy = summary.get("final_test_accuracy")
        what = summary["status"] if accuracy is None else f"accuracy {accuracy:.3f}"
        self._last = f", {name} seed {seed}: {what}"
        self._show()

    def _show(self) -> None:
        if self.rounds_done:
            left = self._clock.left(self.rounds_done, max(self._rounds, self.rounds_done))
            text = f"{self._runs_done} of {self._runs} runs{self._last}, {bytes_text(self._size_bytes)}, {left}"
            self._display.show(self.rounds_done, max(self._rounds, self.rounds_done), text)


def _expected(expectation: "Expectation") -> str:
    up, down = bytes_text(expectation.bytes_up), bytes_text(expectation.bytes_down)
    return f"{duration_text(expectation.wall_s)}, {up} up and {down} down"
