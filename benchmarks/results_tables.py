"""Tables of README.md and docs/results.md, each made of the comparisons that it reads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from compared import Compared, Row, bytes_of, cells, markdown, mean_of, share_of, time_of, to_target
from orderings import mnist, partial_work, similarity
from privacy_curves import privacy, privacy_picture
from tcga_table import tcga

from fed.quantities import count_text, mean_text

__all__ = ["RESULTS", "ResultTable"]

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS_PAGE = ROOT / "docs" / "results.md"
PRIVACY_PAGE = ROOT / "docs" / "privacy.md"
ACCURACY = mean_of("final_test_accuracy")
OWN_ACCURACY = mean_of("client_accuracy_mean")


@dataclass(frozen=True)
class ResultTable:
    """Table of a page.

    Args:
        table: function of the comparisons, in their order, that returns the table's text.
        comparisons: names of files in examples/.
        page: file that holds the table, between markers with its name.
        picture: file for a picture; None draws none.
        draw: function of the comparisons that returns the picture as SVG; None for the first comparison's curves.
    """

    table: Callable[..., str]
    comparisons: tuple[str, ...]
    page: Path = RESULTS_PAGE
    picture: Path | None = None
    draw: Callable[..., str] | None = None


def algorithms(digits: Compared, heterogeneous: Compared) -> str:
    """The README's table."""
    papers = (
        ("`fedavg`", _arxiv("McMahan et al. 2017", "1602.05629"), "FedAvg", "FedAvg"),
        ("`fedprox`", _arxiv("Li et al. 2020", "1812.06127"), "FedProx", "FedProx"),
        ("`fedavgm`", _arxiv("Hsu et al. 2019", "1909.06335"), "FedAvgM", None),
        ("`bmuf`, Nesterov", "Chen & Huo, ICASSP 2016", "BMUF", None),
        ("`scaffold`", _arxiv("Karimireddy et al. 2020", "1910.06378"), None, "SCAFFOLD"),
        ("`fednova`", _arxiv("Wang et al. 2020", "2007.07481"), None, "FedNova"),
        ("`feddyn`", _arxiv("Acar et al. 2021", "2111.04263"), None, "FedDyn"),
        ("`fedadam`", _arxiv("Reddi et al. 2021", "2003.00295"), None, "FedAdam"),
        ("`dpsgd`, ring", _arxiv("Lian et al. 2017", "1705.09056"), "D-PSGD, ring", None),
        ("`local`", "the floor: no communication", "Local", None),
        ("`centralized`", "the ceiling: all data in one place", "Centralized", None),
    )
    rows = []
    for kind, paper, on_digits, on_synthetic in papers:
        measured = []
        if on_digits is not None:
            measured.append(f"digits {ACCURACY(digits.rows[on_digits])}")
        if on_synthetic is not None:
            measured.append(f"synthetic {ACCURACY(heterogeneous.rows[on_synthetic])}")
        rows.append([kind, paper, ", ".join(measured)])
    return markdown(["`kind`", "paper", "test accuracy"], rows)


def _arxiv(authors: str, number: str) -> str:
    return f"{authors}, [{number}](https://arxiv.org/abs/{number})"


def digits(found: Compared) -> str:
    """Eight algorithms on digits."""
    labels = {
        "FedAvg": ("`fedavg`", "mean"),
        "FedProx": ("`fedprox`", "mean"),
        "FedAvgM": ("`fedavgm`", "mean"),
        "BMUF": ("`bmuf`, Nesterov", "mean"),
        "D-PSGD, ring": ("`dpsgd`, ring", "mix"),
        "D-PSGD, exponential": ("`dpsgd`, exponential", "mix"),
        "Local": ("`local`", "–"),
        "Centralized": ("`centralized`", "–"),
    }
    texts = (ACCURACY, OWN_ACCURACY, to_target("rounds"), to_target("bytes"))
    rows = [[kind, over, *(text(found.rows[name]) for text in texts)] for name, (kind, over) in labels.items()]
    return markdown(["`kind`", "over", "test accuracy", "peers' own", "rounds to 0.9", "bytes to 0.9"], rows)


def heterogeneous(found: Compared) -> str:
    """Data that differ between clients."""
    labels = {
        "FedAvg": "`fedavg`",
        "FedProx": "`fedprox`, μ = 1",
        "SCAFFOLD": "`scaffold`",
        "FedNova": "`fednova`",
        "FedDyn": "`feddyn`",
        "FedAdam": "`fedadam`",
    }
    as_good_as = found.rows["FedAvg"]["final_test_accuracy"]

    def as_good(row: Row) -> str:
        return str(found.first_round_as_good(row["name"], as_good_as) or "–")

    texts = (ACCURACY, lambda row: f"{row['final_test_loss']:.3f}", as_good, bytes_of("bytes_up", "bytes_down"))
    head = ["", "test accuracy", "test loss", "as good as FedAvg in round", "bytes"]
    return markdown(head, list(cells(found, labels, texts)))


def peers(found: Compared) -> str:
    """Rules of peers beside FedAvg."""
    labels = {
        "FedAvg": "FedAvg",
        "all-reduce": "all-reduce of FedAvg, ring",
        "D-PSGD": "D-PSGD, ring",
        "gradient tracking": "gradient tracking, ring",
        "D², lazy": "D², lazy ring",
        "SGP, directed ring": "SGP, directed ring",
        "SGP, one-peer exponential": "SGP, one-peer exponential",
        "CHOCO, top 10 %": "CHOCO with top-10 %, ring",
        "local": "local",
    }
    texts = (ACCURACY, to_target("rounds"), bytes_of("bytes_up"), OWN_ACCURACY)
    head = ["variant", "test accuracy", "rounds to 0.85", "bytes sent", "clients' own accuracy"]
    return markdown(head, list(cells(found, labels, texts)))


