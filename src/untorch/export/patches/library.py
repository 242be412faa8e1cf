"""Patches of AOTInductor's libraries: no paths of the build machine, a table of what each is compiled for, and arrays
that are declared where they are used.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from untorch.export.patches.registry import patch, replaced
from untorch.export.weights import parse_constants

__all__ = ["INTERFACE_SYMBOL", "declared_arrays", "interface_table", "neutral_paths"]

# The variable in which native/model/interface_table.cpp looks.
INTERFACE_SYMBOL = "untorch_interface"


@patch(
    "torch._inductor.codegen.cpp_wrapper_cpu.CppWrapperCpu.codegen_model_constructor",
    versions="2.11–2.15",
    why="Generated code checks neither its inputs nor its weights, and the library does not tell what it expects of "
    "them. The loader compares the manifest with this table, so that one that lies is an error instead of a crash.",
    test="test_library.py::test_torchs_libraries_have_no_table",
)
@contextlib.contextmanager
def interface_table(inputs: list[dict[str, Any]], mutated: frozenset[str]) -> Iterator[None]:
    """The generated library tells its inputs, as the manifest has them, and its constants.

    mutated: FQNs of the constants that the code writes.
    """
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    original: Any = CppWrapperCpu.codegen_model_constructor

    def patched(self: Any) -> None:
        original(self)
        constants = [
            {
                "name": constant.name,
                "shape": list(constant.shape),
                "strides": list(constant.strides),
                "mutated": constant.fqn in mutated,
            }
            for constant in parse_constants(self.prefix.getvalue())
        ]
        # A literal in C is one in JSON for ASCII text.
        literal = json.dumps(json.dumps({"inputs": inputs, "constants": constants}))
        self.prefix.writeline(
            f'extern "C" {{ extern __attribute__((visibility("default"))) const char {INTERFACE_SYMBOL}[]; '
            f"const char {INTERFACE_SYMBOL}[] = {literal}; }}"
        )

    with replaced(CppWrapperCpu, "codegen_model_constructor", patched):
        yield


@patch(
    "torch._inductor.cpp_builder._get_shared_cflags",
    "torch._inductor.codecache.write",
    versions="2.11–2.15",
    why="Libraries carry the paths of generated code and of torch's headers, and generated files are named after a "
    "hash of the compiler's command, which has paths too. There is no option for flags of the compiler.",
    test="test_library.py::test_torchs_libraries_carry_paths",
)
@contextlib.contextmanager
def neutral_paths(folder: Path) -> Iterator[None]:
    """Generated files below ``folder`` and torch's headers have relative names in libraries and in generated code."""
    import torch
    from torch._inductor import codecache, cpp_builder

    original_flags: Any = cpp_builder._get_shared_cflags
    original_write: Any = codecache.write
    # The compiler takes the last one that fits.
    prefixes = {os.getcwd(): ".", f"{Path(torch.__file__).parent}/": "torch/", f"{folder}/": ""}

    def flags(*args: Any, **kwargs: Any) -> Any:
        return [*original_flags(*args, **kwargs), *(f"ffile-prefix-map={old}={new}" for old, new in prefixes.items())]

    def write(content: str | bytes, extension: str, extra: str = "", *args: Any, **kwargs: Any) -> Any:
        if not str(kwargs.get("specified_dir", "")).startswith(str(folder)):
            return original_write(content, extension, extra, *args, **kwargs)
        if isinstance(content, str):
            content = content.replace(f"{folder}/", "")
        return original_write(content, extension, "", *args, **kwargs)

    with replaced(cpp_builder, "_get_shared_cflags", flags), replaced(codecache, "write", write):
        yield


@patch(
    "torch._inductor.codegen.cpp_wrapper_cpu.CppWrapperCpu.codegen_int_array_var",
    versions="2.11–2.15",
    why="Declarations of int arrays are remembered by the id of what they were written to (before 2.13, of a bound "
    "method, which each call makes anew). Once that is freed, another object may get its id: the array is used without "
    "a declaration, and the library does not compile. It depends on where memory is free.",
    test="test_library.py::test_torch_forgets_declarations",
)
@contextlib.contextmanager
def declared_arrays() -> Iterator[None]:
    """What int arrays are declared in lives as long as the generated code."""
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    original: Any = CppWrapperCpu.codegen_int_array_var

    def patched(self: Any, int_array: str, writeline: Any, *args: Any, **kwargs: Any) -> Any:
        kept = self.__dict__.setdefault("_untorch_written_to", {})
        graph = kwargs.get("graph")
        kept[id(graph)] = graph
        owner = getattr(writeline, "__self__", writeline)
        writeline = kept.setdefault((id(owner), getattr(writeline, "__name__", "")), writeline)
        return original(self, int_array, writeline, *args, **kwargs)

    with replaced(CppWrapperCpu, "codegen_int_array_var", patched):
        yield
