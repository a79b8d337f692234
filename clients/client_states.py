"""What clients keep from task to task.

Shapes: K, clients of a group; V, a model's floating-point state; I, its integers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from fed.clients.data import ClientId
from fed.layout import Layout
from fed.storage.checkpoints import Tree

__all__ = ["ClientStates"]

_State: TypeAlias = tuple[Tensor, Tensor]
_Kept: TypeAlias = tuple[Tensor, ...]


class ClientStates:
    """The algorithm's state of each client, and what is its own of a model: private parts, or a whole one.

    Args:
        clients: all there are.
        layout: of a whole model.
        first: the run's first: (vector [V], integers [I]).
        state: what the algorithm has a client keep before its first task.
        keeps_models: whether clients train models of their own.
    """

    def __init__(
        self, clients: Sequence[ClientId], layout: Layout, first: _State, state: _Kept, keeps_models: bool
    ) -> None:
        self._clients = clients
        self._layout = layout
        vector, integers = layout.split(*first)[1]
        self._private = vector.clone(), integers.clone()  # views would keep all of the first model
        self._state = state
        self._keeps_models = keeps_models
        self._kept: dict[ClientId, _Kept] = {}

    def before(self, model: _State) -> _Kept:
        """What a client keeps before its first task, if that brings this model, of the shared state."""
        own = model if self._keeps_models else self._private if self._layout.private else ()
        return *self._state, *own

    def stacked(self, clients: Sequence[ClientId], models: Sequence[_State]) -> list[Tensor]:
        """What these clients keep when these models come to them, [K, ·] each."""
        kept = [self._kept.get(client) or self.before(model) for client, model in zip(clients, models, strict=True)]
        return [torch.stack(parts) for parts in zip(*kept, strict=True)]

    def keep(self, clients: Sequence[ClientId], parts: Sequence[Tensor]) -> None:
        """Take down what these clients keep from now on, [K, ·] each."""
        for row, client in enumerate(clients if parts else ()):
            self._kept[client] = tuple(part[row].clone() for part in parts)

    def state(self) -> Tree:
        """All that clients keep, for a checkpoint."""
        return dict(self._kept)

    def restore(self, state: Tree) -> None:
        """Go on with what :meth:`state` said."""
        self._kept = dict(state)

    def whole(self, model: _State) -> _State:
        """A shared state with the private parts of the first model."""
        return self._layout.joined(model, self._private)

    def models(self, model: _State) -> Mapping[ClientId, _State]:
        """Each client's own model, its private parts joined to this shared state; empty where clients keep neither."""
        if not (self._keeps_models or self._layout.private):
            return {}
        before = self.before(model)
        return _Models(self._clients, self._layout, model, {**self._kept}, before[-2:])


@dataclass(frozen=True, eq=False)
class _Models(Mapping[ClientId, _State]):
    """Clients' own models, put together when they are asked for."""

    clients: Sequence[ClientId]
    layout: Layout
    model: _State
    kept: Mapping[ClientId, _Kept]
    before: _Kept

    def __getitem__(self, client: ClientId) -> _State:
        vector, integers = self.kept.get(client, self.before)[-2:]
        return self.layout.joined(self.model, (vector, integers)) if self.layout.private else (vector, integers)

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self.clients)

    def __len__(self) -> int:
        return len(self.clients)
