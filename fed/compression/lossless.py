"""Lossless compression of the bytes that the codecs before it wrote."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from fed.compression.codec import NOT_COMMON
from fed.config.compatibility import Feature, Term
from fed.config.hyperparameters import Hyperparameters
from fed.errors import InvalidPayload

__all__ = ["Zstd"]


@dataclass(frozen=True, kw_only=True)
class Zstd(Hyperparameters):
    """Zstandard, last in a chain: the same values in fewer bytes (RFC 8878).

    Args:
        level: compression level, from 1 (fastest) to 22 (fewest bytes).
    """

    bound: ClassVar[str] = "exact"

    level: Annotated[int, Field(ge=1, le=22)] = 3

    def needs(self) -> Sequence[Term]:
        """Vectors that travel encoded."""
        return (Term(Feature.ENCODED, "set {section} to []"),)

    def lacks(self) -> Sequence[Term]:
        """A common encoding."""
        return (NOT_COMMON,)

    def compress(self, content: "memoryview[int]") -> bytes:
        """One frame, which says how long the content is."""
        import zstandard

        return zstandard.ZstdCompressor(level=self.level).compress(content)

    def decompress(self, frame: "memoryview[int]", most_bytes: int) -> bytes:
        """Reverse :meth:`compress`.

        Args:
            frame: untrusted bytes of a frame.
            most_bytes: largest size of the content.

        Raises:
            InvalidPayload: if the bytes are no frame, or its content is larger.
        """
        import zstandard

        try:
            said = zstandard.frame_content_size(frame)
            # Checked before decompression takes the memory; −1 is the size of a frame that does not say it.
            if not 0 <= said <= most_bytes:
                raise InvalidPayload(f"a zstd frame must say that it holds at most {most_bytes} bytes, got {said}")
            # A window of 128 MiB, Zstandard's own default limit: a frame may ask for gigabytes.
            content = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress(frame)
        except zstandard.ZstdError as error:
            raise InvalidPayload(f"this is no zstd frame: {error}") from error
        return content
