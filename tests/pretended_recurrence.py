"""Cells of recurrent layers, which on a GPU are each one operation, and on the processor several.

Shapes: B samples; H, size of the hidden state; J, gates side by side.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["CELLS"]


def _gru(
    inputs_BJ: Tensor, states_BJ: Tensor, state_BH: Tensor, input_bias_J: Tensor | None, state_bias_J: Tensor | None
) -> tuple[Tensor, Tensor]:
    reset_x, update_x, new_x = _biased(inputs_BJ, input_bias_J).chunk(3, 1)
    reset_h, update_h, new_h = _biased(states_BJ, state_bias_J).chunk(3, 1)
    reset_BH = (reset_x + reset_h).sigmoid()
    update_BH = (update_x + update_h).sigmoid()
    new_BH = (new_x + reset_BH * new_h).tanh()
    kept = torch.cat([reset_BH, update_BH, new_BH, state_BH, new_h], 1)
    return new_BH + update_BH * (state_BH - new_BH), kept


def _gru_backward(gradient_BH: Tensor, kept: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    reset_BH, update_BH, new_BH, state_BH, new_h = kept.chunk(5, 1)
    of_new = gradient_BH * (1 - update_BH) * (1 - new_BH**2)
    of_update = gradient_BH * (state_BH - new_BH) * update_BH * (1 - update_BH)
    of_reset = of_new * new_h * reset_BH * (1 - reset_BH)
    of_inputs = torch.cat([of_reset, of_update, of_new], 1)
    of_states = torch.cat([of_reset, of_update, of_new * reset_BH], 1)
    biases = (of_inputs.sum(0), of_states.sum(0)) if has_bias else (None, None)
    return of_inputs, of_states, gradient_BH * update_BH, *biases


def _lstm(
    inputs_BJ: Tensor, states_BJ: Tensor, cell_BH: Tensor, input_bias_J: Tensor | None, state_bias_J: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    gates_BJ = _biased(inputs_BJ, input_bias_J) + _biased(states_BJ, state_bias_J)
    into, forget, new, out = gates_BJ.chunk(4, 1)
    into, forget, new, out = into.sigmoid(), forget.sigmoid(), new.tanh(), out.sigmoid()
    next_BH = forget * cell_BH + into * new
    return out * next_BH.tanh(), next_BH, torch.cat([into, forget, new, out], 1)


def _lstm_backward(
    gradient_BH: Tensor | None, of_next: Tensor | None, cell_BH: Tensor, next_BH: Tensor, kept: Tensor, has_bias: bool
) -> tuple[Tensor | None, ...]:
    into, forget, new, out = kept.chunk(4, 1)
    gradient_BH = torch.zeros_like(cell_BH) if gradient_BH is None else gradient_BH
    tanh = next_BH.tanh()
    of_cell = gradient_BH * out * (1 - tanh**2) + (0 if of_next is None else of_next)
    of_gates = [
        of_cell * new * into * (1 - into),
        of_cell * cell_BH * forget * (1 - forget),
        of_cell * into * (1 - new**2),
        gradient_BH * tanh * out * (1 - out),
    ]
    of_gates_BJ = torch.cat(of_gates, 1)
    return of_gates_BJ, of_cell * forget, of_gates_BJ.sum(0) if has_bias else None


def _biased(gates_BJ: Tensor, bias_J: Tensor | None) -> Tensor:
    return gates_BJ if bias_J is None else gates_BJ + bias_J


CELLS: Mapping[str, Callable[..., Any]] = {
    "aten::_thnn_fused_gru_cell": _gru,
    "aten::_thnn_fused_gru_cell_backward": _gru_backward,
    "aten::_thnn_fused_lstm_cell": _lstm,
    "aten::_thnn_fused_lstm_cell_backward_impl": _lstm_backward,
}
"""Name of an operation → function of tensors of the processor that computes it."""
