"""Clients that were written for Flower: its ``Context``, ``NumPyClient`` and ``ClientApp``, by Flower's own classes.

Flower is loaded only where an app has loaded it: a class of the shape of a ``NumPyClient`` needs none of it.
"""

import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from fed.clients.apps.arrays import Array, named_arrays
from fed.errors import AppFailed, InvalidModel
from fed.wire.flower_records import flower

__all__ = [
    "MessageClient",
    "as_told_by_flower",
    "context_of",
    "is_client_app",
    "is_message_client",
    "loss_among",
    "of_message_client",
    "unwrapped",
]

_SERVER = 1
_NODE = 2
_RUN = 1
# Times of a message that is answered at once; a reply may ask how much is left.
_CREATED_AT = 1.8e9
_TTL_S = 1e9


def is_client_app(target: object) -> bool:
    """True for a ``ClientApp`` of Flower's."""
    return _is_of_flower(type(target), "ClientApp")


def unwrapped(client: Any) -> Any:
    """The ``NumPyClient`` within what its ``to_client`` made; anything else as it is."""
    return getattr(client, "numpy_client", client)


def is_message_client(client: object) -> bool:
    """True for a ``Client`` of Flower's that is no ``NumPyClient``, and takes Flower's messages."""
    return any(_is_of_flower(kind, "Client") for kind in type(client).__mro__)


def of_message_client(client: Any) -> Any:
    """``ClientApp`` of a ``Client`` of Flower's, which takes its messages for it."""
    return flower("clientapp").ClientApp(client_fn=lambda _: client)


