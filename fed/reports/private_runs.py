"""ε that several private runs cost those whose data all of them used: a search spends what its runs spend together."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fed.privacy.accounting import epsilon
from fed.privacy.plan import PrivacyPlan
from fed.privacy.releases import Release
from fed.quantities import counted, epsilon_text

__all__ = ["cost_together", "privacy_note"]


def privacy_note(runs: Mapping[str, Mapping[Any, Mapping[str, Any]]]) -> str:
    """Sentences on the ε of all private runs together, and on runs without privacy; empty where no run is private.

    Args:
        runs: name of a variant → repetition → the run, whose summary has ``epsilon`` and ``delta`` where it is private.
    """
    summaries = [run["summary"] for repetitions in runs.values() for run in repetitions.values()]
    private = [summary for summary in summaries if summary.get("epsilon") is not None]
    if not private:
        return ""
    together, delta, is_union = cost_together(private)
    cost = f"ε = {epsilon_text(together)} at δ = {delta:.3g}"
    note = f"Privacy: {cost} for those whose data are in the private run."
    if len(private) > 1:
        how = _how(private, is_union=is_union)
        note = f"Privacy: {cost} for those whose data are in all of the {len(private)} private runs ({how})."
    others = len(summaries) - len(private)
    if not others:
        return note
    return f"{note} {counted(others, 'other run')} promised nothing: ε holds only while {_it(others)} unpublished."


def _it(count: int) -> str:
    return "it stays" if count == 1 else "they stay"


def _how(summaries: Sequence[Mapping[str, Any]], *, is_union: bool) -> str:
    """Clause on what the ε of several runs is, and on what it is not."""
    if is_union:
        return f"all their releases as one; the sum of their ε is {epsilon_text(_sums_of(summaries)[0])}"
    if (union := _union_of(summaries)) is not None:
        epsilon_of_all, delta = union
        return f"the sums of theirs; all their releases as one cost {epsilon_text(epsilon_of_all)} at δ = {delta:.3g}"
    return "the sums of theirs"


def cost_together(summaries: Sequence[Mapping[str, Any]]) -> tuple[float, float, bool]:
    """ε and δ of private runs on the same data, and True if they are those of all their releases as one.

    Both hold where all releases are known: all of them as one at the runs' δ, and the sums of ε and of δ. The smaller ε
    is given.

    Args:
        summaries: summaries of the runs, each with ``epsilon`` and ``delta``, and with ``releases``, pairs of a
            release's keys and its count, where they are known.
    """
    sums = _sums_of(summaries)
    union = _union_of(summaries)
    if union is None or sums[0] < union[0]:
        return (*sums, False)
    return (*union, True)


def _sums_of(summaries: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Sum of the runs' ε, and that of their δ."""
    sum_of_epsilons = math.fsum(summary["epsilon"] for summary in summaries)
    return sum_of_epsilons, math.fsum(summary["delta"] for summary in summaries)


def _union_of(summaries: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """ε and δ of all releases as one; None where the runs have several δ, or some releases are not known."""
    deltas = {summary["delta"] for summary in summaries}
    if len(deltas) > 1 or not all(summary.get("releases") for summary in summaries):
        return None
    delta = deltas.pop()
    counts = [{Release.from_keys(keys): count for keys, count in summary["releases"]} for summary in summaries]
    return epsilon(PrivacyPlan.union(*counts), delta), delta
