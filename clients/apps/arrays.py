"""Arrays of an app's model as the one vector that all else of a run knows, and back.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import Tensor, nn

from fed.config.apps import ArraySpec
from fed.errors import AppFailed, InvalidInput, InvalidModel, first_line

__all__ = ["AppModel", "Array", "arrays_in", "as_array", "named_arrays", "read_arrays", "specs_of", "state_of"]

Array: TypeAlias = NDArray[Any]

_FLOATS = ("float16", "float32", "float64")


class AppModel(nn.Module):
    """Arrays of an app's model, by name. It computes nothing: that is the app's own code.

    Floating-point arrays are parameters, all of the widest of their types, so that rules and codecs act on them.
    Integers and booleans are integer buffers, of which the largest value of all clients counts.

    Args:
        specs: name, type and shape of each array, in the app's order.
        arrays: name → numbers; None: zeros.

    Raises:
        InvalidModel: if no array has floating-point numbers, or a number is not finite.

    Example:
        >>> model = AppModel(specs_of({"coef": np.ones((2, 3), np.float32), "steps": np.array(4)}))
        >>> [(name, array.shape, str(array.dtype)) for name, array in model.arrays().items()]
        [('coef', (2, 3), 'float32'), ('steps', (), 'int64')]
    """

    def __init__(self, specs: Sequence[ArraySpec], arrays: Mapping[str, Array] | None = None) -> None:
        super().__init__()
        self.specs = tuple(specs)
        dtypes = [getattr(torch, spec.dtype) for spec in self.specs if spec.dtype in _FLOATS]
        if not dtypes:
            raise InvalidModel("an app's model must have an array of floating-point numbers, got none to average")
        widest = reduce(torch.promote_types, dtypes)
        for spec in self.specs:
            array = np.zeros(spec.shape) if arrays is None else arrays[spec.name]
            # Into the dictionaries themselves, since names may have dots, as those of a state_dict.
            if spec.dtype in _FLOATS:
                self._parameters[spec.name] = nn.Parameter(torch.tensor(array, dtype=widest))
            else:
                self._buffers[spec.name] = torch.tensor(np.asarray(array).astype(np.int64))

    def arrays(self) -> dict[str, Array]:
        """Name → numbers, in the app's order, types and shapes: copies."""
        state = {**self._parameters, **self._buffers}
        found = {}
        for spec in self.specs:
            part = state[spec.name]
            assert part is not None
            found[spec.name] = part.detach().cpu().numpy().astype(spec.dtype).reshape(spec.shape)
        return found

    def forward(self, *inputs: object) -> NoReturn:
        """Refuse: only the app's own code can compute outputs.

        Raises:
            InvalidModel: always.
        """
        raise InvalidModel(
            "the model of an app computes nothing here: give its arrays, such as run.model.arrays(), to the app's code"
        )


def specs_of(arrays: Mapping[str, Array]) -> tuple[ArraySpec, ...]:
    """Name, type and shape of each array."""
    return tuple(ArraySpec(name=name, dtype=str(array.dtype), shape=array.shape) for name, array in arrays.items())


def arrays_in(vector_V: Tensor, integers_I: Tensor, specs: Sequence[ArraySpec]) -> list[Array]:
    """The arrays of a state, in the app's order, types and shapes: copies, which an app may change.

    Args:
        vector_V: floating-point state.
        integers_I: integers of the state.
        specs: name, type and shape of each array.
    """
    rows = {True: vector_V.numpy(), False: integers_I.numpy()}
    ends = {True: 0, False: 0}
    arrays = []
    for spec in specs:
        is_real = spec.dtype in _FLOATS
        begin = ends[is_real]
        ends[is_real] = begin + int(np.prod(spec.shape, dtype=np.int64))
        part = rows[is_real][begin : ends[is_real]]
        arrays.append(part.astype(spec.dtype).reshape(spec.shape))
    return arrays


