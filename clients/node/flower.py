"""A node on Flower's engine. Stock nodes start it anew for each message, so that a client's state lies in a folder.

A node's configuration (``flower-supernode --node-config``) says which data are its own:

- ``data="…/DATA.yaml"``: a :class:`fed.config.node_data.NodeData`; ``client="ann"`` names the node
  where that names no client;
- ``partition-id=0 num-partitions=3``: one client's part of the experiment's own data, as Flower's users number them;

with ``folder="…"`` where a client's state is kept between tasks, for algorithms such as SCAFFOLD, and with
``device="cuda:1"`` on which device the client trains.
"""

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fed.clients.data import FederatedData, load
from fed.clients.node.fixed_part import FixedPartMissing
from fed.clients.node.own_data import described, samples_of
from fed.clients.node.training import STATE_LOST, Hidden, NodeTraining
from fed.config.compatibility import check_deployment
from fed.config.experiment import Experiment
from fed.config.node_data import NodeData
from fed.errors import FedError, InvalidData, InvalidInput
from fed.processes.clock import SYSTEM_CLOCK
from fed.protocol import protocol_pb2 as pb
from fed.protocol.limits import name_of
from fed.secure_aggregation.reasons import Reason
from fed.vectors.tensors import torch
from fed.wire.flower_records import array_of, fixed_part_in, flower, packed, unpacked
from fed.wire.messages import client_id_of
from fed.wire.payloads import hold_to_payload

__all__ = ["FlowerNode", "client_app"]

_log = logging.getLogger(__name__)


def client_app(experiment: Path) -> Any:
    """Flower's ``ClientApp`` for an experiment.

    Args:
        experiment: path of the experiment's file, which travels with the app.

    Raises:
        InvalidInput: if Flower is not installed.
    """
    app = flower("clientapp").ClientApp()
    app.query()(_answering(experiment, FlowerNode.describe))
    app.train()(_answering(experiment, FlowerNode.train))
    app.evaluate()(_answering(experiment, FlowerNode.score))
    return app


def _answering(path: Path, work: Callable[["FlowerNode", pb.Request, bytes], tuple[pb.Response, bytes | None]]) -> Any:
    def answer(message: Any, context: Any) -> Any:
        torch.set_num_threads(1)  # as in a simulation: the same bits
        try:
            check_deployment(experiment := Experiment.load(path))
            node = FlowerNode(experiment, context.node_config)
            with node.given(fixed_part_in(message.content)):
                response, data = work(node, *unpacked(message.content, pb.Request))
        except FixedPartMissing as error:
            response = pb.Response(failed=pb.Failed(reason=str(error), lacks_fixed_part=True))
            data = None
        except FedError as error:
            response = pb.Response(failed=pb.Failed(reason=str(error)))
            data = None
        content = packed(response, None if data is None else array_of(data))
        return flower("app").Message(content, reply_to=message)

    return answer


