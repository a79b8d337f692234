"""Simulated clients: their data, training, groups, executor and devices."""

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
    def sizes(self) -> list[int]:
        """Number of samples of each client, in their order."""
        return [self.data.size_of(client) for client in self.data.clients]

    def device_of(self, client: ClientId) -> Device:
        """Device of a client."""
        return self.devices.device(client, self.streams)
