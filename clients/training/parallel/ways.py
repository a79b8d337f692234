"""Choice of the way of a rank by the kind of ``local.parallel``."""

from contextlib import AbstractContextManager

from fed.clients.training.parallel.ddp import DataParallel
from fed.clients.training.parallel.setup import RankSetup
from fed.clients.training.parallel.way import Rank, Way
from fed.config.parallel import DDP, Parallel

__all__ = ["make_way"]

_WAYS: dict[type[Parallel], type[Way]] = {DDP: DataParallel}


def make_way(setup: RankSetup, rank: Rank, precision: AbstractContextManager[object]) -> Way:
    """The way of a rank.

    Args:
        setup: parts of the run.
        rank: place of this process.
        precision: context for forward passes.
    """
    return _WAYS[type(setup.kind)](setup, rank, precision)
