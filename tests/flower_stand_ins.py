"""As much of Flower's public interfaces as is used, so that tests need neither Flower nor its processes."""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import pytest

from fed.clients.node.flower import client_app
from fed.config.experiment import Experiment
from fed.server.flower.app import server_app, write_app

__all__ = ["Array", "ClientApp", "Federation", "Message", "ServerApp", "StandInGrid", "install", "partitions"]

Handler = Callable[..., Any]


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put them in the place of Flower, whether that is installed or not."""
    names: dict[str, dict[str, Any]] = {
        "app": {"Array": Array, "ArrayRecord": dict, "ConfigRecord": dict, "RecordDict": dict, "Message": Message},
        "clientapp": {"ClientApp": ClientApp},
        "serverapp": {"ServerApp": ServerApp},
    }
    monkeypatch.setitem(sys.modules, "flwr", ModuleType("flwr"))
    for name, contents in names.items():
        module = ModuleType(f"flwr.{name}")
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, f"flwr.{name}", module)


@dataclass
class Array:
    dtype: str
    shape: tuple[int, ...]
    stype: str
    data: Any


class Message:
    """A task for a node, or its reply."""

    def __init__(
        self,
        content: Any,
        node: int = 0,
        kind: str = "",
        *,
        ttl: float | None = None,
        group_id: str = "",
        reply_to: "Message | None" = None,
    ) -> None:
        self._content = content
        self.error: Any = None
        self.metadata = SimpleNamespace(dst_node_id=node, message_type=kind, ttl=ttl, group_id=group_id)
        if reply_to is not None:
            self.metadata.src_node_id = reply_to.metadata.dst_node_id

    def has_content(self) -> bool:
        return self._content is not None

    @property
    def content(self) -> Any:
        if self._content is None:
            raise ValueError("a message that tells of an error has no content")
        return self._content


class ClientApp:
    """Registers what a node does with each type of message."""

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}

    def query(self) -> Handler:
        return self._registering("query")

    def train(self) -> Handler:
        return self._registering("train")

    def evaluate(self) -> Handler:
        return self._registering("evaluate")

    def _registering(self, kind: str) -> Handler:
        return lambda handler: self.handlers.__setitem__(kind, handler)


class ServerApp:
    """Registers what the server does."""

    run: Handler

    def main(self) -> Handler:
        return lambda handler: setattr(self, "run", handler)


@dataclass
class StandInGrid:
    """A grid whose nodes answer at once, or when a test says so.

    Attributes:
        pushed: all messages that were sent.
        open: those that are not answered, by id.
        ready: answers that are to be pulled.
        sender: the node that answers, where it is not the one that was asked.
    """

    pushed: list[Message] = field(default_factory=list, kw_only=True)
    open: dict[str, Message] = field(default_factory=dict, kw_only=True)
    ready: dict[str, Message] = field(default_factory=dict, kw_only=True)
    sender: int | None = field(default=None, kw_only=True)

    def content_of_answer(self, message: Message) -> Any:
        """What a node answers at once: content, a number for an error of Flower's, or None for nothing yet."""
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            ids.append(f"message-{len(self.pushed)}")
            self.pushed.append(message)
            self.open[ids[-1]] = message
        for found in ids:
            if (content := self.content_of_answer(self.open[found])) is not None:
                self.answer(found, content)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.ready.pop(found) for found in sorted(message_ids) if found in self.ready]

    def answer(self, found: str, content: Any) -> None:
        """A reply has come for a message."""
        error = SimpleNamespace(code=content, reason="gone") if isinstance(content, int) else None
        reply = Message(None if error else content, reply_to=self.open.pop(found))
        reply.error, reply.metadata.reply_to_message_id = error, found
        if self.sender is not None:
            reply.metadata.src_node_id = self.sender
        self.ready[found] = reply


@dataclass
class Federation(StandInGrid):
    """Nodes that run an app's client, each message as if in a process of its own.

    Args:
        path: of the experiment in the app.
        configs: of the nodes, by id.
        dies_after: so many tasks the server is killed.
    """

    path: Path
    configs: Mapping[int, Mapping[str, Any]]
    dies_after: int | None = None
    trained: list[int] = field(default_factory=list)

    def get_node_ids(self) -> list[int]:
        return list(self.configs)

    def content_of_answer(self, message: Message) -> Any:
        app, node = client_app(self.path), message.metadata.dst_node_id
        assert isinstance(app, ClientApp)
        if message.metadata.message_type == "train":
            if len(self.trained) == self.dies_after:
                raise KeyboardInterrupt
            self.trained.append(node)
        handler = app.handlers[message.metadata.message_type]
        return handler(message, SimpleNamespace(node_config=self.configs[node])).content


_Grid = TypeVar("_Grid", bound=Federation)


def partitions(clients: int, folder: Path) -> dict[int, dict[str, Any]]:
    """What nodes are configured with that hold a client's part each of the experiment's data."""
    common = {"num-partitions": clients, "folder": str(folder)}
    return {2**60 + number: {"partition-id": number, **common} for number in range(clients)}


def run_app(given: Experiment, folder: Path, clients: int, kind: type[_Grid] = Federation) -> _Grid:  # type: ignore[assignment]
    """Run an experiment's app over nodes that hold a client's part each of its data; leaves ``folder / "run"``."""
    write_app(given, folder / "app")
    (path,) = (folder / "app").glob("*/experiment.yaml")
    grid = kind(path, partitions(clients, folder / "nodes"))
    context = SimpleNamespace(run_config={"min-nodes": clients, "output": str(folder / "run")}, run_id=7)
    app: Any = server_app(path)
    app.run(grid, context)
    return grid
