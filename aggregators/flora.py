"""Low-rank adapters of unequal ranks, stacked: the sum of their products is added to the adapted matrix.

Wang, Shen, He, Sun, Wang, Lyu & Li, "FLoRA: federated fine-tuning large language models with heterogeneous low-rank
adaptations", NeurIPS 2024, arXiv 2409.05976, section 3.

Shapes: see :mod:`fed.vectors.layout`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from pydantic import Field, PositiveInt

from fed.aggregators.adapters import AdaptedLayer, OverAdapters, State
from fed.config.compatibility import Feature, Term
from fed.errors import InvalidExperiment, InvalidModel
from fed.vectors.layout import Layout
from fed.vectors.tensors import Tensor, nn, torch

__all__ = ["FLoRA"]


@dataclass(frozen=True, kw_only=True)
class FLoRA(OverAdapters):
    r"""W takes the sum of the clients' products, and adapters begin anew (Wang et al. 2024, 2409.05976).

    .. math::
        W ← W + s \sum_{i ∈ S} p_i B_i A_i = W + s \, [B_1 … B_n] \, [p_1 A_1; …; p_n A_n],
        \qquad B ← 0, \quad A ← \text{random}

    Side by side, factors of unequal ranks need no padding to be averaged, and no product of one client's B and
    another's A arises. s is the adapter's scale. A begins anew each round with numbers from U(−1/√m, 1/√m) for m
    inputs, as peft begins it. Other parameters that the model trains are averaged as in FedAvg.

    A client of rank r_i < r trains the first r_i rows of A and columns of B alone: the others begin at 0, where their
    gradients are 0. They travel as zeros; ``uplink: [zstd]`` takes away the bytes of these. As with fedex_lora, tasks
    bring the factors that a client lacks, or the matrices W where these are fewer bytes.

    Args:
        ranks: r_i, the rank of each client: the i-th client has the i-th of them, and after the last the first again;
            from 1 to the rank of the model's adapters. None: all have the model's rank.
    """

    asks: ClassVar[frozenset[str]] = frozenset({"place"})

    ranks: Annotated[tuple[PositiveInt, ...], Field(strict=False, min_length=1)] | None = None

    def lacks(self) -> Sequence[Term]:
        """Parameters that mean the same from round to round."""
        way_out = "choose fedex_lora, whose adapters go on"
        return [*super().lacks(), Term(Feature.SAME_PARAMETERS, way_out, "whose adapters begin anew in each round")]

    def for_model(self, module: "nn.Module", layout: Layout) -> Self:
        """The algorithm with the places of the model's adapters.

        Raises:
            InvalidModel: if a factor of one is not trained, or B does not begin at 0.
            InvalidExperiment: if a client's rank is above an adapter's.
        """
        made = super().for_model(module, layout)
        parameters = dict(module.named_parameters())
        for layer in made.adapters:
            if bool(parameters[layer.up].any()):
                raise InvalidModel(f"flora needs adapters that begin at 0, got numbers in {layer.up}: zero them")
            rank = made.parts[layer.down].shape[0]
            if self.ranks is not None and max(self.ranks) > rank:
                raise InvalidExperiment(
                    f"flora.ranks must be 1 to {rank}, the rank of {layer.down}, got {max(self.ranks)}: lower "
                    "it, or give the model adapters of that rank"
                )
        return made

    def local_start(self, anchor_P: Tensor, client_state: Any, places_K: Tensor | None = None) -> Tensor:
        """The model, with zeros beyond a client's own rank."""
        if self.ranks is None or places_K is None or not self.adapters:
            return anchor_P
        ranks_K = torch.tensor(self.ranks)[places_K % len(self.ranks)]
        start_KP = anchor_P.expand(len(ranks_K), -1).clone()
        for layer in self.adapters:
            up, down = self.pair(layer, start_KP)
            beyond = torch.arange(down.shape[1]) >= ranks_K[:, None]  # [K, r]
            up.masked_fill_(beyond[:, None, :], 0.0)
            down.masked_fill_(beyond[:, :, None], 0.0)
        return start_KP

    def stacked(
        self, layer: AdaptedLayer, state: State, messages_SM: Tensor, shares_S: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The clients' own factors, those of A by their shares."""
        up, down = self.pair(layer, messages_SM)
        began_up, began_down = self.pair(layer, state.model_P)
        # Beyond a client's rank this A is that of the model, and B is 0, as their product must be.
        return began_up + up, shares_S[:, None, None] * (began_down + down)

    def combine(
        self, state: State, messages_SM: Tensor, weights_S: Tensor, generator: np.random.Generator
    ) -> tuple[State, Tensor]:
        """The mean update, with that of adapters to their new beginning, and the state with the messages' products."""
        after, mean_M = super().combine(state, messages_SM, weights_S, generator)
        for layer in self.adapters:
            began_up, began_down = self.pair(layer, state.model_P)
            bound = 1.0 / math.sqrt(began_down.shape[1])
            anew = torch.from_numpy(generator.uniform(-bound, bound, size=tuple(began_down.shape)))
            new_up, new_down = self.pair(layer, mean_M)
            new_up.copy_(-began_up)
            new_down.copy_(anew - began_down)
        return after, mean_M
