"""What a client does for an algorithm over ``mean`` before and after its local steps; of one client or of a group.

Shapes: K, clients of a group; P, trainable parameters; V ≥ P, the whole floating-point state; M, numbers of a message.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fed.aggregators.base import Aggregator, ClientWork
from fed.layout import Layout

__all__ = [
    "each_part",
    "first_client_state",
    "message_sizes",
    "messages",
    "starting_states",
]


def first_client_state(aggregator: Aggregator, layout: Layout, vector_V: Tensor) -> Any:
    """What a client keeps before its first task, in the model's type: a named tuple, or None."""
    return each_part(aggregator.init_client(vector_V[: layout.parameters]), lambda part: part.to(layout.dtype))


def each_part(state: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """What a client keeps, with each of its tensors changed: a named tuple of the same type, or None."""
    return state and type(state)(*map(change, state))


def message_sizes(aggregator: Aggregator, params_P: Tensor, population: int) -> list[int]:
    """How many numbers each part of a client's message has."""
    state, number_11 = aggregator.init_client(params_P), params_P.new_ones(1, 1)
    nothing_1P = torch.zeros_like(params_P).unsqueeze(0)
    report = aggregator.report(
        ClientWork(
            update_KP=nothing_1P,
            anchor_P=params_P,
            began_KP=params_P.unsqueeze(0),
            samples_K1=number_11,
            steps_K1=number_11,
            lr=1.0,
            momentum=0.0,
            train_loss_K1=number_11,
            client_state=each_part(state, lambda part: part.unsqueeze(0)),
            broadcast=aggregator.broadcast(aggregator.init(params_P)),
            population=population,
            start_loss_K1=number_11,
            start_gradient_KP=nothing_1P,
            places_K=torch.zeros(1, dtype=torch.int64),
        )
    )
    return [part.shape[1] for part in report.message]


def starting_states(aggregator: Aggregator, layout: Layout, start_V: Tensor, client_state: Any) -> Tensor:
    """The states in which local steps begin: the task's [V], or each client's own [K, V]."""
    anchor_P = start_V[..., : layout.parameters]
    began_KP = aggregator.local_start(anchor_P, client_state)
    if began_KP is anchor_P:
        return start_V
    buffers_KB = start_V[..., layout.parameters :].expand(len(began_KP), -1)
    return torch.cat([began_KP.to(start_V.dtype), buffers_KB], 1)


def messages(
    aggregator: Aggregator, layout: Layout, start_V: Tensor, began: Tensor, trained_KV: Tensor, **work: Any
) -> tuple[Tensor, Tensor, Any]:
    """What clients answer, and what they keep.

    Args:
        aggregator: asks for it.
        layout: the model's.
        start_V: the model that came with the task; or each client's own, [K, V].
        began: of :func:`starting_states`.
        trained_KV: what local steps made of it.
        work: the other fields of :class:`fed.aggregators.base.ClientWork`, of tensors in any type.

    Returns:
        Messages [K, M] in float64, the parts followed by the update of all state but parameters; weights [K] in
        float64; and the clients' state in the model's type.
    """
    update_KV = trained_KV.double().sub_(began)
    params = layout.parameters
    report = aggregator.report(
        ClientWork(
            update_KP=(update_KP := update_KV[:, :params]),
            anchor_P=start_V[..., :params],
            began_KP=began[..., :params].expand_as(update_KP),
            **{name: _in_float64(value) for name, value in work.items()},
        )
    )
    state = each_part(report.client_state, lambda part: part.to(layout.dtype).expand(len(trained_KV), -1))
    is_update = len(report.message) == 1 and report.message[0] is update_KP
    messages_KM = update_KV if is_update else torch.cat([*report.message, update_KV[:, params:]], 1)
    return messages_KM, report.weight_K1.reshape(-1), state


def _in_float64(value: Any) -> Any:
    """Floating-point tensors in float64, whatever holds them."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, tuple):
        wide = [_in_float64(part) for part in value]
        return type(value)(*wide) if hasattr(value, "_fields") else tuple(wide)
    return value
