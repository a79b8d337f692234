"""Concordance indices on TCGA-BRCA, beside the published ones."""

import statistics
from collections.abc import Mapping, Sequence

from compared import Compared, markdown

from fed.quantities import mean_text
from fed.reports.summary import spread

__all__ = ["PUBLISHED", "tcga"]

PUBLISHED: Mapping[str, tuple[float, ...]] = {
    "pooled": (0.796, 0.780, 0.610, 0.782, 0.552),
    "FedAvg": (0.803, 0.423, 0.808, 0.829, 0.814),
    "FedProx": (0.776, 0.428, 0.796, 0.808, 0.775),
    "SCAFFOLD": (0.697, 0.658, 0.751, 0.709, 0.682),
    "FedAdam": (0.838, 0.821, 0.856, 0.862, 0.834),
    "FedAdagrad": (0.831, 0.837, 0.824, 0.832, 0.844),
    "local": (0.696, 0.650, 0.687, 0.660, 0.662),
}
"""C-indices on the pooled test set with seeds 42 to 46: the rows of 100 local steps in FLamby's repository,
flamby/results/results_benchmark_fed_tcga_brca; local: the mean of its six centres' models."""


def tcga(found: Compared) -> str:
    """Ours and the published ones, in the order of our medians."""
    rows = []
    for name, published in PUBLISHED.items():
        rows.append((found.finals(name, "final_test_c_index"), name, published))
    rows.sort(key=lambda row: -statistics.median(row[0]))
    lines = [[name, *_cells(ours), *_cells(published)] for ours, name, published in rows]
    head = ["median", "mean ± deviation", "least – most"]
    return markdown(["", *head, *(f"published {cell}" for cell in head)], lines)


def _cells(values: Sequence[float]) -> tuple[str, str, str]:
    return f"{statistics.median(values):.3f}", mean_text(*spread(values)), f"{min(values):.3f} – {max(values):.3f}"