class FlowerNode:
    """Work of a node on one message; a response is a header, with bytes where it has a payload.

    Args:
        experiment: experiment of the app.
        config: the node's configuration.

    Raises:
        InvalidInput: if the configuration does not say which data are the node's.
    """

    def __init__(self, experiment: Experiment, config: Mapping[str, Any]) -> None:
        self._sent: Path | None = None  # file of the model's fixed part that has come with the message
        self._config = config
        self._device = "auto"
        # The app's experiment names a file of the server's machine.
        self._experiment = experiment.model_copy(update={"fixed": None})
        self._data = self._own()
        self._device = str(config.get("device", self._device))
        (self.client,) = self._data.clients

    @contextmanager
    def given(self, fixed_part: bytes | None) -> Iterator[None]:
        """Work with a fixed part of the model that has come with the message.

        Args:
            fixed_part: bytes of the fixed part; None: the message has brought none.
        """
        if fixed_part is None:
            yield
            return
        with tempfile.TemporaryDirectory() as spool:
            self._sent = Path(spool) / "fixed-part"
            self._sent.write_bytes(fixed_part)
            yield

    def describe(self, request: pb.Request, data: bytes) -> tuple[pb.Response, None]:
        """Describe the node: its name, and the shape and number of its samples."""
        found = described(self._data)
        plan = pb.Plan(signature=found.signature)
        if "folder" not in self._config and self._training(plan, Path()).keeps_states:
            raise InvalidInput(
                f"clients of {self._experiment.algorithm.kind} keep something between tasks: say where with "
                "--node-config 'folder=\"/var/lib/fed\"'"
            )
        found.name = str(self.client)
        return pb.Response(joining=found), None

    def train(self, request: pb.Request, data: bytes) -> tuple[pb.Response, bytes | None]:
        """Do a task."""
        assignment = request.assignment
        with _spooled(assignment.payload, data) as path:
            done = self._done(request.plan, assignment, path)
            if isinstance(done, pb.Failed):
                return pb.Response(failed=done), None
            assert isinstance(done, pb.Answer)  # an app's experiment is refused secure aggregation
            if done.began_anew:
                _log.warning("task %s: %s", name_of(assignment.task), STATE_LOST)
            return pb.Response(answer=done), path.read_bytes()

    def _done(self, plan: pb.Plan, assignment: pb.Assignment, path: Path) -> pb.Answer | pb.Failed | Hidden:
        """The task, done; under privacy what went wrong stays in the log, for it may hold a number of the data."""
        folder = self._folder_of(plan)
        if self._experiment.privacy is None:
            return self._training(plan, folder).train(assignment, path)
        try:
            done = self._training(plan, folder).train(assignment, path)
        except FixedPartMissing:
            raise
        except Exception:
            _log.exception("task %s failed", name_of(assignment.task))
            return pb.Failed(task=assignment.task, reason=Reason.NO_MESSAGE)
        if isinstance(done, pb.Failed) and not done.lacks_model:
            _log.warning("task %s: %s", name_of(assignment.task), done.reason)
            return pb.Failed(task=assignment.task, reason=Reason.NO_MESSAGE)
        return done

    def score(self, request: pb.Request, data: bytes) -> tuple[pb.Response, None]:
        """Score a model on the node's held-out samples."""
        examination = request.examination
        training = self._training(request.plan, self._folder_of(request.plan))
        with _spooled(examination.payload, data) as path:
            return pb.Response(scores=training.score(examination, path)[0]), None

    def _training(self, plan: pb.Plan, folder: Path) -> NodeTraining:
        return NodeTraining(self._data, self._experiment, plan, folder, SYSTEM_CLOCK, self._sent, device=self._device)

    def _folder_of(self, plan: pb.Plan) -> Path:
        """Folder of the client's states in a run."""
        if not plan.run.isalnum():  # it becomes part of a path
            raise InvalidInput(f"a run's name must be letters and digits, got {plan.run[:40]!r}")
        # describe() refuses runs that keep states without a folder: for others a temporary one is enough.
        base = Path(str(self._config.get("folder", tempfile.gettempdir()))).expanduser()
        return base / plan.run / str(self.client)

    def _own(self) -> FederatedData:
        """The node's data, under its id."""
        if "data" in self._config:
            description = NodeData.load(str(self._config["data"]))
            if description.data is None:
                raise InvalidInput("a node on Flower's engine trains on data, got an app: run it as Flower's own app")
            if description.privacy is not None:
                raise InvalidInput(
                    "a node on Flower's engine keeps no ledger of privacy, and could not keep to its owner's limits, "
                    "got privacy in its data file: run fed client, or leave the section out"
                )
            self._experiment = description.experiment_of_node(self._experiment)
            self._device = description.device
            client = self._config.get("client", description.client)
            if not isinstance(client, int | str):
                raise InvalidInput(
                    "the node's data file names no client: give the node a name with --node-config 'client=\"ann\"'"
                )
            return samples_of(description, client_id_of(str(client)), self._experiment.table)
        if "partition-id" in self._config and self._experiment.data is not None:
            return self._partition(self._config["partition-id"], self._config.get("num-partitions"))
        raise InvalidInput(
            "a node must know its data: start flower-supernode with --node-config 'data=\"/…/DATA.yaml\"', or with "
            "'partition-id=0 num-partitions=3' to hold a client's part of the experiment's own data"
        )

    def _partition(self, number: Any, partitions: Any) -> FederatedData:
        assert self._experiment.data is not None
        data = load(self._experiment.data, self._experiment.data_streams, self._experiment.table)
        count = len(data.clients)
        if type(number) is not int or not 0 <= number < count or partitions not in (None, count):
            raise InvalidData(
                f"the experiment deals its data to {count} clients, got partition-id={number} of "
                f"num-partitions={partitions}: set data.clients to the number of nodes"
            )
        # By its place, as Flower numbers partitions: a client's own name may be a text.
        client = data.clients[number]
        return data.only(client, client_id_of(str(client)))


@contextmanager
def _spooled(payload: pb.Payload, data: bytes) -> Iterator[Path]:
    """A file of the bytes that came with a request, once they agree with its header."""
    hold_to_payload(data, payload)
    with tempfile.TemporaryDirectory() as spool:  # gone with the message, however that ends
        path = Path(spool) / "payload"
        path.write_bytes(data)
        yield path