def compression(found: Compared) -> str:
    """Codecs."""
    labels = {
        "uncompressed": "uncompressed",
        "int8": "`int8`",
        "PowerSGD with feedback": "`powersgd`, rank 2, feedback",
        "QSGD 2 bits": "`qsgd`, 2 bits",
        "EDEN 1 bit": "`eden`, 1 bit",
        "sign with feedback": "`sign`, feedback",
        "top-k 2 bits without feedback": "`topk` 1/64 and `two_level`, no feedback",
        "top-k 2 bits with feedback": "`topk` 1/64 and `two_level`, feedback",
        "top-k 2 bits both ways": "the same both ways",
        "STC with feedback": "`stc`, 1/100, feedback",
    }
    most = found.rows["uncompressed"]["bytes_up"]

    def less(row: Row) -> str:
        return "–" if row["bytes_up"] == most else f"{most / row['bytes_up']:.0f} ×"

    up = bytes_of("bytes_up")
    down = bytes_of("bytes_down")
    texts = (ACCURACY, up, less, down, to_target("rounds"), to_target("bytes"))
    head = ["", "test accuracy", "bytes up", "less by", "bytes down", "rounds to 0.9", "bytes to 0.9"]
    return markdown(head, list(cells(found, labels, texts)))


def secure(found: Compared) -> str:
    """Secure aggregation."""
    labels = {
        "plain": "plain",
        "32 bits": "32 bits",
        "16 bits": "16 bits",
        "16 bits, rotation": "16 bits, `rotation`",
        "16 bits, one in ten": "16 bits, `randomk` 1/10",
        "32 bits, clients fail": "32 bits, a tenth of the tasks fails",
    }
    texts = (ACCURACY, to_target("rounds"), bytes_of("bytes_up"), bytes_of("bytes_down"))
    head = ["", "test accuracy", "rounds to 0.9", "bytes up", "bytes down"]
    return markdown(head, list(cells(found, labels, texts)))


def attacks(found: Compared) -> str:
    """Rules by attacks."""
    rules = {
        "fedavg": "`fedavg`",
        "median": "`median`",
        "trimmed_mean(attackers=8)": "`trimmed_mean`",
        "multi_krum(attackers=8)": "`multi_krum`",
        "geometric_median": "`geometric_median`",
        "centered_clipping": "`centered_clipping`, radius 1",
    }
    kinds = {"no attack": "null", "`sign_flip`": "sign_flip(fraction=0.2)", "`alie`": "alie(fraction=0.2)"}
    rows = [
        [label, *(ACCURACY(found.rows[f"algorithm={rule}, adversaries={kind}"]) for kind in kinds.values())]
        for rule, label in rules.items()
    ]
    return markdown(["test accuracy", *kinds], rows)


def personal(found: Compared) -> str:
    """Models of the clients' own."""
    labels = {
        "FedAvg": "`fedavg`, one model for all",
        "FedPer": "`fedper`",
        "FedRep": "`fedrep`",
        "Ditto": "`ditto`",
        "Local": "`local`, all clients train in every round",
    }

    def worst(row: Row) -> str:
        return mean_text(row["client_accuracy_worst_decile"], None)

    texts = (OWN_ACCURACY, worst, bytes_of("bytes_up", "bytes_down"))
    head = ["accuracy on own data", "mean ± deviation over clients", "worst tenth of the clients", "bytes"]
    return markdown(head, list(cells(found, labels, texts)))


def stragglers(found: Compared) -> str:
    """Kinds of rounds by simulated time."""
    labels = {
        "Synchronous": "synchronous, waits for all ten",
        "Over-selection, deadline": "13 selected for 10, deadline of 6 s",
        "FedBuff": "`buffered` (FedBuff), 10 of 20 at a time",
        "FedAsync": "`asynchronous` (FedAsync), 10 at a time",
        "Bounded staleness": "`bounded_staleness`, all the time",
    }

    def staleness(row: Row) -> str:
        return count_text(row["staleness"]) if row["staleness"] else "–"

    times = to_target("virtual_s"), time_of("virtual_s")
    texts = (ACCURACY, *times, share_of("late"), staleness, share_of("idle_share"))
    head = ["", "test accuracy", "simulated time to 0.85", "in all", "late", "staleness", "idle"]
    return markdown(head, list(cells(found, labels, texts)))


RESULTS: Mapping[str, ResultTable] = {
    "algorithms": ResultTable(algorithms, ("digits", "heterogeneous"), README),
    "digits": ResultTable(digits, ("digits",), picture=ROOT / "docs" / "digits.svg"),
    "heterogeneous": ResultTable(heterogeneous, ("heterogeneous",)),
    "peers": ResultTable(peers, ("peers",)),
    "compression": ResultTable(compression, ("compression",)),
    "secure": ResultTable(secure, ("secure",)),
    "attacks": ResultTable(attacks, ("attacks",)),
    "personal": ResultTable(personal, ("personal",)),
    "stragglers": ResultTable(stragglers, ("stragglers",)),
    "partial_work": ResultTable(partial_work, ("partial_work",)),
    "mnist": ResultTable(mnist, ("mnist",)),
    "similarity": ResultTable(similarity, ("similarity",)),
    "tcga": ResultTable(tcga, ("tcga",)),
    "privacy": ResultTable(
        privacy,
        ("privacy", "privacy_mnist"),
        PRIVACY_PAGE,
        picture=ROOT / "docs" / "privacy.svg",
        draw=privacy_picture,
    ),
}
"""Name → table."""
