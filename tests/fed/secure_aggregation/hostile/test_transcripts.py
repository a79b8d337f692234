"""Thousands of hostile coordinators: from all that honest clients say, no message follows, and no sum of too few."""

from collections import Counter

import pytest

from tests.fed.secure_aggregation.hostile.play import STRATEGIES, Transcript, play
from tests.thinned import thinned

_AT_ONCE = 250
_LONG_AT_ONCE = 1000


def _nothing_is_found(seeds: range) -> list[Transcript]:
    transcripts = []
    for seed in seeds:
        transcript = play(seed)
        assert not transcript.findings, f"transcript of the seed {seed}:\n{transcript}"
        transcripts.append(transcript)
    return transcripts


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize("first", thinned(range(0, 2000, _AT_ONCE), quick=1))
def test_no_coordinator_of_2000_learns_a_message(first: int) -> None:
    transcripts = _nothing_is_found(range(first, first + _AT_ONCE))
    sums = Counter(min(transcript.sums, 2) for transcript in transcripts)
    assert sums[1] + sums[2] > 0.6 * _AT_ONCE  # 72 % in the mean; where there is none, clients have refused them all
    assert sums[2] > 0.1 * _AT_ONCE  # 20 %
    parts = Counter(part for transcript in transcripts for part in transcript.parts)
    assert min(parts[name] for name in STRATEGIES) > 0.02 * _AT_ONCE  # 7 % each
    is_resisted = [transcript.sums > 0 and "broken a rule" in str(transcript) for transcript in transcripts]
    assert sum(is_resisted) > 0.25 * _AT_ONCE  # a sum, and an attack that a client has seen


@pytest.mark.long
@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize("first", range(2000, 102_000, _LONG_AT_ONCE))
def test_no_coordinator_of_100000_learns_a_message(first: int) -> None:
    _nothing_is_found(range(first, first + _LONG_AT_ONCE))


def test_no_coordinator_learns_a_message_with_real_cryptography() -> None:
    _nothing_is_found(range(20))


@pytest.mark.usefixtures("cheap")
def test_a_seed_gives_the_same_transcript_again() -> None:
    for seed in range(10):
        first, second = play(seed), play(seed)
        assert str(first) == str(second)
        assert [one.lanes.tobytes() for one in first.world.record.masked] == [
            one.lanes.tobytes() for one in second.world.record.masked
        ]
