import os
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fed.errors import InvalidPayload
from fed.secure_aggregation.shamir import SHARE_BYTES, recover, share

_PRIME = 2**256 + 297


@given(st.binary(min_size=32, max_size=32), st.integers(1, 6), st.integers(0, 3))
def test_every_set_of_t_shares_recovers(secret: bytes, threshold: int, more: int) -> None:
    count = threshold + more
    shares = share(secret, threshold, count, os.urandom)
    assert {len(one) for one in shares} == {SHARE_BYTES}
    for size in range(threshold, count + 1):
        for points in combinations(range(1, count + 1), size):
            assert recover({point: shares[point - 1] for point in points}, count) == secret


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_fewer_shares_fit_every_secret(secret: bytes, guess: bytes) -> None:
    """Each other secret has coefficients that give the same two shares, where three are needed."""
    shares = share(secret, 3, 5, os.urandom)
    # (y − s)/x = a₁ + a₂x at the points 2 and 4
    at_2, at_4 = (
        (int.from_bytes(shares[point - 1], "big") - int.from_bytes(guess, "big")) * pow(point, -1, _PRIME) % _PRIME
        for point in (2, 4)
    )
    second = (at_4 - at_2) * pow(2, -1, _PRIME) % _PRIME
    first = (at_2 - 2 * second) % _PRIME
    drawn = first.to_bytes(48, "big") + second.to_bytes(48, "big")
    again = share(guess, 3, 5, lambda count: drawn[:count])
    assert (again[1], again[3]) == (shares[1], shares[3])
    assert (again == shares) == (guess == secret)


def _through(values: dict[int, int], at: int) -> int:
    """Lagrange's interpolation as the textbook has it."""
    total = 0
    for i, value in values.items():
        factor = 1
        for j in values:
            if j != i:
                factor = factor * (at - j) * pow(i - j, -1, _PRIME) % _PRIME
        total += factor * value
    return total % _PRIME


def test_recovery_is_lagranges_interpolation() -> None:
    shares = share(os.urandom(32), 4, 9, os.urandom)
    chosen = {point: shares[point - 1] for point in (1, 3, 4, 7, 9)}
    textbook = _through({point: int.from_bytes(one, "big") for point, one in chosen.items()}, 0)
    assert recover(chosen, 9) == textbook.to_bytes(32, "big")


def test_shares_of_one_secret_differ_each_time() -> None:
    assert share(bytes(32), 2, 3, os.urandom) != share(bytes(32), 2, 3, os.urandom)
    assert share(bytes(32), 1, 2, os.urandom) == [bytes(33)] * 2  # a polynomial of degree 0


def test_what_is_no_secret_is_refused() -> None:
    with pytest.raises(InvalidPayload, match="one secret"):
        recover({1: (2**256 + 5).to_bytes(33, "big")}, 1)
