"""Cheap cryptography for all transcripts of a module."""

from collections.abc import Iterator

import pytest

from tests.fed.secure_aggregation.hostile import ideal


@pytest.fixture(scope="module")
def cheap() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        ideal.use(patch)
        yield
