"""AOTInductor: its settings, and one method's graph compiled by it as the method's target wants it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import fx

from untorch.export.compiler_errors import explain_compiler
from untorch.export.complex_scalars import ComplexScalars
from untorch.export.environment import environment
from untorch.export.errors import CompileError
from untorch.export.kept_sizes import FixedSizeError, keeps_sizes
from untorch.export.kernel_calls import CALLS_FILE, describe_call, write_calls
from untorch.export.library import find_runtime_library
from untorch.export.method import Method
from untorch.export.patches import (
    dependent_launches,
    equal_layers,
    has_cpp_march,
    kernel_origins,
    neutral_paths,
    objects_at_a_time,
    torch_version,
)
from untorch.export.target import InductorRun
from untorch.export.torch_logs import quiet_logs
from untorch.ops import (
    byte_max_pool,
    causal_conv1d,
    channels_last_weight,
    computed_once,
    decoder_linears,
    fused_convolution,
    gated_delta_rule,
    int4,
    int4_moe,
    int8,
    int8_convolution,
    moe_grouped_mm,
    nvfp4,
    nvfp4_int8,
    nvfp4_moe,
    packed_convolution,
    packed_linear,
    paged_attention,
    paged_prefill,
    proxy_result,
    recurrent,
    recurrent_steps,
    w4a8,
    w8a8,
)
from untorch.validation import OptionError

__all__ = ["begin_inductor"]


# Inductor weighs parallel loops against a number of threads. A fixed one keeps the code the same on every build
# machine; the number of threads is chosen where the file runs.
_ASSUMED_THREADS = 8


def _inductor_options(method: Method, folder: Path) -> dict[str, Any]:
    options, target = method.options, method.target
    values: dict[str, Any] = {
        "aot_inductor.package": True,
        "aot_inductor.output_path": str(folder),
        "aot_inductor.link_libtorch": False,
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.package_constants_on_disk_format": "pickle_weights",
        "aot_inductor.custom_op_libs": ["untorch"],
        "aot_inductor.custom_ops_to_c_shims": {
            packed_convolution.OPERATOR: [packed_convolution.C_SHIM],
            packed_linear.OPERATOR: [packed_linear.C_SHIM],
            int4.OPERATOR: int4.C_SHIMS,
            int4_moe.OPERATOR: int4_moe.C_SHIMS,
            byte_max_pool.OPERATOR: [byte_max_pool.C_SHIM],
            int8.OPERATOR: [int8.C_SHIM],
            int8_convolution.OPERATOR: [int8_convolution.C_SHIM],
            moe_grouped_mm.OPERATOR: moe_grouped_mm.C_SHIMS,
            nvfp4.OPERATOR: nvfp4.C_SHIMS,
            nvfp4_int8.OPERATOR: [nvfp4_int8.C_SHIM],
            nvfp4_moe.OPERATOR: nvfp4_moe.C_SHIMS,
            proxy_result.CHECK_RESULT: [proxy_result.C_SHIM],
            paged_attention.OPERATOR: [paged_attention.C_SHIM],
            **paged_prefill.C_SHIMS,
            decoder_linears.OPERATOR: [decoder_linears.C_SHIM],
            fused_convolution.OPERATOR: [fused_convolution.C_SHIM],
            recurrent.OPERATOR: [recurrent.C_SHIM],
            recurrent_steps.OPERATOR: [recurrent_steps.C_SHIM],
            w4a8.OPERATOR: [w4a8.C_SHIM],
            w8a8.OPERATOR: [w8a8.C_SHIM],
            causal_conv1d.OPERATOR: [causal_conv1d.C_SHIM],
            gated_delta_rule.OPERATOR: [gated_delta_rule.C_SHIM],
        },
        "post_grad_custom_pre_pass": ComplexScalars(),
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
        **target.inductor_config(options),
    }
    values = {name: value for name, value in values.items() if value is not None}
    host = target.host
    if host.vector_bits is not None:
        values["cpp.simdlen"] = host.vector_bits or 1
    if host.march is not None and has_cpp_march():
        values["cpp.march"] = host.march
    if torch_version() < (2, 13):
        # Its result has the dtype of the two numbers, int64 for 0 and 1, instead of the tensor's.
        values["optimize_scatter_upon_const_tensor"] = False
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


def begin_inductor(method: Method, folder: Path, generated: list[tuple[str, str | None]] | None = None) -> InductorRun:
    """Begins to compile the traced method with its files below ``folder``.

    generated: what generated_only() gives. The code is generated then and not compiled; ``paths`` of the result are the
    wrapper and the extern nodes' JSON themselves.
    """
    links, output = folder / "lib", folder / "out"
    outlined = method.options.outline_layers
    shortened = outlined is not False
    if outlined is None:
        outlined = method.target.device == "cpu"
    links.mkdir()
    output.mkdir()
    (links / "libuntorch.so").symlink_to(find_runtime_library())
    method.target.link_libraries(links)
    assert method.program.example_inputs is not None
    args, kwargs = method.program.example_inputs
    values = _inductor_options(method, output)

    def aot_compile(module: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        channels_last_weight.register_lowering()
        computed_once.register_lowering()
        packed_convolution.register_lowering()
        fused_convolution.register_lowering()
        byte_max_pool.register_lowering()
        int8_convolution.register_lowering()
        _realize_operands(module)

        def compile_module() -> Any:
            with quiet_logs(), kernel_origins(describe_call) as sequence, objects_at_a_time(), keeps_sizes(module):
                return torch._inductor.aot_compile(module, args, kwargs, options=values), sequence

        try:
            result, sequence = compile_module() if layers is None else layers.compile(module, compile_module)
        except FixedSizeError as error:
            raise CompileError(f"method {method.name!r}: Inductor {error}: make them static") from error
        except Exception as error:
            if not generated:
                if (explained := explain_compiler(method.name, error)) is not None:
                    raise explained from error
                raise
            wrapper, extern_nodes = generated[-1]
            return [wrapper, extern_nodes or ""]
        write_calls(sequence, folder / CALLS_FILE)
        if not isinstance(result, list):
            raise CompileError(
                f"method {method.name!r}: AOTInductor gave {type(result).__name__}, expected a list of files"
            )
        return [item for item in result if isinstance(item, dict) or item]

    # Line tables of Triton's kernels hold the paths of their sources.
    line_info = os.environ.get("TRITON_DISABLE_LINE_INFO", "1")
    path = os.environ.get("LIBRARY_PATH")
    with (
        environment("LIBRARY_PATH", f"{links}:{path}" if path else str(links)),
        environment("TRITON_DISABLE_LINE_INFO", line_info),
        neutral_paths(output),
        equal_layers(outlined=outlined) if shortened else contextlib.nullcontext() as layers,
        dependent_launches() if _launches_dependent(method) else contextlib.nullcontext(),
    ):
        return method.target.begin_inductor(method, aot_compile, (tuple(args), dict(kwargs)))


def _realize_operands(module: fx.GraphModule) -> None:
    """What operators of libraries read is computed once.

    Inductor knows that of an operator once it has lowered one: what the first one of a process reads would be computed
    again for each of its other readers, and a model's code depend on what was compiled before it.
    """
    from torch._inductor.lowering import lowerings, needs_realized_inputs

    for owner in module.modules():
        for node in owner.graph.nodes if isinstance(owner, fx.GraphModule) else ():
            if isinstance(node.target, torch._ops.OpOverload) and node.target not in lowerings:
                needs_realized_inputs.add(node.target)


def _launches_dependent(method: Method) -> bool:
    """Whether the GPU has programmatic dependent launch, and the caller does not forbid it."""
    architecture = method.target.architecture
    has_pdl = architecture is not None and int(architecture.removeprefix("sm_")) >= 90
    if method.options.pdl and not has_pdl:
        raise OptionError(f"option pdl: sm_90 and newer GPUs have it, not {architecture or 'CPUs'}: leave it out")
    return has_pdl and method.options.pdl is not False
