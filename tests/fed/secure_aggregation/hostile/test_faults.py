"""Each fault that is put back is found."""

from collections.abc import Iterator

import pytest

from tests.fed.secure_aggregation.hostile import world
from tests.fed.secure_aggregation.hostile.faults import FAULTS
from tests.fed.secure_aggregation.hostile.play import play
from tests.thinned import thinned

_SEEDS = 400  # the slowest is found by the fiftieth


@pytest.fixture(autouse=True)
def _thresholds_anew() -> Iterator[None]:
    world.lowest_threshold.cache_clear()
    yield
    world.lowest_threshold.cache_clear()


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize("name", thinned(FAULTS, quick=9))
def test_each_fault_is_found_by_its_strategies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    fault.put_back(monkeypatch)
    assert any(
        fault.shows in finding
        for seed in range(_SEEDS)
        for finding in play(seed, strategies=fault.strategies, settings=fault.settings).findings
    )
