"""First exchange of a run whose tables are standardized over all clients: its rounds, whatever fleet they are over.

Shapes: see :mod:`fed.vectors.layout`.
"""

import logging

from fed.clients.first_exchange import MOST_ATTEMPTS
from fed.config.table import TableSection
from fed.errors import RunFailed
from fed.server.rounds.coordinated import Coordinated
from fed.vectors.tensors import Tensor

__all__ = ["exchanged", "say_found"]

_log = logging.getLogger(__name__)


def exchanged(federation: Coordinated) -> Tensor:
    """The means that the clients of a federation have found, [F] in float64.

    Args:
        federation: federation of :func:`fed.clients.first_exchange.exchange_of`, before its first round.

    Raises:
        RunFailed: if nobody answers.
    """
    for number in range(1, MOST_ATTEMPTS + 1):
        stats = federation.round(number)
        if not stats.replied:
            continue
        if stats.replied < stats.selected:
            _log.warning(
                "standardize: %d of %d clients have answered, and the numbers are over these",
                stats.replied,
                stats.selected,
            )
        if stats.capped_weights:
            _log.warning(
                "standardize: %d clients have more samples than secure_aggregation.max_weight, with which they count",
                stats.capped_weights,
            )
        means_F, _ = federation.model()
        return means_F.double()
    raise RunFailed(
        "standardize: federated needs an answer of the clients, got none: their logs have the reasons; give "
        "rounds.deadline_s more time, or write means and deviations"
    )


def say_found(table: TableSection, clients: int) -> None:
    """Say once what the run's tables are standardized by."""
    _log.info(
        "standardized over %d clients, by mean and deviation: %s",
        clients,
        ", ".join(f"{name} {mean:.6g} and {deviation:.6g}" for name, (mean, deviation) in table.moments.items()),
    )
