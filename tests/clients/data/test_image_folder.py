"""Images in files, a folder a class: values, numbers of classes, sizes, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fed.clients.data import FederatedData
from fed.clients.data.held import SamplesOnDemand, whole
from fed.clients.data.sources.image_folder import image_folder
from fed.errors import InvalidData

DRAW = np.random.default_rng(0)


def save(file: Path, height: int = 4, width: int = 5, channels: int = 3, draw: np.random.Generator = DRAW) -> Any:
    """Pixels of an image that is saved."""
    pixels = draw.integers(256, size=(height, width, channels), dtype=np.uint8)
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels if channels > 1 else pixels[:, :, 0]).save(file)
    return pixels


def test_pixels_and_classes_are_those_of_files_in_order(tmp_path: Path) -> None:
    saved = [save(tmp_path / name) for name in ("cat/b.png", "cat/c/a.png", "dog/a.bmp")]
    (tmp_path / "dog" / "notes.txt").write_text("no image")
    (tmp_path / ".hidden").mkdir()
    samples = image_folder(str(tmp_path))
    assert samples.inputs.dtype == torch.float32
    expected = np.stack(saved).astype(np.float32) / 255
    np.testing.assert_array_equal(samples.inputs.movedim(1, 3).numpy(), expected)
    assert samples.targets.tolist() == [0, 0, 1]
    assert (samples.classes, samples.names.labels) == (2, ("cat", "dog"))


def test_folders_train_and_test_are_both_sets(tmp_path: Path) -> None:
    for name in ("train/a/1.png", "train/b/1.png", "test/b/2.png"):
        save(tmp_path / name)
    samples = image_folder(str(tmp_path))
    assert samples.targets.tolist() == [0, 1]
    assert samples.test is not None
    assert samples.test[1].tolist() == [1]


def test_a_node_without_a_class_numbers_classes_as_others(tmp_path: Path) -> None:
    save(tmp_path / "dog" / "1.png")
    assert image_folder(str(tmp_path)).targets.tolist() == [0]
    samples = image_folder(str(tmp_path), classes=["cat", "dog", "bird"])
    assert (samples.targets.tolist(), samples.classes) == ([1], 3)
    assert samples.names.labels == ("cat", "dog", "bird")


@pytest.mark.parametrize(("size", "expected"), [(6, (6, 6)), ((3, 7), (3, 7))])
def test_images_are_resized_and_turned_gray(tmp_path: Path, size: Any, expected: tuple[int, int]) -> None:
    pixels = save(tmp_path / "a" / "1.png", 8, 8)
    save(tmp_path / "a" / "2.png", 9, 4)
    samples = image_folder(str(tmp_path), size=size, grayscale=True)
    assert samples.inputs.shape == (2, 1, *expected)
    # The weights of ITU-R 601, by which Pillow turns colours to gray, keep the mean as resizing does, nearly.
    gray = (pixels @ np.array([0.299, 0.587, 0.114])).mean() / 255
    assert abs(float(samples.inputs[0].mean()) - gray) < 0.06


@pytest.mark.parametrize("channels", [1, 4])
def test_gray_images_and_transparent_ones_have_three_channels(tmp_path: Path, channels: int) -> None:
    pixels = save(tmp_path / "a" / "1.png", channels=channels)
    inputs = image_folder(str(tmp_path)).inputs[0].movedim(0, 2)
    np.testing.assert_array_equal((inputs * 255).round().numpy(), np.broadcast_to(pixels[..., :3], inputs.shape))


def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="with a folder of images a class, got nowhere"):
        image_folder("nowhere")
    with pytest.raises(InvalidData, match="got no image in 0 folders"):
        image_folder(str(tmp_path))
    save(tmp_path / "cat" / "1.png", 4, 5)
    save(tmp_path / "cat" / "2.png", 5, 4)
    with pytest.raises(InvalidData, match=r"2\.png: .* one size, got 5×4 pixels beside 4×5 pixels of .*data\.size"):
        image_folder(str(tmp_path))
    with pytest.raises(InvalidData, match=r"one of data\.classes, got 'cat'; did you mean cats.* or add the class"):
        image_folder(str(tmp_path), classes=["cats"])
    (tmp_path / "cat" / "2.png").write_bytes((tmp_path / "cat" / "1.png").read_bytes()[:40])
    with pytest.raises(InvalidData, match=r"2\.png: cannot be read as an image"):
        image_folder(str(tmp_path))
    Image.fromarray(np.zeros((4, 5), dtype=np.uint16)).save(tmp_path / "cat" / "2.png")
    with pytest.raises(InvalidData, match=r"2\.png: images must have 8 bits a channel, got the mode I;16"):
        image_folder(str(tmp_path))


def test_a_section_names_the_folder_and_deals_it(tmp_path: Path, loaded: Callable[..., FederatedData]) -> None:
    for number in range(6):
        save(tmp_path / "ab"[number % 2] / f"{number}.png")
    data = loaded(kind="image_folder", path=str(tmp_path), size=[4, 4], clients=2, test_fraction=0)
    assert data.clients == (0, 1)
    assert data.read(0)[0].shape == (3, 3, 4, 4)
    assert data.names.labels == ("a", "b")


def test_images_read_as_needed_have_the_same_bits(tmp_path: Path, loaded: Callable[..., FederatedData]) -> None:
    for number in range(12):
        save(tmp_path / "ab"[number % 2] / f"{number}.png")
    keys: dict[str, Any] = {"kind": "image_folder", "path": str(tmp_path), "partition": "shards", "clients": 2}
    expected = loaded(**keys)
    data = loaded(**keys, as_needed=True)
    assert (data.clients, data.number_of_classes()) == (expected.clients, 2)
    for held, pair in [(data.read(0), expected.read(0)), (data.read(1), expected.read(1)), (data.test, expected.test)]:
        assert isinstance(held, SamplesOnDemand)
        assert pair is not None
        assert all(map(torch.equal, whole(held), pair))
    (tmp_path / "a" / "2.png").write_bytes(b"damaged")
    with pytest.raises(InvalidData, match=r"2\.png: cannot be read as an image"):
        [whole(data.read(client)) for client in data.clients] + [whole(data.test)]
