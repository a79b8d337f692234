"""Exact sums and robust rules at a million parameters, each in turn with the operation that limits it, and byzfl.

The limit of an exact sum is the sum itself: each vector added to another in float64. The limit of rules by distances is
one product of the matrix of all messages with its transpose, in float64. Memory is the most beside the messages.
"""

import importlib
import importlib.util
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

import numpy as np
import torch
from machine import memory_mb
from ratios import Ratio
from report import Table
from rich.console import Console

from fed.aggregators.robust.centres import Median, TrimmedMean
from fed.aggregators.robust.distances import Bulyan, GeometricMedian, Krum, MultiKrum
from fed.aggregators.transforms import Messages, Reducer
from fed.vectors.reduction import WeightedMean

PARAMETERS = 10**6
MESSAGES = 100
ATTACKERS = 20
VECTORS = 16
PRODUCT = "matrix product in float64"
SUM_MS = 5.0
SUM_TYPES = (torch.float32, torch.float64)
MOST_TIMES = {("krum", PRODUCT): 1.3, ("geometric_median", PRODUCT): 3.0, ("bulyan", "krum"): 2.5}
RULES: dict[str, Reducer] = {
    "krum": Krum(attackers=ATTACKERS),
    "multi_krum": MultiKrum(attackers=ATTACKERS),
    "bulyan": Bulyan(attackers=ATTACKERS),
    "geometric_median": GeometricMedian(attackers=ATTACKERS),
    "median": Median(attackers=ATTACKERS),
    "trimmed_mean": TrimmedMean(attackers=ATTACKERS),
}
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "krum": ("Krum", {"f": ATTACKERS}),
    "geometric_median": ("GeometricMedian", {}),
    "median": ("Median", {}),
}
_PEAKS = Path("/proc/self/clear_refs")


def measure_sums(repetitions: int) -> list[dict[str, Any]]:
    """Milliseconds in which a client's vector is added to an exact mean, and to a vector of float64."""
    return [_measure_sum(dtype, repetitions) for dtype in SUM_TYPES]


