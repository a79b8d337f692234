"""Pace of a node: how many optimizer steps it can take until a deadline."""

from collections.abc import Callable
from dataclasses import replace

from fed.clients.training.batches import Batches, normalises_batches
from fed.clients.training.work_items import Recipe, Train
from fed.processes.clock import Clock

__all__ = ["Pace"]

_SHARE_OF_TIME = 0.9  # planned for local steps, since some take longer than the last


class Pace:
    """Seconds that one optimizer step takes, measured in the last task.

    A task of several phases cannot be cut: its steps are all taken, whatever time they need.

    Args:
        recipe: the recipe of the client's training.
        samples: number of samples that the client trains on.
        clock: time, by which steps are measured.
    """

    def __init__(self, recipe: Recipe, samples: int, clock: Clock) -> None:
        self._clock = clock
        self._recipe = recipe
        self._samples = samples
        self._step_s: float | None = None

    def note(self, train: Train, took_s: float) -> None:
        """Take note of the time that a training took, in seconds."""
        self._step_s = took_s / self._steps_of(train)

    def in_time(self, train: Train, until_s: float, do: Callable[[Train], object]) -> Train:
        """The training, cut to the steps that fit at the pace of the last task; before the first task a step is tried.

        Args:
            train: the training that the task asks for.
            until_s: the time by which it must be done, by the clock.
            do: function that trains; its result is not used.
        """
        # Fewer steps of one phase would leave the next one at another start than the paper's.
        if len(self._recipe.phases) > 1:
            return train
        if self._step_s is None:
            # Twice: the first try has costs that come once, and tells nothing of the pace.
            self._step_s = min(self._tried_step_s(train, do) for _ in range(2))
        most = self._steps_of(train)
        left_s = until_s - self._clock.monotonic_s()
        # At least one, though it may be late: an answer without a step has nothing to add.
        steps = int(max(1, min(most, _SHARE_OF_TIME * left_s / self._step_s)))
        return replace(train, steps=(steps,)) if steps < most else train

    def _steps_of(self, train: Train) -> int:
        """Optimizer steps of the first phase; several phases are not counted."""
        phase = self._recipe.phases[0]
        never_single = normalises_batches(self._recipe.module)
        steps = phase.steps(train.steps[0])
        local = phase.local(self._recipe.local)
        return Batches(local, self._samples, never_single=never_single, steps=steps).steps

    def _tried_step_s(self, train: Train, do: Callable[[Train], object]) -> float:
        """Seconds of one step."""
        began_s = self._clock.monotonic_s()
        do(replace(train, steps=(1,)))
        return self._clock.monotonic_s() - began_s
