"""Groups of clients that train together, and the number of steps that each takes."""

import logging
from collections.abc import Sequence
from functools import cache
from itertools import accumulate

from fed.aggregators.base import Phase
from fed.clients.training.batches import Batches
from fed.config.experiment import Local

__all__ = ["Groups"]

_log = logging.getLogger(__name__)


class Groups:
    """Cuts tasks into groups of clients that take about as many steps as each other, the longest first.

    Args:
        local: the experiment's section of that name.
        size: largest number of clients of a group, at least 1.
        never_single: True if no step may have a single sample, as BatchNorm needs it.
        phases: phases of a task, one after another.

    Attributes:
        most_together: largest number of clients that a device has computed together; None: whole groups.
        uncaptured: reason why a device's steps are no CUDA graphs; empty where they are, or need not be.

    Example:
        >>> groups = Groups(Local(batch_size=10), size=2)
        >>> groups.of([10, 50, 20, 10, 30])
        [[1], [4, 2], [0, 3]]
    """

    def __init__(
        self, local: Local, size: int, never_single: bool = False, phases: Sequence[Phase] = (Phase(),)
    ) -> None:
        self.size = size
        self.most_together: int | None = None
        self.uncaptured = ""
        self._local = local
        self._never_single = never_single
        self._phases = phases
        self._of_task = cache(self._counted)  # there are far fewer sizes than tasks

    def note(self, most_together: int | None, uncaptured: str = "") -> None:
        """Note, and say once, that a device has computed a group in parts, or without CUDA graphs.

        Args:
            most_together: largest number of clients of a part; None: it has computed the whole group.
            uncaptured: reason why steps are no CUDA graphs; empty where they are, or need not be.
        """
        if uncaptured and not self.uncaptured:
            _log.warning("a step goes on without a CUDA graph, which is slower: %s", uncaptured)
            self.uncaptured = uncaptured
        if most_together is None:
            return
        if self.most_together is None:
            _log.warning(
                "a group of %d clients does not fit into the device's memory, and is computed in parts of %d or fewer: "
                "this changes results by rounding; set simulation.group to %d to compute all groups alike",
                self.size,
                most_together,
                most_together,
            )
        self.most_together = min(most_together, self.most_together or most_together)

    def steps(self, samples: int, steps: int | None = None) -> int:
        """Number of optimizer steps for this many samples; with the task's own number of steps, in all phases."""
        return self._of_task(samples, steps)[0]

    def seen(self, samples: int, steps: int | None = None) -> int:
        """Number of samples that those steps see, each as often as it is seen."""
        return self._of_task(samples, steps)[1]

    def steps_within(self, seen: float, samples: int, steps: int | None = None) -> int:
        """Number of a task's steps that see at most ``seen`` samples; 0 with several phases, which go together.

        Args:
            seen: largest number of samples seen.
            samples: number of the client's samples.
            steps: the task's own number of steps, or None.
        """
        if len(self._phases) > 1:
            return 0
        (batches,) = self._batches_of(samples, steps)
        epochs, rest = divmod(max(seen, 0.0), samples)
        within = sum(end <= rest for end in accumulate(batches.sizes))
        return min(int(epochs) * len(batches.sizes) + within, batches.steps)

    def _counted(self, samples: int, steps: int | None) -> tuple[int, int]:
        phases = self._batches_of(samples, steps)
        return sum(phase.steps for phase in phases), sum(phase.seen for phase in phases)

    def _batches_of(self, samples: int, steps: int | None) -> list[Batches]:
        return [
            Batches(phase.local(self._local), samples, never_single=self._never_single, steps=phase.steps(steps))
            for phase in self._phases
        ]

    def of(self, samples: Sequence[int], steps: Sequence[int | None] = ()) -> list[list[int]]:
        """Groups of tasks, as few as possible, whose sizes differ by one at most.

        Args:
            samples: number of samples of each task's client.
            steps: number of steps of each task; None, or no entries: the section's.

        Returns:
            Places in ``samples``, group by group; tasks of equal steps stay in order.
        """
        said = steps or [None] * len(samples)
        order = sorted(range(len(samples)), key=lambda place: -self.steps(samples[place], said[place]))
        count = -(-len(order) // self.size)
        # Cut at equal shares: with full groups first the last one might be a single client.
        return [order[number * len(order) // count : (number + 1) * len(order) // count] for number in range(count)]
