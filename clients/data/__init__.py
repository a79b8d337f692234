"""What is learned from, and who holds what."""

from fed.clients.data.federated import ClientId, FederatedData, Pair
from fed.clients.data.load import load
from fed.clients.data.samples import Samples

__all__ = ["ClientId", "FederatedData", "Pair", "Samples", "load"]
