"""Messages as lanes of whole numbers, which secure aggregation masks and adds.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from fed.compression.codec import CodecState, Draw
from fed.errors import InvalidExperiment
from fed.privacy.noise import NoiseSource
from fed.secure_aggregation.fixed_point import ClientNumbers, FixedPoint
from fed.secure_aggregation.lane_noise import LaneNoise
from fed.secure_aggregation.settings import SecureAggregation
from fed.vectors.tensors import Tensor, torch
from fed.wire.format import Format, Outgoing

__all__ = ["hide", "secured"]


def secured(message: Format, settings: SecureAggregation, most_clients: int, noise: LaneNoise | None = None) -> Format:
    """The format of the same messages in lanes that are masked and added.

    Args:
        message: format of the messages as they are.
        settings: settings of secure aggregation.
        most_clients: the largest number of clients that a round asks.
        noise: clip and noise of each message under differential privacy; None without.

    Raises:
        InvalidExperiment: if the messages cannot be added in fixed point.
    """
    if message.integers:
        raise InvalidExperiment(
            f"secure_aggregation needs a model without integer buffers, whose largest values are no sums, got "
            f"{message.integers} integers: replace batch normalisation by GroupNorm, or give it track_running_stats="
            "False"
        )
    heaviest = settings.heaviest(weighs_samples=message.weighs_samples)
    parts = [numbers for numbers in message.linear_sizes if numbers]
    clips = (settings.clip,) * len(parts) if isinstance(settings.clip, float) else settings.clip
    if len(clips) != len(parts):
        raise InvalidExperiment(
            f"secure_aggregation.clip must be one number, or one for each of {len(parts)} parts of a message, of "
            f"{parts} numbers, got {[*clips]}: correct it"
        )
    fixed = FixedPoint(
        bits=settings.bits,
        parts=tuple(parts),
        clips=clips,
        most_clients=most_clients,
        max_weight=heaviest,
        noise=noise,
    )
    return replace(message, fixed=fixed)


def hide(
    message: Format,
    update_KM: Tensor,
    state: CodecState,
    draw: Draw,
    beside: ClientNumbers,
    source: NoiseSource | None = None,
) -> Outgoing:
    """Messages as lanes, to be masked and added.

    Args:
        message: format from :func:`secured`.
        update_KM: finite messages, [K, M].
        state: states that the clients keep for the codecs, [K, ·] each.
        draw: the random streams.
        beside: numbers of the clients that are summed beside their messages.
        source: source of the clients' noise under differential privacy; None without.
    """
    assert message.fixed is not None
    encoder = message.encoder
    parts = update_KM.split_with_sizes(message.sizes, 1)
    wanted = []
    values = []
    for part, is_coded, kept in zip(parts, message.are_coded, _kept_by_part(message, state), strict=True):
        if encoder is None or not is_coded:
            values.append(part)
            continue
        wanted.append((encoder.feedback.wanted(part.to(encoder.chain.values.dtype), kept), kept))
        values.append(encoder.linear(wanted[-1][0], draw).double())
    generators = [_generator(draw, row, source) for row in range(len(update_KM))]
    values_KJ = message.counted(torch.cat(values, 1))
    overflown = message.fixed.too_large_losses(beside)
    if not torch.isfinite(values_KJ).all():
        rows = torch.isfinite(values_KJ).all(1).logical_not().nonzero().flatten().tolist()
        overflown |= dict.fromkeys(rows, "what the codecs of uplink make of its update is not finite")
    if overflown:
        return Outgoing([], torch.empty(len(values_KJ), 0), overflown=overflown)
    lanes, read_KJ = message.fixed.quantise(values_KJ, beside, generators)
    counted = []
    lost = []
    if encoder is not None and wanted[0][1]:  # a client knows what its lanes stand for, clipping and rounding too
        read = read_KJ.split_with_sizes(message.linear_sizes, 1)
        coded = [part for part, is_coded in zip(read, message.are_coded, strict=True) if is_coded]
        for (wanted_KP, kept), part_KJ in zip(wanted, coded, strict=True):
            decoded_KP = encoder.chain.from_linear(part_KJ.to(wanted_KP.dtype), draw)
            states = encoder.feedback.states(wanted_KP, decoded_KP, kept)
            counted.append(states[0])
            lost.append(states[1])
    joined = [
        {name: torch.cat([of[name] for of in states], 1) for name in states[0]} if states else {}
        for states in (counted, lost)
    ]
    return Outgoing(
        payloads=[(row,) for row in lanes],
        update_KM=torch.empty(len(lanes), 0),
        counted=joined[0],
        lost=joined[1],
        lanes_KL=lanes,
    )


def _generator(draw: Draw, row: int, source: NoiseSource | None) -> np.random.Generator:
    """Generator of a client's rounding, or of its noise."""
    if source is None:
        return draw._replace(purpose="rounding").own(row)
    repeats = draw.repeats[row] if draw.repeats else 0
    return source.generator("in lanes", draw.clients[row], draw.rounds[row], repeats)


def _kept_by_part(message: Format, state: CodecState) -> Iterator[CodecState]:
    """State of codecs that belongs to each part; none of those that are not coded."""
    chunks = {name: iter(part.chunk(message.coded, 1)) for name, part in state.items()}
    for is_coded in message.are_coded:
        yield {name: next(parts) for name, parts in chunks.items()} if is_coded else {}
