"""Runs a written file where torch cannot be imported, and compares its results to eager PyTorch's."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.export.graph_signature import InputKind, SymIntArgument
from torch.utils import _pytree as pytree

from untorch.export.errors import VerificationError
from untorch.export.signature import dtype_name
from untorch.runtime.registry import find_kernel, find_registration

__all__ = ["OutputDifference", "compare", "from_numpy", "to_numpy", "verify_file"]

_TIMEOUT_SECONDS = 600

# Runs in a fresh process. None in sys.modules makes every `import torch` fail.
_SCRIPT = """
import json, sys
sys.modules["torch"] = None
folder, path, method, kernels, weights = sys.argv[1:]
import numpy
import untorch

def load(name, dtype, shape, strides):
    elements = numpy.load(f"{folder}/{name}.npy")
    if dtype == "bfloat16":
        import ml_dtypes
        elements = elements.view(ml_dtypes.bfloat16)
    return numpy.lib.stride_tricks.as_strided(elements, shape, [s * elements.itemsize for s in strides])

with open(f"{folder}/inputs.json") as file:
    inputs = json.load(file)
def remote(connection, target):
    # A kernel that the exporting process has: it computes there.
    def kernel(*args, **kwargs):
        connection.send((target, args, kwargs))
        error, result, changed = connection.recv()
        if error is not None:
            raise RuntimeError(error)
        for own, value in zip([*args, *kwargs.values()], changed):
            if isinstance(own, numpy.ndarray) and own.flags.writeable:
                own[...] = value
        return result
    return kernel

if kernels:
    from multiprocessing.connection import Client
    connection = Client(f"{folder}/kernels", "AF_UNIX")
    for target, cast, unchecked in json.loads(kernels):
        untorch.register_kernel(target, remote(connection, target), cast=cast, unchecked=unchecked)
program = untorch.load(path, weights=weights or None)
results = program[method].run([load(f"input_{i}", *form) for i, form in enumerate(inputs)])
written = []
for i, result in enumerate(results):
    if result is None:
        written.append(None)
        continue
    array = numpy.asarray(result)
    name = str(array.dtype)
    if name == "bfloat16":
        array = array.view(numpy.uint16)
    numpy.save(f"{folder}/output_{i}.npy", array)
    written.append(name)
with open(f"{folder}/outputs.json", "w") as file:
    json.dump(written, file)
