"""Sum of all that clients have sent, where each message says by how much a client's update has changed.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Mapping
from fractions import Fraction

from fed.errors import RunFailed
from fed.server.fleet import Fleet
from fed.storage.checkpoints import Tree
from fed.vectors.tensors import Tensor, torch
from fed.wire.format import Format

__all__ = ["SentSum"]


class SentSum:
    r"""The coordinator's side of :class:`fed.compression.feedback.EF21`.

    .. math:: S ← S + \sum_i w_i c_i, \qquad Δ = S / \sum_i w_i

    The second sum goes over all clients that have ever registered, whether their messages counted or were lost.

    Args:
        message: format of clients' messages; their encoded parts are changes, and the others are not.
    """

    def __init__(self, message: Format) -> None:
        self._weighs_samples = message.weighs_samples
        coded = zip(message.sizes, message.are_coded, strict=True)
        self._coded_M = torch.cat([torch.full((numbers,), is_coded) for numbers, is_coded in coded])
        self._sum_M = torch.zeros(len(self._coded_M), dtype=torch.float64)
        self._weights: dict[int | str, int] = {}

    def add(self, mean_M: Tensor, samples_of: Mapping[int | str, int], weight: int | Fraction, fleet: Fleet) -> Tensor:
        """Add the messages of a round.

        Args:
            mean_M: weighted mean of the messages, in float64.
            samples_of: client → its number of samples, of those whose messages count.
            weight: sum of the weights of the messages.
            fleet: fleet of the clients.

        Returns:
            Mean of all clients' updates, [M]; of parts that are not changes, the mean of the messages.

        Raises:
            RunFailed: if the algorithm weighs clients neither by samples nor alike.
        """
        for client in fleet.registered():
            self._weights.setdefault(client, fleet.size_of(client) if self._weighs_samples else 1)
        # What clients train on may be less than what they hold.
        counted = {client: samples if self._weighs_samples else 1 for client, samples in samples_of.items()}
        self._weights |= counted
        expected = sum(counted.values())
        if weight != expected:
            raise RunFailed(
                "error_feedback ef21 needs clients that are weighed by their samples, or alike, in every round, got "
                f"weights of {float(weight):g} in place of {expected} together: set error_feedback to ef"
            )
        self._sum_M += mean_M * expected * self._coded_M
        return torch.where(self._coded_M, self._sum_M / sum(self._weights.values()), mean_M)

    def state(self) -> Tree:
        """State for a checkpoint."""
        return {"sum": self._sum_M, "weights": self._weights}

    def restore(self, state: Tree) -> None:
        """Resume from what :meth:`state` wrote down."""
        self._sum_M = state["sum"]
        self._weights = state["weights"]
