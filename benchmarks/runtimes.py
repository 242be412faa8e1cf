"""The runtimes behind one face: open a file, then turn arrays into a function of no arguments that runs it.

Every function takes numpy arrays and gives a numpy array of its own, as an application would use it. Each runtime is
imported when it is opened, so that a process holds only its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy

Array: TypeAlias = "numpy.ndarray[Any, Any]"
Call: TypeAlias = Callable[[], Array]
Prepare: TypeAlias = Callable[[Sequence[Array]], Call]


def open_numpy(file: str, threads: int | None) -> Prepare:
    """No model at all: what Python and numpy take by themselves."""

    def prepare(arrays: Sequence[Array]) -> Call:
        return lambda: numpy.add(arrays[0], 1)

    return prepare


def open_untorch(file: str, threads: int | None, names: str = "") -> Prepare:
    """untorch; no thread count means all cores. ``names``: the arrays go into a dict with these keys, a letter each."""
    import untorch

    forward = untorch.load(file, num_threads=threads or 0).forward
    forward.open()

    def prepare(arrays: Sequence[Array]) -> Call:
        if len(arrays) == 1 or names:
            x = dict(zip(names, arrays, strict=True)) if names else arrays[0]
            return lambda: forward(x)
        return lambda: forward(*arrays)

    return prepare


def open_torch(file: str, threads: int | None, raw: bool = False, names: str = "") -> Prepare:
    """torch's loader; ``raw`` skips the Python code that rebuilds nested arguments and results. ``names``: a dict."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    model = torch._inductor.aoti_load_package(file)
    from_numpy = torch.from_numpy

    def prepare(arrays: Sequence[Array]) -> Call:
        if raw:
            run = model.loader.run
            return lambda: run([from_numpy(x) for x in arrays])[0].numpy()
        if names:
            return lambda: model({name: from_numpy(x) for name, x in zip(names, arrays, strict=True)}).numpy()
        return lambda: model(*[from_numpy(x) for x in arrays]).numpy()

    return prepare


def open_onnxruntime(file: str, threads: int | None) -> Prepare:
    """ONNX Runtime with its defaults: all graph optimisations, its own thread pool."""
    import onnxruntime  # type: ignore[import-untyped,unused-ignore]

    options = onnxruntime.SessionOptions()
    if threads is not None:
        options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_inputs()]

    def prepare(arrays: Sequence[Array]) -> Call:
        feed = dict(zip(names, arrays, strict=True))
        return lambda: session.run(None, feed)[0]

    return prepare


def import_openvino() -> Any:
    """The module, told that it is in a test run: otherwise importing it sends usage statistics."""
    os.environ["CI"] = "true"
    import openvino  # type: ignore[import-untyped,unused-ignore]

    return openvino


def open_openvino(file: str, threads: int | None, cache: str | None = None, share_outputs: bool = False) -> Prepare:
    """OpenVINO, float32 throughout, tuned for latency; inputs are shared with it, not copied.

    ``cache`` is a folder for compiled models. With ``share_outputs`` a result is overwritten by the next call.
    """
    openvino = import_openvino()
    properties: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    if threads is not None:
        properties["INFERENCE_NUM_THREADS"] = threads
    core = openvino.Core()
    if cache is not None:
        core.set_property({"CACHE_DIR": cache})
    request = core.compile_model(file, "CPU", properties).create_infer_request()

    def prepare(arrays: Sequence[Array]) -> Call:
        inputs = list(arrays)
        infer = request.infer
        return lambda: infer(inputs, share_inputs=True, share_outputs=share_outputs)[0]

    return prepare


OPEN: dict[str, Callable[..., Prepare]] = {
    "numpy": open_numpy,
    "untorch": open_untorch,
    "torch": open_torch,
    "onnxruntime": open_onnxruntime,
    "openvino": open_openvino,
}
