"""Client side of algorithms over ``mean``: start, report and state of one client or of a group.

Shapes: see :mod:`fed.vectors.layout`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from fed.aggregators.base import Aggregator, ClientWork, Reduced, Report
from fed.errors import InvalidExperiment
from fed.vectors.layout import Layout
from fed.vectors.tensors import Tensor, torch
from fed.wire.format import Format

__all__ = ["each_part", "first_client_state", "format_of", "reported", "starting_states", "weighs_samples"]


def first_client_state(aggregator: Aggregator, layout: Layout, vector_V: Tensor) -> Any:
    """State of a client before its first task, in the model's type: a named tuple, or None.

    Args:
        aggregator: the algorithm.
        layout: layout of the model.
        vector_V: the first model.
    """
    return each_part(aggregator.init_client(vector_V[: layout.parameters]), lambda part: part.to(layout.dtype))


def each_part(state: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """State of a client with each of its tensors changed: a named tuple of the same type, or None."""
    return state and type(state)(*map(change, state))


def format_of(
    aggregator: Aggregator, layout: Layout, population: int, is_encoded: bool = False, clients: int = 1
) -> Format:
    """The format of a run's messages, found by reporting on an update of zeros.

    Args:
        aggregator: the algorithm.
        layout: layout of the part of the model that leaves a client.
        population: the number of clients.
        is_encoded: True if codecs encode the clients' values.
        clients: the number of clients that report in a round.

    Returns:
        The format that coordinator, fleets, plans and nodes read.

    Raises:
        InvalidExperiment: if the report is not made of rows, one for each client.
    """
    params_P = torch.zeros(layout.parameters, dtype=torch.float64)
    state = aggregator.init_client(params_P)
    first = aggregator.init(params_P)
    zeros_1P = params_P.unsqueeze(0)

    def tried(samples: float, number: float, update_1P: Tensor) -> Report:
        """The report of a client with so many samples, with this number for all other numbers, and with this update."""
        number_11 = torch.full((1, 1), number, dtype=torch.float64)
        return aggregator.report(
            ClientWork(
                update_KP=update_1P,
                anchor_P=params_P,
                began_KP=zeros_1P,
                samples_K1=torch.full((1, 1), samples, dtype=torch.float64),
                steps_K1=number_11,
                lr=1.0,
                momentum=0.0,
                train_loss_K1=number_11,
                client_state=each_part(state, lambda part: part.unsqueeze(0)),
                broadcast=aggregator.broadcast(first),
                population=population,
                start_loss_K1=number_11,
                start_gradient_KP=update_1P,
                places_K=torch.zeros(1, dtype=torch.int64),
            )
        )

    report = tried(2.0, 1.0, zeros_1P)
    _check_report(aggregator, report)
    # of other clients, too: one weight may be the number of samples, or 1, by chance or below a bound
    others = tried(2.0**40, 5.0, zeros_1P + 1.0), tried(3.0, 0.25, zeros_1P - 1.0)
    weights = [one.weight_K1.item() for one in (report, *others)]
    broadcast = aggregator.broadcast(first)
    later = broadcast
    if broadcast:  # it may grow after the first round, as AFL's mixture does
        means = tuple(torch.ones(part.shape[1], dtype=torch.float64) for part in report.message)
        later = aggregator.broadcast(aggregator.apply(first, Reduced(means, clients, population)))
    return Format(
        dtype=layout.dtype,
        parts=tuple(part.shape[1] for part in report.message),
        buffers=layout.returned_size - layout.parameters,
        moved=layout.moved_size,
        is_factored=_is_factored(aggregator, layout, first),
        integers=layout.integer_count,
        parameters=layout.parameters,
        broadcast=tuple(part.numel() for part in broadcast),
        later_broadcast=tuple(part.numel() for part in later),
        sends_models=_is(report.message, zeros_1P) and aggregator.plain_start and not is_encoded and not layout.moved,
        weighs_samples=weights == [2.0, 2.0**40, 3.0],
        weighs_alike=weights == [1.0, 1.0, 1.0],
        votes=aggregator.votes,
    )


def _is_factored(aggregator: Aggregator, layout: Layout, first: Any) -> bool:
    """True if movements travel as factors; not where the model's type would lose small ones round after round."""
    is_wide = layout.dtype in (torch.float32, torch.float64)
    return bool(layout.moved_size) and is_wide and aggregator.factors(first) is not None


def weighs_samples(aggregator: Aggregator) -> bool:
    """Tell whether a client's weight is its number of samples, whatever the model."""
    smallest = Layout(parameters=2, size=2, dtype=torch.float32, trained=(), averaged=(), integers=())
    return format_of(aggregator, smallest, 2).weighs_samples


