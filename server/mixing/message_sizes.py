"""Sizes of what peers send each other in a round, found by a round of one peer without neighbours.

Shapes: see :mod:`fed.vectors.layout`.
"""

from typing import TYPE_CHECKING

from fed.aggregators.peer_rule import PeerRule
from fed.server.mixing.neighbourhood import EncodedRows
from fed.server.mixing.primitives import Exchanges, PeerCodec
from fed.server.mixing.rule_states import first_codec_state, first_state, next_state
from fed.vectors.layout import Layout
from fed.vectors.mixing import Weights
from fed.vectors.tensors import Tensor, torch
from fed.wire.payloads import TensorSpec

if TYPE_CHECKING:
    from fed.topology import Topology

__all__ = ["exchange_specs", "exchanged_bytes", "sent_bytes"]


def exchanged_bytes(
    rule: PeerRule, layout: Layout, topology: "Topology | None", rounds: int, codec: PeerCodec | None = None
) -> int:
    """Bytes that peers send in rounds in which all take part: each receives what its neighbours send.

    Args:
        rule: rule that makes the exchanges.
        layout: layout of a peer's model.
        topology: neighbours in each round; None where peers never meet.
        rounds: number of rounds.
        codec: codec of vectors that travel encoded.
    """
    if topology is None:
        return 0
    # One round stands for all where the topology stays the same.
    last = rounds if topology.changes else 1
    of_rounds = [topology.weights(number) for number in range(1, 1 + last)]
    pairs = sum(len(weights.senders_X) for weights in of_rounds) * rounds // len(of_rounds)
    return pairs * sent_bytes(rule, layout, codec)


def sent_bytes(rule: PeerRule, layout: Layout, codec: PeerCodec | None = None) -> int:
    """Bytes that a peer sends each neighbour in a round.

    Args:
        rule: rule that makes the exchanges.
        layout: layout of a peer's model.
        codec: codec of vectors that travel encoded.
    """
    return _dry_run(rule, layout, codec).sent_bytes


def exchange_specs(
    rule: PeerRule, layout: Layout, codec: PeerCodec | None = None
) -> tuple[tuple[TensorSpec, ...], ...]:
    """The tensors that a peer sends each neighbour in each exchange of a round.

    Args:
        rule: rule that makes the exchanges.
        layout: layout of a peer's model.
        codec: codec of vectors that travel encoded.
    """
    return tuple(_dry_run(rule, layout, codec).sent)


def _dry_run(rule: PeerRule, layout: Layout, codec: PeerCodec | None) -> "_DryRun":
    """A round of a peer without neighbours, with a model of zeros."""
    dry_run = _DryRun()
    buffers_NR = torch.zeros(1, layout.size - layout.parameters, dtype=layout.dtype)
    first = first_state(rule, torch.zeros(1, layout.parameters, dtype=torch.float64))
    exchanges = Exchanges(dry_run, buffers_NR, codec, codec_state=first_codec_state(codec, 1), members=[0])
    next_state(rule, first, dry_run, exchanges)
    return dry_run


class _DryRun:
    """A neighbourhood of one, where local steps do nothing and what would be sent is counted."""

    # Rules may divide by it.
    lr = 1.0

    def __init__(self) -> None:
        self.sent: list[tuple[TensorSpec, ...]] = []
        self.sent_bytes = 0

    def __call__(self, x_NP: Tensor) -> Tensor:
        return x_NP

    def exchange(self, *tensors_NM: Tensor, encoded: EncodedRows | None = None) -> tuple[Weights, tuple[Tensor, ...]]:
        specs = [TensorSpec(tensor_NM.dtype, tensor_NM.shape[1]) for tensor_NM in tensors_NM]
        self.sent_bytes += sum(spec.size_bytes for spec in specs)
        if encoded is not None:
            specs.append(TensorSpec(torch.uint8, encoded.most_bytes, may_be_shorter=True))
            self.sent_bytes += encoded.size_bytes
            if encoded.before_NM is not None:
                specs.append(TensorSpec(torch.float64, encoded.before_NM.shape[1], may_be_shorter=True))
        self.sent.append(tuple(specs))
        return Weights.of(torch.ones(1, 1)), tensors_NM if encoded is None else (*tensors_NM, encoded.vectors_NM)
