"""Client states, kept from task to task: records of named tensors, changed by the coordinator's verdict alone."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from fed.clients.data import ClientId
from fed.clients.data.on_demand import ByClient
from fed.compression.codec import CodecState
from fed.storage.checkpoints import Tree
from fed.vectors.layout import Layout
from fed.vectors.tensors import Tensor, torch

__all__ = ["ClientState", "ClientStates", "algorithm_state", "at_discount", "client_state", "codec_state"]

ClientState: TypeAlias = dict[str, Tensor]
"""Tensors by name: ``algorithm.NAME`` of the algorithm's state, ``model.params`` and ``model.integers`` of a model that
is the client's own, or of a model's private parts, ``codec.NAME`` of the codecs' states. Of K clients, [K, ·] each."""

_State: TypeAlias = tuple[Tensor, Tensor]
_CODEC = "codec."


def client_state(algorithm: Any, model: Sequence[Tensor] = (), codec: CodecState = MappingProxyType({})) -> ClientState:
    """The record of an algorithm's state, of the client's own model, and of the codecs' states.

    Args:
        algorithm: a named tuple of tensors, or None.
        model: (params, integers), or nothing.
        codec: tensors by name.
    """
    named = {} if algorithm is None else algorithm._asdict()
    own = dict(zip(("model.params", "model.integers"), model, strict=True)) if model else {}
    kept = {f"{_CODEC}{name}": part for name, part in codec.items()}
    return {**{f"algorithm.{name}": part for name, part in named.items()}, **own, **kept}


def codec_state(state: ClientState) -> ClientState:
    """The codecs' part of a record, by their own names."""
    return {name.removeprefix(_CODEC): part for name, part in state.items() if name.startswith(_CODEC)}


def algorithm_state(state: ClientState, kind: type | None) -> Any:
    """The algorithm's part of a record, as its own named tuple; None where it keeps nothing."""
    if kind is None:
        return None
    return kind(**{name: state[f"algorithm.{name}"] for name in kind._fields})  # type: ignore[attr-defined]  # a named tuple


def at_discount(before: ClientState, after: ClientState, discount: float) -> ClientState:
    """The record of a client whose update counted at a discount s: s of the way from before to after.

    Args:
        before: the record with which its task began; of codecs, the state that is left if the message is lost.
        after: the record that the task left.
        discount: s in [0, 1]; 0 for a message that is lost.
    """
    if discount in (0, 1):
        return after if discount else before
    return {
        name: torch.lerp(before[name], part, discount) if part.is_floating_point() else part
        for name, part in after.items()
    }


class ClientStates:
    """The records of all clients.

    Args:
        clients: ids of all clients.
        layout: the layout of a whole model.
        first: the run's first model: (vector [V], integers [I]).
        state: the algorithm's state of a client before its first task: a named tuple, or None.
        keeps_models: True if clients train models of their own.
        codec: tensors, by name, that codecs keep of a client before its first task.
    """

    def __init__(
        self,
        clients: Sequence[ClientId],
        layout: Layout,
        first: _State,
        state: Any,
        keeps_models: bool,
        codec: CodecState = MappingProxyType({}),
    ) -> None:
        self._clients = clients
        self._layout = layout
        vector, integers = layout.split(*first)[1]
        self._private = vector.clone(), integers.clone()  # views would keep all of the first model
        self._first = client_state(state, (), codec)
        self._keeps_models = keeps_models
        self._kept: dict[ClientId, ClientState] = {}
        self.names = tuple(self.before(self._private))
        self.codec_names = tuple(client_state(None, (), codec))

    def before(self, model: _State) -> ClientState:
        """The record of a client before its first task, which comes with this model."""
        own: Sequence[Tensor] = ()
        if self._keeps_models:
            own = model
        elif self._layout.private:
            own = self._private
        return {**self._first, **client_state(None, own)}

    def of(self, client: ClientId, model: _State) -> ClientState:
        """The record of a client whose task comes with this model."""
        return {**self.before(model), **self._kept.get(client, {})}

    def stacked(self, clients: Sequence[ClientId], models: Sequence[_State]) -> list[Tensor]:
        """The records of clients whose tasks come with these models, [K, ·] each, in the order of ``names``."""
        if not self.names:
            return []
        kept = [self.of(client, model) for client, model in zip(clients, models, strict=True)]
        return [torch.stack([state[name] for state in kept]) for name in self.names]

    def commit(self, client: ClientId, state: ClientState) -> None:
        """Keep a client's record, or a part of one, for its next task."""
        self._kept[client] = {**self._kept.get(client, {}), **state}

    def state(self) -> Tree:
        """All records, for a checkpoint."""
        return dict(self._kept)

    def restore(self, state: Tree) -> None:
        """Resume from the records that :meth:`state` gave."""
        self._kept = dict(state)

    def whole(self, model: _State) -> _State:
        """A shared state with the private parts of the first model."""
        return self._layout.joined(model, self._private)

    def models(self, model: _State) -> Mapping[ClientId, _State]:
        """Each client's own model, its private parts joined to this shared state; empty where clients keep neither."""
        if not (self._keeps_models or self._layout.private):
            return {}
        # A copy: the next round commits while these are scored.
        kept = {**self._kept}
        before = self.before(model)

        def model_of(client: ClientId) -> _State:
            state = {**before, **kept.get(client, {})}
            own = state["model.params"], state["model.integers"]
            return self._layout.joined(model, own) if self._layout.private else own

        return ByClient(self._clients, model_of)
