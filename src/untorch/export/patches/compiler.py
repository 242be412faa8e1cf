"""A patch of how generated C++ is compiled and linked: the host's code and the kernels at a time, with headers parsed
before, and as a library that also loads with glibc 2.28.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from untorch.export.patches.registry import patch, replaced
from untorch.export.portable_link import is_library_link, portable_options
from untorch.export.precompiled_headers import generated_source, with_precompiled_header
from untorch.export.runtime_interface import compile_in_parts
from untorch.runtime.log import INFO, log

__all__ = ["objects_at_a_time", "plain_regex"]

# Shadows the standard's <regex>.
_HEADERS = Path(__file__).resolve().parents[1] / "headers"
# All that aoti_runtime/model_base.h may do with regular expressions for headers/regex to be enough.
_REGEX_USES = (
    r"#include <regex>",
    r'std::regex re\("\([a-z|]+\)\(:\(\[0-9\]\+\)\)\?"\);',
    r"std::smatch sm;",
    r"std::regex_match\(device_str, sm, re\);",
)


@functools.cache
def plain_regex() -> Path | None:
    """The folder of headers/regex, if this torch's runtime headers need no more of <regex> than is there."""
    import torch

    header = Path(torch.__file__).parent / "include/torch/csrc/inductor/aoti_runtime/model_base.h"
    try:
        text = header.read_text()
    except OSError:
        return None
    uses = re.findall(r"<regex>|std::(?:regex|smatch|cmatch|sregex|cregex|ssub_match|match_results)\w*", text)
    fits = len(uses) == len(_REGEX_USES) and all(re.search(use, text) for use in _REGEX_USES)
    return _HEADERS if fits else None


@patch(
    "torch._inductor.cpp_builder._run_compile_cmd",
    versions="2.11–2.15",
    why="Inductor compiles the host's code, waits, and compiles the kernels. Both spend most of their time on headers: "
    "torch's precompiled ones are keyed by export's temporary folder, and <regex>, which reads the name of a device, "
    "takes a third. The library asks for the names of its build machine's glibc and libstdc++.",
    test="test_compiler.py::test_torch_compiles_one_object_after_the_other",
)
@contextlib.contextmanager
def objects_at_a_time() -> Iterator[None]:
    """Generated sources are compiled while Inductor goes on; its next other command waits for them.

    The one that links the library gets portable_options.
    """
    from torch._inductor import cpp_builder

    original: Any = cpp_builder._run_compile_cmd
    is_gcc = cpp_builder.is_gcc()
    pending: list[Future[None]] = []

    def compile_source(compiler: str, arguments: list[str], source: str, folder: str) -> None:
        if source.endswith(".wrapper.cpp") and (shadow := plain_regex()) is not None:
            arguments = [f"-I{shadow}", *arguments]
        if is_gcc:
            arguments = with_precompiled_header(compiler, arguments)
        if not compile_in_parts(compiler, arguments, folder):
            original(shlex.join([compiler, *arguments]), folder)

    def wait() -> None:
        done, pending[:] = list(pending), []
        for future in done:
            future.result()

    def run(command: str, cwd: str) -> None:
        compiler, *arguments = shlex.split(command)
        if (source := generated_source(arguments)) is not None:
            # Inductor removes the folder before the compiler is done with it.
            pending.append(pool.submit(compile_source, compiler, arguments, source, os.path.dirname(cwd)))
            return
        wait()
        if is_library_link(arguments):
            with portable_options(compiler) as options:
                try:
                    original(shlex.join([compiler, *arguments, *options]), cwd)
                except Exception as error:  # what the linker refuses without them, too, is raised below
                    log(INFO, "the library is for this system's glibc and newer ones: %s", error)
                else:
                    return
        original(command, cwd)

    with ThreadPoolExecutor(2, thread_name_prefix="untorch-compile") as pool:
        with replaced(cpp_builder, "_run_compile_cmd", run):
            yield
        wait()