def _check_report(aggregator: Aggregator, report: Any) -> None:
    """Refuse one client's report that is not made of rows."""
    if not isinstance(report, Report):
        got = type(report).__name__
    elif not isinstance(report.message, tuple) or not report.message:
        got = "an empty message" if report.message == () else f"the message {type(report.message).__name__}"
    else:
        parts = {f"part {place} of the message": part for place, part in enumerate(report.message)}
        wrong = {name: part for name, part in parts.items() if _shape(part)[:1] != (1,) or len(_shape(part)) != 2}
        wrong |= {} if math.prod(_shape(report.weight_K1) or (0,)) == 1 else {"the weight": report.weight_K1}
        if not wrong:
            return
        got = ", ".join(f"{name} as {_shape(part) or type(part).__name__}" for name, part in wrong.items())
    name = type(aggregator).__name__
    raise InvalidExperiment(
        f"{name}.report must return a Report whose tensors have a row for each client, so of one client a tuple of "
        f"parts [1, ·] and a weight [1, 1], got {got}: correct {name}.report; fed.aggregators.slowmo is an example"
    )


def _shape(part: Any) -> tuple[int, ...]:
    return tuple(part.shape) if isinstance(part, Tensor) else ()


def starting_states(
    aggregator: Aggregator, layout: Layout, start_V: Tensor, client_state: Any, places: Sequence[int] = ()
) -> Tensor:
    """States in which local steps begin: the task's [V], or each client's own [K, V].

    Args:
        aggregator: the algorithm.
        layout: layout of the model.
        start_V: the task's model.
        client_state: state of the clients, a named tuple, or None.
        places: each client's number among all, where the algorithm asks for it.
    """
    anchor_P = start_V[..., : layout.parameters]
    if places:
        began_KP = aggregator.local_start(anchor_P, client_state, torch.tensor(places))
    else:
        began_KP = aggregator.local_start(anchor_P, client_state)
    if began_KP is anchor_P:  # no copy for each client
        return start_V
    # Buffers are no part of the algorithm: local steps begin with those of the server.
    buffers_KB = start_V[..., layout.parameters :].expand(len(began_KP), -1)
    return torch.cat([began_KP.to(start_V.dtype), buffers_KB], 1)


def reported(
    aggregator: Aggregator, layout: Layout, start: Tensor, began: Tensor, trained_KV: Tensor, **work: Any
) -> tuple[Tensor, Tensor, Any, bool]:
    """The messages that clients report, and their states.

    Args:
        aggregator: the algorithm.
        layout: layout of the part of the model that leaves a client.
        start: the model that came with the task, [V], or each client's own, [K, V].
        began: models at which local steps began, from :func:`starting_states`.
        trained_KV: models at which local steps ended.
        work: other fields of :class:`fed.aggregators.base.ClientWork`; their tensors may have any type.

    Returns:
        Messages [K, M] in float64, the parts followed by the update of the float buffers; weights [K] in float64; the
        clients' states, in the model's type; and whether a message is the update alone, as it is.
    """
    returned = layout.returned_size
    # double() of float64 would be no copy
    update_KV = trained_KV[:, :returned].to(torch.float64, copy=True).sub_(began[..., :returned])
    params = layout.parameters
    update_KP = update_KV[:, :params]
    report = aggregator.report(
        ClientWork(
            update_KP=update_KP,
            anchor_P=start[..., :params],
            began_KP=began[..., :params].expand_as(update_KP),
            **{name: _in_float64(value) for name, value in work.items()},
        )
    )
    state = each_part(report.client_state, lambda part: part.to(layout.dtype).expand(len(trained_KV), -1))
    is_update = _is(report.message, update_KP)
    update_KM = update_KV if is_update else torch.cat([*report.message, update_KV[:, params:]], 1)
    return update_KM, report.weight_K1.reshape(-1), state, is_update


def _is(message: tuple[Tensor, ...], update_KP: Tensor) -> bool:
    # By identity: an algorithm may return a changed copy that happens to be equal.
    return len(message) == 1 and message[0] is update_KP


def _in_float64(value: Any) -> Any:
    """Floating-point tensors in float64, in whatever container they come."""
    if isinstance(value, Tensor):  # written out, for PyTorch's tree_map takes three times as long
        return value.double() if value.is_floating_point() else value
    if isinstance(value, tuple):
        wide = [_in_float64(part) for part in value]
        return type(value)(*wide) if hasattr(value, "_fields") else tuple(wide)
    return value
