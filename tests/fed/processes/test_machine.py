"""Settings of a process: what the garbage collector looks at."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress

import pytest

from fed.processes.machine import frozen_objects


class Ring:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def thawed() -> Iterator[None]:
    """The collector looks at all objects, until the test ends."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("thawed")
def test_the_collector_leaves_out_what_was_there_before() -> None:
    before = weakref.ref(Ring())
    with suppress(ValueError), frozen_objects():
        within = weakref.ref(Ring())
        gc.collect()
        assert before() is not None
        assert within() is None
        raise ValueError
    gc.collect()
    assert before() is None


@pytest.mark.usefixtures("thawed")
def test_what_was_frozen_before_stays_frozen() -> None:
    gc.freeze()
    with frozen_objects(), frozen_objects():
        pass
    assert gc.get_freeze_count()
