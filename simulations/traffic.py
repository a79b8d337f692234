"""What a run will send, known before its first round.

Shapes: P, the parameters that clients share; N peers.
"""

from dataclasses import dataclass

from torch import Tensor

from fed.layout import Layout
from fed.simulations.peers import degrees

__all__ = ["PeerTraffic"]


@dataclass(frozen=True)
class PeerTraffic:
    """Models among peers, where a rule mixes once a round.

    Args:
        layout: of a peer's model.
        mixing_NN: W, sparse; None where peers never meet.
        peers: how many there are.
        rounds: how many there are.
    """

    layout: Layout
    mixing_NN: Tensor | None
    peers: int
    rounds: int

    @property
    def message_size(self) -> int:
        """A model's."""
        return self.layout.size

    @property
    def bytes_up(self) -> int:
        """A model from every peer to each of its neighbours, in each round."""
        models = sum(degrees(self.mixing_NN, self.peers))
        return self.rounds * models * self.layout.size * self.layout.dtype.itemsize

    @property
    def bytes_down(self) -> int:
        """The same, for what a peer sends a neighbour receives."""
        return self.bytes_up
