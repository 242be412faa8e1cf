"""Operators without a C function in methods for CUDA: registered kernels, their stream and results, native operators.

The fake driver's device memory is the CPU's, so that a kernel can compute in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.native.cuda.fake_gpu import found
from tests.warm_process import run_warm

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # torch's own

SCRIPT = """
X = np.arange(12, dtype=np.float32).reshape(3, 4)
context, pointer = ctypes.c_void_p(), ctypes.c_uint64()

class Array:
    # What a kernel makes: memory of the fake GPU with these values.
    def __init__(self, values, stream=None):
        values = np.ascontiguousarray(values)
        fake.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        fake.cuCtxSetCurrent(context)
        assert fake.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(max(values.nbytes, 1))) == 0
        ctypes.memmove(pointer.value, values.ctypes.data, values.nbytes)
        self.__cuda_array_interface__ = {"data": (pointer.value, False), "shape": values.shape,
            "typestr": values.dtype.str, "strides": None, "version": 3, "stream": stream}

def values_of(tensor):
    info = tensor.__cuda_array_interface__
    size = int(np.prod(info["shape"]))
    raw = (ctypes.c_float * size).from_address(info["data"][0])
    return np.frombuffer(raw, np.float32).reshape(info["shape"]).copy()

def events(call):
    before = len(fake.fake_events())
    call()
    return [[line.split()[0], int(line.split()[1])] for line in fake.fake_events()[before:].decode().splitlines()]

def refused(call):
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error), type(error.__cause__).__name__]

def scale(x, factor):
    return Array(values_of(x) * np.float32(factor))

program = untorch.load(path)
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("triton")
    path = tmp_path_factory.mktemp("proxy") / "model.pt2"
    done = run_warm(["-m", "tests.native.cuda.proxy_models", path])
    assert done.returncode == 0, done.stderr[-3000:]
    return path


def run(driver: Path, models: Path, script: str) -> dict[str, Any]:
    return found(driver, models, SCRIPT + script)


def test_a_kernel_gets_tensors_and_the_stream(driver: Path, models: Path) -> None:
    script = """
def kernel(x, factor):
    found["class"], found["device"], found["dtype"], found["shape"] = type(x).__name__, x.device, x.dtype, x.shape
    found["factor"] = factor
    found["interface"] = x.__cuda_array_interface__["stream"]
    stream = untorch.current_stream()
    found["stream"], found["pair"] = int(stream), stream.__cuda_stream__()
    found["numpy"] = x.numpy().tolist()
    found["dlpack"] = x.__dlpack_device__()
    kept.append(x)
    return scale(x, factor)
kept = []
untorch.register_kernel("proxy::scale", kernel, device="cuda")
with untorch.stream(0xabc0):
    found["out"] = program.scale(X).tolist()
    found["after"] = int(untorch.current_stream())
try:
    kept[0].shape
except untorch.ClosedError as error:
    found["kept"] = str(error)
"""
    result = run(driver, models, script)
    values = [[float(4 * row + column) for column in range(4)] for row in range(3)]
    assert (result["class"], result["device"], result["dtype"], result["shape"]) == (
        "Tensor",
        "cuda:0",
        "float32",
        [3, 4],
    )
    assert result["factor"] == 3.0
    assert result["stream"] == result["interface"] == result["after"] == 0xABC0
    assert result["pair"] == [0, 0xABC0]
    assert result["numpy"] == values
    assert result["dlpack"] == [2, 0]
    assert result["out"] == [[3 * value for value in row] for row in values]
    assert result["kept"] == "this tensor belonged to a call of a kernel that has returned"


def test_calls_of_operators_without_a_c_function_are_not_replayed(driver: Path, models: Path) -> None:
    result = run(driver, models, 'found["graphs"] = untorch.load(path, cuda_graphs=2).scale.graphs')
    assert result["graphs"] == [0, "the model calls operators without a C function"]


