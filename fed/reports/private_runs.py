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
        alone = epsilon_text(math.fsum(summary["epsilon"] for summary in private))
        how = f"all their releases as one; the sum of their ε is {alone}" if is_union else "the sums of theirs"
        note = f"Privacy: {cost} for those whose data are in all of the {len(private)} private runs ({how})."
    others = len(summaries) - len(private)
    if not others:
        return note
    return f"{note} {counted(others, 'other run')} promised nothing: ε holds only while {_it(others)} unpublished."


def _it(count: int) -> str:
    return "it stays" if count == 1 else "they stay"


def cost_together(summaries: Sequence[Mapping[str, Any]]) -> tuple[float, float, bool]:
    """ε and δ of private runs on the same data, and True if all their releases are known and counted as one.

    Args:
        summaries: summaries of the runs, each with ``epsilon`` and ``delta``, and with ``releases``, pairs of a
            release's keys and its count, where they are known.
    """
    deltas = {summary["delta"] for summary in summaries}
    if len(deltas) == 1 and all(summary.get("releases") for summary in summaries):
        delta = deltas.pop()
        counts = [{Release.from_keys(keys): count for keys, count in summary["releases"]} for summary in summaries]
        return epsilon(PrivacyPlan.union(*counts), delta), delta, True
    sum_of_epsilons = math.fsum(summary["epsilon"] for summary in summaries)
    return sum_of_epsilons, math.fsum(summary["delta"] for summary in summaries), False