def _measure_sum(dtype: torch.dtype, repetitions: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    vectors = [0.01 * torch.randn(PARAMETERS, generator=generator, dtype=dtype) for _ in range(VECTORS)]
    exact = WeightedMean(PARAMETERS)
    plain_P = torch.zeros(PARAMETERS, dtype=torch.float64)
    for vector_P in vectors[:2]:  # the first is kept as it is, and the second makes the lanes
        exact.add(vector_P, 7)
    found: list[tuple[float, float]] = []
    for _ in range(repetitions):
        ours_s = _duration_s(lambda: [exact.add(vector_P, 7) for vector_P in vectors])
        found.append((ours_s, _duration_s(lambda: [plain_P.add_(vector_P) for vector_P in vectors])))
    ours_ms, plain_ms = ([1e3 * one / VECTORS for one in column] for column in zip(*found, strict=True))
    medians = {"exact_ms": statistics.median(ours_ms), "plain_ms": statistics.median(plain_ms)}
    return {"type": str(dtype).removeprefix("torch."), **medians, "times_plain": Ratio.of(ours_ms, plain_ms)}


def measure_rules(repetitions: int, console: Console) -> list[dict[str, Any]]:
    """Seconds of each rule on a fifth of attackers, of byzfl's of that name, and of one matrix product."""
    generator = torch.Generator().manual_seed(0)
    messages_SM = 0.01 * torch.randn(MESSAGES, PARAMETERS, generator=generator, dtype=torch.float64)
    messages_SM[:ATTACKERS] += 1.0
    messages = Messages(messages_SM, torch.ones(MESSAGES, dtype=torch.float64))
    byzfl = _byzfl()
    runs: dict[str, Callable[[], object]] = {PRODUCT: lambda: messages_SM @ messages_SM.T}
    for name, rule in RULES.items():
        runs[name] = partial(rule.reduce, None, messages, np.random.default_rng(0))
        if byzfl is not None and name in THEIRS:
            kind, options = THEIRS[name]
            runs[f"byzfl {name}"] = partial(getattr(byzfl, kind)(**options), messages_SM)
    times_s: dict[str, list[float]] = {name: [] for name in runs}
    peaks_mb = {}
    for _ in range(repetitions):
        for name, run in runs.items():
            before_mb = _begin_peak()
            times_s[name].append(_duration_s(run))
            peaks_mb[name] = None if before_mb is None else memory_mb("VmHWM") - before_mb
        console.print(", ".join(f"{name} {found[-1]:.2f} s" for name, found in times_s.items()), style="dim")
    size_mb = messages_SM.nbytes / 1e6
    return [
        {
            "rule": name,
            "seconds": statistics.median(found),
            "times_product": Ratio.of(found, times_s[PRODUCT]),
            "times_krum": Ratio.of(found, times_s["krum"]),
            "theirs_times": Ratio.of(times_s[f"byzfl {name}"], found) if f"byzfl {name}" in times_s else None,
            "beside_messages": None if peaks_mb[name] is None else peaks_mb[name] / size_mb,
        }
        for name, found in times_s.items()
    ]


def tables(sums: Sequence[Mapping[str, Any]], rules: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    """Tables of what was measured."""
    if sums:
        rows = [
            [f"{one['type']}", f"{one['exact_ms']:.2f}", f"{one['plain_ms']:.2f}", _text(one["times_plain"])]
            for one in sums
        ]
        head = ["vectors in", "exact mean, ms", "addition in float64, ms", "ratio"]
        yield Table(f"A client's {PARAMETERS:,} numbers added to a sum; at most {SUM_MS:g} ms are allowed", head, rows)
    if rules:
        columns = "times_product", "times_krum", "theirs_times"
        rows = [
            [
                f"`{one['rule']}`" if one["rule"] in RULES else one["rule"],
                f"{one['seconds']:.2f}",
                *(_text(one[column]) for column in columns),
                "–" if one["beside_messages"] is None else f"{one['beside_messages']:.2f}",
            ]
            for one in rules
        ]
        title = (
            f"Robust rules on {MESSAGES} messages of {PARAMETERS:,} numbers in float64, {ATTACKERS} of them attackers'"
        )
        head = [
            "rule",
            "seconds",
            "times the product",
            "times `krum`",
            "byzfl : fed",
            "memory beside the messages, times theirs",
        ]
        yield Table(title, head, rows)


def over_limits(sums: Sequence[Mapping[str, Any]], rules: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences on what takes longer, or more memory, than it may."""
    found = [
        f"the exact mean of {one['type']} must take at most {SUM_MS:g} ms a client, got {one['exact_ms']:.2f}"
        for one in sums
        if one["exact_ms"] > SUM_MS
    ]
    of_rule = {one["rule"]: one for one in rules}
    for (name, other), most in MOST_TIMES.items():
        ratio = of_rule[name]["times_product" if other == PRODUCT else "times_krum"] if rules else (0.0,)
        if ratio[0] > most:
            found.append(f"{name} must take at most {most:g} times {other}, got {ratio[0]:.2f}")
    for one in rules:
        if one["theirs_times"] is not None and one["theirs_times"][0] < 1:
            found.append(f"{one['rule']} must be ahead of byzfl, got {one['theirs_times'][0]:.2f} times its speed")
        if one["rule"] in RULES and one["beside_messages"] is not None and one["beside_messages"] > 1.02:
            found.append(
                f"{one['rule']} may take as much memory as the messages, got {one['beside_messages']:.2f} times"
            )
    return found


def _text(ratio: Sequence[float] | None) -> str:
    return "–" if ratio is None else str(Ratio(*ratio))


def _duration_s(run: Callable[[], object]) -> float:
    began_s = perf_counter()
    run()
    return perf_counter() - began_s


def _begin_peak() -> float | None:
    """Forget the most memory that this process has held; returns what it holds, None where the system does not say."""
    if not _PEAKS.exists():
        return None
    _PEAKS.write_text("5")
    return memory_mb("VmRSS")


def _byzfl() -> ModuleType | None:
    """Aggregators of byzfl, where it is installed; its ``__init__`` asks for torchvision, which they do not need."""
    spec = importlib.util.find_spec("byzfl")
    if spec is None or spec.submodule_search_locations is None:
        return None
    package = ModuleType("byzfl")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["byzfl"] = package
    return importlib.import_module("byzfl.aggregators")
