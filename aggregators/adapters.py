"""Low-rank adapters of a model's matrices: the layers that have them, and sums of products of their factors.

A layer with an adapter computes with W + s B A, where W is not trained. It has the attributes ``lora_A`` and
``lora_B``, layers or parameters, its ``scaling`` s, and W as the weight of its ``base_layer`` or as its own: the names
that the libraries peft and loralib use. A is [r, inputs], for a rank r, and B is [outputs, r].

Shapes: see :mod:`fed.vectors.layout`.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self, cast

import numpy as np

from fed.aggregators.base import Aggregator, Reduced
from fed.config.compatibility import Feature, Sections, Term
from fed.errors import InvalidExperiment, InvalidModel, InvalidPayload
from fed.vectors.layout import Layout, Part
from fed.vectors.tensors import Tensor, nn, torch

__all__ = ["AdaptedLayer", "OverAdapters", "State", "adapted_layers"]


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


class State(NamedTuple):
    """Server state of algorithms over adapters.

    Args:
        model_P: global model.
        moved_J: sum of all movements of the matrices that have adapters, one after another.
        factors: factors of the last of them, rounded as they travel.
    """

    model_P: Tensor
    moved_J: Tensor
    factors: Tensor


@dataclass(frozen=True, kw_only=True)
class OverAdapters(Aggregator):
    r"""Algorithm that looks at factors of adapters, and moves the matrices that they adapt.

    .. math:: W ← W + s \, U D, \qquad U = [U_1 … U_n], \quad D = [D_1; …; D_n]

    U_k is [outputs, r] and D_k is [r, inputs]. A subclass gives them by :meth:`stacked`. They are what travels where
    they are fewer numbers than W.
    """

    linear: ClassVar[bool] = False

    adapters: ClassVar[tuple[AdaptedLayer, ...]] = ()
    """Adapters of the model; those that :meth:`for_model` returns have some."""
    parts: ClassVar[Mapping[str, Part]] = {}
    """Places of the adapters' tensors by name: of factors in a message, of W among all that is moved."""

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
            stage = section.make()
            if getattr(stage, "changes_mean", False) or getattr(stage, "acts_alone", False):
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
        layers = adapted_layers(module)
        parts = {}
        for layer in layers:
            for name in (layer.down, layer.up):
                if name not in trained:
                    raise InvalidModel(
                        f"{type(self).__name__} needs adapters both of whose factors are trained, got {name}, which is "
                        "not: choose fedavg, whose mean is exact where one factor is the same on all clients"
                    )
                parts[name] = trained[name]
            base = bases[layer.base]
            parts[layer.base] = replace(base, offset=base.offset - layout.returned_size)
        made = copy(self)
        # No hyper-parameters, and the class is frozen.
        object.__setattr__(made, "adapters", tuple(layers))
        object.__setattr__(made, "parts", parts)
        return made

    def pair(self, layer: AdaptedLayer, rows_SM: Tensor) -> tuple[Tensor, Tensor]:
        """B [S, outputs, r] and A [S, r, inputs] in rows that begin with parameters, or with their changes."""
        return self.parts[layer.up].view(rows_SM), self.parts[layer.down].view(rows_SM)

    def init(self, params_P: Tensor) -> State:
        """The model, and no movement."""
        moved_J = torch.zeros(sum(self.parts[layer.base].size for layer in self.adapters), dtype=torch.float64)
        return State(params_P, moved_J, moved_J.new_zeros(0))

    def moved(self, state: State) -> Tensor:
        """The sum of all movements."""
        return state.moved_J

    def factors(self, state: State) -> Tensor:
        """U and D of each adapter, one after another."""
        return state.factors

    def factor_count(self, messages: int) -> int:
        """Numbers of U and D of all adapters, of as many terms as :meth:`terms` says."""
        return self.terms(messages) * self._numbers_of_a_term()

    def terms(self, messages: int) -> int:
        """Number n of U_k and D_k that so many messages give."""
        return messages

    @abstractmethod
    def stacked(
        self, layer: AdaptedLayer, state: State, messages_SM: Tensor, shares_S: Tensor
    ) -> tuple[Tensor, Tensor]:
        """U_k [n, outputs, r] and D_k [n, r, inputs] of an adapter.

        Args:
            layer: layer with the adapter.
            state: server state before these messages.
            messages_SM: messages of the clients.
            shares_S: p, each client's share of the weights.
        """

    def combine(
        self, state: State, messages_SM: Tensor, weights_S: Tensor, generator: np.random.Generator
    ) -> tuple[State, Tensor]:
        """The mean update, and the state with the movement of these messages."""
        shares_S = weights_S / weights_S.sum()
        pieces = [state.factors.new_zeros(0)]
        for layer in self.adapters:
            ups, downs = self.stacked(layer, state, messages_SM, shares_S)
            # Side by side, they are one product.
            both = torch.cat([ups.transpose(0, 1).flatten(), downs.flatten()])
            # Rounded before they are multiplied, for clients multiply what travels.
            pieces.append(both.to(self.parts[layer.up].dtype).double())
        factors = torch.cat(pieces)
        moved_J = state.moved_J + self.movement(factors)
        return state._replace(moved_J=moved_J, factors=factors), shares_S @ messages_SM

    def movement(self, factors: Tensor) -> Tensor:
        """Sum of the products s U D of each adapter, one after another.

        Raises:
            InvalidPayload: if they are no factors of these adapters.
        """
        one = self._numbers_of_a_term()
        count, rest = divmod(len(factors), one) if one else (0, len(factors))
        if rest:
            raise InvalidPayload(f"factors of the model's adapters must be a multiple of {one}, got {len(factors)}")
        moved_J = torch.zeros(sum(self.parts[layer.base].size for layer in self.adapters), dtype=torch.float64)
        end = 0
        for layer in self.adapters:
            up = self.parts[layer.up]
            down = self.parts[layer.down]
            begin = end
            middle = begin + count * up.size
            end = middle + count * down.size
            terms = count * down.shape[0]
            ups = factors[begin:middle].view(up.shape[0], terms)
            downs = factors[middle:end].view(terms, down.shape[1])
            product = layer.scale * (ups @ downs)
            self.parts[layer.base].view(moved_J).copy_(product.T if layer.is_transposed else product)
        return moved_J

    def apply(self, state: State, reduced: Reduced) -> State:
        """The model plus the mean update."""
        return state._replace(model_P=state.model_P + reduced.update_P)

    def _numbers_of_a_term(self) -> int:
        """Numbers of one U_k and D_k of all adapters."""
        return sum(self.parts[name].size for layer in self.adapters for name in (layer.up, layer.down))


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
