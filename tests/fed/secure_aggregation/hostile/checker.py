"""Independent checker: from all that left honest clients, and all that the adversary has, what follows of a message.

Each masked vector is an equation: a client's message plus masks, of which some are known. The checker finds the message
by the bytes, with all masks of its own making, so that no wrong equation goes unseen.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from tests.fed.secure_aggregation.hostile import algebra, spec
from tests.fed.secure_aggregation.hostile.knowledge import Knowledge
from tests.fed.secure_aggregation.hostile.record import Masked, Record

_MASK = "mask "


class Unexplained(AssertionError):
    """A masked vector is not what the checker says that it is, and so nothing that it concludes counts."""


class Checker:
    """Search for all that the adversary can compute from a transcript.

    Args:
        record: the record of the transcript.
        fewest: the smallest number of honest clients whose messages alone may be combined.
    """

    def __init__(self, record: Record, fewest: int) -> None:
        self._record = record
        self._fewest = fewest
        self._known = Knowledge(record)
        self._streams: dict[tuple[bytes, int, int], np.ndarray] = {}

    def findings(self) -> list[str]:
        """Sentences, one for each thing that no adversary may have."""
        both = sorted({owner for owner, _ in self._known.seeds & self._known.maskings})
        found = [f"both secrets of {owner} in one session" for owner in both]
        found += [f"the message {name} is determined" for name in algebra.determined(self.sums)]
        for masked, name in zip(self._record.masked, self._messages, strict=True):
            if name != masked.message:
                found.append(f"{masked.dealt.owner} has masked {_said(name)} for the task of {_said(masked.message)}")
        few = algebra.smallest_support(self.sums, _client_of, self._fewest)
        if few is not None and not found:
            found.append(f"a combination of the messages of {', '.join(few)} alone, of fewer than {self._fewest}")
        return found

    @cached_property
    def sums(self) -> Sequence[algebra.Row]:
        """A basis of all sums of honest messages that follow."""
        return algebra.sums_of_messages(map(self._equation, self._record.masked, self._messages), _is_message)

    @cached_property
    def _messages(self) -> Sequence[str]:
        """Name of the message in each masked vector, by its bytes."""
        return [*map(self._message, self._record.masked)]

    def _equation(self, masked: Masked, message: str) -> algebra.Equation:
        """The unknown parts of a masked vector."""
        dealt, known = masked.dealt, self._known
        at = dealt.owner, dealt.session
        own = dealt.keys[dealt.place].masking
        unknown = {} if at in known.seeds else {f"{_MASK}{known.secrets[at].seed.hex()}": 1}
        for place, key in self._agreed(masked).items():
            if not {own, dealt.keys[place].masking} & known.publics:
                unknown[f"{_MASK}{key.hex()}"] = 1 if dealt.place < place else -1
        return unknown | ({message: 1} if message else {})

    def _message(self, masked: Masked) -> str:
        """Name of the message that is left when all masks are taken away.

        Raises:
            Unexplained: if that is none of the client's messages.
        """
        dealt = masked.dealt
        lanes = masked.lanes.view(f"u{masked.bits // 8}").copy()
        lanes -= self._stream(self._known.secrets[dealt.owner, dealt.session].seed, masked)
        for place, key in self._agreed(masked).items():
            if dealt.place < place:
                lanes -= self._stream(key, masked)
            else:
                lanes += self._stream(key, masked)
        name = self._record.plain[dealt.owner].get(lanes.tobytes())
        if name is None:
            raise Unexplained(f"a masked vector of {dealt.owner} is none of its messages with the masks of its session")
        return name

    def _agreed(self, masked: Masked) -> dict[int, bytes]:
        """Keys of the masks that a client has in common with others, by their places."""
        dealt = masked.dealt
        private = self._known.secrets[dealt.owner, dealt.session].masking
        return {
            place: spec.agreed(private, dealt.keys[place].masking, dealt.session, "mask") for place in masked.senders
        }

    def _stream(self, key: bytes, masked: Masked) -> np.ndarray:
        at = key, len(masked.lanes), masked.bits
        if at not in self._streams:
            self._streams[at] = spec.stream(*at)
        return self._streams[at]


def _said(name: str) -> str:
    return name or "no step"


def _is_message(name: str) -> bool:
    return not name.startswith(_MASK)


def _client_of(message: str) -> str:
    return message.split("/")[0]
