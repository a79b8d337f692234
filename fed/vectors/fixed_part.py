"""Fixed part of a model: what is not trained, stays the same on all clients, and never travels.

It is every parameter with ``requires_grad = False``. Of a layer with parameters, none of which is trained, it is the
saved buffers, too, such as the statistics of a BatchNorm in a frozen body: they would change in training, so that the
layer that holds them computes as in evaluation.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import groupby

from fed.errors import InvalidExperiment, InvalidModel
from fed.vectors.tensors import Tensor, nn, torch

__all__ = [
    "TrainingModes",
    "Untouched",
    "evaluating_layers",
    "fixed_layers",
    "fixed_state",
    "in_training",
    "packed",
    "train_alone",
    "unpack",
]


def train_alone(module: "nn.Module", patterns: Sequence[str]) -> None:
    """Train those parameters alone whose names fit one of some patterns.

    Args:
        module: the model; ``requires_grad`` of its parameters is set.
        patterns: shell patterns of names, such as ``head.*``, each of which fits a parameter.

    Raises:
        InvalidExperiment: if a pattern fits none.

    Example:
        >>> module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        >>> train_alone(module, ["1.*"])
        >>> sorted(fixed_state(module))
        ['0.bias', '0.weight']
    """
    # Tied weights have several names, by each of which they may be meant.
    named = list(module.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name, _ in named):
            raise InvalidExperiment(
                f"model.train must have patterns that fit names of the model's parameters, got {pattern!r}, which fits "
                f"none of {', '.join(name for name, _ in named[:8])}{', …' if len(named) > 8 else ''}"
            )
    chosen = {id(part) for name, part in named if any(fnmatchcase(name, pattern) for pattern in patterns)}
    for _, part in named:
        part.requires_grad_(id(part) in chosen)


def fixed_state(module: "nn.Module") -> dict[str, Tensor]:
    """Tensors of a model's fixed part by name; of tied weights the first name.

    Example:
        >>> module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        >>> _ = module[:2].requires_grad_(False)
        >>> [name for name in fixed_state(module) if name.startswith("1.")]
        ['1.weight', '1.bias', '1.running_mean', '1.running_var', '1.num_batches_tracked']
    """
    return {name: part.detach() for name, part in _held(module).items()}


def _held(module: "nn.Module") -> dict[str, Tensor]:
    """The parameters themselves, which a forward pass may give other memory."""
    saved = module.state_dict().keys()
    held = {id(buffer) for layer in fixed_layers(module) for buffer in layer.buffers(recurse=False)}
    parameters = {name: part for name, part in module.named_parameters() if not part.requires_grad}
    buffers = {name: part for name, part in module.named_buffers() if name in saved and id(part) in held}
    return {**parameters, **buffers}


def in_training(module: "nn.Module") -> "nn.Module":
    """The module in training mode, but for layers of its fixed part that hold buffers, which compute as in evaluation.

    Example:
        >>> module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        >>> _ = module[:2].requires_grad_(False)
        >>> [layer.training for layer in in_training(module)]
        [True, False, True]
    """
    module.train()
    for layer in evaluating_layers(module):
        layer.eval()
    return module


def evaluating_layers(module: "nn.Module") -> list["nn.Module"]:
    """Layers of the fixed part that hold buffers: they compute as in evaluation, also while others are trained."""
    return [layer for layer in fixed_layers(module) if next(layer.buffers(recurse=False), None) is not None]


class TrainingModes:
    """Sets one module in training mode again and again, as :func:`in_training` does, and walks it once.

    Args:
        module: the model.

    Example:
        >>> module = nn.Sequential(nn.Linear(2, 3), nn.Dropout())
        >>> modes = TrainingModes(module)
        >>> modes.set()
        >>> _ = module.eval()
        >>> modes.set()
        >>> module[1].training
        True
    """

    def __init__(self, module: "nn.Module") -> None:
        self._module = module
        self._layers = list(module.modules())
        # A method of the user's own may do more than to set a mode.
        self._is_plain = all(
            type(layer).train is nn.Module.train and "train" not in vars(layer) for layer in self._layers
        )
        self._modes: list[bool] | None = None

    def set(self) -> None:
        """Set the mode of every layer, unless each has the one that it was given before."""
        if self._is_plain and [layer.training for layer in self._layers] == self._modes:
            return
        in_training(self._module)
        self._modes = [layer.training for layer in self._layers]


def packed(state: Mapping[str, Tensor]) -> list[Tensor]:
    """Tensors of a state in one row for each type, in the order of their types' names; booleans are uint8.

    Example:
        >>> [row.tolist() for row in packed({"a": torch.ones(1, 2), "b": torch.tensor(True), "c": torch.zeros(1)})]
        [[1.0, 1.0, 0.0], [1]]
    """
    return [torch.cat([part.reshape(-1) for part in parts]) for _, parts in _by_type(state)]


def unpack(rows: Sequence[Tensor], state: Mapping[str, Tensor]) -> None:
    """Write rows of :func:`packed` into the tensors of a state, in place.

    Args:
        rows: rows of a state with tensors of the same sizes and types.
        state: state that they are written into.
    """
    for row, (_, parts) in zip(rows, _by_type(state), strict=True):
        for part, numbers in zip(parts, row.split_with_sizes([part.numel() for part in parts]), strict=True):
            part.copy_(numbers.view(part.shape))


class Untouched:
    """Check that trainings leave the fixed part of a model as it is: by all numbers in the first of them.

    Later ones are held to the tensors' places and versions, which takes no time.

    Args:
        module: the model.
        moved: names of parameters that the coordinator moves, which each task brings anew.
    """

    def __init__(self, module: "nn.Module", moved: Collection[str] = ()) -> None:
        self._state = {name: part for name, part in _held(module).items() if name not in moved}
        self._before: list[Tensor] | None = None  # in the first training alone, for it takes the part's memory again
        self._seen: list[tuple[int, int]] | None = None

    def begin(self) -> None:
        """Look at it before a training."""
        if self._seen is None:
            self._before = [part.clone() for part in self._state.values()]
            self._seen = self._marks()

    def check(self) -> None:
        """Check it after a training.

        Raises:
            InvalidModel: if a number has changed.
        """
        assert self._seen is not None, "begin() comes first"
        marks = self._marks()
        before = self._before
        self._before = None
        for place, (name, part) in enumerate(self._state.items()):
            is_equal = marks[place] == self._seen[place] if before is None else bool((part == before[place]).all())
            if not is_equal:
                raise InvalidModel(
                    f"a model's forward pass must leave what is not trained as it is, for it is the same on all "
                    f"clients, got a change of {name}: make it a buffer of a layer that is trained, which is averaged"
                )
        self._seen = marks

    def _marks(self) -> list[tuple[int, int]]:
        return [(part.data_ptr(), part._version) for part in self._state.values()]


def fixed_layers(module: "nn.Module") -> Iterator["nn.Module"]:
    """Modules with parameters, none of which is trained, and all modules within them."""
    parameters = list(module.parameters())
    if parameters and not any(part.requires_grad for part in parameters):
        yield from module.modules()
    else:
        for child in module.children():
            yield from fixed_layers(child)


def _by_type(state: Mapping[str, Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
    """Types by name, and the tensors of each in their order; booleans as views of uint8."""
    parts = [part.view(torch.uint8) if part.dtype == torch.bool else part for part in state.values()]
    ordered = sorted(parts, key=lambda part: str(part.dtype))  # stable
    for name, of_type in groupby(ordered, key=lambda part: str(part.dtype)):
        yield name, list(of_type)
