"""Simulated clients, and what does their work."""

from dataclasses import dataclass
from functools import cached_property

from fed.clients.data import ClientId, FederatedData
from fed.clients.training.executor import Executor
from fed.randomness import Streams
from fed.simulations.devices import Device, Devices
from fed.simulations.groups import Groups

__all__ = ["SimulatedClients"]


@dataclass(frozen=True)
class SimulatedClients:
    """Who there is to train, on what, in which groups, by whom, and how fast.

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
    def sizes(self) -> list[int]:
        """How many samples each client holds, in their order."""
        return [self.data.size_of(client) for client in self.data.clients]

    def device_of(self, client: ClientId) -> Device:
        """What a client runs on."""
        return self.devices.device(client, self.streams)
