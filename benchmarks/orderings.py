"""Tables of orderings that papers report: rounds to a target by local work, by partial work, and by similarity."""

from collections.abc import Mapping

from compared import Compared, cells, mean_of, to_target
from report import Table

__all__ = ["mnist", "partial_work", "similarity"]

PUBLISHED_ROUNDS: Mapping[str, tuple[int, int]] = {
    "FedSGD": (626, 483),
    "E = 1, B = 10": (34, 350),
    "E = 5, B = 10": (20, 229),
    "E = 20, B = 10": (18, 173),
}
"""Rounds of a CNN to an accuracy of 0.99 on MNIST, IID and not (McMahan et al. 2017, 1602.05629, table 2)."""


def mnist(found: Compared) -> Table:
    """Rounds to the target by local work, beside McMahan's."""
    rounds = to_target("rounds")
    rows = [
        [name, *(rounds(found.rows[f"{name}, {split}"]) for split in ("IID", "shards")), *map(str, published)]
        for name, published in PUBLISHED_ROUNDS.items()
    ]
    return Table("", ["", "IID", "not IID", "published, IID", "published, not IID"], rows)


def partial_work(found: Compared) -> Table:
    """Accuracies by what becomes of partial work."""
    labels = {
        "dropped": "FedAvg, tasks that were cut off are dropped",
        "FedAvg": "FedAvg, their partial updates count",
        "FedProx": "FedProx with μ = 1, likewise",
    }
    return Table("", ["", "test accuracy"], list(cells(found, labels, [mean_of("final_test_accuracy")])))


def similarity(found: Compared) -> Table:
    """Rounds to the target by similarity, algorithm and local epochs."""
    rounds = to_target("rounds")
    names = dict.fromkeys(name.rpartition(", ")[0] for name in found.rows)
    shares = list(dict.fromkeys(name.rpartition(", ")[2] for name in found.rows))
    rows = [[name, *(rounds(found.rows[f"{name}, {share}"]) for share in shares)] for name in names]
    return Table("", ["rounds to 0.8", *shares], rows)
