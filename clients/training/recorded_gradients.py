"""Recorded gradients: a batch's loss and gradient by operations that were recorded once, for PyTorch's own layers.

A class of a user's own is recorded if its forward pass is plain code (:mod:`fed.clients.training.plain_code`), or if it
says that it may be, by ``is_recordable = True``.

A replay has the bits of the passes that it stands for. It takes a third of the time of a small model's, since neither
layers are called nor is a graph of the loss built, and Python does not call the operations.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch.nn.functional import gelu, relu
from torch.nn.modules import module as calls

from fed.clients.scoring.losses import bce, counted_cross_entropy, cross_entropy, mse
from fed.clients.scoring.measures import Loss
from fed.clients.training.flat import FlatParameters, gradients_of
from fed.clients.training.interpreted import Function
from fed.clients.training.op_graphs import record
from fed.clients.training.plain_code import has_plain_code
from fed.clients.training.reading import Batch, with_parameters
from fed.vectors.tensors import Tensor, nn, torch

__all__ = ["RECORDED_AFTER", "RecordedGradients", "is_recordable"]

RECORDED_AFTER = 100
"""Number of batches of one shape after which recording pays: it takes as long as a hundred small steps."""

_MOST_SHAPES = 64

_LAYERS = frozenset(
    {
        *(nn.Sequential, nn.Identity, nn.Flatten, nn.Unflatten, nn.Linear, nn.Conv1d, nn.Conv2d),
        *(nn.LayerNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d),
        *(nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d),
        *(nn.RNN, nn.GRU),  # oneDNN's LSTM keeps what gradients need only where some are recorded
        *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Hardtanh),
        *(nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Softmax, nn.Dropout, nn.Dropout1d, nn.Dropout2d),
        *(nn.ModuleList, nn.Embedding, nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention),
        nn.modules.linear.NonDynamicallyQuantizableLinear,  # within MultiheadAttention
    }
)
"""Layers whose operations follow from their attributes and from the shape of their input."""

_LOSSES = frozenset({cross_entropy, counted_cross_entropy, mse, bce})


def is_recordable(module: "nn.Module") -> bool:
    """True if a model is made of PyTorch's own layers, of plain code, and of classes with ``is_recordable = True``.

    What else runs in a forward pass may differ from one pass to the next.

    Example:
        >>> is_recordable(nn.Sequential(nn.Linear(2, 3), nn.ReLU())), is_recordable(nn.RReLU())
        (True, False)
    """
    hooks_of_all = (calls._global_forward_hooks, calls._global_forward_pre_hooks, calls._global_backward_hooks)
    is_hooked = any(hooks_of_all) or any(calls._global_backward_pre_hooks)
    if is_hooked or not all(_is_plain(part) for part in module.modules()):
        return False
    own = [part for part in module.modules() if type(part) not in _LAYERS and not _is_declared(part)]
    return not own or has_plain_code(module, own)


def _is_plain(part: "nn.Module") -> bool:
    """True if a call of a layer is its class's forward pass and no more, and always the same operations."""
    hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
    of_parameters = [parameter._backward_hooks for parameter in part.parameters(recurse=False)]
    if "forward" in vars(part) or any(hooks) or any(of_parameters):
        return False
    if type(part) not in _LAYERS:
        return True
    counts_batches = getattr(part, "momentum", 0.0) is None  # as some BatchNorm
    scales_rows = getattr(part, "max_norm", None) is not None
    is_sparse = getattr(part, "sparse", False)
    has_own_code = getattr(part, "activation", relu) not in (relu, gelu)
    return not (counts_batches or scales_rows or is_sparse or has_own_code)


def _is_declared(part: "nn.Module") -> bool:
    # Of the class itself: one that is derived from it has another forward pass.
    return vars(type(part)).get("is_recordable", False) is True


class _Program(NamedTuple):
    """Functions of all parameters, inputs and targets.

    Args:
        gradients: function that gives gradients of all parameters, and last the loss.
        descent: function that moves the parameters by its last argument times their gradients, and gives the loss.
    """

    gradients: Function
    descent: Function


