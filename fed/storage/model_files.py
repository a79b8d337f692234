"""Files of a run's models, as safetensors, and the facts of the data that a named model is made with."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open
from safetensors.torch import load_file, save

from fed.config.sections import ModelSection
from fed.errors import InvalidInput
from fed.storage.atomic_files import replaced, write_atomically
from fed.storage.serialization import bytes_of
from fed.vectors.fixed_part import fixed_state, train_alone
from fed.vectors.tensors import Tensor, nn, torch

__all__ = ["ModelInputs", "read_fixed_part", "read_model", "read_models", "write_model", "write_models"]


class ModelInputs(NamedTuple):
    """Facts of the data that the experiment's model is made with.

    Args:
        input_shape: shape of one sample; a tree of shapes where inputs are a tree.
        classes: number of classes of the labels, ≥ 1.
        dtype: type of the inputs, such as ``float32``.
    """

    input_shape: Sequence[int] | Mapping[str, Any]
    classes: int
    dtype: str

    def make(self, section: ModelSection) -> "nn.Module":
        """The model of a section ``model``, in its first state."""
        shape = self.input_shape if isinstance(self.input_shape, Mapping) else tuple(self.input_shape)
        module: nn.Module = section.make(input_shape=shape, classes=self.classes)
        if section.train is not None:
            train_alone(module, section.train)
        is_users_own = section.kind.startswith("python:")
        dtype = getattr(torch, self.dtype)
        # A matrix product of two types raises.
        return module.to(dtype) if dtype.is_floating_point and not is_users_own else module


def write_model(path: Path, model: "nn.Module") -> None:
    """Write a model's tensors in place of a file. Other values of its state are left out.

    Args:
        path: path of the file.
        model: model to write.

    Raises:
        OSError: if it cannot be written; the file that was there is unchanged.
    """
    state = {name: part.contiguous().clone() for name, part in _tensors(model).items()}  # tied weights occur twice
    write_atomically(path, save(state))


def write_models(path: Path, models: "Mapping[int | str, nn.Module]") -> None:
    """Write the models of N clients in place of a file: each tensor of all clients, [N, ...], under its name.

    The file's metadata ``clients`` is a JSON list of ids in that order. No more than a client's tensor is copied at a
    time, so that the file takes no memory.

    Args:
        path: path of the file.
        models: client → its model, all of one shape, at least one.

    Raises:
        OSError: if it cannot be written; the file that was there is unchanged.
    """
    states = [_tensors(model) for model in models.values()]
    with replaced(path) as file:
        file.write(_header([*models], states[0]))
        # Tensor by tensor, as the header lists them; in a client's order each tensor would be in pieces.
        for name in states[0]:
            for state in states:
                file.write(bytes_of(state[name]))


def read_model(path: Path, model: "nn.Module") -> "nn.Module":
    """Fill a model with a file's tensors.

    Args:
        path: path of a file that :func:`write_model` wrote.
        model: model of the same shape, which is filled.

    Returns:
        The model, in evaluation mode.

    Raises:
        InvalidInput: if the file cannot be read, or is another model's.
    """
    try:
        state = load_file(path)
    except Exception as error:  # of the system, or of the library's own kinds
        raise _unreadable(path, error) from None
    return _filled(path, model, state)


def read_fixed_part(path: Path, model: "nn.Module") -> None:
    """Fill the fixed part of a model with a file's tensors of these names; the file may hold others.

    Args:
        path: path of a safetensors file.
        model: model whose fixed part is overwritten.

    Raises:
        InvalidInput: if the file cannot be read, or holds others.
    """
    state = fixed_state(model)
    if not state:
        raise InvalidInput(f"{path} is to hold what is not trained, but all of the model is: name model.train, too")
    try:
        with safe_open(path, "pt") as file:
            held = {name: file.get_tensor(name) for name in file.keys() if name in state}  # noqa: SIM118
    except Exception as error:
        raise _unreadable(path, error) from None
    for name, part in state.items():
        found = held.get(name)
        if found is None or (found.dtype, found.shape) != (part.dtype, part.shape):
            got = "none" if found is None else f"{found.dtype} {list(found.shape)}"
            raise InvalidInput(
                f"{path} must hold {name} as {part.dtype} {list(part.shape)}, which is not trained, got {got}: give a "
                "file of this very model"
            )
        part.copy_(found)


def read_models(path: Path, make: "Callable[[], nn.Module]") -> "dict[int | str, nn.Module]":
    """Fill a model for each client with a file's tensors; none where there is no file.

    Args:
        path: path of a file that :func:`write_models` wrote.
        make: function that makes a model of the same shape.

    Raises:
        InvalidInput: if the file cannot be read, or is of other models.
    """
    if not path.exists():
        return {}
    try:
        with safe_open(path, "pt") as file:
            clients = json.loads(file.metadata()["clients"])
            parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
    except Exception as error:
        raise _unreadable(path, error) from None
    return {
        client: _filled(path, make(), {name: part[row] for name, part in parts.items()})
        for row, client in enumerate(clients)
    }


def _tensors(model: "nn.Module") -> dict[str, Tensor]:
    return {name: part for name, part in model.state_dict().items() if isinstance(part, Tensor)}


def _header(clients: Sequence[int | str], state: Mapping[str, Tensor]) -> bytes:
    """The head of a safetensors file of N clients' tensors."""
    of_empty = save({name: torch.empty(0, dtype=part.dtype) for name, part in state.items()})
    kinds = json.loads(of_empty[8 : 8 + int.from_bytes(of_empty[:8], "little")])  # the library's names of the types
    content: dict[str, Any] = {"__metadata__": {"clients": json.dumps(clients)}}
    end = 0
    for name, part in state.items():
        begin = end
        end += len(clients) * part.numel() * part.itemsize
        shape = [len(clients), *part.shape]
        content[name] = {"dtype": kinds[name]["dtype"], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # safetensors aligns what follows the header to 8 bytes
    return len(text).to_bytes(8, "little") + text


def _filled(path: Path, model: "nn.Module", state: Mapping[str, Tensor]) -> "nn.Module":
    # Compared first: load_state_dict would copy some tensors before it raises.
    own = _tensors(model)
    shapes_own, shapes = ({name: (part.dtype, part.shape) for name, part in one.items()} for one in (own, state))
    if shapes_own != shapes:
        different = sorted({name for name, _ in shapes_own.items() ^ shapes.items()})
        raise InvalidInput(
            f"{path} must hold the tensors of the run's model, got others for {', '.join(different[:3])}: give "
            "fed.Run.load(…, model=…) the factory that the run was given"
        )
    model.load_state_dict(state, strict=False)  # all tensors are there, and other values were not written
    return model.eval()


def _unreadable(path: Path, error: Exception) -> InvalidInput:
    return InvalidInput(f"{path} must hold a model's tensors ({error}): restore the file")
