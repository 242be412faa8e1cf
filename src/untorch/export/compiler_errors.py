"""What is said when a compiler refuses generated code: the first error, and where the compiler's whole output is."""

from __future__ import annotations

import os
import re
import tempfile
from typing import Any

from untorch.export.errors import CompileError

__all__ = ["explain_compiler"]

_MAX_LENGTH = 300


def explain_compiler(method: str, error: BaseException) -> CompileError | None:
    """The error for users, if a compiler of generated code is behind it. Its output goes to a file that stays."""
    refusal = _refusal(error)
    if refusal is None:
        return None
    output = str(refusal.output)
    handle, log = tempfile.mkstemp(prefix="untorch-compiler-", suffix=".log")
    with os.fdopen(handle, "w") as file:
        file.write(f"{' '.join(refusal.cmd)}\n\n{output}")
    compiler = os.path.basename(refusal.cmd[0]) if refusal.cmd else "the compiler"
    return CompileError(
        f"method {method!r}: {compiler} did not compile the code that torch generated: {_first_error(output)}\n"
        f"  All of its output: {log}"
    )


def _refusal(error: BaseException | None) -> Any:
    """The compiler's error among the causes: Inductor wraps it."""
    from torch._inductor.exc import CppCompileError

    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, CppCompileError):
            return error
        seen.add(id(error))
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return None


def _first_error(output: str) -> str:
    """The first line that says error, without the temporary folder; else the last one."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    found = next((line for line in lines if re.search(r"\berror:", line)), lines[-1] if lines else "no output")
    return re.sub(r"(?<![\w.])/\S*/", "", found)[:_MAX_LENGTH]
