"""Tensor parallelism: each rank holds a share of the layers' parameters, and computes that share of their outputs.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import distributed

from fed.clients.scoring.measures import Loss
from fed.clients.training.parallel.pieces import filled, whole_pieces
from fed.clients.training.parallel.plans import plan_for
from fed.clients.training.parallel.setup import BatchPart, RankSetup
from fed.clients.training.parallel.sharded_layers import Cut, computes_alone, cuts_of
from fed.clients.training.parallel.way import Found, Rank, Way
from fed.clients.training.reading import called
from fed.config.parallel import TensorParallel
from fed.vectors.tensors import Tensor, nn, torch

__all__ = ["ShardedLayers"]


class ShardedLayers(Way):
    """Way of ``tensor``. What no rank has a share of, all compute alike, so that all draw alike, too."""

    draws_alike = True

    def __init__(self, setup: RankSetup, rank: Rank, precision: AbstractContextManager[object]) -> None:
        super().__init__(setup, rank, precision)
        assert isinstance(setup.kind, TensorParallel)
        layers = dict(self.module.named_modules())
        plan = plan_for(self.module, setup.kind.plan)
        made: dict[int, nn.Parameter] = {}
        cuts: dict[int, Cut] = {}
        for name, style in plan.items():
            for cut in cuts_of(layers[name], style):
                self._cut(cut, made, cuts)
        for name, style in plan.items():
            computes_alone(layers[name], style)
        filled(self.module, rank.device, made)
        self.module.to(rank.device)
        self.pieces = [
            replace(piece, shape=cuts[id(piece.parameter)].shape, index=cuts[id(piece.parameter)].index)
            if id(piece.parameter) in cuts
            else replace(piece, is_written=rank.number == 0)
            for piece in whole_pieces(self.module, is_written=True)
        ]
        # Each rank has seen a part of what these are used for.
        partial = {
            id(part): part
            for name, style in plan.items()
            if style in ("sequence", "partial")
            for part in layers[name].parameters()
            if part.requires_grad
        }
        self._summed: list[nn.Parameter] = list(partial.values())

    def _cut(self, cut: Cut, made: dict[int, "nn.Parameter"], cuts: dict[int, Cut]) -> None:
        """Give a module its share of a parameter."""
        whole: Any = getattr(cut.layer, cut.key)
        if id(whole) not in made:
            empty = torch.empty(cut.local, dtype=whole.dtype, device=self.rank.device)
            made[id(whole)] = nn.Parameter(empty, requires_grad=whole.requires_grad)
        setattr(cut.layer, cut.key, made[id(whole)])
        cuts[id(made[id(whole)])] = cut

    def backward(self, part: BatchPart, loss: Loss, scale: float, *, is_last: bool) -> Found:  # noqa: D102
        with self.precision:
            found = loss(called(self.module, part.inputs), part.targets)
        (found * (scale * part.weight)).backward()  # type: ignore[no-untyped-call]
        if is_last:
            for parameter in self._summed:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                distributed.all_reduce(parameter.grad)
        # All ranks have found the same.
        return [(found.detach(), float(part.samples))] if self.rank.number == 0 else []

    def check_buffers(self, before: Sequence[Tensor], after: Sequence[Tensor], names: Sequence[str]) -> None:
        """Do nothing: all ranks see whole batches, as one process does."""
