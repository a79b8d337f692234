"""The three fleets, each with clients of which a test says when they answer, go away and come back."""

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from fed.clients.node.edge_node import EdgeNode
from fed.clients.node.own_data import samples_of
from fed.clients.node.training import Hidden
from fed.clients.training.devices import devices_of
from fed.clients.training.executor import InProcess
from fed.clients.training.worker import Work
from fed.config.experiment import Experiment
from fed.config.node_data import NodeData
from fed.processes.clock import SYSTEM_CLOCK
from fed.protocol.protocol_pb2 import Answer, Assignment, Failed, Plan, Response, Signature
from fed.server.fleet import Fleet
from fed.server.flower.app import write_app
from fed.server.flower.fleet import FlowerFleet, flat_payload
from fed.server.grpc.fleet import NodeFleet
from fed.server.grpc.service import Patience
from fed.server.real_fleet import RealFleet
from fed.simulations.availability import Spell, Spells
from fed.simulations.devices import Device, Devices
from fed.simulations.fleet import SimulatedFleet
from fed.simulations.simulated_clients import SimulatedClients
from fed.simulations.simulation import Simulation
from fed.storage.checkpoints import Tree
from fed.vectors.randomness import Streams
from fed.wire.dialling import DialPatience
from fed.wire.flower_records import packed, unpacked
from fed.wire.messages import GlobalModel, Task
from fed.wire.payloads import read, split, written
from tests.flower_stand_ins import Federation, Message, partitions
from tests.server.grpc.threaded import ThreadedTraining

__all__ = ["BOUND_S", "CLIENTS", "KINDS", "REAL", "SLOW", "Stage", "nodes_at"]

CLIENTS, SLOW = 3, 2
BOUND_S = 30.0
_GOES_S, _COMES_S = 50.0, 100.0
_OF_NODES = ("name", "seed", "data_seed", "model", "local", "algorithm", "evaluation", "uplink")


class Stage:
    """A fleet of clients 0, 1 and 2, the last of whom takes long: until a test lets it answer.

    Attributes:
        fleet: of them.
        soon_s: in which the slow one has not answered, of the fleet's clock.
        patience_s: in which all is done that is not held back.

    Args:
        experiment: what they work for.
        folder: for all that is kept.
        visits: whether the slow one goes away and comes back.
    """

    fleet: Fleet
    soon_s = 0.1
    patience_s = BOUND_S

    def __init__(self, experiment: Experiment, folder: Path, *, visits: bool = False) -> None:
        self._experiment, self._folder = experiment, folder
        self._simulation = Simulation(experiment)
        self._prepared = self._simulation.prepared

    def task(self, number: int, client: int, vector_V: Tensor | None = None, **more: Any) -> Task:
        """To train the first model, or another."""
        first_V, integers_I = self.model()
        version, params_V = (0, first_V) if vector_V is None else (1, vector_V.to(first_V))
        model = GlobalModel(version, params_V, integers_I, self._prepared.first_context().broadcast)
        return Task(number, more.pop("round", 1), client, model, **more)

    def model(self) -> tuple[Tensor, Tensor]:
        """The first one."""
        return self._prepared.layout.shared.pack(self._prepared.module)

    def sizes(self) -> list[int]:
        """How many samples each client trains on."""
        return [self._prepared.data.size_of(client) for client in range(CLIENTS)]

    def held_out(self) -> list[int]:
        """How many samples each client scores models on."""
        assert self._prepared.held_out is not None
        return [len(self._prepared.held_out[client][1]) for client in range(CLIENTS)]

    def release(self) -> None:
        """Let the slow client answer."""

    def leave(self) -> None:
        """The slow client goes away, in the middle of whatever it does."""

    def come(self) -> None:
        """It comes back, and is slow again."""

    def await_answers(self, count: int) -> None:
        """Wait until so many answers are there in all, collected or not."""

    def restored(self, state: Tree, under_way: Iterable[Task]) -> "Stage":
        """Another one, which goes on from a state of the fleet; this one is over."""
        self.close()
        again = type(self)(self._experiment, self._folder)
        again.fleet.restore(state)
        again.begin()
        again.fleet.dispatch(under_way)
        return again

    def begin(self) -> None:
        """All clients are there."""

    def close(self) -> None:
        """Leave nothing behind."""


