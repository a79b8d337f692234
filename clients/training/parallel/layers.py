"""Layers of a model: the modules in whose units it is sharded, and before which it may be cut."""

from collections import Counter
from collections.abc import Iterator, Sequence

from fed.errors import InvalidExperiment, InvalidModel
from fed.vectors.tensors import nn

__all__ = ["layers_of", "unit_names"]


def layers_of(module: "nn.Module") -> list[str]:
    """Names of a model's layers, in its own order: modules that a list or a sequence of modules holds, if they train.

    Example:
        >>> layers_of(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))))
        ['0', '2.0', '2.1']
    """
    return [name for name, layer in _layers(module, "") if next(layer.parameters(), None) is not None]


def unit_names(units: Sequence[str] | None, module: "nn.Module") -> list[str]:
    """Names of the modules whose parameters are gathered together, besides the rest of the model.

    Args:
        units: names of modules; None: those of the layers.
        module: the model.

    Raises:
        InvalidExperiment: if a named unit is no module of the model, or shares a parameter with the rest.
        InvalidModel: if a parameter is a single number, which cannot be shared out.
    """
    for name, part in module.named_parameters():
        if not part.ndim:
            raise InvalidModel(
                f"a parameter must have a dimension to be shared out by local.parallel: fsdp, got the single number "
                f"{name}: give it the shape (1,), or use ddp"
            )
    names = layers_of(module) if units is None else list(units)
    known = dict(module.named_modules())
    uses = Counter(id(part) for layer in module.modules() for part in layer.parameters(recurse=False))
    apart = []
    for name in names:
        if not name or name not in known:
            raise InvalidExperiment(
                f"local.parallel.units must be names of the model's modules, got {name!r}; known: "
                f"{', '.join(list(known)[1:9])}"
            )
        within = Counter(id(part) for layer in known[name].modules() for part in layer.parameters(recurse=False))
        if all(uses[part] == count for part, count in within.items()):
            apart.append(name)
        elif units is not None:
            raise InvalidExperiment(
                f"local.parallel.units must share no parameter with the rest of the model, got {name}: leave it out"
            )
    return apart


def _layers(module: "nn.Module", prefix: str) -> Iterator[tuple[str, "nn.Module"]]:
    for name, child in module.named_children():
        if isinstance(module, _CONTAINERS) and not isinstance(child, _CONTAINERS):
            yield prefix + name, child
        else:
            yield from _layers(child, f"{prefix}{name}.")


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
