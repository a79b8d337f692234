"""Speeds, bytes and accuracies of codecs as tables."""

from collections.abc import Iterator

from report import Report, Table, digits

COMPRESSION = "<!-- compression: begin -->", "<!-- compression: end -->"


def tables(report: Report) -> Iterator[Table]:
    """All tables."""
    if report["speeds"]:
        yield _speeds(report)
    if report["mnist"].keys() - report["speeds"].keys():
        yield _accuracies(report)


def _speeds(report: Report) -> Table:
    lengths = [one["numbers"] for one in next(iter(report["speeds"].values()))]
    head = ["", "bits", "ratio", "points lost", *(f"{length:,}" for length in lengths), "pays below"]
    rows = []
    for name, found in report["speeds"].items():
        last = found[-1]
        trained = report["mnist"].get(name)
        rows.append(
            [
                name,
                f"{last['bits']:.3g}",
                digits(last["ratio"]),
                f"{trained['points_lost']:.2f}" if trained else "–",
                *(f"{digits(one['encode_gb_s'])} / {digits(one['decode_gb_s'])}" for one in found),
                _bandwidth(last["pays_below_mbit_s"]),
            ]
        )
    copies = [
        digits(max(found[place]["copy_gb_s"] for found in report["speeds"].values())) for place in range(len(lengths))
    ]
    rows.append(["copy", "32", "1", "–", *copies, "–"])
    title = (
        f"GB of float32 a second that one core encodes / decodes, median of {report['repetitions']}, by the length of "
        "the vector; the rest for the longest"
    )
    return Table(title, head, rows)


def _accuracies(report: Report) -> Table:
    rows = [
        [
            name,
            f"{found['accuracy']:.4f}",
            f"{min(found['accuracies']):.4f} – {max(found['accuracies']):.4f}",
            f"{found['points_lost']:.2f}",
            digits(found["times_fewer"]),
        ]
        for name, found in report["mnist"].items()
        if name not in report["speeds"]
    ]
    head = ["", "test accuracy", "least – most", "points lost", "times fewer bytes up"]
    return Table("MNIST, MLP 784-200-10, ten clients, 30 rounds, mean of three seeds", head, rows)


def _bandwidth(megabits_s: float) -> str:
    return f"{digits(megabits_s / 1000)} Gbit/s" if megabits_s >= 1000 else f"{digits(megabits_s)} Mbit/s"
