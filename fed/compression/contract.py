"""Check of codecs against their contract, before a run begins.

Shapes: see :mod:`fed.vectors.layout`.
"""

from fed.compression.chain import CodecChain
from fed.compression.codec import Codec, CodecState, Draw
from fed.errors import InvalidExperiment
from fed.vectors.randomness import Streams
from fed.vectors.tensors import torch

__all__ = ["check_chain"]


def check_chain(key: str, chain: CodecChain) -> None:
    """Encode and decode zeros with each codec, so that one that breaks its contract is named before the run.

    Args:
        key: place of the chain in the experiment, for the error.
        chain: chain of codecs.

    Raises:
        InvalidExperiment: if a codec fails, or writes more than it says.
    """
    draw = Draw(Streams(0), [1], [0])
    for place, (codec, values) in enumerate(zip(chain.lossy, chain.stages, strict=False)):
        alone = CodecChain((codec,), values)
        name = type(codec).__name__
        rows_1M = torch.zeros(1, values.numbers, dtype=values.dtype)
        try:
            state = {key: part[None] for key, part in alone.init().items()}
            if state and (place or codec.is_common):
                raise InvalidExperiment(_state_refused(codec, state))
            message = alone.encode(rows_1M, state, draw).content
            decoded = [*alone.read(alone.decode(message, draw), draw).shape]
        except InvalidExperiment as error:
            raise InvalidExperiment(f"{key}: {error}") from None
        except Exception as error:
            raise InvalidExperiment(
                f"{key}'s {name} must encode and decode {values.numbers} zeros, got {type(error).__name__}: "
                f"{error}: correct {name}"
            ) from error
        if decoded != [1, values.numbers]:
            raise InvalidExperiment(
                f"{key}'s {name} must decode {values.numbers} values to [1, {values.numbers}], got {decoded}: "
                f"correct {name}"
            )


def _state_refused(codec: Codec, state: CodecState) -> str:
    """Sentence on a codec that keeps a state where none is kept."""
    kept = ", ".join(state)
    name = type(codec).__name__
    if codec.is_common:
        return f"a codec that is the same for all clients must keep no client's state, got {kept}: correct {name}"
    return f"a codec that keeps a state must be the first of its chain, got {kept} of {name}: put it first"
