"""AOTInductor: its options, and one method's graph compiled by it, here or in a process for a GPU that is not there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx

from untorch.export.absent_driver import stub_driver
from untorch.export.absent_gpu import Produced, compile_elsewhere
from untorch.export.cuda import CudaTarget, driver_library
from untorch.export.errors import CompileError
from untorch.export.kernel_choice import read_tuning, recording
from untorch.export.kernel_sources import keeping_sources
from untorch.export.library import find_runtime_library
from untorch.export.matmul_choice import INDUCTOR_OPTIONS, timing
from untorch.export.options import ExportOptions
from untorch.export.targets import CpuTarget
from untorch.export.torch_patches import has_cpp_march
from untorch.ops import int4, nvfp4, nvfp4_moe, packed_linear
from untorch.runtime.errors import UntorchError

__all__ = ["run_inductor"]


# Inductor weighs parallel loops against a number of threads. A fixed one keeps the code the same on every build
# machine; how many run is decided where the file runs.
_ASSUMED_THREADS = 8


def _inductor_options(
    target: CpuTarget, options: ExportOptions, folder: Path, gpu: CudaTarget | None = None
) -> dict[str, Any]:
    values: dict[str, Any] = {
        "aot_inductor.package": True,
        "aot_inductor.output_path": str(folder),
        "aot_inductor.link_libtorch": False,
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.package_constants_on_disk_format": "pickle_weights",
        "aot_inductor.custom_op_libs": ["untorch"],
        "aot_inductor.custom_ops_to_c_shims": {
            packed_linear.OPERATOR: [packed_linear.C_SHIM],
            int4.OPERATOR: int4.C_SHIMS,
            nvfp4.OPERATOR: nvfp4.C_SHIMS,
            nvfp4_moe.OPERATOR: nvfp4_moe.C_SHIMS,
        },
        "aot_inductor.precompile_headers": False,
        # Its bound is 2 even where the program allows 1; the loader checks the program's own bounds.
        "aot_inductor.check_lowerbound": False,
        "aot_inductor.enable_line_tables": False,
        "aot_inductor.enable_frame_pointer": False,
        "aot_inductor.compile_wrapper_opt_level": options.wrapper_optimisation,
        "cpp.dynamic_threads": True,
        "cpp.threads": _ASSUMED_THREADS,
        "compile_threads": 1,
        "freezing": False,
    }
    if gpu is not None and gpu.absent is not None:
        # Padding is decided by measuring. Small tensors are looked at for numbers, and have no values while compiling.
        values |= {"shape_padding": False, "always_keep_tensor_constants": True}
        values["aot_inductor.embed_kernel_binary"] = True
    elif gpu is not None:
        # One file: the kernels lie in the library. They are compiled by torch's own pool of processes.
        values["aot_inductor.embed_kernel_binary"] = True
        del values["compile_threads"]
    if gpu is not None and options.matmul == "auto":
        values |= INDUCTOR_OPTIONS
    if target.vector_bits is not None:
        values["cpp.simdlen"] = target.vector_bits or 1
    if target.march is not None and has_cpp_march():
        values["cpp.march"] = target.march
    return _known_here(values) | dict(options.inductor)


def _known_here(values: dict[str, Any]) -> dict[str, Any]:
    """Without the settings that only tune, where this torch does not have them."""
    from torch._inductor import config

    optional = {
        "aot_inductor.precompile_headers",
        "aot_inductor.check_lowerbound",
        "aot_inductor.enable_line_tables",
        "aot_inductor.enable_frame_pointer",
    }
    known = config.get_config_copy()
    return {key: value for key, value in values.items() if key in known or key not in optional}


def run_inductor(
    name: str,
    program: torch.export.ExportedProgram,
    module: fx.GraphModule,
    target: CpuTarget,
    options: ExportOptions,
    folder: Path,
    gpu: CudaTarget | None,
    generated: list[tuple[str, str | None]] | None = None,
) -> Produced:
    """Compiles; or, with what generated_only() gives, has the code generated, which is then in the place of paths."""
    links, output = folder / "lib", folder / "out"
    links.mkdir()
    output.mkdir()
    (links / "libuntorch.so").symlink_to(find_runtime_library())
    if gpu is not None and gpu.absent is None:
        (links / "libcuda.so").symlink_to(driver_library())
    elif gpu is not None:
        from torch._inductor.cpp_builder import get_cpp_compiler

        stub_driver(links / "libcuda.so", get_cpp_compiler())
    assert program.example_inputs is not None
    args, kwargs = program.example_inputs
    values = _inductor_options(target, options, output, gpu)

    def compile_graph(module: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        try:
            result = torch._inductor.aot_compile(module, args, kwargs, options=values)
        except Exception:
            if not generated:
                raise
            wrapper, extern_nodes = generated[-1]
            return [wrapper, extern_nodes or ""]
        if not isinstance(result, list):
            raise CompileError(f"method {name!r}: AOTInductor gave {type(result).__name__}, expected a list of files")
        return [item for item in result if isinstance(item, dict) or item]

    with _environment("LIBRARY_PATH", str(links)):
        if gpu is not None and gpu.absent is not None:
            tuning = {} if options.tuning is None else read_tuning(options.tuning).get(gpu.architecture, {})
            return compile_elsewhere(name, module, (tuple(args), dict(kwargs)), gpu.absent, compile_graph, tuning)
        try:
            with (
                recording(None if gpu is None else gpu.architecture) as choices, keeping_sources() as sources,
                contextlib.nullcontext() if gpu is None else timing(choices[gpu.architecture]),
            ):  # fmt: skip
                result = compile_graph(module, tuple(args), dict(kwargs))
        except UntorchError:
            raise
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise CompileError(f"method {name!r}: AOTInductor failed: {reason}") from error
    paths = [item for item in result if isinstance(item, str)]
    tensors = {fqn: tensor for item in result if isinstance(item, dict) for fqn, (tensor, _) in item.items()}
    return Produced(paths, tensors, frozenset(), choices, sources)


@contextlib.contextmanager
def _environment(name: str, first: str) -> Iterator[None]:
    """Puts ``first`` in front of a path variable."""
    old = os.environ.get(name)
    os.environ[name] = f"{first}:{old}" if old else first
    try:
        yield
    finally:
        if old is None:
            del os.environ[name]
        else:
            os.environ[name] = old
