"""Client states, kept from task to task: records of named tensors, changed by the coordinator's verdict alone."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fed.clients.data import ClientId
from fed.clients.data.on_demand import ByClient
from fed.layout import Layout
from fed.storage.checkpoints import Tree

__all__ = ["ClientState", "ClientStates", "algorithm_state", "at_discount", "client_state"]

ClientState: TypeAlias = dict[str, Tensor]
"""Tensors by name: ``algorithm.NAME`` of the algorithm's state, ``model.params`` and ``model.integers`` of a model that
is the client's own, or of a model's private parts. Of K clients, [K, ·] each."""

_State: TypeAlias = tuple[Tensor, Tensor]


def client_state(algorithm: Any, model: Sequence[Tensor] = ()) -> ClientState:
    """The record of an algorithm's state and of the client's own model.

    Args:
        algorithm: a named tuple of tensors, or None.
        model: (params, integers), or nothing.
    """
    named = {} if algorithm is None else algorithm._asdict()
    own = dict(zip(("model.params", "model.integers"), model, strict=True)) if model else {}
    return {**{f"algorithm.{name}": part for name, part in named.items()}, **own}


def algorithm_state(state: ClientState, kind: type | None) -> Any:
    """The algorithm's part of a record, as its own named tuple; None where it keeps nothing."""
    return kind(**{name: state[f"algorithm.{name}"] for name in kind._fields}) if kind is not None else None  # type: ignore[attr-defined]


def at_discount(before: ClientState, after: ClientState, discount: float) -> ClientState:
    """The record of a client whose update counted at a discount s: s of the way from before to after.

    Args:
        before: what its task began with.
        after: what the task left.
        discount: s in (0, 1].
    """
    if discount == 1:
        return after
    return {
        name: torch.lerp(before[name], part, discount) if part.is_floating_point() else part
        for name, part in after.items()
    }


class ClientStates:
    """The records of all clients.

    Args:
        clients: all there are.
        layout: the layout of a whole model.
        first: the run's first model: (vector [V], integers [I]).
        state: the algorithm's state of a client before its first task: a named tuple, or None.
        keeps_models: clients train models of their own.
    """

    def __init__(
        self, clients: Sequence[ClientId], layout: Layout, first: _State, state: Any, keeps_models: bool
    ) -> None:
        self._clients = clients
        self._layout = layout
        vector, integers = layout.split(*first)[1]
        self._private = vector.clone(), integers.clone()  # views would keep all of the first model
        self._first = client_state(state)
        self._keeps_models = keeps_models
        self._kept: dict[ClientId, ClientState] = {}
        self.names = tuple(self.before(self._private))

    def before(self, model: _State) -> ClientState:
        """The record of a client before its first task, which brings this model of the shared state."""
        own = model if self._keeps_models else self._private if self._layout.private else ()
        return {**self._first, **client_state(None, own)}

    def of(self, client: ClientId, model: _State) -> ClientState:
        """The record of a client to which this model comes."""
        return self._kept.get(client) or self.before(model)

    def stacked(self, clients: Sequence[ClientId], models: Sequence[_State]) -> list[Tensor]:
        """The records of clients to which these models come, [K, ·] each, in the order of ``names``."""
        if not self.names:
            return []
        kept = [self.of(client, model) for client, model in zip(clients, models, strict=True)]
        return [torch.stack([state[name] for state in kept]) for name in self.names]

    def commit(self, client: ClientId, state: ClientState) -> None:
        """Keep a client's record for its next task."""
        self._kept[client] = state

    def state(self) -> Tree:
        """All records, for a checkpoint."""
        return dict(self._kept)

    def restore(self, state: Tree) -> None:
        """Resume from what :meth:`state` wrote down."""
        self._kept = dict(state)

    def whole(self, model: _State) -> _State:
        """A shared state with the private parts of the first model."""
        return self._layout.joined(model, self._private)

    def models(self, model: _State) -> Mapping[ClientId, _State]:
        """Each client's own model, its private parts joined to this shared state; empty where clients keep neither."""
        if not (self._keeps_models or self._layout.private):
            return {}
        # a copy: the next round commits while these are scored
        kept, before = {**self._kept}, self.before(model)

        def model_of(client: ClientId) -> _State:
            state = kept.get(client, before)
            own = state["model.params"], state["model.integers"]
            return self._layout.joined(model, own) if self._layout.private else own

        return ByClient(self._clients, model_of)
