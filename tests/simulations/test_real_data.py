"""What the framework promises on real data; of digits, see test_compare.py."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import fed

ROOT = Path(__file__).resolve().parents[2]
MNIST = ROOT.parent / "shared" / "data" / "mnist"


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
