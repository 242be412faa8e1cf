"""Tensor maps of the W4A16 sm_90 GEMM, as the fake driver records them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native.cuda.fake_gpu import found

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # torch's own

# Elements (0: of one byte, 1: of two, 2: of four), columns, rows, row stride in bytes, boxDim (columns, rows), swizzle.
# The model's layers have 500 and 896 inputs, x is padded to 504 and weights to 512, and 896 and 255
# outputs, padded to 256.
X = [[1, 504, 0, 1008, 64, 0, 3], [1, 896, 0, 1792, 64, 0, 3]]
WEIGHTS = [[2, 512, 112, 2048, 128, 0, 0], [2, 896, 32, 3584, 128, 0, 0]]
INT4_SCALES = [[2, 896, 4, 3584, 0, 1, 0], [2, 256, 7, 1024, 0, 1, 0]]
NVFP4_SCALES = [[0, 32, 896, 32, 16, 0, 0], [0, 112, 128, 112, 16, 0, 0]]


@pytest.mark.parametrize("kind", ["int4", "nvfp4"])
@pytest.mark.parametrize(
    ("rows", "tile", "columns"),
    [(3, 8, 256), (20, 32, 256), (64, 64, 256), (300, 128, 192), (384, 192, 128), (388, 224, 128), (500, 256, 128)],
)
def test_tensor_maps(rows: int, tile: int, columns: int, kind: str, driver: Path, package: Path) -> None:
    """boxDim is TileM or TileN, and the residue in M. NVFP4's scales have two columns a row where the row stride is no
    multiple of 16 bytes, as with 896 inputs.
    """
    script = f"""
import os
for kernel, m in (("GEMV", "0"), ("SM90", "100000"), ("TILE", "{tile}")):
    os.environ["UNTORCH_{kind.upper()}_" + kernel + "_M"] = m
untorch.load(path)[{kind!r}](np.zeros(({rows}, 500), np.float16))
found["maps"] = [[int(number) for number in line.split()] for line in fake.fake_tensor_maps().decode().splitlines()]
found["kernels"] = sum("w4a16_gemm_sm90_kernel" in name for name in fake.fake_launches().decode().split())
"""
    result = found(driver, package, script)
    expected = []
    for layer, (x, weights) in enumerate(zip(X, WEIGHTS, strict=True)):
        last = rows % tile or tile
        for box in [last] if last in (rows, tile) else [last, tile]:
            expected.append([*x[:2], rows, *x[3:5], box, x[6]])
        expected.append([*weights[:5], columns // 8, weights[6]])
        if kind == "int4":
            scales = INT4_SCALES[layer]
            expected.append([*scales[:4], columns, *scales[5:]])
        else:
            scales = NVFP4_SCALES[layer]
            expected.append([*scales[:5], columns // (1, 2)[layer], scales[6]])
    assert result == {"maps": expected, "kernels": 2}
