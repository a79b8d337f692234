"""Clients as they are written for Flower, all with the steps of ``DigitsClient``; Flower must be installed."""

from typing import Any

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import Client
from flwr.clientapp import ClientApp
from flwr.common import (
    Code,
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    GetParametersIns,
    GetParametersRes,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)

from tests.clients.apps.torch_client import DigitsClient, client_fn

__all__ = ["ParametersClient", "app", "of_client_fn", "of_parameters"]

_OK = Status(Code.OK, "")


def _train(message: Message, context: Context) -> Message:
    client = DigitsClient(context.node_config["partition-id"])
    config = message.content["config"]
    assert config["server-round"] == config["round"]
    arrays, samples, metrics = client.fit(message.content["arrays"].to_numpy_ndarrays(), config)
    record = MetricRecord({"num-examples": samples, **metrics})
    # As named as it came: a state_dict, or a list.
    is_named = set(message.content["arrays"]) == set(client.net.state_dict())
    answer = ArrayRecord(client.net.state_dict() if is_named else arrays)
    return Message(content=RecordDict({"arrays": answer, "metrics": record}), reply_to=message)


def _evaluate(message: Message, context: Context) -> Message:
    client = DigitsClient(context.node_config["partition-id"])
    arrays = message.content["arrays"].to_numpy_ndarrays()
    loss, samples, metrics = client.evaluate(arrays, message.content["config"])
    record = MetricRecord({"num-examples": samples, "eval_loss": loss, **metrics})
    return Message(content=RecordDict({"metrics": record}), reply_to=message)


app = ClientApp()
app.train()(_train)
app.evaluate()(_evaluate)

of_client_fn = ClientApp(client_fn=client_fn)


class ParametersClient(Client):  # type: ignore[misc]  # Flower is not installed where types are checked
    """A ``Client`` of Flower's messages, which is no ``NumPyClient``."""

    def __init__(self, context: Context) -> None:
        self.own = DigitsClient(context.node_config["partition-id"])

    def get_parameters(self, ins: GetParametersIns) -> GetParametersRes:
        return GetParametersRes(_OK, ndarrays_to_parameters(self.own.get_parameters({})))

    def fit(self, ins: FitIns) -> FitRes:
        arrays, samples, metrics = self.own.fit(parameters_to_ndarrays(ins.parameters), ins.config)
        return FitRes(_OK, ndarrays_to_parameters(arrays), samples, metrics)

    def evaluate(self, ins: EvaluateIns) -> EvaluateRes:
        loss, samples, metrics = self.own.evaluate(parameters_to_ndarrays(ins.parameters), ins.config)
        return EvaluateRes(_OK, loss, samples, metrics)


def of_parameters(context: Context) -> Any:
    return ParametersClient(context)
