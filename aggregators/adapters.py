"""Low-rank adapters of a model's matrices: the layers that have them, and sums of products of their factors.

A layer with an adapter computes with W + s B A, where W is not trained. It has the attributes ``lora_A`` and
``lora_B``, layers or parameters, its ``scaling`` s, and W as the weight of its ``base_layer`` or as its own: the names
that the libraries peft and loralib use. A is [r, inputs], for a rank r, and B is [outputs, r].

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self, cast

from fed.aggregators.base import Aggregator
from fed.config.compatibility import Feature, Sections, Term
from fed.errors import InvalidExperiment, InvalidModel
from fed.vectors.layout import Layout, Part
from fed.vectors.tensors import Tensor, nn, torch

__all__ = ["AdaptedLayer", "Adapter", "OverAdapters", "adapted_layers"]


class AdaptedLayer(NamedTuple):
    """Names of the tensors of a layer with an adapter.

    Args:
        down: name of A.
        up: name of B.
        base: name of W.
        scale: s, by which B A is multiplied.
        is_transposed: True if W is stored as [inputs, outputs].
    """

    down: str
    up: str
    base: str
    scale: float
    is_transposed: bool


@dataclass(frozen=True)
class Adapter:
    """Places of an adapter's tensors.

    Args:
        down: place of A, [r, inputs], in a message.
        up: place of B, [outputs, r], in a message.
        base: place of W in what the coordinator moves by itself.
        scale: s, by which B A is multiplied.
        is_transposed: True if W is stored as [inputs, outputs].
    """

    down: Part
    up: Part
    base: Part
    scale: float
    is_transposed: bool

    def factors(self, rows_SM: Tensor) -> tuple[Tensor, Tensor]:
        """B [S, outputs, r] and A [S, r, inputs] in rows that begin with parameters, or with their changes."""
        return self.up.view(rows_SM), self.down.view(rows_SM)

    def movement(self, up: Tensor, down: Tensor, shares_S: Tensor) -> Tensor:
        r"""Movement of W, flat, by :math:`s \sum_i p_i B_i A_i`.

        Args:
            up: B of each client, [S, outputs, r].
            down: A of each client, [S, r, inputs].
            shares_S: p, each client's share of the weights.
        """
        # The clients' factors side by side are one product of rank S r.
        ups = up.transpose(0, 1).flatten(1)
        downs = (shares_S[:, None, None] * down).flatten(0, 1)
        product = self.scale * (ups @ downs)
        return (product.T if self.is_transposed else product).flatten()


@dataclass(frozen=True, kw_only=True)
class OverAdapters(Aggregator):
    """Algorithm that looks at factors of adapters, and moves the matrices that they adapt."""

    linear: ClassVar[bool] = False

    adapters: ClassVar[tuple[Adapter, ...]] = ()
    """Adapters of the model; those that :meth:`for_model` returns have some."""

    def needs(self) -> Sequence[Term]:
        """Single messages of a cohort: a share of a client's factors is no share of their product."""
        why = "for it averages the products of their factors"
        features = Feature.MEAN_OF_ANSWERS, Feature.COHORTS
        return [*super().needs(), *(Term(feature, "choose ffa_lora", why) for feature in features)]

    def check_experiment(self, experiment: Sections) -> None:
        """Refuse stages that change the mean, which would not change the products.

        Raises:
            InvalidExperiment: if there is such a stage.
        """
        super().check_experiment(experiment)
        for section in experiment.stages or ():
            if getattr(section.make(), "changes_mean", False):
                raise InvalidExperiment(
                    f"{experiment.algorithm.kind} must be without stages that change the mean, for the products of "
                    f"factors would go out without that change, got {section.kind}: choose ffa_lora, or leave it out"
                )

    def moves(self, module: "nn.Module") -> list[str]:
        """The matrices W that have adapters."""
        return [layer.base for layer in adapted_layers(module)]

    def for_model(self, module: "nn.Module", layout: Layout) -> Self:
        """The algorithm with the places of the model's adapters.

        Raises:
            InvalidModel: if a factor of one is not trained.
        """
        trained = {part.name: part for part in layout.trained}
        bases = {part.name: part for part in layout.averaged}
        adapters = []
        for layer in adapted_layers(module):
            for name in (layer.down, layer.up):
                if name not in trained:
                    raise InvalidModel(
                        f"{type(self).__name__} needs adapters both of whose factors are trained, got {name}, which is "
                        "not: choose fedavg, whose mean is exact where one factor is the same on all clients"
                    )
            base = bases[layer.base]
            behind = Part(base.name, base.shape, base.offset - layout.returned_size, base.dtype)
            adapters.append(
                Adapter(
                    down=trained[layer.down],
                    up=trained[layer.up],
                    base=behind,
                    scale=layer.scale,
                    is_transposed=layer.is_transposed,
                )
            )
        made = copy(self)
        object.__setattr__(made, "adapters", tuple(adapters))  # no hyper-parameter, and the class is frozen
        return made

    def first_movements(self) -> Tensor:
        """Zeros in the place of all movements, [J]."""
        return torch.zeros(sum(adapter.base.size for adapter in self.adapters), dtype=torch.float64)


