"""Fully sharded data parallelism: each rank holds a share of every parameter, and takes a share of each batch.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fed.clients.scoring.measures import Loss
from fed.clients.training.parallel.collectives import check_alike
from fed.clients.training.parallel.layers import unit_names
from fed.clients.training.parallel.pieces import Piece, filled
from fed.clients.training.parallel.setup import BatchPart, RankSetup
from fed.clients.training.parallel.way import Found, Rank, Way
from fed.clients.training.parallel.with_loss import WithLoss
from fed.config.parallel import FSDP
from fed.vectors.tensors import Tensor, nn

__all__ = ["FullySharded"]


class FullySharded(Way):
    """Way of ``fsdp``. A unit's parameters are gathered when it computes, by PyTorch's own ``fully_shard``."""

    def __init__(self, setup: RankSetup, rank: Rank, precision: AbstractContextManager[object]) -> None:
        super().__init__(setup, rank, precision)
        assert isinstance(setup.kind, FSDP)
        mesh = init_device_mesh(rank.device.type, (rank.count,))
        modules = dict(self.module.named_modules())
        shapes = {name: tuple(part.shape) for name, part in self.module.named_parameters()}
        made: dict[int, nn.Parameter] = {}
        # Unit by unit, so that no rank has all of them at once; memory that nobody writes to costs nothing on the CPU.
        for name in unit_names(setup.kind.units, self.module):
            filled(modules[name], rank.device, made)
            fully_shard(modules[name], mesh=mesh)
        filled(self.module, rank.device, made)
        made.clear()
        self.module.to(rank.device)
        self._rest = WithLoss(self.module)
        fully_shard(self._rest, mesh=mesh)
        self.pieces = [self._piece(name, part, shapes[name]) for name, part in self.module.named_parameters()]

    def _piece(self, name: str, parameter: Any, shape: tuple[int, ...]) -> Piece:
        rows = -(-shape[0] // self.rank.count)
        begin = min(self.rank.number * rows, shape[0])
        return Piece(
            name=name,
            parameter=parameter,
            local=parameter.detach().to_local(),
            shape=shape,
            index=(slice(begin, min(begin + rows, shape[0])),),
        )

    def backward(self, part: BatchPart, loss: Loss, scale: float, *, is_last: bool) -> Found:  # noqa: D102
        with self.precision:
            found: Tensor = self._rest(loss, part.inputs, part.targets)
        (share,) = part.shares
        # fully_shard takes the mean over ranks, and what is wanted is a sum.
        (found * (scale * share * part.weight * self.rank.count)).backward()  # type: ignore[no-untyped-call]
        return [(found.detach(), share * part.samples)]

    def gradient(self, piece: Piece) -> Tensor | None:  # noqa: D102
        found: Any = piece.parameter.grad
        return None if found is None else found.to_local().reshape(-1)

    def check_buffers(self, before: Sequence[Tensor], after: Sequence[Tensor], names: Sequence[str]) -> None:  # noqa: D102
        check_alike(after, names)