def loss_among(metrics: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Value of the metric that is a loss, or None.

    Args:
        metrics: metrics by name.
        names: names of losses, the first one first; where none is there, the only metric that ends in "loss" is taken.
    """
    found = [name for name in names if name in metrics]
    found = found or [name for name in metrics if name.lower().endswith("loss")]
    return metrics[found[0]] if found and (found[0] in names or len(found) == 1) else None


def as_told_by_flower(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a task, also under the names that Flower's strategies have for them."""
    told = dict(config)
    told |= {name: config["round"] for name in ("server_round", "server-round") if "round" in config}
    told |= {name: config["mu"] for name in ("proximal_mu", "proximal-mu") if "mu" in config}
    return told


def context_of(node_config: Mapping[str, Any], run_config: Mapping[str, Any]) -> Any:
    """Flower's ``Context`` of a client in one task, with a state that is empty.

    Args:
        node_config: facts of the node, ``partition-id`` and ``num-partitions`` among them.
        run_config: the experiment's ``app.config``.
    """
    parts = {"node_id": _NODE, "node_config": dict(node_config), "run_config": dict(run_config)}
    if "flwr" not in sys.modules:
        return SimpleNamespace(run_id=_RUN, state={}, **parts)
    records = flower("app")
    return records.Context(run_id=_RUN, state=records.RecordDict(), **parts)


class MessageClient:
    """Client of a ``ClientApp``: each task is one of Flower's messages, and its answer another.

    A task's content has the records ``arrays`` and ``config``, as Flower's strategies send them; of a ``ClientApp``
    with a ``client_fn``, those of Flower's earlier messages.

    Args:
        app: the ``ClientApp``.
        context: Flower's context of the client.
        names: names of the model's arrays, in order; empty before they are known.
    """

    def __init__(self, app: Any, context: Any, names: Sequence[str]) -> None:
        self._app = app
        self._context = context
        self._names = names
        self._has_client_fn = getattr(app, "_call", None) is not None

    @property
    def has_initial(self) -> bool:
        """True if a ``client_fn`` makes clients, which have ``get_parameters``."""
        return self._has_client_fn

    def get_parameters(self, config: Mapping[str, Any]) -> list[Array]:
        """First arrays, of a client that ``client_fn`` makes."""
        content = {"getparametersins.config": flower("app").ConfigRecord(dict(config))}
        return _arrays_of(self._reply("get_parameters", content), ())

    def fit(self, arrays: Sequence[Array], config: Mapping[str, Any]) -> tuple[list[Array], int, dict[str, Any]]:
        """Answer of the function that ``@app.train()`` registers."""
        reply = self._reply("train", self._content("fitins", arrays, config))
        samples, metrics = _numbers_of(reply, "fitres")
        return _arrays_of(reply, self._names), samples, metrics

    def evaluate(self, arrays: Sequence[Array], config: Mapping[str, Any]) -> tuple[float, int, dict[str, Any]]:
        """Answer of the function that ``@app.evaluate()`` registers; of no samples where there is none."""
        if not self._has_client_fn and "evaluate.default" not in getattr(self._app, "_registered_funcs", {}):
            return 0.0, 0, {}
        reply = self._reply("evaluate", self._content("evaluateins", arrays, config))
        samples, metrics = _numbers_of(reply, "evaluateres")
        loss = loss_among(metrics, ("loss", "eval_loss", "eval-loss"))
        if loss is None:
            told = ", ".join(metrics) or "none"
            raise AppFailed(f"must answer with a loss among its metrics, got {told}: add eval_loss")
        return loss, samples, metrics

    def _content(self, earlier: str, arrays: Sequence[Array], config: Mapping[str, Any]) -> dict[str, Any]:
        records = flower("app")
        names = self._names or [str(number) for number in range(len(arrays))]
        by_name = zip(names, arrays, strict=True)
        record = records.ArrayRecord({name: records.Array(array) for name, array in by_name})
        settings = records.ConfigRecord(dict(config))
        if self._has_client_fn:
            return {f"{earlier}.parameters": record, f"{earlier}.config": settings}
        return {"arrays": record, "config": settings}

    def _reply(self, kind: str, content: Mapping[str, Any]) -> Any:
        records = flower("app")
        # With metadata of its own: without them Flower asks for the run of its own process.
        metadata = records.Metadata(
            run_id=_RUN,
            message_id="task",
            src_node_id=_SERVER,
            dst_node_id=_NODE,
            reply_to_message_id="",
            group_id="",
            created_at=_CREATED_AT,
            ttl=_TTL_S,
            message_type=kind,
        )
        message = records.Message(content=records.RecordDict(dict(content)), metadata=metadata)
        reply = self._app(message, self._context)
        if reply.has_error():
            raise AppFailed(f"answers with Flower's error {reply.error.code}: {reply.error.reason}")
        return reply.content


def _arrays_of(content: Any, names: Sequence[str]) -> list[Array]:
    """The arrays of the only record that has some, in the order of the names."""
    records = list(content.array_records.values())
    if len(records) != 1:
        raise AppFailed(f"must answer with one ArrayRecord, got {len(records)}: put all arrays into one")
    try:
        arrays = named_arrays(records[0], "the answer")
    except InvalidModel as error:
        raise AppFailed(str(error)) from None
    if names and arrays.keys() != set(names):
        different = sorted(arrays.keys() ^ set(names))
        raise AppFailed(
            f"must answer with the arrays that it was sent, got others: {', '.join(different[:3])}: keep the names"
        )
    return [arrays[name] for name in names or arrays]


def _numbers_of(content: Any, earlier: str) -> tuple[Any, dict[str, Any]]:
    """Number of samples and metrics of a reply."""
    if f"{earlier}.num_examples" in content:
        samples = content[f"{earlier}.num_examples"]["num_examples"]
        metrics = dict(content.get(f"{earlier}.metrics", {}))
        if f"{earlier}.loss" in content:
            metrics["loss"] = content[f"{earlier}.loss"]["loss"]
        return samples, metrics
    metrics = {name: value for record in content.metric_records.values() for name, value in record.items()}
    if "num-examples" not in metrics:
        raise AppFailed(
            "must answer with num-examples among its metrics, by which the mean is weighted, got none: add it"
        )
    return metrics.pop("num-examples"), metrics


def _is_of_flower(kind: type, name: str) -> bool:
    return kind.__name__ == name and kind.__module__.partition(".")[0] == "flwr"