def adapted_layers(module: "nn.Module") -> list[AdaptedLayer]:
    """Layers of a model that have adapters.

    Raises:
        InvalidModel: if there is none, or one is no product of two matrices.

    Example:
        >>> class LoRALinear(nn.Module):
        ...     def __init__(self) -> None:
        ...         super().__init__()
        ...         self.base_layer = nn.Linear(3, 2).requires_grad_(False)
        ...         self.lora_A = nn.Linear(3, 1, bias=False)
        ...         self.lora_B = nn.Linear(1, 2, bias=False)
        ...         self.scaling = 2.0
        >>> adapted_layers(LoRALinear())[0].base
        'base_layer.weight'
    """
    # By identity, for tied weights have several names.
    names = {id(part): name for name, part in reversed([*module.named_parameters()])}
    found = [_layer(name, layer, names) for name, layer in _with_adapters(module)]
    if not found:
        raise InvalidModel(
            "an algorithm over low-rank adapters needs a model with layers that have lora_A, lora_B and scaling, such "
            "as peft.get_peft_model makes, got none: choose fedavg"
        )
    return found


def _with_adapters(module: "nn.Module") -> Iterator[tuple[str, "nn.Module"]]:
    for name, layer in module.named_modules():
        if hasattr(layer, "lora_A") and hasattr(layer, "lora_B"):
            yield name, layer


def _layer(name: str, layer: "nn.Module", names: Mapping[int, str]) -> AdaptedLayer:
    down = _factor(name, layer, "lora_A")
    up = _factor(name, layer, "lora_B")
    base = getattr(layer, "base_layer", layer)
    matrix = getattr(base, "weight", None)
    is_transposed = bool(getattr(layer, "fan_in_fan_out", False))
    shape = None if matrix is None else tuple(matrix.T.shape if is_transposed else matrix.shape)
    if any(getattr(layer, "use_dora", {}).values()) or (up.shape[0], down.shape[1]) != shape:
        raise InvalidModel(
            f"adapters must be products of two matrices, as long and as wide as the weight that they adapt, got {name} "
            f"with {tuple(up.shape)} times {tuple(down.shape)} for {shape}: adapt linear layers alone, without DoRA"
        )
    scaling = getattr(layer, "scaling", 1.0)
    (scale,) = scaling.values() if isinstance(scaling, Mapping) else (scaling,)
    return AdaptedLayer(
        down=names[id(down)],
        up=names[id(up)],
        base=names[id(matrix)],
        scale=float(scale),
        is_transposed=is_transposed,
    )


def _factor(name: str, layer: "nn.Module", attribute: str) -> Tensor:
    """A factor of a layer: a parameter, the weight of a layer, or that of the one layer in a dictionary of layers."""
    held: Any = getattr(layer, attribute)
    if isinstance(held, nn.ModuleDict | nn.ParameterDict):
        if len(held) != 1:
            raise InvalidModel(
                f"a layer must have one adapter of matrices, got {len(held)} in {name}.{attribute}: adapt linear "
                "layers alone, by one adapter"
            )
        (held,) = held.values()
    factor = held if isinstance(held, Tensor) else held.weight
    if factor.ndim != 2 or getattr(held, "bias", None) is not None:
        raise InvalidModel(
            f"adapters must be products of two matrices, got {name}.{attribute} of shape {tuple(factor.shape)}, or one "
            "with a bias: adapt linear layers alone, without biases of adapters"
        )
    return cast(Tensor, factor)
