"""A repository of `untorch triton` in the Triton Inference Server that nvidia-pytriton's wheel brings.

UNTORCH_TRITON_PYTHON names the Python of an environment with nvidia-pytriton, numpy and untorch, and without torch.
The wheel's stub process was built for NumPy 1: with a newer one it gets the sizes of outputs wrong.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

import untorch
from tests import packages
from untorch.integrations.triton import write_repository

pytestmark = [pytest.mark.slow]

PYTHON = os.environ.get("UNTORCH_TRITON_PYTHON")
if PYTHON is None:
    pytest.skip("needs UNTORCH_TRITON_PYTHON, a Python with nvidia-pytriton", allow_module_level=True)

# Runs beside the server: the client is NVIDIA's, unmodified.
CLIENT = """
import concurrent.futures, json, sys, threading
import numpy as np, ml_dtypes
import tritonclient.grpc, tritonclient.http

out = {}
for module, port in ((tritonclient.http, sys.argv[1]), (tritonclient.grpc, sys.argv[2])):
    local = threading.local()  # a client for HTTP belongs to its thread

    def infer(name, inputs, **more):
        if not hasattr(local, "client"):
            local.client = module.InferenceServerClient(f"127.0.0.1:{port}")
        return local.client.infer(name, inputs, **more)

    def rows(ids, scale, names=("scaled", "total", "odd")):
        inputs = [module.InferInput("ids", list(ids.shape), "INT64"), module.InferInput("scale", list(scale.shape), "FP32")]
        inputs[0].set_data_from_numpy(ids)
        inputs[1].set_data_from_numpy(scale)
        wanted = [module.InferRequestedOutput(name) for name in names]
        return infer("m_rows", inputs, outputs=wanted)

    def one(seed):
        rng = np.random.default_rng(seed)
        ids = rng.integers(0, 9, (rng.integers(1, 4), rng.integers(2, 5)))
        scale = rng.random((len(ids), 1), np.float32)
        result = rows(ids, scale)
        np.testing.assert_allclose(result.as_numpy("scaled"), ids * scale, rtol=1e-6)
        np.testing.assert_allclose(result.as_numpy("total"), (ids * scale).sum(1, keepdims=True), rtol=1e-5)
        np.testing.assert_array_equal(result.as_numpy("odd"), ids % 2 == 1)
        return True

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(300)))
    half = rows(np.array([[1, 2]]), np.float32([[2]]), ("half",)).as_numpy("half")
    half = half if half.dtype.name == "bfloat16" else half.view(ml_dtypes.bfloat16)
    assert half.tolist() == [[2, 4]], half
    x = module.InferInput("x", [2, 3], "BF16")
    x.set_data_from_numpy(np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16))
    doubled = infer("m_half", [x]).as_numpy("output")
    assert doubled.astype(float).tolist() == [[0, 2, 4], [6, 8, 10]]
    try:
        rows(np.array([[1]]), np.float32([[2]]))
    except Exception as error:
        out[module.__name__] = str(error)
statistics = tritonclient.http.InferenceServerClient(f"127.0.0.1:{sys.argv[1]}").get_inference_statistics("m_rows")
(model,) = statistics["model_stats"]
out["rows"], out["calls"] = model["inference_count"], model["execution_count"]
print(json.dumps(out))
"""


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def environment() -> tuple[pathlib.Path, dict[str, str]]:
    """The wheel's folder of the server, and the environment in which its stub finds that Python."""
    code = "import pytriton, sysconfig, json; print(json.dumps([pytriton.__path__[0], sysconfig.get_config_var('LIBDIR')]))"
    done = subprocess.run([str(PYTHON), "-c", code], capture_output=True, text=True, check=True)
    pytriton, libraries = json.loads(done.stdout)
    wheel = pathlib.Path(pytriton)
    # The stub takes the first python3 of PATH for its own, and ignores PYTHONPATH.
    path = os.pathsep.join([str(pathlib.Path(str(PYTHON)).parent), os.environ["PATH"]])
    library_path = os.pathsep.join([str(wheel.parent / "nvidia_pytriton.libs"), libraries])
    return wheel / "tritonserver", {**os.environ, "PATH": path, "LD_LIBRARY_PATH": library_path}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int, pathlib.Path]]:
    """Its ports, and its log."""
    folder = tmp_path_factory.mktemp("triton")
    package = packages.compiled(packages.ROOT / "tests" / "unit" / "models.py", "rows")
    write_repository(package, folder / "repository", name="m", num_threads=1)
    wheel, variables = environment()
    done = subprocess.run([str(PYTHON), "-c", "import sys; print(*sys.version_info[:2], sep='.')"], capture_output=True, text=True)  # fmt: skip
    backend = folder / "backends" / "python"
    backend.mkdir(parents=True)
    for file in [
        *(wheel / "backends" / "python").glob("*.*"), wheel / "python_backend_stubs" / done.stdout.strip() / "triton_python_backend_stub",
    ]:  # fmt: skip
        shutil.copy(file, backend)
    (backend / "triton_python_backend_stub").chmod(0o755)
    http, grpc = free_port(), free_port()
    command = [
        str(wheel / "bin" / "tritonserver"), f"--model-repository={folder / 'repository'}",
        f"--backend-directory={folder / 'backends'}", f"--http-port={http}", f"--grpc-port={grpc}",
        "--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--allow-metrics=false",
        "--disable-auto-complete-config",
    ]  # fmt: skip
    log = folder / "server.log"
    with log.open("w") as stream:
        process = subprocess.Popen(command, env=variables, stdout=stream, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 60
        while "Started HTTPService" not in log.read_text():
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-4000:]
            time.sleep(0.2)
        yield http, grpc, log
    finally:
        process.terminate()
        process.wait(60)


def test_clients(server: tuple[int, int, pathlib.Path]) -> None:
    http, grpc, log = server
    done = subprocess.run(
        [str(PYTHON), "-W", "ignore", "-c", CLIENT, str(http), str(grpc)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:] + log.read_text()[-2000:]
    out = json.loads(done.stdout)
    for protocol in ("http", "grpc"):
        text = out[f"tritonclient.{protocol}"]
        assert re.search(r"method 'rows', input 'ids': expected int64\[\w+, \w+\], got int64\[1, 1\]", text), text
    assert out["calls"] < out["rows"]  # requests were joined


def test_the_model_runs_without_torch(server: tuple[int, int, pathlib.Path]) -> None:
    done = subprocess.run([str(PYTHON), "-c", "import torch"], capture_output=True, text=True, check=False)
    assert "No module named 'torch'" in done.stderr
    assert untorch.__version__ and sys.executable != PYTHON
