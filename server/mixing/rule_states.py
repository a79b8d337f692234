"""States of a peer's rule: made, moved and renewed by the rule, and checked against its contract.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Sequence
from typing import Any

from fed.aggregators.peer_rule import PeerRule
from fed.compression.codec import CodecState
from fed.errors import InvalidExperiment
from fed.server.mixing.primitives import Exchanges, PeerCodec
from fed.vectors.tensors import Tensor, torch

__all__ = ["first_codec_state", "first_state", "next_state", "renewed_state"]


def first_codec_state(codec: PeerCodec | None, peers: int) -> CodecState:
    """State of the codecs before the first round, a row for each peer."""
    return {name: part.repeat(peers, 1) for name, part in codec.encoder.init().items()} if codec else {}


def first_state(rule: PeerRule, params_NP: Tensor) -> Any:
    """A rule's state before the first round, checked against its contract.

    Raises:
        InvalidExperiment: if it is another than :meth:`PeerRule.init` is to give.
    """
    return _checked(rule, "init", rule.init(params_NP), params_NP.shape)


def next_state(rule: PeerRule, state: Any, descend: Any, mix: Exchanges) -> Any:
    """A rule's state after a round, checked against its contract.

    Args:
        rule: rule that makes one step.
        state: state of the rule before the round.
        descend: local steps of the round, a :class:`fed.aggregators.peer_rule.Descend`.
        mix: exchanges of the round.

    Raises:
        InvalidExperiment: if it is another than :meth:`PeerRule.step` is to give.
    """
    return _checked(rule, "step", rule.step(state, descend, mix), state.model_NP.shape)


def renewed_state(rule: PeerRule, state: Any, anew_S: Sequence[int]) -> Any:
    """A state in which some peers have begun anew, checked against the contract.

    Args:
        rule: rule that makes the new states.
        state: state of all that take part in a round.
        anew_S: rows of the peers that begin anew.

    Raises:
        InvalidExperiment: if :meth:`PeerRule.renewed` gives no such state.
    """
    if not rule.conserves_sum or not anew_S:  # without a sum over members nothing has to be put right
        return state
    rows_K = torch.tensor(anew_S)
    # the rule sees those alone that begin anew: the others keep their bits
    before = type(state)(*(part[rows_K] for part in state))
    after = _checked(rule, "renewed", rule.renewed(before), before.model_NP.shape)
    return type(state)(*(part.index_copy(0, rows_K, new) for part, new in zip(state, after, strict=True)))


def _checked(rule: PeerRule, method: str, state: Any, shape: "torch.Size") -> Any:
    named = f"{type(rule).__name__}.{method}"
    if "model_NP" not in getattr(state, "_fields", ()):
        raise InvalidExperiment(
            f"{named} must give a named tuple with the field model_NP, got {type(state).__name__}: write "
            "class State(NamedTuple), whose field model_NP is every peer's model"
        )
    for name, part in state._asdict().items():
        is_model = name == "model_NP"
        its_shape: tuple[int, ...] = part.shape if isinstance(part, Tensor) else ()
        dtype = part.dtype if isinstance(part, Tensor) else None
        is_like_models = its_shape == shape and dtype == torch.float64
        has_row_a_peer = its_shape[:1] == shape[:1]
        fits = is_like_models if is_model else has_row_a_peer
        if fits:
            continue
        got = f"{str(dtype)[6:]} {list(its_shape)}" if dtype else type(part).__name__  # without "torch."
        must = f"float64 {list(shape)}" if is_model else f"a tensor with a row for each of {shape[0]} peers"
        raise InvalidExperiment(f"{named} must give {name} as {must}, got {got}: rules compute on rows of peers")
    return state
