"""Simulated clients: their data, devices and executor."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from fed.clients.data import ClientId, FederatedData
from fed.clients.training.executor import Executor
from fed.clients.training.groups import Groups
from fed.simulations.availability import Spells
from fed.simulations.devices import Device, Devices
from fed.vectors.randomness import Streams

__all__ = ["SimulatedClients"]

_KEPT_DEVICES = 2**16


@dataclass(frozen=True)
class SimulatedClients:
    """Simulated clients, with all that their tasks need.

    Args:
        data: samples of each client, and the test set.
        groups: rule by which clients train together.
        executor: executor of the clients' work.
        devices: source of each client's device, and of the times at which clients are available.
        streams: random streams of the run.
        have_links: True if a device's bandwidth and latency count; False if time on the network is counted elsewhere.

    Raises:
        InvalidInput: if there can be no such devices.
    """

    data: FederatedData
    groups: Groups
    executor: Executor
    devices: Devices
    streams: Streams
    have_links: bool = True

    def __post_init__(self) -> None:
        """Make one device, so that an error in a file of devices is found before the first round."""
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

        def device(client: ClientId) -> Device:
            found = self.devices.device(client, self.streams)
            return found if self.have_links else Device.on_site(found.samples_per_s)

        return lru_cache(_KEPT_DEVICES)(device)

    def fate(self, samples: int, steps: int | None, *named: int | str) -> tuple[int | None, float | None]:
        """Fate of a client in its local steps.

        Args:
            samples: number of samples that the client holds.
            steps: number of steps that the task asks for; None for the experiment's.
            named: parts of the name of the random stream, such as the task's number.

        Returns:
            Number of steps that the client takes before it is cut off, None if it is not; and the share of its time,
            in [0, 1), after which it breaks down, None if it does not.
        """
        if not (self.devices.failure or self.devices.interruption):
            return None, None
        # All at once: the rate of failures does not move the draw of interruptions.
        fails, at, is_cut, after = self.streams.uniforms("fate", *named)
        total = self.groups.steps(samples, steps)
        cut: int | None = None
        if is_cut < self.devices.interruption and total > 1:  # one step has no part that could be left out
            # From 1 to total − 1: a client that is cut off has done something, and not all.
            cut = 1 + int(after * (total - 1))
        breaks_at = at if fails < self.devices.failure else None
        return cut, breaks_at
