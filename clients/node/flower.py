"""A node on Flower's engine, which stock nodes start anew for each message: what a client keeps lies in a folder.

A node's configuration (``flower-supernode --node-config``) says which data are its own:

- ``data="…/DATA.yaml"``: a :class:`fed.config.node_data.NodeData`; ``client="ann"`` names the node
  where that names no client;
- ``partition-id=0 num-partitions=3``: one client's of the experiment's own data, as Flower's users number them;

and with ``folder="…"`` where to keep what algorithms such as SCAFFOLD have a client keep between tasks.
"""

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fed.clients.data import ClientId, Pair, load
from fed.clients.node.training import BEGAN_ANEW, NodeTask, NodeTraining, described, forget_before, samples_of
from fed.clients.training.work_items import Train
from fed.config.compatibility import check_deployment
from fed.config.experiment import Experiment
from fed.config.node_data import NodeData
from fed.errors import FedError, InvalidData, InvalidInput
from fed.randomness import Streams
from fed.wire.flower_records import field, flower, packed, unpacked
from fed.wire.payloads import read, written
from fed.wire.protocol_pb2 import Payload, Signature

__all__ = ["FlowerNode", "client_app"]

_log = logging.getLogger(__name__)


def client_app(experiment: Path) -> Any:
    """Flower's ``ClientApp`` for an experiment.

    Args:
        experiment: its file, which travels with the app.

    Raises:
        InvalidInput: if Flower is not installed.
    """
    app = flower("clientapp").ClientApp()
    app.query()(_answering(experiment, FlowerNode.describe))
    app.train()(_answering(experiment, FlowerNode.train))
    app.evaluate()(_answering(experiment, FlowerNode.score))
    return app


def _answering(path: Path, work: Callable[["FlowerNode", Any], tuple[Sequence[Tensor], dict[str, Any]]]) -> Any:
    def answer(message: Any, context: Any) -> Any:
        torch.set_num_threads(1)  # as in a simulation: the same bits
        try:
            check_deployment(experiment := Experiment.load(path))
            node = FlowerNode(experiment, context.node_config)
            tensors, fields = work(node, message.content)
        except FedError as error:
            tensors, fields = (), {"problem": str(error)}
        return flower("app").Message(packed(tensors, **fields), reply_to=message)

    return answer


class FlowerNode:
    """What a node does with a message; its answers are tensors and fields.

    Args:
        experiment: the app's.
        config: the node's configuration.

    Raises:
        InvalidInput: if that does not say which data are the node's.
    """

    def __init__(self, experiment: Experiment, config: Mapping[str, Any]) -> None:
        self._experiment = experiment
        self._config = config
        self.client, self._pair = self._own()

    def describe(self, content: Mapping[str, Any]) -> tuple[Sequence[Tensor], dict[str, Any]]:
        """Who this is, and what there is to say of its data."""
        found = described(self._pair)._asdict()
        found["input_shape"] = list(found["input_shape"])
        if "folder" not in self._config and self._made_ready(found, Path()).keeps_states:
            raise InvalidInput(
                f"clients of {self._experiment.algorithm.kind} keep something between tasks: say where with "
                "--node-config 'folder=\"/var/lib/fed\"'"
            )
        return (), {"client": self.client, **found}

    def train(self, content: Mapping[str, Any]) -> tuple[Sequence[Tensor], dict[str, Any]]:
        """Do a task."""
        fields, tensors = unpacked(content)
        training, folder = self._training(fields)
        if "durable_after" in fields:
            forget_before(folder, field(fields, "durable_after", str))
        with tempfile.TemporaryDirectory() as spool:
            path = Path(spool) / "task"
            payload = written(path, tensors).SerializeToString()
            name, kept_after = field(fields, "name", str), fields.get("kept_after")
            done = training.train(NodeTask(name, self._task(fields), payload, path, kept_after))
            if done.problem:
                return (), {"problem": done.problem, "diverged": done.diverged}
            answer = read(path, Payload.FromString(done.payload))
        if done.began_anew:
            _log.warning("task %s: %s", name, BEGAN_ANEW)
        counts = {"weight": done.weight, "samples": done.samples, "train_loss": done.train_loss}
        return answer, {**counts, "began_anew": done.began_anew}

    def score(self, content: Mapping[str, Any]) -> tuple[Sequence[Tensor], dict[str, Any]]:
        """Score a model on what the node holds out."""
        fields, tensors = unpacked(content)
        training, _ = self._training(fields)
        with tempfile.TemporaryDirectory() as spool:
            path = Path(spool) / "model"
            payload = written(path, tensors).SerializeToString()
            samples, loss, metric = training.score(payload, path, fields.get("kept_after"))
        return (), {"samples": samples, "loss": loss, "metric": metric}

    def _task(self, fields: Mapping[str, Any]) -> Train:
        number, repeats = field(fields, "round", int), field(fields, "repeats", int)
        return Train(
            (self.client,),
            number,
            "messages",
            fields.get("lr"),
            (fields.get("steps"),),
            field(fields, "broadcast_count", int),
            field(fields, "population", int),
            (fields["place"],) if "place" in fields else (),
            ((number, *filter(None, [repeats])),),
        )

    def _training(self, fields: Mapping[str, Any]) -> tuple[NodeTraining, Path]:
        """Made ready for the experiment, and the folder where the client's states are."""
        run = field(fields, "run", str)
        if not run.isalnum():
            raise InvalidInput(f"a run's name must be letters and digits, got {run[:40]!r}")
        base = Path(str(self._config.get("folder", tempfile.gettempdir()))).expanduser()
        folder = base / run / str(self.client)
        return self._made_ready(fields, folder), folder

    def _made_ready(self, fields: Mapping[str, Any], folder: Path) -> NodeTraining:
        """For a model that is made for such data."""
        signature = Signature(
            input_shape=field(fields, "input_shape", list),
            input_dtype=field(fields, "input_dtype", str),
            classes=field(fields, "classes", int),
        )
        return NodeTraining(self.client, self._pair, self._experiment, signature, folder)

    def _own(self) -> tuple[ClientId, Pair]:
        """The node's id and samples."""
        if "data" in self._config:
            description = NodeData.load(str(self._config["data"]))
            client = self._config.get("client", description.client)
            if not isinstance(client, int | str):
                raise InvalidInput(
                    "the node's data file names no client: give the node a name with --node-config 'client=\"ann\"'"
                )
            return client, samples_of(description)
        if "partition-id" in self._config and self._experiment.data is not None:
            return self._partition(self._config["partition-id"], self._config.get("num-partitions"))
        raise InvalidInput(
            "a node must know its data: start flower-supernode with --node-config 'data=\"/…/DATA.yaml\"', or with "
            "'partition-id=0 num-partitions=3' to hold a client's part of the experiment's own data"
        )

    def _partition(self, number: Any, partitions: Any) -> tuple[ClientId, Pair]:
        assert self._experiment.data is not None
        data = load(self._experiment.data, Streams(self._experiment.seed))
        count = len(data.clients)
        if type(number) is not int or not 0 <= number < count or partitions not in (None, count):
            raise InvalidData(
                f"the experiment deals its data to {count} clients, got partition-id={number} of "
                f"num-partitions={partitions}: set data.clients to the number of nodes"
            )
        client = data.clients[number]
        return client, data.read(client)