def test_the_librarys_own_stream_is_current_in_a_kernel(driver: Path, models: Path) -> None:
    script = """
def kernel(x, factor):
    found["stream"] = int(untorch.current_stream())
    return scale(x, factor)
untorch.register_kernel("proxy::scale", kernel, device="cuda")
program.scale(X)
found["after"] = int(untorch.current_stream())
"""
    result = run(driver, models, script)
    assert result["stream"] == result["after"] != 0


def test_results_are_ordered_and_copied_on_the_stream(driver: Path, models: Path) -> None:
    """The stream that a result is ready on is waited for; nothing waits on the host."""
    script = """
def kernel(x, factor):
    made = Array(X * 5, stream=0xdef0)
    del seen[:]
    seen.append(len(fake.fake_events()))
    return made
seen = []
untorch.register_kernel("proxy::scale", kernel, device="cuda")
x = Array(X)
with untorch.stream(0xabc0):
    out = program.scale(x)
found["events"] = [[line.split()[0], int(line.split()[1])]
    for line in fake.fake_events()[seen[0]:].decode().splitlines()]
found["out"] = values_of(out).tolist() == (X * 5).tolist()
"""
    result = run(driver, models, script)
    assert result["out"]
    assert result["events"][:3] == [["record", 0xDEF0], ["wait", 0xABC0], ["copy", 0xABC0]]
    assert not any(kind.startswith("synchronize") for kind, _ in result["events"])


def test_wrong_results(driver: Path, models: Path) -> None:
    script = """
def try_(result, **options):
    untorch.register_kernel("proxy::scale", lambda x, factor: result, device="cuda", **options)
    return refused(lambda: program.scale(X))
found["dtype"] = try_(Array(X.astype(np.float64)))
found["shape"] = try_(Array(X[:2]))
found["numpy"] = try_(X)
found["none"] = try_(None)
found["two"] = try_((Array(X), Array(X)))
found["cast kind"] = try_(Array(X * 1j), cast=True)
untorch.register_kernel("proxy::pair", lambda x: (Array(X), Array(X[0])), device="cuda")
found["second"] = refused(lambda: program.pair(X))
untorch.register_kernel("proxy::pair", lambda x: (Array(X), Array(X[:, 0])), device="cuda")
found["pair"] = [part.tolist() for part in program.pair(X)]
"""
    result = run(driver, models, script)
    kernel = "kernel of `proxy::scale` (node "
    name, text, _ = result["dtype"]
    assert name == "ModelError" and kernel in text
    assert (
        "result 0: expected the dtype float32, which the operator's fake implementation declares, got float64[3, 4]"
        in text
    )
    assert "convert it in the kernel, or register the kernel with cast=True" in text
    name, text, _ = result["shape"]
    assert name == "ModelError" and "result 0: expected float32[3, 4], got float32[2, 4]: return the dtype and" in text
    name, text, _ = result["numpy"]
    expected = "expected an array on cuda:0 (DLPack or __cuda_array_interface__) as result 0, got `ndarray`"
    assert name == "ModelError" and expected in text
    assert "as result 0, got `NoneType`" in result["none"][1]
    assert "got `tuple of 2`" in result["two"][1]
    assert "got complex64[3, 4]: convert it in the kernel" in result["cast kind"][1]
    assert "result 1: expected float32[3], got float32[4]" in result["second"][1]
    assert result["pair"][1] == [0, 4, 8]


def test_what_a_kernel_raises(driver: Path, models: Path) -> None:
    script = """
def kernel(x, factor):
    raise error
untorch.register_kernel("proxy::scale", kernel, device="cuda")
error = ZeroDivisionError("mine")
found["error"] = refused(lambda: program.scale(X))
error = KeyboardInterrupt("now")
try:
    program.scale(X)
except KeyboardInterrupt as caught:
    found["interrupt"] = caught is error
found["stream"] = untorch._core.exchange_stream(None, None)[0]
untorch.register_kernel("proxy::scale", scale, device="cuda")
found["again"] = program.scale(X).tolist() == (X * 3).tolist()
"""
    result = run(driver, models, script)
    name, text, cause = result["error"]
    assert name == "ModelError" and "ZeroDivisionError: mine" in text and cause == "ZeroDivisionError"
    assert result["interrupt"] and result["again"] and result["stream"] is None


