"""IDX files, written here byte by byte as LeCun's page describes them."""

import gzip
import hashlib
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fed.clients.data import FederatedData
from fed.clients.data.sources.idx import idx, read_idx
from fed.errors import InvalidData

MNIST = Path(__file__).parents[4] / "shared" / "data" / "mnist"

Bytes = NDArray[np.uint8]


def idx_bytes(array: Bytes) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(struct.pack(">i", size) for size in array.shape)
    return header + array.tobytes()


def images(number: int, seed: int = 0, shape: tuple[int, ...] = (28, 28)) -> Bytes:
    return np.random.default_rng(seed).integers(256, size=(number, *shape), dtype=np.uint8)


def labels(number: int) -> Bytes:
    return (np.arange(number) % 10).astype(np.uint8)


def write(folder: Path, part: str, x: Bytes, y: Bytes, ending: str = "") -> None:
    pack = gzip.compress if ending else bytes
    (folder / f"{part}-images-idx{x.ndim}-ubyte{ending}").write_bytes(pack(idx_bytes(x)))
    (folder / f"{part}-labels-idx1-ubyte{ending}").write_bytes(pack(idx_bytes(y)))


@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_any_number_of_dimensions_is_read_back(tmp_path_factory: pytest.TempPathFactory, shape: list[int]) -> None:
    array = images(shape[0], shape=tuple(shape[1:]))
    file = tmp_path_factory.mktemp("idx") / "some-idx-ubyte"
    file.write_bytes(idx_bytes(array))
    np.testing.assert_array_equal(read_idx(file), array)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_two_pairs_are_the_training_and_the_test_set(tmp_path: Path, ending: str) -> None:
    write(tmp_path, "train", images(12), labels(12), ending)
    write(tmp_path, "t10k", images(5, seed=1), labels(5), ending)
    samples = idx(str(tmp_path), test_fraction=0.9)
    assert (samples.inputs.dtype, samples.inputs.shape, samples.targets.dtype) == (
        torch.float32,
        (12, 1, 28, 28),
        torch.int64,
    )
    np.testing.assert_array_equal(samples.inputs[:, 0].numpy(), (images(12) / 255).astype(np.float32))
    assert samples.test is not None
    np.testing.assert_array_equal(samples.test[0][:, 0].numpy(), (images(5, seed=1) / 255).astype(np.float32))
    assert samples.test[1].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("part", ["train", "t10k"])
def test_of_one_pair_the_last_share_is_the_test_set(tmp_path: Path, part: str) -> None:
    write(tmp_path, part, images(10), labels(10), ".gz")
    samples = idx(str(tmp_path), test_fraction=0.3)
    assert samples.test is not None
    assert (samples.targets.tolist(), samples.test[1].tolist()) == ([0, 1, 2, 3, 4, 5, 6], [7, 8, 9])
    assert idx(str(tmp_path), test_fraction=0.0).test is None


def test_colour_images_keep_channels_and_names_may_have_dots(tmp_path: Path) -> None:
    (tmp_path / "train-images.idx4-ubyte").write_bytes(idx_bytes(images(4, shape=(3, 8, 8))))
    (tmp_path / "train-labels.idx1-ubyte").write_bytes(idx_bytes(labels(4)))
    assert idx(str(tmp_path), test_fraction=0.0).inputs.shape == (4, 3, 8, 8)


def refused(folder: Path, loaded: Callable[..., FederatedData]) -> str:
    with pytest.raises(InvalidData) as caught:
        loaded(kind="idx", path=str(folder), clients=2)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("kept_bytes", [0, 3, 4, 15, 16, 8000])
def test_a_truncated_file_is_named_with_what_was_found(
    tmp_path: Path, loaded: Callable[..., FederatedData], ending: str, kept_bytes: int
) -> None:
    write(tmp_path, "train", images(12), labels(12))
    file = tmp_path / "train-images-idx3-ubyte"
    content = file.read_bytes()[:kept_bytes]
    file.unlink()
    (tmp_path / f"train-images-idx3-ubyte{ending}").write_bytes(gzip.compress(content) if ending else content)
    message = refused(tmp_path, loaded)
    assert f"train-images-idx3-ubyte{ending}" in message
    assert "fetch the file again" in message
    if kept_bytes >= 16:
        assert f"must hold {16 + 12 * 28 * 28} bytes, as many as its header says, got {kept_bytes}" in message