"""


@dataclass(frozen=True)
class OutputDifference:
    """How far one output is from eager's: the largest absolute difference, and that over eager's largest value."""

    name: str
    max_abs: float
    max_rel: float


def verify_file(
    path: Path,
    method: str,
    program: torch.export.ExportedProgram,
    outputs: list[dict[str, Any] | None],
    tolerance: float,
    kernels: Sequence[str] = (),
    module: torch.nn.Module | None = None,
    weights: str | None = None,
) -> list[OutputDifference]:
    """Compares the method in ``path`` on the program's example inputs. Raises VerificationError.

    module: computes what is expected, if it is not the program, whose graph has no static ranges of int8.

    weights: the .safetensors file, or the folder of files, that the file takes weights from.

    kernels: the operators that go to Python kernels. Those that are registered in this process compute in it.
    """
    assert program.example_inputs is not None
    args, kwargs = program.example_inputs
    leaves = pytree.tree_leaves((args, kwargs))
    specs = [spec.arg for spec in program.graph_signature.input_specs if spec.kind == InputKind.USER_INPUT]
    inputs = [
        leaf.detach() if isinstance(leaf, torch.Tensor) else torch.tensor(leaf)
        for leaf, spec in zip(leaves, specs, strict=True)
        if isinstance(leaf, torch.Tensor) or isinstance(spec, SymIntArgument)
    ]
    with tempfile.TemporaryDirectory(prefix="untorch-verify-") as name:
        folder = Path(name)
        for i, tensor in enumerate(inputs):
            numpy.save(folder / f"input_{i}.npy", to_numpy(_elements(tensor)))
        forms = [(dtype_name(t.dtype), list(t.shape), list(t.stride())) for t in inputs]
        (folder / "inputs.json").write_text(json.dumps(forms))
        copied_args, copied_kwargs = pytree.tree_map_only(torch.Tensor, _copy, (args, kwargs))
        result = (module or program.module())(*copied_args, **copied_kwargs)
        expected = [
            leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf
            for leaf in pytree.tree_leaves(result, is_leaf=lambda x: x is None)
        ]
        # Constants are not computed: the loader has them from the manifest.
        expected = [
            None if entry is not None and "constant" in entry else leaf
            for leaf, entry in zip(expected, outputs, strict=True)
        ]
        _run(folder, path, method, kernels, weights)
        dtypes = json.loads((folder / "outputs.json").read_text())
        results = [
            None if dtype is None else from_numpy(numpy.load(folder / f"output_{i}.npy"), dtype)
            for i, dtype in enumerate(dtypes)
        ]
    return compare(method, results, expected, [o["name"] if o else None for o in outputs], tolerance)


def compare(
    method: str, results: list[Any], expected: list[Any], names: list[str | None], tolerance: float
) -> list[OutputDifference]:
    """The differences of flat outputs. Raises VerificationError for another count, shape, dtype or value."""
    if len(results) != len(expected):
        raise VerificationError(f"method {method!r}: expected {len(expected)} outputs, got {len(results)}")
    differences = []
    for i, (result, reference) in enumerate(zip(results, expected, strict=True)):
        name = names[i] if i < len(names) and names[i] else f"output_{i}"
        where = f"method {method!r}, output {name}"
        if reference is None or result is None:
            if reference is not result:
                raise VerificationError(f"{where}: expected {_kind(reference)}, got {_kind(result)}")
            continue
        reference = reference if isinstance(reference, torch.Tensor) else torch.tensor(reference)
        if result.shape != reference.shape or result.dtype != reference.dtype:
            raise VerificationError(f"{where}: expected {_kind(reference)}, got {_kind(result)}")
        difference = _difference(str(name), result, reference)
        differences.append(difference)
        if not difference.max_rel <= tolerance:
            raise VerificationError(
                f"{where}: the largest difference from eager is {difference.max_abs:.3g}, which is "
                f"{difference.max_rel:.3g} of its largest value; the tolerance is {tolerance:g}"
            )
    return differences


def to_numpy(tensor: torch.Tensor) -> numpy.ndarray[Any, Any]:
    """The tensor's values with its strides where numpy can hold them; bfloat16 as its bits in uint16."""
    tensor = tensor.cpu()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def from_numpy(array: numpy.ndarray[Any, Any], dtype: str) -> torch.Tensor:
    """The inverse of ``to_numpy``."""
    tensor = torch.from_numpy(numpy.ascontiguousarray(array).reshape(array.shape))
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """The part of the storage that the tensor looks at, as a vector: .npy files do not keep strides."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((reach + 1 if tensor.numel() else 0,), (1,))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value.dtype)}{list(value.shape)}"
    return "None" if value is None else type(value).__name__


def _difference(name: str, result: torch.Tensor, reference: torch.Tensor) -> OutputDifference:
    if reference.numel() == 0:
        return OutputDifference(name, 0.0, 0.0)
    wide = torch.complex128 if reference.is_complex() else torch.float64
    a, b = result.to(wide), reference.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    distance = torch.where(same, torch.zeros((), dtype=torch.float64), (a - b).abs())
    largest = float(distance.nan_to_num(nan=float("inf"), posinf=float("inf")).max())
    finite = b.abs()[b.isfinite()]
    scale = float(finite.max()) if finite.numel() else 0.0
    return OutputDifference(name, largest, largest / max(scale, 1e-6))


def _run(folder: Path, path: Path, method: str, kernels: Sequence[str], weights: str | None) -> None:
    found = {target: find_registration(target) for target in kernels}
    own = [(target, entry.cast, entry.unchecked) for target, entry in found.items() if entry is not None]
    arguments = [str(folder), str(path), method, json.dumps(own) if own else "", weights or ""]
    command = [sys.executable, "-c", _SCRIPT, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    try:
        with _serve_kernels(folder) if own else contextlib.nullcontext():
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise VerificationError(f"method {method!r}: no result after {_TIMEOUT_SECONDS} s") from error
    if done.returncode != 0:
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
        text = done.stderr.strip() or done.stdout.strip()
        raise VerificationError(f"method {method!r} does not load or run without torch ({how}):\n{text}")


@contextlib.contextmanager
def _serve_kernels(folder: Path) -> Iterator[None]:
    """Runs kernels of this process for the other one, which connects to a socket in the folder."""
    from multiprocessing.connection import Client, Listener

    address = str(folder / "kernels")

    def serve() -> None:
        with listener.accept() as connection, contextlib.suppress(EOFError, OSError):
            while (request := connection.recv()) is not None:
                target, args, kwargs = request
                try:
                    result = find_kernel(target)(*args, **kwargs)
                    connection.send((None, result, [*args, *kwargs.values()]))
                except Exception as error:
                    connection.send((f"{type(error).__name__}: {error}", None, []))

    with Listener(address, "AF_UNIX") as listener:
        thread = threading.Thread(target=serve, name="untorch-verify", daemon=True)
        thread.start()
        try:
            yield
        finally:
            if thread.is_alive():  # the other process never connected
                with contextlib.suppress(OSError), Client(address, "AF_UNIX") as connection:
                    connection.send(None)
            thread.join()
