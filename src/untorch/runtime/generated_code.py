"""What the generated C++ of a stock package says about results of Python kernels: the extern nodes' JSON does not."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["DeclaredResult", "declared_result"]

_DTYPES = {
    "float": "float32", "double": "float64", "int64_t": "int64", "int32_t": "int32", "int16_t": "int16",
    "int8_t": "int8", "uint8_t": "uint8", "bool": "bool", "uint16_t": "uint16", "uint32_t": "uint32",
    "uint64_t": "uint64", "half": "float16", "bfloat16": "bfloat16", "at::Half": "float16", "c10::Half": "float16",
    "at::BFloat16": "bfloat16", "c10::BFloat16": "bfloat16", "at::Float8_e4m3fn": "float8_e4m3fn",
    "at::Float8_e5m2": "float8_e5m2", "c10::complex<float>": "complex64", "c10::complex<double>": "complex128",
    "at::complex<float>": "complex64", "at::complex<double>": "complex128",
}  # fmt: skip
_POINTER = re.compile(r"\((?:const )?([A-Za-z_][\w:]*(?:<\w+>)?)\s*\*\)\((.*?)\.data_ptr\(\)\)")
_ALIAS = re.compile(r"^\s*(?:const )?(?:auto|RAIIAtenTensorHandle)&?&? (\w+)\s*(?:=|\()(.*);", re.MULTILINE)


@dataclass(frozen=True)
class DeclaredResult:
    """dtype: None where no pointer to the memory is taken. Sizes and strides: an int, or the C++ of an expression."""

    dtype: str | None
    sizes: tuple[int | str, ...]
    strides: tuple[int | str, ...]


def declared_result(source: str, name: str) -> DeclaredResult | None:
    """The declaration of the buffer ``name``; None if the code does not check its size and strides."""
    checked = re.search(rf"assert_size_stride\({name}, \{{([^}}]*)\}}, \{{([^}}]*)\}}", source)
    if checked is None:
        return None
    # Views of the buffer and those who take its memory over address it, too.
    names = {name}
    for alias, value in _ALIAS.findall(source):
        if names & set(re.findall(r"\w+", value)):
            names.add(alias)
    dtypes = {_DTYPES.get(kind) for kind, value in _POINTER.findall(source) if names & set(re.findall(r"\w+", value))}
    return DeclaredResult(dtypes.pop() if len(dtypes) == 1 else None, _dims(checked[1]), _dims(checked[2]))


def _dims(text: str) -> tuple[int | str, ...]:
    parts = [part.strip() for part in text.split(",")]
    return tuple(int(part[:-1]) if re.fullmatch(r"-?\d+L", part) else part for part in parts if part)
