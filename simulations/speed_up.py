"""Speed-up by worker processes, as the parts of a run let it be expected: the rule of ``workers: auto``."""

from dataclasses import dataclass

__all__ = ["RunTimes"]

_START_S = 5.0
"""Seconds until workers are at work, where PyTorch must be loaded for them; 11 were seen on a busy machine."""

_MARGIN = 1.1
"""Least expected speed-up, for a few steps foretell a whole run no better."""


@dataclass(frozen=True, kw_only=True)
class RunTimes:
    r"""Seconds of a run's parts on this machine, measured or estimated before it begins.

    A work item is one group's training. One process takes

    .. math:: T_0 = R n (t + m) + E

    With w workers beside the main process, on c cores, a run ends after :math:`T_w` at most:

    .. math::
        T_w = S + \max \{ R n (m + s), \;
        R ((n / w + 1 - 1 / w) (t + s) + m + s) + E / \min(w, e), \;
        (R n (t + m + 2 s) + E) / c \}

    The first bound is the main process, which sends every item and takes every result. The second is the worker that
    ends last, by Graham's bound for items that all take t; of unequal ones, whose mean is t, the last may take longer.
    The third is the cores. S are the seconds until workers are at work. What the main process does between rounds is
    the same in all of them, and is left out.

    Workers pay where :math:`T_0 \ge 1.1 \, T_w`. From :math:`w = n (t + s) / n (m + s)` on more of them change nothing.

    Args:
        rounds: R, number of times that as many clients train as in a round.
        items: n, number of items of a round, at least 1.
        item_s: t, seconds of an item's work, the mean of a round's items.
        main_s: m, seconds of the main process for an item and its result.
        sending_s: s, seconds of an item's way to a worker and of its result's way back, which both ends spend.
        evaluation_s: E, seconds of all evaluations of the run.
        evaluation_items: e, number of items of an evaluation, at least 1.

    Example:
        >>> mnist = RunTimes(rounds=100, items=4, item_s=0.1, main_s=1e-3, sending_s=5e-4)
        >>> round(mnist.alone_s), round(mnist.with_workers_s(2, cores=2))
        (40, 30)
        >>> mnist.workers(most=2, cores=2)
        2

    Reference:
        Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17, 1969, theorem 1.
    """

    rounds: float
    items: int
    item_s: float
    main_s: float
    sending_s: float
    evaluation_s: float = 0.0
    evaluation_items: int = 1

    @property
    def alone_s(self) -> float:
        """T₀, seconds of the run in one process."""
        return self.rounds * self.items * (self.item_s + self.main_s) + self.evaluation_s

    def with_workers_s(self, workers: int, cores: int) -> float:
        """T_w, the most seconds that the run takes with workers.

        Args:
            workers: w, number of workers, at least 1.
            cores: c, number of cores that the machine has for them and the main process.
        """
        sent_s = self.main_s + self.sending_s
        done_s = self.item_s + self.sending_s
        of_main_s = self.rounds * self.items * sent_s
        waves = self.items / workers + 1 - 1 / workers
        scored_s = self.evaluation_s / min(workers, self.evaluation_items)
        of_last_s = self.rounds * (waves * done_s + sent_s) + scored_s
        of_cores_s = (self.rounds * self.items * (sent_s + done_s) + self.evaluation_s) / cores
        return _START_S + max(of_main_s, of_last_s, of_cores_s)

    def workers(self, most: int, cores: int) -> int:
        """Number of workers with which the run ends soonest, the fewest of several; 0 where none pay.

        Args:
            most: largest number of workers.
            cores: number of cores.
        """
        counts = range(2, most + 1)
        best = min(counts, key=lambda workers: self.with_workers_s(workers, cores), default=0)
        if not best or self.alone_s < _MARGIN * self.with_workers_s(best, cores):
            return 0
        return best
