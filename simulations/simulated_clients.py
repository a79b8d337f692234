"""Simulated clients: their data, devices and executor, and the groups that train together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import accumulate

from fed.aggregators.base import Phase
from fed.clients.data import ClientId, FederatedData
from fed.clients.training.batches import Batches
from fed.clients.training.executor import Executor
from fed.config.experiment import Local
from fed.randomness import Streams
from fed.simulations.availability import Spells
from fed.simulations.devices import Device, Devices

__all__ = ["Groups", "SimulatedClients"]

_KEPT_DEVICES = 2**16


class Groups:
    """Cuts tasks into groups of clients that take about as many steps as each other, the longest first.

    Args:
        local: the experiment's section of that name.
        size: the most clients of a group.
        never_single: no step has a single sample, as BatchNorm needs it.
        phases: what a task consists of.

    Example:
        >>> groups = Groups(Local(batch_size=10), size=2)
        >>> groups.of([10, 50, 20, 10, 30])
        [[1], [4, 2], [0, 3]]
    """

    def __init__(
        self, local: Local, size: int, never_single: bool = False, phases: Sequence[Phase] = (Phase(),)
    ) -> None:
        self.size = size
        self._local = local
        self._never_single = never_single
        self._phases = phases
        self._of_task = cache(self._counted)  # there are far fewer sizes than tasks

    def steps(self, samples: int, steps: int | None = None) -> int:
        """Number of optimizer steps for this many samples; with the task's own number of steps, in all phases."""
        return self._of_task(samples, steps)[0]

    def seen(self, samples: int, steps: int | None = None) -> int:
        """Number of samples that those steps see, each as often as it is seen."""
        return self._of_task(samples, steps)[1]

    def steps_within(self, seen: float, samples: int, steps: int | None = None) -> int:
        """Number of a task's steps that see at most ``seen`` samples; 0 with several phases, which go together.

        Args:
            seen: the limit.
            samples: the client's.
            steps: the task's own number, or None.
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
        locals_ = [(phase.local(self._local), phase.steps(steps)) for phase in self._phases]
        return [Batches(local, samples, self._never_single, its_steps) for local, its_steps in locals_]

    def of(self, samples: Sequence[int], steps: Sequence[int | None] = ()) -> list[list[int]]:
        """Groups of as many tasks, give or take one, as few as there can be.

        Args:
            samples: how many each task's client holds.
            steps: how many each task says; as the section unless given.

        Returns:
            Places in ``samples``, group by group; of equal steps those in order.
        """
        said = steps or [None] * len(samples)
        order = sorted(range(len(samples)), key=lambda place: -self.steps(samples[place], said[place]))
        count = -(-len(order) // self.size)
        # cut at equal shares: with full groups first the last one might be a single client
        return [order[number * len(order) // count : (number + 1) * len(order) // count] for number in range(count)]


@dataclass(frozen=True)
class SimulatedClients:
    """Simulated clients, with all that their tasks need.

    Args:
        data: by client.
        groups: who trains together.
        executor: does the work.
        devices: what they run on.
        streams: the run's.

    Raises:
        InvalidInput: if there can be no such devices.
    """

    data: FederatedData
    groups: Groups
    executor: Executor
    devices: Devices
    streams: Streams

    def __post_init__(self) -> None:
        """Make a device, so that a file of them that is wrong is found before the first round."""
        self.device_of(self.data.clients[0])

    @cached_property
    def spells(self) -> dict[ClientId, Spells]:
        """The spells of the clients that are not always available."""
        clients = () if self.devices.are_always_there else self.data.clients
        found = ((client, self.devices.spells(client, self.streams)) for client in clients)
        return {client: spells for client, spells in found if spells is not None}

    @cached_property
    def sizes(self) -> list[int]:
        """Number of samples of each client, in their order."""
        return [self.data.size_of(client) for client in self.data.clients]

    @cached_property
    def device_of(self) -> Callable[[ClientId], Device]:
        """Device of a client; those asked for last are kept, for there may be a million clients."""
        return lru_cache(_KEPT_DEVICES)(lambda client: self.devices.device(client, self.streams))

    def fate(self, samples: int, steps: int | None, *named: int | str) -> tuple[int | None, float | None]:
        """Fate of a client in its local steps.

        Args:
            samples: the client's.
            steps: the task's own number, or None.
            named: names the draw.

        Returns:
            The steps that it takes, where it is cut off; the part of its time after which it breaks down, if it does.
        """
        if not (self.devices.failure or self.devices.interruption):
            return None, None
        # all at once: the rate of failures does not move the draw of interruptions
        fails, at, is_cut, after = self.streams.uniforms("fate", *named)
        total = self.groups.steps(samples, steps)
        cut = 1 + int(after * (total - 1)) if is_cut < self.devices.interruption and total > 1 else None
        return cut, at if fails < self.devices.failure else None
