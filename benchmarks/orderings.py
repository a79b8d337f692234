"""Tables of orderings that papers report: rounds to a target by local work, by partial work, and by similarity."""

from collections.abc import Mapping

from compared import Compared, cells, markdown, mean_of, to_target

__all__ = ["mnist", "partial_work", "similarity"]

PUBLISHED_ROUNDS: Mapping[str, tuple[int, int]] = {
    "FedSGD": (626, 483),
    "E = 1, B = 10": (34, 350),
    "E = 5, B = 10": (20, 229),
}
"""Rounds of a CNN to an accuracy of 0.99 on MNIST, IID and not (McMahan et al. 2017, 1602.05629, table 2)."""


def mnist(found: Compared) -> str:
    """Rounds to the target by local work, beside McMahan's."""
    rounds = to_target("rounds")
    rows = [
        [name, *(rounds(found.rows[f"{name}, {split}"]) for split in ("IID", "shards")), *map(str, published)]
        for name, published in PUBLISHED_ROUNDS.items()
    ]
    return markdown(["", "IID", "not IID", "published, IID", "published, not IID"], rows)


def partial_work(found: Compared) -> str:
    """Accuracies by what becomes of partial work."""
    labels = {
        "dropped": "FedAvg, tasks that were cut off are dropped",
        "FedAvg": "FedAvg, their partial updates count",
        "FedProx": "FedProx with μ = 1, likewise",
    }
    return markdown(["", "test accuracy"], list(cells(found, labels, [mean_of("final_test_accuracy")])))


def similarity(found: Compared) -> str:
    """Rounds to the target by algorithm, local epochs and similarity."""
    rounds = to_target("rounds")
    shares = (0, 10, 100)
    rows = [
        [f"`{kind}`", str(epochs), *(rounds(found.rows[_cell(kind, epochs, share)]) for share in shares)]
        for kind in ("fedavg", "scaffold")
        for epochs in (1, 5, 10)
    ]
    return markdown(["`kind`", "local epochs", *(f"{share} % similarity" for share in shares)], rows)


def _cell(kind: str, epochs: int, share: int) -> str:
    """Name of a variant in examples/similarity.yaml."""
    return f"algorithm={kind}, local.epochs={epochs}, data.partition=similarity(percent={share})"
