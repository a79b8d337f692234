"""ε of private runs in lists, pages and comparisons."""

from typing import Any

import pytest

from fed.privacy.accounting import epsilon
from fed.privacy.releases import Release
from fed.reports.private_runs import cost_together, privacy_note

_RELEASE = Release(noise_multiplier=2.0, sampling=0.1)


def _summary(
    count: int, delta: float = 1e-5, *, says_releases: bool = True, release: Release = _RELEASE
) -> dict[str, Any]:
    summary: dict[str, Any] = {"epsilon": epsilon({release: count}, delta), "delta": delta}
    if says_releases:
        summary["releases"] = [[release.keys(), count]]
    return summary


def test_releases_of_several_runs_count_as_one() -> None:
    together, delta, is_union = cost_together([_summary(10), _summary(30)])
    assert (together, delta, is_union) == (epsilon({_RELEASE: 40}, 1e-5), 1e-5, True)
    assert together < _summary(10)["epsilon"] + _summary(30)["epsilon"]


def test_sums_are_given_where_they_are_less_than_the_union() -> None:
    """A client is in a run with probability δ: so far nothing is promised of it, and in two runs that is too much."""
    runs = [_summary(1, release=Release(noise_multiplier=0.2, sampling=1e-5))] * 2
    assert cost_together(runs) == (0.0, 2e-5, False)
    note = privacy_note({"a": dict(enumerate({"metrics": [], "summary": run} for run in runs))})
    assert "ε = 0 at δ = 2e-05 for those whose data are in all of the 2 private runs (the sums of theirs; " in note
    assert "all their releases as one cost 0.693 at δ = 1e-05)" in note


@pytest.mark.parametrize("other", [_summary(30, says_releases=False), _summary(30, delta=1e-6)])
def test_unlike_runs_cost_the_sums_of_theirs(other: dict[str, Any]) -> None:
    together, delta, is_union = cost_together([_summary(10), other])
    assert not is_union
    assert together == pytest.approx(_summary(10)["epsilon"] + other["epsilon"])
    assert delta == pytest.approx(1e-5 + other["delta"])


def test_note_counts_private_runs_and_names_the_others() -> None:
    private = {"metrics": [], "summary": _summary(10)}
    public: dict[str, Any] = {"metrics": [], "summary": {}}
    assert privacy_note({"a": {0: public}}) == ""
    note = privacy_note({"a": {0: private, 1: private}, "b": {0: public}})
    assert note.startswith("Privacy: ε = ")
    assert "at δ = 1e-05 for those whose data are in all of the 2 private runs (all their releases as one; " in note
    assert note.endswith("1 other run promised nothing: ε holds only while it stays unpublished.")
    alone = privacy_note({"a": {0: private}})
    assert alone.endswith("at δ = 1e-05 for those whose data are in the private run.")
