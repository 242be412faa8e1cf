"""A profile of a method on a GPU, with a fake CUDA driver (tests/native/cuda/fake_driver.cpp): its kernels do nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import packages
from tests.native.cuda.fake_gpu import build_driver, found
from tests.native.shim import lib

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(lib, "aoti_torch_cuda_mm_out"), reason="the library was built without nvcc"),
]

SCRIPT = """
from untorch.profiler import profile, roofline
roofline._COPY_BYTES, roofline._CUDA_SIZE = 1 << 20, 16
measured = profile(path, [np.zeros((4, 1024), np.float32)], runs=3, warmup=1)
found = measured.to_json() | {"events": measured.trace()["traceEvents"]}
"""


def test_kernels_have_the_gpus_times(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    package = packages.compiled(Path(__file__).parents[2] / "serve/models.py", "gpu")
    document = found(build_driver(tmp_path), package, SCRIPT)
    assert document["device"] == "cuda:0" and not document["graph"] and document["runs"] == 3
    limits = document["roofline"]
    assert limits["dtype"] == "bfloat16" and limits["bytes_per_second"] > 0 and limits["operations_per_second"] > 0
    [kernel] = [row for row in document["rows"] if row["kind"] == "launch"]
    assert kernel["name"].startswith("triton_") and kernel["calls"] == 1
    assert kernel["bytes"] == 2 * 4 * 1024 * 4 and kernel["lines"] and document["matched"]
    assert document["rows"][-1]["name"] == "GPU idle"
    processes = {e["pid"]: e["args"]["name"] for e in document["events"] if e["name"] == "process_name"}
    on_gpu = [e for e in document["events"] if e["ph"] == "X" and processes[e["pid"]] == "cuda:0"]
    assert [e["name"] for e in on_gpu].count(kernel["name"]) == 3
