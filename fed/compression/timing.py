"""Time that a chain of codecs takes on this machine, beside the bytes that it saves."""

import statistics
import time

from fed.compression.codec import Draw
from fed.compression.feedback import Encoder
from fed.vectors.randomness import Streams
from fed.vectors.tensors import torch

__all__ = ["facts_of", "pays_below_bytes_per_s"]

_REPEATS = 3
_LATE = 1000  # round, after any warm-up


def pays_below_bytes_per_s(encoder: Encoder) -> float:
    r"""Bandwidth of a link below which encoding a vector pays: there the bytes saved take longer than the codecs.

    .. math:: \frac{\text{bytes raw} - \text{bytes encoded}}{\text{seconds to encode and decode}}

    The vector is Gaussian, and the median of three times counts, after a first one.

    Args:
        encoder: chain of codecs and feedback that encodes the vector.

    Returns:
        Bytes a second; 0 where a message is as long as the vector.
    """
    values = encoder.chain.values
    draw = Draw(Streams(0), rounds=[_LATE], clients=[0])
    rows_1M = torch.from_numpy(Streams(0).generator("timing").standard_normal((1, values.numbers))).to(values.dtype)
    state = {name: part[None] for name, part in encoder.init().items()}
    times_s = []
    saved_bytes = 0
    for _ in range(1 + _REPEATS):
        began_s = time.perf_counter()  # the first time is left out below: fresh memory is slow
        messages = encoder.encode(rows_1M, state, draw).messages
        encoder.decode(messages, draw)
        times_s.append(time.perf_counter() - began_s)
        saved_bytes = values.size_bytes - len(messages[0])
    return max(saved_bytes, 0) / statistics.median(times_s[1:])


def facts_of(encoder: Encoder | None) -> dict[str, float]:
    """Key of a run's summary, ``uplink_pays_below_bytes_per_s``; none where nothing is encoded."""
    return {"uplink_pays_below_bytes_per_s": pays_below_bytes_per_s(encoder)} if encoder else {}
