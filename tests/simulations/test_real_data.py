"""What the framework promises on real data."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import fed

ROOT = Path(__file__).resolve().parents[2]
MNIST = ROOT.parent / "shared" / "data" / "mnist"


@pytest.mark.long
def test_on_digits_averaging_passes_090_and_lies_between_floor_and_ceiling() -> None:
    comparison = fed.Comparison.load(ROOT / "examples" / "digits.yaml")
    result = fed.compare(comparison, jobs=2)
    accuracy = {row["algorithm"] + row["name"]: row["final_test_accuracy"]["mean"] for row in result.rows}
    over_mean = [value for name, value in accuracy.items() if name.startswith(("fedavg", "fedprox", "fedavgm", "bmuf"))]
    assert len(over_mean) == 4
    assert min(over_mean) > 0.90
    [ceiling] = [value for name, value in accuracy.items() if name.startswith("centralized")]
    [floor] = [value for name, value in accuracy.items() if name.startswith("local")]
    assert max(accuracy.values()) == ceiling
    assert min(accuracy.values()) == floor


@pytest.mark.long
@pytest.mark.skipif(not MNIST.is_dir(), reason="MNIST's files are not beside this checkout")
def test_on_mnist_fedavg_passes_095_within_20_rounds() -> None:
    class Enough(Exception):
        pass

    class Watch:
        def begin(self, expectation: object) -> None:
            assert expectation is not None

        def round(self, line: Mapping[str, Any]) -> None:
            if line["test_accuracy"] > 0.95:
                raise Enough

    experiment = fed.Experiment(
        data={"kind": "idx", "path": str(MNIST), "clients": 100},
        model={"kind": "cnn"},
        local={"lr": 0.1, "batch_size": 10, "epochs": 5},
        rounds={"count": 20, "cohort": 10},
    )
    with pytest.raises(Enough):
        fed.simulate(experiment, observer=Watch())
