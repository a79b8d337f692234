"""Apps of NumPy alone, as users write them: in the idiom of this package, and in Flower's without Flower."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Broken", "FlowerClient", "Reals", "Regression", "client_fn"]

Array = NDArray[Any]


class Regression:
    """Linear regression by full batches; its noise comes from NumPy's global generator."""

    def __init__(self, client_id: int) -> None:
        self.client_id = client_id
        draw = np.random.default_rng(client_id)
        self.inputs = draw.normal(size=(20 + client_id, 3))
        self.targets = self.inputs @ [1.0, 2.0, 3.0]

    def initial(self) -> list[Array]:
        return [np.zeros(3, np.float32), np.array(0), np.zeros((1, 2))]

    def fit(self, arrays: Sequence[Array], config: Mapping[str, Any]) -> tuple[list[Array], int, dict[str, Any]]:
        weights, rounds, unused = arrays
        for _ in range(config["epochs"]):
            weights = weights - config["lr"] * self.inputs.T @ self._errors(weights) / len(self.targets)
        weights = weights + 1e-3 * np.random.normal(size=3)
        loss = float(np.mean(self._errors(weights) ** 2))
        metrics = {"train_loss": loss, "mu": config.get("mu", 0.0), "bonus": config.get("bonus", 0)}
        return [weights, rounds + 1, unused], len(self.targets), metrics

    def evaluate(self, arrays: Sequence[Array], config: Mapping[str, Any]) -> tuple[float, int, dict[str, Any]]:
        loss = float(np.mean(self._errors(arrays[0]) ** 2))
        return loss, len(self.targets), {"accuracy": 1 / (1 + loss), "told_round": config.get("round", 0)}

    def _errors(self, weights: Array) -> Array:
        errors: Array = self.inputs @ weights - self.targets
        return errors


class Reals(Regression):
    """The same client without whole numbers in its model, which secure sums need."""

    def initial(self) -> list[Array]:
        return super().initial()[:1]

    def fit(self, arrays: Sequence[Array], config: Mapping[str, Any]) -> tuple[list[Array], int, dict[str, Any]]:
        found, samples, metrics = super().fit([arrays[0], np.array(0), np.zeros((1, 2))], config)
        return found[:1], samples, metrics


class Broken(Regression):
    """A client that does what the key ``how`` of its settings says, if it is client 1."""

    def fit(self, arrays: Sequence[Array], config: Mapping[str, Any]) -> Any:
        found, samples, metrics = super().fit(arrays, config)
        if self.client_id != 1:
            return found, samples, metrics
        match config["how"]:
            case "raises":
                raise ValueError("no luck")
            case "is not finite":
                found[0][2] = np.nan
            case "has another shape":
                found[0] = found[0][:2]
            case "has another number of arrays":
                found.pop()
            case "has no samples":
                samples = 0
            case "has samples of no number":
                return found, float("nan"), metrics
            case "has negative samples":
                samples = -3
            case "forgets the metrics":
                return found, samples
            case "has metrics of no numbers":
                metrics["history"] = {"loss": [0.1]}
            case "names a metric badly":
                metrics["1st"] = 1.0
        return found, samples, metrics


class FlowerClient:
    """A client of the shape of Flower's ``NumPyClient``."""

    def __init__(self, partition: int, partitions: int) -> None:
        self.own = Regression(partition)
        self.partitions = partitions

    def get_parameters(self, config: Mapping[str, Any]) -> list[Array]:
        return self.own.initial()

    def fit(self, parameters: list[Array], config: Mapping[str, Any]) -> tuple[list[Array], int, dict[str, Any]]:
        assert config["server_round"] == config["round"]
        return self.own.fit(parameters, config)

    def evaluate(self, parameters: list[Array], config: Mapping[str, Any]) -> tuple[float, int, dict[str, Any]]:
        return self.own.evaluate(parameters, config)


def client_fn(context: Any) -> FlowerClient:
    return FlowerClient(context.node_config["partition-id"], context.node_config["num-partitions"])