class Simulated(Stage):
    """Simulated clients: what is to happen to them is written down before."""

    patience_s = 1e4

    def __init__(self, experiment: Experiment, folder: Path, *, visits: bool = False) -> None:
        super().__init__(experiment, folder)
        made, devices = self._simulation, _Written(visits=visits)
        executor = InProcess(partial(Work, made.recipe), devices_of(1))
        clients = SimulatedClients(made.data, made.groups, executor, devices, made.streams)
        assert made.way_out is not None
        self.fleet = SimulatedFleet(clients, states=self._prepared.client_states(), way_out=made.way_out, reduces=True)

    def restored(self, state: Tree, under_way: Iterable[Task]) -> Stage:
        """Its tasks are in the state."""
        return super().restored(state, ())


@dataclass(frozen=True, kw_only=True)
class _Written(Devices):
    visits: bool = False

    @property
    def are_always_there(self) -> bool:
        return not self.visits

    def device(self, client: int | str, streams: Streams) -> Device:
        return Device(samples_per_s=1.0 if client == SLOW else 1000.0)

    def spells(self, client: int | str, streams: Streams) -> Spells | None:
        return _Visits() if client == SLOW and self.visits else None


class _Visits(Spells):
    def at(self, time_s: float) -> Spell:
        return next(
            Spell(is_there, until_s)
            for is_there, until_s in ((True, _GOES_S), (False, _COMES_S), (True, float("inf")))
            if time_s < until_s
        )