def state_of(arrays: Sequence[Array], specs: Sequence[ArraySpec], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The state of arrays that an app returns: vector [V] and integers [I].

    Args:
        arrays: arrays in the app's order.
        specs: name, type and shape that each must have; floating-point types are converted.
        dtype: type of the vector.

    Raises:
        AppFailed: if their number, a shape or a kind of numbers is another, or a number is not finite.
    """
    if len(arrays) != len(specs):
        raise AppFailed(
            f"must return {len(specs)} arrays, as the model has, got {len(arrays)}: return all, in their order"
        )
    reals = [torch.zeros(0, dtype=dtype)]
    integers = [torch.zeros(0, dtype=torch.int64)]
    for spec, array in zip(specs, arrays, strict=True):
        if array.shape != tuple(spec.shape):
            raise AppFailed(
                f"must return array {spec.name} of shape {tuple(spec.shape)}, got {array.shape}: make one model at all "
                "clients, such as one of all classes"
            )
        if spec.dtype not in _FLOATS:
            if array.dtype.kind not in "iub":
                raise AppFailed(
                    f"must return array {spec.name} as whole numbers, {spec.dtype}, got {array.dtype}: convert it"
                )
            integers.append(torch.from_numpy(array.astype(np.int64)).flatten())
            continue
        if array.dtype.kind not in "fiub":
            raise AppFailed(f"must return array {spec.name} as {spec.dtype}, got {array.dtype}: convert it")
        # In its own type first: the app is handed these very numbers again.
        own = array.astype(spec.dtype)
        if not np.isfinite(own).all():
            place = tuple(int(index) for index in np.argwhere(~np.isfinite(own))[0])
            raise AppFailed(
                f"must return finite numbers, got {own[place]} in array {spec.name} at {list(place)}: take smaller "
                "steps, or look for a division by zero"
            )
        reals.append(torch.from_numpy(own).to(dtype).flatten())
    return torch.cat(reals), torch.cat(integers)


def named_arrays(made: object, what: str) -> dict[str, Array]:
    """Name → array of whatever an app gives as its model.

    Args:
        made: list of arrays, mapping of names to arrays (a ``state_dict``, Flower's ``ArrayRecord``), PyTorch module,
            or object with ``get_weights`` (a model of Keras).
        what: subject of errors, such as "initial of client 0".

    Raises:
        InvalidModel: if it is none of these, or holds what no array of numbers can.
    """
    # First, since a model of Keras on PyTorch is a module too, whose state has each array twice.
    if hasattr(made, "get_weights"):
        made = made.get_weights()
    elif isinstance(made, nn.Module):
        made = made.state_dict()
    if isinstance(made, Mapping):
        items = [(str(name), part) for name, part in made.items()]
    elif isinstance(made, list | tuple):
        items = [(str(number), part) for number, part in enumerate(made)]
    else:
        raise InvalidModel(
            f"{what} must give a list of arrays, names with arrays, or a model, got {type(made).__name__}"
        )
    arrays = {name: as_array(part, f"array {name} of {what}") for name, part in items}
    if not arrays:
        raise InvalidModel(f"{what} must give at least one array, got none")
    return arrays


def as_array(part: Any, what: str) -> Array:
    """An array of NumPy, of another framework's array.

    Args:
        part: array of NumPy, PyTorch, JAX, Keras or Flower, or a number.
        what: subject of the error.

    Raises:
        InvalidModel: if it holds no numbers, or numbers of a type that does not travel.
    """
    try:
        if isinstance(part, Tensor):
            part = part.detach().cpu()
        made = part.numpy() if hasattr(part, "numpy") and not isinstance(part, np.ndarray) else part
        array = np.asarray(made)
    except Exception as error:
        raise InvalidModel(f"{what} must be an array of numbers, got {type(part).__name__}: {first_line(error)}") from (
            error
        )
    if array.dtype.kind not in "fiub" or str(array.dtype) in ("float128", "longdouble"):
        raise InvalidModel(
            f"{what} must be of float16, float32, float64, integers or bool, got {array.dtype}: convert it, or flatten "
            "nested parts into a list of arrays"
        )
    return array


def read_arrays(path: Path) -> dict[str, Array]:
    """Name → array of a file (.npz, .safetensors).

    Raises:
        InvalidInput: if it cannot be read.
    """
    try:
        if path.suffix == ".safetensors":
            found = load_file(path)
            # The file has them by type: a list's arrays go back to their order.
            return (
                dict(sorted(found.items(), key=lambda item: int(item[0]))) if all(map(str.isdecimal, found)) else found
            )
        with np.load(path, allow_pickle=False) as kept:
            return {name: kept[name] for name in kept.files}
    except (OSError, ValueError, SafetensorError) as error:
        raise InvalidInput(f"{path} must hold the first arrays ({first_line(error)}): restore the file") from None
