import os

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR, GCM

from fed.secure_aggregation import masks
from fed.secure_aggregation.masks import Mask, add_masks


def test_keystream_is_the_standards() -> None:
    """NIST's GCM test case 14: a key of zeros, a nonce of zeros, a block of zeros."""
    lanes = np.zeros(2, np.uint64)
    add_masks(lanes, [Mask(bytes(32), is_added=True)])
    assert lanes.astype("<u8").tobytes().hex() == "cea7403d4d606b6e074ec5d3baf39d18"


@pytest.mark.parametrize("mode", [CTR, GCM])
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("numbers", [1, 5, 65_537, 300_001])
def test_masks_are_keystreams_in_either_mode(
    mode: type, dtype: type, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "keystream_mode", lambda: mode)
    keys = [os.urandom(32) for _ in range(3)]
    lanes = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, numbers, dtype, endpoint=True)
    expected = lanes.copy()
    for key, sign in zip(keys, (1, -1, 1), strict=True):
        # from counter 2 on, in one call
        encryptor = Cipher(AES(key), CTR(bytes(15) + b"\2")).encryptor()
        stream: np.ndarray = np.frombuffer(encryptor.update(bytes(lanes.nbytes)), dtype)
        expected = expected + stream if sign > 0 else expected - stream
    add_masks(lanes, [Mask(key, sign > 0) for key, sign in zip(keys, (1, -1, 1), strict=True)])
    assert np.array_equal(lanes, expected)


def test_more_keys_than_open_contexts_are_all_used(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [os.urandom(32) for _ in range(7)]
    lanes, again = np.zeros(9, np.uint32), np.zeros(9, np.uint32)
    add_masks(lanes, (Mask(key, is_added=True) for key in keys))
    monkeypatch.setattr(masks, "_MOST_CONTEXTS", 2)
    add_masks(again, (Mask(key, is_added=True) for key in keys))
    assert np.array_equal(lanes, again)
    add_masks(lanes, (Mask(key, is_added=False) for key in keys))
    assert not lanes.any()


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_threads_share_masks_and_the_sum_is_the_same(threads: int) -> None:
    masks = [Mask(os.urandom(32), number % 3 > 0) for number in range(5)]
    lanes, again = (np.arange(70_000, dtype=np.uint32) for _ in range(2))
    add_masks(lanes, masks)
    add_masks(again, masks, threads=threads)
    assert np.array_equal(lanes, again)
