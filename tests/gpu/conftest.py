"""What every GPU test needs: a GPU, packages that are compiled once, and a share of the GPU's memory."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
from collections.abc import Iterator
from pathlib import Path

# One hardware queue a stream, as far as they go: a stream must not wait because another one's queue is its own. A GPU has
# some hundreds for all processes, and says that it is out of memory when none is left. CUDA reads it when it starts.
os.environ.setdefault(
    "CUDA_DEVICE_MAX_CONNECTIONS", str(min(32, max(8, 128 // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))))
)

# Processes of pytest-xdist share the cores: sixteen of them with threads and compilers for all cores each take ten times
# as long.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import hypothesis
import pytest
import torch
from torch import nn

hypothesis.settings.register_profile("sanitize", max_examples=10, deadline=None)
SANITIZE = os.environ.get("UNTORCH_SANITIZE") == "1"


# PyTorch's own, the first time that a process does it; a colon would end the pattern.
_WARNINGS = ("TensorFloat32 tensor cores for float32", "Warning. Profiler clears events")


def pytest_configure(config: pytest.Config) -> None:
    for text in _WARNINGS:
        config.addinivalue_line("filterwarnings", f"ignore:{text}:UserWarning")
    # Processes of pytest-xdist begin with different GPUs, where there are several. CUDA reads it when it starts.
    worker, gpus = os.environ.get("PYTEST_XDIST_WORKER"), len(glob.glob("/dev/nvidia[0-9]*"))
    if worker is not None and gpus > 1:
        order = [(int(worker.removeprefix("gw")) + i) % gpus for i in range(gpus)]
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, order)))
    if not torch.cuda.is_available():
        raise pytest.UsageError(
            "tests/gpu needs an NVIDIA GPU and a torch with CUDA: run it with `make test-gpu` there"
        )
    if SANITIZE:
        hypothesis.settings.load_profile("sanitize")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not SANITIZE:
        return
    # Tests say their own number of examples, which a profile does not change.
    few = hypothesis.settings.get_profile("sanitize").max_examples
    for item in items:
        function = getattr(item, "obj", None)
        own = getattr(function, "_hypothesis_internal_use_settings", None)
        if own is not None and own.max_examples > few:
            changed = hypothesis.settings(own, max_examples=few, deadline=None)
            getattr(function, "__func__", function)._hypothesis_internal_use_settings = changed


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the packages lie; the processes of pytest-xdist share it."""
    base = tmp_path_factory.getbasetemp()
    path = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "packages"
    path.mkdir(exist_ok=True)
    return path


@pytest.fixture(autouse=True)
def share_of_the_gpu(request: pytest.FixtureRequest, folder: Path) -> Iterator[None]:
    """Other processes' tests may run meanwhile; not while a test that has ``alone`` fills or measures the memory."""
    with open(folder / "gpu.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if "alone" in request.fixturenames else fcntl.LOCK_SH)
        yield


@pytest.fixture
def alone(share_of_the_gpu: None) -> Iterator[None]:
    """No other test runs on the GPU."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    yield
    with contextlib.suppress(RuntimeError):
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def streams(request: pytest.FixtureRequest) -> Iterator[None]:
    """The library's own; shims, which native's tests call, run on torch's, in order with torch's own work.

    Not in a conftest.py of native's: pytest before 9.2 forgets one where a folder is named twice.
    """
    import untorch

    with untorch.stream(None):
        if request.path.parent.name == "native":
            from tests.native.shim import use_torch_stream

            use_torch_stream()
        yield


@pytest.fixture
def mlp(folder: Path) -> tuple[Path, nn.Module]:
    from tests.gpu.models import exported, mlp_batch, mlp_module

    module = mlp_module()
    return exported(folder, "mlp", module, (torch.randn(4, 64),), dynamic_shapes=mlp_batch()), module


@pytest.fixture
def stock_mlp(folder: Path) -> tuple[Path, nn.Module]:
    """The same model by PyTorch's packager."""
    from tests.gpu.models import mlp_batch, mlp_module, stock

    args = (torch.randn(4, 64, device="cuda"),)
    return stock(folder, "stock_mlp", mlp_module(), args, dynamic_shapes=mlp_batch()), mlp_module()


@pytest.fixture(params=["untorch", "stock"])
def either_mlp(request: pytest.FixtureRequest) -> tuple[Path, nn.Module]:
    """The model by either packager."""
    package: tuple[Path, nn.Module] = request.getfixturevalue("mlp" if request.param == "untorch" else "stock_mlp")
    return package


@pytest.fixture
def chain(folder: Path) -> Path:
    from tests.gpu.models import Chain, N, exported

    return exported(folder, "chain", Chain(), (torch.zeros(N), torch.zeros(N)))


@pytest.fixture
def counter(folder: Path) -> Path:
    from tests.gpu.models import Counter, exported

    return exported(folder, "counter", Counter(), (torch.ones(4),))


@pytest.fixture
def echo(folder: Path) -> Path:
    from tests.gpu.models import Echo, exported

    return exported(folder, "echo", Echo(), (torch.ones(8, 64),))


@pytest.fixture
def noise(folder: Path) -> Path:
    from tests.gpu.models import Noise, exported

    return exported(folder, "noise", Noise(), (torch.ones(4096),))


@pytest.fixture
def outer(folder: Path) -> Path:
    from torch.export import Dim

    from tests.gpu.models import Outer, exported

    n = Dim("n", min=2, max=1 << 30)
    return exported(folder, "outer", Outer(), (torch.ones(8),), dynamic_shapes=({0: n},))


@pytest.fixture
def heavy(folder: Path) -> Path:
    from tests.gpu.models import Heavy, exported

    path = folder / "heavy.pt2"
    return path if path.exists() else exported(folder, "heavy", Heavy(), (torch.arange(4),))
