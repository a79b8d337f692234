"""Recurrent layers step by step, as ``vmap`` can compute them for many clients at once.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fed.vectors.tensors import Tensor, torch

__all__ = ["RecurrentLayers"]

_MOST_STEPS = 256
_State: TypeAlias = tuple[Tensor, ...]
_Cell: TypeAlias = Callable[[Tensor, _State, Tensor, Tensor | None], _State]
"""(input of a step, the state before it, W, b) → the state after it, whose first part is the output."""


class RecurrentLayers(TorchFunctionMode):
    """Mode in which LSTM, GRU and plain recurrent layers are computed step by step, with operations of their own.

    PyTorch computes all steps in one operation, for which ``vmap`` has no rule. Packed sequences, projections of the
    state and sequences of more than 256 steps, which take seconds to record, stay as they are.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute an operation, step by step if it is a recurrent layer."""
        cell = _CELLS.get(function)
        if cell is None or kwargs or isinstance(args[2], Tensor) or not _is_plain(*args):
            return function(*args, **(kwargs or {}))
        return _stacked(cell, *args)


def _stacked(
    cell: _Cell,
    x: Tensor,
    begin: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    has_bias: bool,
    layers: int,
    dropout: float,
    training: bool,
    is_bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """All layers; returns the last one's outputs, and each part of all layers' last states."""
    starts = [begin] if isinstance(begin, Tensor) else begin
    outputs_TBH = x.transpose(0, 1) if batch_first else x
    directions = 1 + is_bidirectional
    each = 4 if has_bias else 2  # tensors of one layer and direction
    ends: list[_State] = []
    for layer in range(layers):
        if layer and dropout and training:
            outputs_TBH = functional.dropout(outputs_TBH, dropout)
        passes = []
        for direction in range(directions):
            place = layer * directions + direction
            state = tuple(start[place] for start in starts)
            passed, end = _passed(cell, outputs_TBH, state, *weights[place * each : (place + 1) * each], back=direction)
            passes.append(passed)
            ends.append(end)
        outputs_TBH = torch.cat(passes, -1) if is_bidirectional else passes[0]
    output = outputs_TBH.transpose(0, 1) if batch_first else outputs_TBH
    return output, *(torch.stack(parts) for parts in zip(*ends, strict=True))


def _passed(
    cell: _Cell,
    x_TBI: Tensor,
    state: _State,
    of_input: Tensor,
    of_state: Tensor,
    input_bias: Tensor | None = None,
    state_bias: Tensor | None = None,
    *,
    back: int,
) -> tuple[Tensor, _State]:
    """One layer in one direction; returns its outputs and its last state."""
    steps = functional.linear(x_TBI, of_input, input_bias).unbind()  # one product for all steps
    outputs = []
    for step in reversed(steps) if back else steps:
        state = cell(step, state, of_state, state_bias)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if back else outputs), state


def _lstm(step: Tensor, state: _State, weight: Tensor, bias: Tensor | None) -> _State:
    hidden, kept = state
    gates = step + functional.linear(hidden, weight, bias)
    enters, stays, new, leaves = gates.chunk(4, -1)
    kept = stays.sigmoid() * kept + enters.sigmoid() * new.tanh()
    return leaves.sigmoid() * kept.tanh(), kept


def _gru(step: Tensor, state: _State, weight: Tensor, bias: Tensor | None) -> _State:
    (hidden,) = state
    sizes = [2 * hidden.shape[-1], hidden.shape[-1]]
    read, read_new = torch.split(step, sizes, -1)
    held, held_new = torch.split(functional.linear(hidden, weight, bias), sizes, -1)
    resets, stays = (read + held).sigmoid().chunk(2, -1)
    new = torch.addcmul(read_new, resets, held_new).tanh()
    return (new + stays * (hidden - new),)


def _plain(activation: Callable[[Tensor], Tensor], step: Tensor, state: _State, weight: Tensor, bias: Any) -> _State:
    return (activation(step + functional.linear(state[0], weight, bias)),)


def _is_plain(
    x: Tensor,
    _begin: Any,
    weights: Sequence[Tensor],
    has_bias: bool,
    layers: int,
    _dropout: float,
    _training: bool,
    is_bidirectional: bool,
    batch_first: bool,
) -> bool:
    """True for sequences that are not too long, in layers without projections."""
    plain = layers * (1 + is_bidirectional) * (4 if has_bias else 2)
    return x.shape[1 if batch_first else 0] <= _MOST_STEPS and len(weights) == plain


_CELLS: Mapping[Any, _Cell] = {
    torch.lstm: _lstm,
    torch.gru: _gru,
    torch.rnn_tanh: partial(_plain, torch.tanh),
    torch.rnn_relu: partial(_plain, torch.relu),
}
