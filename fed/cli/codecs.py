"""``fed codecs``: the list of codecs, and all about one of them, taken from its docstring and its code.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fed.cli.kinds import WHAT, show_all, tell
from fed.errors import InvalidExperiment, InvalidInput

if TYPE_CHECKING:
    from fed.compression.codec import Values

__all__ = ["codecs"]

# A layer so large that headers and indices do not blur the figures.
_SIDE = 1000
# Updates of clients are small numbers around 0.
_SCALE = 0.01
_MEASURED = "measured on a layer of 1,000 × 1,000 Gaussian values in float32, standard deviation 0.01"
_LATE = 1 << 20  # a round after any warm-up


def codecs(
    name: Annotated[str | None, typer.Argument(help="The one to describe; without it all are listed.")] = None,
) -> None:
    """List the built-in codecs, or tell all about one: equation, hyper-parameters, bits, bound, place in a chain."""
    from fed.config.registry import CODECS

    if name is not None:
        tell(CODECS, name, partial(_facts, name))
        return
    # Each is made once, for it is both measured and described.
    made = {kind: CODECS.make(kind).make() for kind in CODECS.builtin}
    bits = {kind: _bits(codec) for kind, codec in made.items()}

    def cells(kind: str, what: str, paper: str) -> tuple[str, ...]:
        return f"{bits[kind]:>6.3g}", what, _properties(made[kind]), made[kind].bound, paper or "–"

    notes = (
        f"bits: a parameter's, at the defaults, {_MEASURED}",
        "bound: ω of unbiased codecs and 1 − δ of contractions are the mean of ‖C(x) − x‖²/‖x‖²",
        "fed codecs NAME tells all about one of them",
    )
    headings = ("bits", WHAT, "properties", "bound", "paper")
    show_all(CODECS, headings, cells, notes, order=lambda kind: -bits[kind])


def _facts(kind: str, codec: Any) -> Iterator[tuple[str, str]]:
    """Bits, bound, state and place in a chain of a codec."""
    from fed.compression.codec import Codec
    from fed.compression.lossless import Zstd
    from fed.config.registry import CODECS

    if not isinstance(codec, Codec | Zstd):
        raise InvalidInput(f"{kind} must be a fed.compression.codec.Codec, not a {type(codec).__name__}: derive it")
    try:
        bits = _bits(codec)
        kept = codec.init(_values()) if isinstance(codec, Codec) else {}
    except Exception as error:  # whatever a user's codec raises
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise InvalidInput(f"{kind} must encode {_SIDE * _SIDE:,} values, got {problem}: correct it") from error
    yield "bits a parameter", f"{bits:.3g}, {32 / bits:.3g} × fewer than 32; {_MEASURED}"
    yield "properties", _properties(codec)
    yield "bound", codec.bound or "–"
    yield "client keeps", ", ".join(f"{name} ({part.numel():,} numbers)" for name, part in kept.items()) or "nothing"
    yield "before it", ", ".join(other for other in CODECS.builtin if not _refusal([other, kind])) or "no codec"
    yield "behind it", ", ".join(other for other in CODECS.builtin if not _refusal([kind, other])) or "no codec"
    yield "error feedback", _with_feedback(kind, codec)
    yield "downlink", _refusal([], downlink=[kind]) or "encodes what goes out, too"
    yield "needs", ", ".join(term.feature.value for term in codec.needs()) or "nothing"
    if lacks := codec.lacks():
        yield "refused with", f"what needs {' or '.join(term.feature.value for term in lacks)}"


def _properties(codec: Any) -> str:
    from fed.compression.codec import Codec

    if not isinstance(codec, Codec):
        return "lossless"
    claims = {"linear": codec.is_linear, "unbiased": codec.is_unbiased, "contraction": codec.is_contraction}
    return ", ".join(name for name, is_claimed in claims.items() if is_claimed) or "–"


def _values() -> "Values":
    import torch

    from fed.compression.codec import Values

    return Values(_SIDE * _SIDE, torch.float32, (torch.Size([_SIDE, _SIDE]),))


def _bits(codec: Any) -> float:
    """Bits a parameter of a message, with its header; measured where they depend on the values."""
    import torch

    from fed.compression.chain import CodecChain
    from fed.compression.codec import Codec, Draw
    from fed.vectors.randomness import Streams

    chain = CodecChain((codec,), _values())
    size_bytes = chain.size_bytes
    # A length that depends on the values cannot be computed: it is measured.
    if not isinstance(codec, Codec) or not codec.has_fixed_size:
        row_1M = torch.randn(1, chain.values.numbers, generator=torch.Generator().manual_seed(0)).mul_(_SCALE)
        state = {name: part[None] for name, part in chain.init().items()}
        size_bytes = len(chain.encode(row_1M, state, Draw(Streams(0), [_LATE], [0])).content[0])
    return 8 * size_bytes / chain.values.numbers


def _refusal(uplink: list[str], **sections: object) -> str:
    """The reason why an experiment with these codecs is refused; empty where it is not."""
    from fed.config.experiment import Experiment

    try:
        Experiment(uplink=uplink, **sections)
    except InvalidExperiment as error:
        return f"refused: {str(error).splitlines()[0]}"
    return ""


def _with_feedback(kind: str, codec: Any) -> str:
    from fed.compression.chain import CodecChain

    if reason := _refusal([kind], error_feedback="ef"):
        return reason
    is_contraction = CodecChain((codec,), _values()).is_contraction
    return "goes around it" if is_contraction else "goes around it, and scales each message by 1/(1 + ω) of its own ω"
