"""Images as arrays: the steps of a package."""

from __future__ import annotations

import contextlib
import io
import random
from pathlib import Path

import numpy as np
import pytest

from untorch.pipeline.image_steps import apply_steps, read_image
from untorch.runtime.errors import ArgumentTypeError, FileMissingError, InvalidArgumentError

Image = pytest.importorskip("PIL.Image")


def picture(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize(("height", "width", "shape"), [(40, 20, (3, 20, 10)), (20, 41, (3, 10, 20))])
def test_the_shortest_edge_keeps_the_aspect_ratio(height: int, width: int, shape: tuple[int, ...]) -> None:
    assert apply_steps(read_image(picture(height, width)), [["resize_shortest", 10, 2]]).shape == shape


def test_a_crop_takes_the_middle() -> None:
    image = picture(9, 8)
    found = apply_steps(read_image(image), [["center_crop", 4, 4]])
    np.testing.assert_array_equal(found, image[2:6, 2:6].transpose(2, 0, 1))


def test_a_crop_that_is_larger_pads_with_black() -> None:
    image = picture(3, 4)
    found = apply_steps(read_image(image), [["center_crop", 6, 6]])
    np.testing.assert_array_equal(found[:, 2:5, 1:5], image.transpose(2, 0, 1))
    assert found[:, :2].max() == 0 and found[:, 5:].max() == 0 and found[:, :, 5:].max() == 0


def test_rescale_and_normalize() -> None:
    image = picture(4, 4)
    found = apply_steps(read_image(image), [["rescale", 1 / 255], ["normalize", [0.5, 0.4, 0.3], [0.1, 0.2, 0.3]]])
    expected = (image.transpose(2, 0, 1) / 255 - np.reshape([0.5, 0.4, 0.3], (3, 1, 1))) / np.reshape(
        [0.1, 0.2, 0.3], (3, 1, 1)
    )
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_an_unknown_step() -> None:
    with pytest.raises(ValueError, match="unknown step 'blur'"):
        apply_steps(read_image(picture(4, 4)), [["blur", 1]])


def test_files_and_bytes_give_what_arrays_give(tmp_path: Path) -> None:
    image = picture(5, 6)
    read_image(image).save(tmp_path / "a.png")
    for source in (tmp_path / "a.png", (tmp_path / "a.png").read_bytes(), read_image(image)):
        np.testing.assert_array_equal(np.asarray(read_image(source)), image)


def test_the_exif_orientation_is_followed(tmp_path: Path) -> None:
    image = read_image(picture(8, 16))
    exif = image.getexif()
    exif[0x0112] = 6  # turned by 90 degrees
    image.save(tmp_path / "turned.png", exif=exif)
    for source in (tmp_path / "turned.png", (tmp_path / "turned.png").read_bytes()):
        np.testing.assert_array_equal(np.asarray(read_image(source)), np.rot90(picture(8, 16), -1))


@pytest.mark.parametrize("multiple", [1, 16])
def test_edges_within_limits_are_those_of_transformers(multiple: int) -> None:
    transforms = pytest.importorskip("transformers.image_transforms")
    yolos = pytest.importorskip("transformers.models.yolos.image_processing_pil_yolos")
    expect = transforms.get_size_with_aspect_ratio if multiple == 1 else yolos.get_size_with_aspect_ratio_yolos
    sizes = [*np.random.default_rng(0).integers(30, 300, (400, 2)).tolist(), [96, 96], [96, 159], [161, 96], [58, 96]]
    for height, width in sizes:
        found = apply_steps(
            read_image(np.zeros((height, width, 3), np.uint8)), [["resize_edges", 96, 160, multiple, 0]]
        )
        assert found.shape[1:] == tuple(expect((height, width), 96, 160)), (height, width)


def test_refusals(tmp_path: Path) -> None:
    for url in ("https://example.org/cat.jpg", Path("https://example.org/cat.jpg"), "data:image/png;base64,AAAA"):
        text = (
            "pipeline: inputs: expected a file, got the URL .*, which is not fetched: download it, and pass its path or"
        )
        with pytest.raises(InvalidArgumentError, match=text):
            read_image(url)
    with pytest.raises(FileMissingError, match="there is no file"):
        read_image(tmp_path / "none.png")
    with pytest.raises(InvalidArgumentError, match="expected an image that Pillow reads"):
        read_image(b"no image")
    with pytest.raises(
        InvalidArgumentError, match=r"expected an array \[height, width, 3\] of uint8, got float64 \[2, 2\]"
    ):
        read_image(np.zeros((2, 2)))
    with pytest.raises(ArgumentTypeError, match="expected a path, bytes, a Pillow image, an array.*got int"):
        read_image(7)


def test_a_crop_with_half_a_pixel() -> None:
    """torchvision rounds to the even pixel: 0.5 → 0, 1.5 → 2."""
    image = read_image(np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3))
    given = np.asarray(image, np.float32).transpose(2, 0, 1)
    np.testing.assert_array_equal(apply_steps(image, [["center_crop_even", 4, 4]]), given[:, 0:4, 2:6])
    np.testing.assert_array_equal(apply_steps(image, [["center_crop", 4, 4]]), given[:, 0:4, 1:5])


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "WEBP"])
def test_damaged_files_are_refused(kind: str) -> None:
    """Whatever Pillow raises for them."""
    file = io.BytesIO()
    Image.fromarray(picture(30, 40)).save(file, kind)
    rng = random.Random(kind)
    for _ in range(60):
        data = bytearray(file.getvalue())
        for _ in range(rng.choice((1, 4, 16))):
            data[rng.randrange(len(data))] = rng.choice((0, 127, 255, rng.randrange(256)))
        with contextlib.suppress(InvalidArgumentError):
            assert read_image(bytes(data[: rng.choice((len(data), rng.randrange(len(data))))]), max_pixels=10_000)


def test_pixels_of_files_are_counted_before_they_are_decoded() -> None:
    file = io.BytesIO()
    Image.new("1", (10_000, 5_000)).save(file, "PNG")
    text = "expected an image of at most 1000000 pixels, got 10000 × 5000"
    with pytest.raises(InvalidArgumentError, match=text):
        read_image(file.getvalue(), max_pixels=1_000_000)
    assert read_image(file.getvalue(), formats=["PNG"]).size == (10_000, 5_000)
    with pytest.raises(InvalidArgumentError, match="expected an image that Pillow reads: JPEG, GIF"):
        read_image(file.getvalue(), formats=["JPEG", "GIF"])
