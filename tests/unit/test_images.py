"""``read_image``: what careless callers pass. tests/unit/pipeline/test_image_steps.py has paths, arrays and damage."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from untorch.images import read_image
from untorch.runtime.errors import FileMissingError, InvalidArgumentError

Image = pytest.importorskip("PIL.Image")

PICTURE = np.random.default_rng(0).integers(0, 256, (9, 12, 3), np.uint8)


def read(source: Any) -> Any:
    return read_image(source, "pipeline: inputs", "pipeline")


def encoded(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def test_modes() -> None:
    """As Pillow converts them, which is what transformers takes."""
    whole = Image.fromarray(PICTURE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for image in (whole.convert(mode) for mode in ("1", "L", "LA", "P", "RGBA", "CMYK", "I", "F")):
            found = read(image)
            assert (found.mode, found.size) == ("RGB", (12, 9))
            np.testing.assert_array_equal(np.asarray(found), np.asarray(image.convert("RGB")))
    frames = encoded(whole.convert("P"), "GIF", save_all=True, append_images=[Image.new("P", (12, 9))])
    assert read(frames).tobytes() == Image.open(io.BytesIO(frames)).convert("RGB").tobytes()


@pytest.mark.parametrize(
    ("values", "mode"),
    [
        (PICTURE[..., 0].astype(np.uint16) * 257, "I;16"),
        (PICTURE[..., 0].astype(np.int32) - 300, "I"),
        (PICTURE[..., 0].astype(np.float32) / 255, "F"),
        (PICTURE[..., 0].astype(np.float32) * 2, "F"),
    ],
)
def test_values_that_are_clipped(values: np.ndarray, mode: str) -> None:
    text = (
        f"^pipeline: inputs: expected values from 0 to 255, got others in an image of Pillow's mode {mode}, which are "
    )
    image = Image.fromarray(values)
    with pytest.warns(UserWarning, match=text + "clipped: scale it to 8 bits"):
        found = read(image)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(image.convert("RGB")))
    with pytest.warns(UserWarning, match=text):
        read(encoded(image, "TIFF"))


def test_images_of_pillow_that_cannot_be_read(tmp_path: Path) -> None:
    data = encoded(Image.fromarray(np.tile(PICTURE, (20, 20, 1))), "JPEG")
    (tmp_path / "half.jpg").write_bytes(data[: len(data) // 2])
    closed = Image.fromarray(PICTURE)
    closed.close()
    with Image.open(tmp_path / "half.jpg") as half:
        for image in (half, closed):
            with pytest.raises(InvalidArgumentError, match="^pipeline: inputs: expected an image that Pillow reads: "):
                read(image)
    for size in ((0, 5), (5, 0)):
        with pytest.raises(InvalidArgumentError, match=f"expected an image with pixels, got {size[0]} × {size[1]}"):
            read(Image.new("RGB", size))


def test_errors_say_what_was_got(tmp_path: Path) -> None:
    text = tmp_path / "text.jpg"
    text.write_text("this is no image")
    with pytest.raises(InvalidArgumentError) as caught:
        read(text)
    assert str(caught.value) == (
        f"pipeline: inputs: expected an image that Pillow reads: a format that Pillow knows; got {text}"
    )
    with pytest.raises(InvalidArgumentError, match="; got 16 bytes that begin with b'this is '$"):
        read(text.read_bytes())
    with pytest.raises(InvalidArgumentError, match="; got no bytes$"):
        read(b"")
    with pytest.raises(FileMissingError, match="there is no file .*: it is a folder, pass its files"):
        read(tmp_path)
