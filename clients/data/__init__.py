"""What is learned from, and who holds what."""

from fed.clients.data.federated import FederatedData
from fed.clients.data.load import load
from fed.clients.data.on_demand import ClientsOnDemand
from fed.clients.data.pairs import ClientId, Pair
from fed.clients.data.samples import Samples

__all__ = ["ClientId", "ClientsOnDemand", "FederatedData", "Pair", "Samples", "load"]
