"""Data of clients: sources, partitions among clients, test sets, and the samples themselves."""

from fed.clients.data.federated import FederatedData
from fed.clients.data.held import Held, Pair, SamplesOnDemand
from fed.clients.data.load import load
from fed.clients.data.on_demand import ClientsOnDemand
from fed.clients.data.samples import ClientId, Names, Samples

__all__ = [
    "ClientId",
    "ClientsOnDemand",
    "FederatedData",
    "Held",
    "Names",
    "Pair",
    "Samples",
    "SamplesOnDemand",
    "load",
]