class _Real(Stage, ABC):
    """Real nodes."""

    fleet: RealFleet

    def begin(self) -> None:
        assert self._simulation.message is not None
        keeps_states = bool(self._prepared.client_states().names)
        keys = self._experiment.dump()
        plan = Plan(
            run="stage",
            experiment=json.dumps({**{key: keys[key] for key in _OF_NODES}, "data": None}),
            signature=Signature(input_shape=[64], input_dtype="float32", classes=10),
            heartbeat_s=0.2,
        )
        self.fleet.begin(plan, self._simulation.message, self._prepared.streams, keeps_states=keeps_states)
        self.fleet.await_nodes(CLIENTS)
        assert list(self.fleet.available()) == [*range(CLIENTS)]

    @abstractmethod
    def forge(self, client: int, forgery: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> None:
        """From now on a client answers something else than it has trained."""


class OverGrpc(_Real):
    """Nodes of threads, over gRPC on loopback."""

    def __init__(self, experiment: Experiment, folder: Path, *, visits: bool = False) -> None:
        super().__init__(experiment, folder)
        self.fleet = self._fleet = NodeFleet(
            "127.0.0.1:0",
            folder / "spool",
            credentials=None,
            accepts=lambda joining: None,
            clock=SYSTEM_CLOCK,
            patience=Patience(heartbeat_s=0.2, silence_s=BOUND_S, lease_s=2.0, stall_s=BOUND_S),
        )
        self._gate = threading.Event()
        self._nodes = {client: self._node(client) for client in range(CLIENTS)}

    def release(self) -> None:
        self._gate.set()

    def leave(self) -> None:
        self._nodes[SLOW].close()

    def come(self) -> None:
        self._gate = threading.Event()
        self._nodes[SLOW] = self._node(SLOW)

    def await_answers(self, count: int) -> None:
        _wait_for(lambda: sum(node.edge.tasks_done for node in self._nodes.values()) >= count)

    def forge(self, client: int, forgery: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> None:
        self._nodes[client].training.forgery = forgery

    def close(self) -> None:
        self._gate.set()
        for node in self._nodes.values():
            node.close()
        self._fleet.close("the test is over", is_final=True)

    def _node(self, client: int) -> "_Node":
        gate = self._gate if client == SLOW else None
        return _Node(self._fleet.port, client, self._experiment, self._folder / f"node-{client}", gate)


class _Node:
    """One node's threads."""

    def __init__(
        self, port: int, client: int, experiment: Experiment, folder: Path, gate: threading.Event | None = None
    ) -> None:
        training: Any = _Training(client, experiment, folder / "kept", gate)
        self.training: _Training = training
        files, patience = folder / "files", DialPatience(backoff_s=0.05, most_backoff_s=0.2)
        self.edge = EdgeNode(f"127.0.0.1:{port}", None, str(client), client, training, files, patience=patience)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self.edge.run, kwargs={"stopped": self._stopped}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self.join()

    def join(self) -> None:
        self._thread.join(BOUND_S)
        assert not self._thread.is_alive()


class _Training(ThreadedTraining):
    """What a training process does, in this one, once its gate is open."""

    forgery: Callable[[Sequence[Tensor]], Sequence[Tensor]] | None = None

    def __init__(self, client: int, experiment: Experiment, folder: Path, gate: threading.Event | None) -> None:
        description = NodeData(data=experiment.dump()["data"], client=client, seed=experiment.seed)
        super().__init__(samples_of(description, client), folder)
        self._gate = gate

    def train(self, assignment: Assignment, path: Path, until_s: float | None = None) -> Answer | Failed | Hidden:
        if self._gate is not None:
            assert self._gate.wait(BOUND_S)
        done = super().train(assignment, path, until_s)
        if self.forgery is not None and isinstance(done, Answer):
            done.payload.CopyFrom(written(path, self.forgery(read(path, done.payload))))
        return done


class OverFlower(_Real):
    """Nodes on a stand-in of Flower's grid, each message as in a process of its own."""

    def __init__(self, experiment: Experiment, folder: Path, *, visits: bool = False) -> None:
        super().__init__(experiment, folder)
        app = folder / "app"
        if not app.exists():
            write_app(experiment, app)
        (path,) = app.glob("*/experiment.yaml")
        self._grid = _GatedGrid(path, partitions(CLIENTS, folder / "nodes"))
        self.fleet = FlowerFleet(self._grid, accepts=lambda joining: None)
        vars(self.fleet).update(pull_every_s=0.001, look_every_s=0.0, absent_s=1.0)

    def release(self) -> None:
        self._grid.is_open = True
        for found, message in [*self._grid.open.items()]:
            self._grid.answer(found, self._grid.content_of_answer(message))

    def leave(self) -> None:
        (gone,) = [node for node, config in self._grid.configs.items() if config["partition-id"] == SLOW]
        self._config = self._grid.configs.pop(gone)
        for found in [*self._grid.open]:
            self._grid.answer(found, 5)

    def come(self) -> None:
        self._grid.is_open = False
        self._grid.configs[2**61] = self._config

    def forge(self, client: int, forgery: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> None:
        self._grid.forgeries[client] = forgery


class _GatedGrid(Federation):
    """Holds the slow client's answers back until it is open."""

    configs: dict[int, Any]

    def __init__(self, path: Path, configs: dict[int, Any]) -> None:
        super().__init__(path, configs)
        self.is_open = False
        self.forgeries: dict[int, Callable[[Sequence[Tensor]], Sequence[Tensor]]] = {}

    def content_of_answer(self, message: Message) -> Any:
        client = self.configs[message.metadata.dst_node_id]["partition-id"]
        is_task = message.metadata.message_type == "train"
        if is_task and client == SLOW and not self.is_open:
            return None
        content = super().content_of_answer(message)
        if is_task and client in self.forgeries:
            response, data = unpacked(content, Response)
            payload, array = flat_payload(self.forgeries[client](split(data, response.answer.payload)))
            response.answer.payload.CopyFrom(payload)
            return packed(response, array)
        return content


def nodes_at(port: int, experiment: Experiment, folder: Path) -> list[_Node]:
    """Nodes of threads that report to a server there, until it sends them home."""
    return [_Node(port, client, experiment, folder / f"node-{client}") for client in range(CLIENTS)]


def _wait_for(condition: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < limit_s
        time.sleep(0.01)


KINDS: dict[str, type[Stage]] = {"simulated": Simulated, "gRPC": OverGrpc, "Flower": OverFlower}
REAL: dict[str, type[_Real]] = {"gRPC": OverGrpc, "Flower": OverFlower}
