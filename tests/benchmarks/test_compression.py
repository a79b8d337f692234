"""The benchmark of codecs measures what it says, and what it trains keeps its accuracy."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
MNIST = ROOT.parent / "shared" / "data" / "mnist"


@pytest.fixture
def compression(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("compression")


def measured(compression: Any, output: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["compression.py", "--output", str(output), *options])
    assert compression.main() == 0
    report: dict[str, Any] = json.loads(output.read_text())
    return report


def test_both_ways_take_as_long_at_the_bandwidth_told(compression: Any) -> None:
    numbers, size_bytes, encode_s, decode_s = 1000, 300, 0.25, 0.5
    bits_s = 1e6 * compression.rates(numbers, size_bytes, encode_s, decode_s, 1.0)["pays_below_mbit_s"]
    assert 8 * 4 * numbers / bits_s == pytest.approx(8 * size_bytes / bits_s + encode_s + decode_s)


def test_each_chain_is_measured_and_trained(compression: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = "--chains", "int8,topk + two_level + ef", "--numbers", "1024", "--repetitions", "1", "--no-data"
    report = measured(compression, tmp_path / "compression.json", monkeypatch, *options)
    assert report["mnist"] == {}
    ((int8,), (sparse,)) = report["speeds"].values()
    assert (int8["bytes"], int8["bits"]) == (1 + 1024 + 4, 8 * 1029 / 1024)
    assert sparse["ratio"] > 100
    assert all(one[key] > 0 for one in (int8, sparse) for key in one)


def test_what_falls_short_is_said(compression: Any) -> None:
    speed = {"numbers": 10**7, "encode_gb_s": 0.5, "decode_gb_s": 2.0}
    report = {"speeds": {"sign": [speed]}, "mnist": {"int8": {"points_lost": 0.31, "times_fewer": 3.99}}}
    assert compression.shortfalls(report) == [
        "sign must encode at least 1 GB/s of 10 million numbers, got 0.50",
        "int8 must come within 0.3 points of no codec, got 0.31",
    ]


@pytest.mark.long
@pytest.mark.skipif(not MNIST.is_dir(), reason="MNIST is not there")
def test_mnist_loses_little_to_codecs(compression: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chains = "int8,sign + ef,topk + two_level + ef,DiLoCo + topk + two_level + ef"
    report = measured(
        compression, tmp_path / "compression.json", monkeypatch, "--chains", chains, "--numbers", "--data", str(MNIST)
    )
    assert list(report["mnist"]) == ["no codec", "DiLoCo", *chains.split(",")]