class RecordedGradients:
    """Losses and gradients of a model that is recordable, by shapes of batches.

    Attributes:
        after: number of batches of a shape before it is recorded.

    Args:
        module: the model, in training.
        flat: the trainable parameters of the model.
    """

    def __init__(self, module: "nn.Module", flat: FlatParameters) -> None:
        self.after = RECORDED_AFTER
        self._module = module
        self._flat = flat
        self._seen: Counter[Hashable] = Counter()
        self._programs: dict[Hashable, _Program | None] = {}  # None: it has not the bits of the passes
        self._one = torch.ones((), dtype=flat.x_Q.dtype)  # a constant, which no replay makes anew

    def of(self, loss: Loss, batch: Batch) -> tuple[Tensor, ...] | None:
        """Gradients of all parameters in their shapes, and last the loss; None until the batch's shape is a usual one.

        Args:
            loss: loss of the batch.
            batch: inputs and targets on the CPU.
        """
        program = self._program(loss, batch)
        return None if program is None else self._replayed(program.gradients, loss, batch)

    def descend(self, loss: Loss, batch: Batch, lr: float) -> Tensor | None:
        """Take a step of plain gradient descent, and give the loss before it; None as :meth:`of` gives it, and no step.

        Args:
            loss: loss of the batch.
            batch: inputs and targets on the CPU.
            lr: η of x ← x − η g.
        """
        program = self._program(loss, batch)
        if program is None:
            return None
        (found,) = self._replayed(program.descent, loss, batch, -lr)
        return found

    def _program(self, loss: Loss, batch: Batch) -> "_Program | None":
        inputs = batch.inputs
        targets = batch.targets
        if loss not in _LOSSES or type(inputs) is not Tensor or type(targets) is not Tensor:
            return None
        if not (inputs.is_contiguous() and targets.is_contiguous()):  # a program has views of these
            return None
        key = (loss, inputs.shape, inputs.dtype, targets.shape, targets.dtype, self._flat.has_channels_last)
        if key not in self._programs:
            self._seen[key] += 1
            if self._seen[key] <= self.after or len(self._programs) == _MOST_SHAPES:
                return None
            self._programs[key] = self._recorded(loss, [*self._flat.views, inputs, targets])
        return self._programs[key]

    def _replayed(self, function: Function, loss: Loss, batch: Batch, *numbers: float) -> tuple[Tensor, ...]:
        try:
            return _replay(function, *self._flat.views, batch.inputs, batch.targets, *numbers)
        except RuntimeError:
            # Every error of an operation is of this kind here. The passes raise it as what it is.
            self._passes(loss, *[view.clone() for view in self._flat.views], batch.inputs, batch.targets)
            raise

    def _recorded(self, loss: Loss, tensors: list[Tensor]) -> "_Program | None":
        """Program of a loss and its gradients; None if there is none that has the bits of the passes."""
        passes = partial(self._passes, loss)
        results = []
        try:
            with self._without_a_trace():
                recording = record(passes, tensors)
            program = _Program(recording.interpreted(), recording.interpreted(moved=len(self._flat.views)))
            for function in (passes, partial(_replay, program.gradients)):
                with self._without_a_trace():
                    results.append(function(*[tensor.clone() for tensor in tensors]))
        # A look at numbers, or another version of PyTorch, whose interpreter is called otherwise. An error of the
        # passes themselves comes again with them.
        except (RuntimeError, AttributeError):
            return None
        return program if all(map(torch.equal, *results)) else None

    def _passes(self, loss: Loss, *tensors: Tensor) -> tuple[Tensor, ...]:
        *views, inputs, targets = tensors
        parameters = [view.requires_grad_() for view in views]
        output = with_parameters(self._module, dict(zip(self._flat.names, parameters, strict=True)), inputs)
        found = loss(output, targets)
        # torch.autograd.grad would import SymPy to check the gradient that it is given, which takes half a second.
        gradients = [part for part in gradients_of(found, self._one, parameters) if part is not None]
        if len(gradients) < len(parameters):
            raise RuntimeError("gradients of parameters that a loss does not depend on cannot be recorded")
        return *gradients, found.detach()

    @contextmanager
    def _without_a_trace(self) -> Iterator[None]:
        """Block after which no random number is drawn, and no statistics of BatchNorm have moved."""
        buffers = [(buffer, buffer.clone()) for buffer in self._module.buffers()]
        generator = torch.default_generator.get_state()
        try:
            yield
        finally:
            torch.default_generator.set_state(generator)
            for buffer, before in buffers:
                if not torch.equal(buffer, before):  # what is not trained is to be left untouched
                    buffer.copy_(before)


def _replay(function: Function, *arguments: Any) -> tuple[Tensor, ...]:
    with torch.inference_mode():  # in which operations take up to a tenth less time
        return function(*arguments)
