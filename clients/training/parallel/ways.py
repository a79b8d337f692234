"""Choice of the way of a rank by the kind of ``local.parallel``."""

from contextlib import AbstractContextManager

from fed.clients.training.parallel.setup import RankSetup
from fed.clients.training.parallel.way import Rank, Way
from fed.config.parallel import FSDP, Pipeline, TensorParallel

__all__ = ["make_way"]


def make_way(setup: RankSetup, rank: Rank, precision: AbstractContextManager[object]) -> Way:
    """The way of a rank.

    Args:
        setup: parts of the run.
        rank: place of this process.
        precision: context for forward passes.
    """
    # Imported where they are used: PyTorch's part of each takes up to half a second to load.
    if isinstance(setup.kind, FSDP):
        from fed.clients.training.parallel.fsdp import FullySharded

        return FullySharded(setup, rank, precision)
    if isinstance(setup.kind, Pipeline):
        from fed.clients.training.parallel.pipeline import PipelineStage

        return PipelineStage(setup, rank, precision)
    if isinstance(setup.kind, TensorParallel):
        from fed.clients.training.parallel.tensor import ShardedLayers

        return ShardedLayers(setup, rank, precision)
    from fed.clients.training.parallel.ddp import DataParallel

    return DataParallel(setup, rank, precision)