@pytest.mark.parametrize("kept_bytes", [0, 5, 20, -9])
def test_a_truncated_archive_is_named(tmp_path: Path, loaded: Callable[..., FederatedData], kept_bytes: int) -> None:
    write(tmp_path, "train", images(12), labels(12), ".gz")
    file = tmp_path / "train-images-idx3-ubyte.gz"
    file.write_bytes(file.read_bytes()[:kept_bytes])
    message = refused(tmp_path, loaded)
    assert str(file) in message
    assert "fetch the file again" in message


@pytest.mark.parametrize(
    ("where", "said"), [(0, "Not a gzipped file"), (10, "Error -3 while decompressing"), (-6, "CRC check failed")]
)
def test_a_corrupt_archive_is_named(
    tmp_path: Path, loaded: Callable[..., FederatedData], where: int, said: str
) -> None:
    write(tmp_path, "train", images(12), labels(12), ".gz")
    file = tmp_path / "train-images-idx3-ubyte.gz"
    content = bytearray(file.read_bytes())
    content[where] ^= 255
    file.write_bytes(content)
    assert f"{file}: cannot be read ({said}" in refused(tmp_path, loaded)


def test_other_damage_is_named(tmp_path: Path, loaded: Callable[..., FederatedData]) -> None:
    whole = idx_bytes(images(12))
    file = tmp_path / "train-images-idx3-ubyte"
    write(tmp_path, "train", images(12), labels(12))
    file.write_bytes(whole + b"\0")
    assert "the file is too long" in refused(tmp_path, loaded)
    file.write_bytes(b"\x89PNG" + whole[4:])
    assert f"{file}: an IDX file of unsigned bytes must begin with bytes 00 00 08" in refused(tmp_path, loaded)
    assert "got 89 50 4e 47" in refused(tmp_path, loaded)
    file.write_bytes(whole[:2] + b"\x0d" + whole[3:])  # floats
    assert "got 00 00 0d 03" in refused(tmp_path, loaded)


def test_missing_and_mismatched_files_are_named(tmp_path: Path, loaded: Callable[..., FederatedData]) -> None:
    assert "there is no such folder" in refused(tmp_path / "nowhere", loaded)
    assert "must hold train-images-idx3-ubyte or t10k-images-idx3-ubyte" in refused(tmp_path, loaded)
    write(tmp_path, "train", images(12), labels(11))
    assert "labels of shape (11,) and images of shape (12, 28, 28)" in refused(tmp_path, loaded)
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    assert "must hold train-labels-idx1-ubyte beside" in refused(tmp_path, loaded)
    write(tmp_path, "train", images(0), labels(0))
    assert "got labels of shape (0,)" in refused(tmp_path, loaded)


def test_a_test_set_of_another_shape_is_refused(tmp_path: Path, loaded: Callable[..., FederatedData]) -> None:
    write(tmp_path, "train", images(12), labels(12))
    write(tmp_path, "t10k", images(5, shape=(8, 8)), labels(5))
    assert "inputs of the test set must be like those of client 0" in refused(tmp_path, loaded)


@pytest.mark.skipif(not MNIST.is_dir(), reason=f"needs {MNIST}")
def test_mnist_is_read_exactly_and_split_in_order(loaded: Callable[..., FederatedData]) -> None:
    pixels = read_idx(MNIST / "t10k-images-idx3-ubyte.gz")
    digits = read_idx(MNIST / "t10k-labels-idx1-ubyte.gz")
    assert hashlib.md5(idx_bytes(pixels)).hexdigest() == "2646ac647ad5339dbf082846283269ea"
    assert hashlib.md5(idx_bytes(digits)).hexdigest() == "27ae3e4e09519cfbb04c329615203637"
    data = loaded(kind="idx", path=str(MNIST), clients=100)
    assert set(data.sizes.values()) == {80}
    assert data.test is not None
    assert data.test[1].tolist() == digits[8000:].tolist()
    assert (data.test[0].shape, data.number_of_classes()) == ((2000, 1, 28, 28), 10)
