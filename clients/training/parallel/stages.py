"""Stages of a model: the modules before which it is cut, and the parameters that each stage computes with.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from fed.clients.training.parallel.layers import layers_of
from fed.clients.training.parallel.without_memory import Spreading, spare_recurrent
from fed.clients.training.reading import called
from fed.errors import FedError, InvalidExperiment, InvalidModel, first_line
from fed.vectors.fixed_part import in_training
from fed.vectors.tensors import Tensor, nn, torch
from fed.vectors.trees import Tree

__all__ = ["Stages", "check_stages", "cut"]


class Stages(NamedTuple):
    """Cut of a model.

    Args:
        begins: names of the modules at which the second stage and all later ones begin.
        held: names of the parameters of each stage; one that several stages compute with is in each of them.
    """

    begins: tuple[str, ...]
    held: tuple[frozenset[str], ...]


def check_stages(names: Sequence[str] | None, module: "nn.Module", count: int) -> None:
    """Check the names of modules at which stages begin.

    Args:
        names: names of modules; None: the model is cut by its layers.
        module: the model.
        count: number of stages.

    Raises:
        InvalidExperiment: if they are not as many as stages behind the first, or no modules of the model.
        InvalidModel: if there are fewer layers than stages.
    """
    known = dict(module.named_modules())
    if names is None:
        layers = layers_of(module)
        if len(layers) < count:
            raise InvalidModel(
                f"a model must have {count} layers in lists or sequences of modules to be cut into {count} stages, got "
                f"{len(layers)}: name the modules at which later stages begin in local.parallel.stages"
            )
        return
    if len(names) != count - 1:
        raise InvalidExperiment(
            f"local.parallel.stages must name the module at which each stage behind the first begins, {count - 1} for "
            f"local.devices={count}, got {len(names)}"
        )
    for name in names:
        if not name or name not in known:
            raise InvalidExperiment(
                f"local.parallel.stages must be names of the model's modules, got {name!r}; known: "
                f"{', '.join(list(known)[1:9])}"
            )


def cut(
    module: "nn.Module", example: Tree, device: "torch.device", *, names: Sequence[str] | None, count: int
) -> Stages:
    """Cut a model into stages.

    It computes the shapes for an example, to see which parameters each layer uses. Unless their beginnings are named,
    stages hold parameters as equal in number as layers allow.

    Args:
        module: the model, its parameters without memory.
        example: inputs of a batch.
        device: device of these inputs.
        names: names of the modules at which the stages behind the first begin; None: layers are chosen.
        count: number of stages.

    Raises:
        InvalidModel: if the model looks at numbers, or does not call the modules that are named.
    """
    marks = layers_of(module) if names is None else list(names)
    called_at, used = _uses(module, example, device, marks)
    if names is not None and called_at != marks:
        raise InvalidModel(
            f"stages must begin at modules that the model calls in this order, got {', '.join(marks)} in "
            f"local.parallel.stages and calls of {', '.join(called_at) or 'none'}: correct the names"
        )
    if len(called_at) < count - 1:
        raise InvalidModel(
            f"a model must call {count - 1} of its layers to be cut into {count} stages, got {len(called_at)}: name "
            "the modules at which later stages begin in local.parallel.stages"
        )
    sizes = {name: part.numel() for name, part in module.named_parameters()}
    begins = list(range(1, count)) if names is not None else _even_cuts(used, sizes, count)
    stages = [
        frozenset().union(*used[begin:end]) for begin, end in zip([0, *begins], [*begins, len(used)], strict=True)
    ]
    spare = frozenset(sizes) - frozenset().union(*stages)
    stages[0] |= spare  # of no use, but part of the state
    return Stages(tuple(called_at[begin - 1] for begin in begins), tuple(stages))


def _even_cuts(used: Sequence[frozenset[str]], sizes: dict[str, int], count: int) -> list[int]:
    """Numbers of the intervals at which stages begin, so that these hold parameters as equal in number as can be."""
    seen: set[str] = set()
    new = []
    for names in used:
        new.append(sum(sizes[name] for name in names - seen))
        seen |= names
    before = [0, *accumulate(new)]  # number of parameters before each interval
    cuts: list[int] = []
    for number in range(1, count):
        least = cuts[-1] + 1 if cuts else 1
        most = len(used) - (count - number)
        wanted = before[-1] * number / count
        cuts.append(min(range(least, most + 1), key=lambda place: abs(before[place] - wanted)))
    return cuts


def _uses(
    module: "nn.Module", example: Tree, device: "torch.device", marks: Sequence[str]
) -> tuple[list[str], list[frozenset[str]]]:
    """Modules in the order of their first calls; and the parameters that are used before each, and after the last."""
    names = {id(part): name for name, part in module.named_parameters()}
    modules = dict(module.named_modules())
    called_at: list[str] = []
    used: list[set[str]] = [set()]

    def note(tensors: list[Tensor]) -> None:
        used[-1].update(names[id(tensor)] for tensor in tensors if id(tensor) in names)

    def mark(name: str) -> Any:
        def begin(layer: "nn.Module", given: Any) -> None:
            if name not in called_at:
                called_at.append(name)
                used.append(set())

        return begin

    spreading = Spreading(device, note)
    spare_recurrent(module, lambda: spreading)
    hooks = [modules[name].register_forward_pre_hook(mark(name)) for name in marks]
    buffers = [part.clone() for part in module.buffers()]
    in_training(module)
    try:
        with torch.no_grad(), spreading:
            called(module, example)
    except FedError:
        raise
    except Exception as error:
        raise InvalidModel(
            "a model must compute the same operations whatever its numbers are to be cut into stages, got "
            f"{first_line(error)}: use another local.parallel"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
        for part, before in zip(module.buffers(), buffers, strict=True):
            part.copy_(before)
    return called_at, [frozenset(part) for part in used]
