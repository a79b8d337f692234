"""Thousands of hostile coordinators: from all that honest clients say, no message follows, and no sum of too few."""

from collections import Counter

import pytest

from tests.fed.secure_aggregation.hostile.play import STRATEGIES, Transcript, play

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
@pytest.mark.parametrize("first", range(0, 2000, _AT_ONCE))
def test_no_coordinator_of_2000_learns_a_message(first: int) -> None:
    transcripts = _nothing_is_found(range(first, first + _AT_ONCE))
    sums = Counter(min(transcript.sums, 2) for transcript in transcripts)
    assert sums[1] + sums[2] > 0.65 * _AT_ONCE  # 73 % of them have a sum: those of the others refuse them all
    assert sums[2] > 0.12 * _AT_ONCE
    parts = Counter(part for transcript in transcripts for part in transcript.parts)
    assert min(parts[name] for name in STRATEGIES) > 0.03 * _AT_ONCE
    attacked = sum(transcript.sums > 0 and not {*transcript.parts} <= {"honest_round"} for transcript in transcripts)
    refused = sum(transcript.sums > 0 and "aborted" in str(transcript) for transcript in transcripts)
    print(first, sums, attacked, refused)


@pytest.mark.long
@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize("first", range(2000, 102_000, _LONG_AT_ONCE))
def test_no_coordinator_of_100000_learns_a_message(first: int) -> None:
    _nothing_is_found(range(first, first + _LONG_AT_ONCE))


def test_no_coordinator_learns_a_message_with_real_cryptography() -> None:
    _nothing_is_found(range(40))


@pytest.mark.usefixtures("cheap")
def test_a_seed_gives_the_same_transcript_again() -> None:
    for seed in range(30):
        first, second = play(seed), play(seed)
        assert str(first) == str(second)
        assert [one.lanes.tobytes() for one in first.world.record.masked] == [
            one.lanes.tobytes() for one in second.world.record.masked
        ]
