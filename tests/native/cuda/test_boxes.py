"""What products of packed weights have copied by boxes, as a driver without a GPU writes it down."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native.cuda.fake_gpu import found

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # torch's own

# Elements (1: of two bytes, 2: of four), columns, rows, bytes from row to row, a box's columns and rows, swizzle.
# The model's layers have 500 and 1024 inputs, which rows of x are padded to 504 for and weights to 512, and 1024 and
# 255 outputs, padded to 256.
X = [[1, 504, 0, 1008, 64, 0, 3], [1, 1024, 0, 2048, 64, 0, 3]]
WEIGHTS = [[2, 512, 128, 2048, 128, 0, 0], [2, 1024, 32, 4096, 128, 0, 0]]
SCALES = [[2, 1024, 4, 4096, 0, 1, 0], [2, 256, 8, 1024, 0, 1, 0]]


@pytest.mark.parametrize("kind", ["int4", "nvfp4"])
@pytest.mark.parametrize(
    ("rows", "tile", "columns"), [(3, 8, 256), (20, 32, 256), (64, 64, 256), (300, 128, 192), (500, 256, 128)]
)
def test_boxes(rows: int, tile: int, columns: int, kind: str, driver: Path, package: Path) -> None:
    """Boxes of a tile's rows and columns; NVFP4's scales, 8 bytes a column, are too narrow for any."""
    script = f"""
import os
for kernel, rows in (("NARROW", "0"), ("STREAM", "100000")):
    os.environ["UNTORCH_{kind.upper()}_" + kernel + "_ROWS"] = rows
untorch.load(path)[{kind!r}](np.zeros(({rows}, 500), np.float16))
found["boxes"] = [[int(number) for number in line.split()] for line in fake.fake_boxes().decode().splitlines()]
found["kernels"] = sum("stream_packed" in name for name in fake.fake_launches().decode().split())
"""
    result = found(driver, package, script)
    expected = []
    for x, weights, scales in zip(X, WEIGHTS, SCALES, strict=True):
        expected.append([*x[:2], rows, *x[3:5], tile, x[6]])
        expected.append([*weights[:5], columns // 8, weights[6]])
        if kind == "int4":
            expected.append([*scales[:4], columns, *scales[5:]])
    assert result == {"boxes": expected, "kernels": 2}
