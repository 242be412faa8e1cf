"""Memory of a GPU that is exhausted by a call, with a fake CUDA driver: tests/native/cuda/fake_driver.cpp."""

from __future__ import annotations

import concurrent.futures
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests import packages
from tests.native.cuda.fake_gpu import build_driver
from tests.native.shim import lib
from tests.serve.process import Server, serve

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(lib, "aoti_torch_cuda_mm_out"), reason="the library was built without nvcc"),
]

WIDTH = 1024
MEMORY = 24 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("gpu")
    package = packages.compiled(pathlib.Path(__file__).parents[1] / "models.py", "gpu")
    driver = build_driver(folder)
    with serve(folder, f"gpu={package}", LD_LIBRARY_PATH=str(driver), FAKE_GPU_MEMORY=str(MEMORY)) as one:
        yield one


def call(server: Server, rows: int) -> tuple[int, Any]:
    x = np.zeros((rows, WIDTH), np.float32)
    header = (
        f'{{"inputs":[{{"name":"x","datatype":"FP32","shape":[{rows},{WIDTH}],"parameters":'
        f'{{"binary_data_size":{x.nbytes}}}}}],"parameters":{{"binary_data_output":true}}}}'
    ).encode()
    length = {"Inference-Header-Content-Length": str(len(header))}
    status, _, body = server.request("POST", "/v2/models/gpu/infer", header + x.tobytes(), length)
    return status, body


def test_a_call_that_is_too_large(server: Server) -> None:
    """It gets an error that says why; the calls before and behind it are answered."""
    assert call(server, 4)[0] == 200
    for _ in range(2):
        status, body = call(server, 6000)  # 24 MB, and as much for the result
        assert status == 503
        assert b"out of memory on cuda:0: asked for" in body
        assert call(server, 4)[0] == 200
    assert server.json("GET", "/v2/health/ready")[0] == 200


def test_others_meanwhile(server: Server) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        large = [pool.submit(call, server, 6000) for _ in range(2)]
        small = [pool.submit(call, server, 8) for _ in range(40)]
        assert [one.result()[0] for one in large] == [503] * 2
        assert {one.result()[0] for one in small} == {200}
