"""A client of PyTorch in the idiom of Flower's ``NumPyClient``, derived from it where Flower is installed."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import Tensor, nn

__all__ = ["CLIENTS", "DigitsClient", "client_fn", "first_of_the_page", "net", "samples"]

CLIENTS = 3
Array = NDArray[Any]


def _base() -> type:
    try:
        return import_module("flwr.client").NumPyClient  # type: ignore[no-any-return]
    except ImportError:
        return object


if TYPE_CHECKING:
    NumPyClient = object
else:
    NumPyClient = _base()


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def samples(client: int) -> tuple[Tensor, Tensor]:
    digits = load_digits()
    inputs = torch.tensor(digits.data[client :: 4 * CLIENTS] / 16, dtype=torch.float32)
    return inputs, torch.tensor(digits.target[client :: 4 * CLIENTS])


class DigitsClient(NumPyClient):
    def __init__(self, partition_id: int) -> None:
        self.net = net()
        self.inputs, self.targets = samples(partition_id)

    def get_parameters(self, config: Mapping[str, Any]) -> list[Array]:
        return [value.cpu().numpy() for value in self.net.state_dict().values()]

    def set_parameters(self, parameters: Sequence[Array]) -> None:
        named = zip(self.net.state_dict(), parameters, strict=True)
        self.net.load_state_dict(OrderedDict((name, torch.tensor(value)) for name, value in named))

    def fit(self, parameters: Sequence[Array], config: Mapping[str, Any]) -> tuple[list[Array], int, dict[str, Any]]:
        self.set_parameters(parameters)
        optimizer = torch.optim.SGD(self.net.parameters(), lr=config["lr"])
        for _ in range(config["epochs"]):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.net(self.inputs), self.targets)
            torch.autograd.backward(loss)
            optimizer.step()
        return self.get_parameters({}), len(self.targets), {"train_loss": loss.item()}

    def evaluate(self, parameters: Sequence[Array], config: Mapping[str, Any]) -> tuple[float, int, dict[str, Any]]:
        self.set_parameters(parameters)
        with torch.no_grad():
            outputs = self.net(self.inputs)
        accuracy = (outputs.argmax(1) == self.targets).double().mean().item()
        loss = nn.functional.cross_entropy(outputs, self.targets).item()
        return loss, len(self.targets), {"accuracy": accuracy, "told_round": config["server_round"]}


def client_fn(context: Any) -> Any:
    client = DigitsClient(context.node_config["partition-id"])
    return client.to_client() if hasattr(client, "to_client") else client


def first_of_the_page() -> dict[str, Array]:
    """First arrays of the model on the page on Flower."""
    return {"weight": np.full((10, 64), 0.01, np.float32), "bias": np.zeros(10, np.float32)}