def test_a_kernel_does_not_call_its_caller(driver: Path, models: Path) -> None:
    script = """
def kernel(x, factor):
    found["again"] = refused(lambda: program.scale(X))[1]
    found["other"] = program.pair(x)[1].shape
    return scale(x, factor)
untorch.register_kernel("proxy::scale", kernel, device="cuda")
untorch.register_kernel("proxy::pair", lambda x: (Array(X), Array(X[:, 0])), device="cuda")
program.scale(X)
"""
    result = run(driver, models, script)
    assert result["again"].startswith("method 'scale': a Python kernel calls the method that runs it")
    assert result["other"] == [3]


def test_a_kernel_may_keep_its_input(driver: Path, models: Path) -> None:
    """The first kernel's input is memory of the model, which uses it again; the input of the call is the caller's."""
    script = """
kept, numbers = [], []
class Consumer:
    def __init__(self, tensor):
        self.capsule = tensor.__dlpack__(stream=int(untorch.current_stream()), max_version=(1, 0))
def kernel(x, factor):
    kept.append(Consumer(x))
    return scale(x, factor)
untorch.register_kernel("proxy::scale", kernel, device="cuda")
live = untorch._core.live_tensors()
for _ in range(5):
    program.around(X)
found["more"] = untorch._core.live_tensors() - live
kept.clear()
found["left"] = untorch._core.live_tensors() - live
"""
    result = run(driver, models, script)
    assert result["more"] == 5 and result["left"] == 0


def test_a_missing_kernel(driver: Path, models: Path) -> None:
    result = run(driver, models, 'found["missing"] = refused(lambda: program.scale(X))')
    name, text, _ = result["missing"]
    assert name == "UnsupportedError"
    assert "operator `proxy::scale` has no kernel for cuda" in text
    assert 'untorch.register_kernel("proxy::scale", fn, device="cuda")' in text


def test_a_kernel_for_the_cpu_does_not_serve(driver: Path, models: Path) -> None:
    script = """
untorch.register_kernel("proxy::scale", lambda x, factor: x)
found["missing"] = refused(lambda: program.scale(X))
"""
    assert "has no kernel for cuda" in run(driver, models, script)["missing"][1]


C_SCRIPT = """
import os
lib = ctypes.CDLL(os.path.join(os.path.dirname(untorch.__file__), "libuntorch.so"))
lib.untorch_last_error.restype = ctypes.c_char_p
lib.untorch_program_find.restype = ctypes.c_void_p

class View(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int32), ("device_type", ctypes.c_int32),
                ("device_index", ctypes.c_int32), ("ndim", ctypes.c_int32), ("sizes", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("read_only", ctypes.c_int32)]
class CallerStream(ctypes.Structure):
    _fields_ = [("stream", ctypes.c_void_p), ("is_set", ctypes.c_int32)]
lib.untorch_caller_stream_exchange.argtypes = [CallerStream]
lib.untorch_caller_stream_exchange.restype = CallerStream
Callback = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p,
                            ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
sizes, strides = (ctypes.c_int64 * 2)(3, 4), (ctypes.c_int64 * 2)(4, 1)

def run(callback):
    c_program, out, alias = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int32()
    assert lib.untorch_program_open(path.encode(), None, ctypes.byref(c_program)) == 0, lib.untorch_last_error()
    method = ctypes.c_void_p(lib.untorch_program_find(c_program, b"scale"))
    kept = Callback(callback) if callback else None
    if kept:
        lib.untorch_method_set_proxy(method, kept, None)
    view = View(X.ctypes.data, 6, 0, -1, 2, sizes, strides, 0)
    lib.untorch_caller_stream_exchange(CallerStream(0xabc0, 1))
    code = lib.untorch_method_run(method, ctypes.byref(view), ctypes.c_size_t(1), ctypes.byref(out),
                                  ctypes.byref(alias), ctypes.c_size_t(1))
    lib.untorch_caller_stream_exchange(CallerStream(None, 0))
    text = lib.untorch_last_error().decode() if code else ""
    if out:
        got = View()
        lib.untorch_tensor_view(out, ctypes.byref(got))
        found["out"] = [got.device_type, (ctypes.c_float * 12).from_address(got.data)[:]]
        lib.untorch_tensor_free(out)
    lib.untorch_program_free(c_program)
    return code, text
"""


