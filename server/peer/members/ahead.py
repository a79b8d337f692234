"""Peers that are ahead of this one: logged once each, and once more when this peer has caught up."""

import logging
from dataclasses import dataclass

from fed.quantities import counted

__all__ = ["Ahead"]

_log = logging.getLogger(__name__)


@dataclass
class _Stretch:
    """Rounds in which a peer's messages were not taken.

    Args:
        latest: the last of these rounds.
        rounds: the number of these rounds, ≥ 1.
    """

    latest: int
    rounds: int = 1


class Ahead:
    """Peers whose messages are of later rounds than this one takes.

    To be ahead is no fault, and the message is not refused: these peers go on while this one catches up.

    Args:
        what: noun for the messages in log lines, in the plural, such as "vectors".

    Example:
        >>> ahead = Ahead("vectors")
        >>> for number in (8, 8, 9):
        ...     ahead.note("ben", number, own=2)
        >>> ahead.end("ben")
        2
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._stretches: dict[str, _Stretch] = {}

    def note(self, name: str, number: int, own: int) -> None:
        """Take note of a message that is not taken.

        Args:
            name: the name of its sender.
            number: the number of the message's round.
            own: the number of this peer's round.
        """
        stretch = self._stretches.get(name)
        if stretch is None:
            self._stretches[name] = _Stretch(number)
            _log.warning(
                "%r is ahead: its %s of round %d are not taken, for this peer is in round %d; another line follows "
                "when this peer has caught up",
                name,
                self._what,
                number,
                own,
            )
        # A round is counted once, however many messages and tries it has.
        elif number != stretch.latest:
            stretch.latest = number
            stretch.rounds += 1

    def end(self, name: str) -> int:
        """Take note that a peer's messages are taken again, or come no more; returns the number of rounds missed."""
        stretch = self._stretches.pop(name, None)
        if stretch is None:
            return 0
        _log.info(
            "%r is not ahead any more: its %s of %s were not taken", name, self._what, counted(stretch.rounds, "round")
        )
        return stretch.rounds