def test_a_callback_of_c(driver: Path, models: Path) -> None:
    """Views say where tensors lie, untorch_call_stream gives the stream, and results have to lie on the GPU."""
    script = """
def scale_into(context, node, num_ints, ints, num_tensors, tensors):
    given, stream = View(), ctypes.c_void_p()
    lib.untorch_tensor_view(ctypes.c_void_p(tensors[0]), ctypes.byref(given))
    lib.untorch_call_stream(0, ctypes.byref(stream))
    found["given"] = [node, num_tensors, given.device_type, given.device_index, stream.value]
    made = Array(np.frombuffer((ctypes.c_float * 12).from_address(given.data), np.float32) * np.float32(3))
    view = View(made.__cuda_array_interface__["data"][0], 6, 1, 0, 2, sizes, strides, 0)
    return lib.untorch_tensor_assign(ctypes.c_void_p(tensors[1]), ctypes.byref(view))
def on_the_cpu(context, node, num_ints, ints, num_tensors, tensors):
    view = View(X.ctypes.data, 6, 0, -1, 2, sizes, strides, 0)
    return lib.untorch_tensor_assign(ctypes.c_void_p(tensors[1]), ctypes.byref(view))
found["code"] = run(scale_into)
found["cpu"] = run(on_the_cpu)
found["none"] = run(None)
"""
    result = run(driver, models, C_SCRIPT + script)
    assert result["code"] == [0, ""]
    assert result["given"] == [0, 2, 1, 0, 0xABC0]
    assert result["out"] == [1, [3.0 * i for i in range(12)]]
    assert "kernel of `proxy::scale` (node `buf" in result["cpu"][1]
    assert "result 0: expected an array on cuda:0, got one on cpu" in result["cpu"][1]
    assert (
        "the model calls operator `proxy::scale` (node 0) on cuda:0, which has neither a C function nor a native kernel "
        "there, and no proxy callback was set: set one with untorch_method_set_proxy"
    ) in result["none"][1]


def test_native_operators_run_without_python(driver: Path, models: Path) -> None:
    """The fake driver runs no kernel: what is launched, and that the size is waited for once."""
    script = """
def refuse(*_):
    raise AssertionError("Python was called")
from untorch.runtime import method
method._ProxyHandler.__call__ = refuse
boxes, scores = np.zeros((6, 4), np.float32), np.zeros(6, np.float32)
program.detect(boxes, scores)
before = len(fake.fake_launches())
found["events"] = events(lambda: program.detect(boxes, scores))
found["launches"] = fake.fake_launches()[before:].decode().split()
"""
    result = run(driver, models, script)
    launches = " ".join(result["launches"])
    assert "make_mask" in launches and "reduce_mask" in launches
    assert launches.index("make_mask") < launches.index("reduce_mask")


def test_a_registered_kernel_takes_a_native_operator_over(driver: Path, models: Path) -> None:
    script = """
def nms(dets, scores, iou_threshold):
    found["threshold"] = iou_threshold
    return Array(np.array([2, 0]))
untorch.register_kernel("torchvision::nms", nms, device="cuda")
boxes, scores = np.zeros((6, 4), np.float32), np.zeros(6, np.float32)
found["kept"] = program.detect(boxes, scores)[0].tolist()
"""
    result = run(driver, models, script)
    assert result == {"threshold": 0.5, "kept": [2, 0]}
