"""``QuantizeOptions``: how a method's linear layers are quantised, checked when it is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from untorch.validation import OptionError, check_option, hint

__all__ = ["QuantizeOptions"]

# The group sizes, the methods and the GEMMs for large M (prefill) of each dtype.
_CHOICES = {
    "int4": (Literal[32, 64, 128, 256], Literal["hqq", "rtn"], Literal["exact"]),
    "int8": (Literal[None], Literal["rtn"], Literal["exact"]),
    "nvfp4": (Literal[16], Literal["search", "rtn"], Literal["exact", "fp8", "fp4"]),
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "int4": {"group_size": 128, "method": "hqq"},
    "int8": {"group_size": None, "method": "rtn"},
    "nvfp4": {"group_size": 16, "method": "search"},
}


@dataclass(frozen=True)
class QuantizeOptions:
    """How the linear layers of a method are quantised: the arguments of ``untorch.quant.quantize``.

    dtype: "int4", "int8" or "nvfp4". int8 also quantises activations, a row at a time when the layer is called; it is
        for CPUs.
    group_size: inputs that share a scale; None: 128 for int4, 16 for nvfp4. int8 has no groups.
    method: "hqq" or "rtn" for int4, "rtn" for int8, "search" or "rtn" for nvfp4; None: the first of these.
    include, exclude: the layers, by name or by a function, as ``untorch.quant.quantize`` takes them.
    prefill: for nvfp4, how GPUs may multiply at large M: "exact", "fp8" or "fp4".

    Raises OptionError.
    """

    dtype: Literal["int4", "int8", "nvfp4"]
    group_size: int | None = None
    method: str | None = None
    include: Any = None
    exclude: Any = None
    prefill: str = "exact"

    def __post_init__(self) -> None:
        check_option("quantize: dtype", self.dtype, Literal["int4", "int8", "nvfp4"])
        if self.dtype == "nvfp4" and self.group_size not in (None, 16):
            raise OptionError(
                f"option quantize: group_size: nvfp4 has blocks of 16, which cannot be chosen: leave it out, got "
                f"{self.group_size!r}"
            )
        if self.dtype == "int8" and self.group_size is not None:
            raise OptionError(
                f"option quantize: group_size: int8 has a scale an output, no groups: leave it out, got "
                f"{self.group_size!r}"
            )
        if self.dtype != "nvfp4" and self.prefill != "exact":
            raise OptionError(
                f"option quantize: prefill: {self.dtype} has 'exact' alone, which need not be given; nvfp4 has others; "
                f"got {self.prefill!r}"
            )
        sizes, methods, prefills = _CHOICES[self.dtype]
        for name, kind in (("group_size", sizes), ("method", methods)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, _DEFAULTS[self.dtype][name])
            check_option(f"quantize: {name}", getattr(self, name), kind)
        check_option("quantize: prefill", self.prefill, prefills)

    @classmethod
    def read(cls, value: str | Mapping[str, Any] | QuantizeOptions) -> QuantizeOptions:
        """Options as a dtype's name, as a dictionary of these fields, or as they are. Raises OptionError."""
        if isinstance(value, QuantizeOptions):
            return value
        if isinstance(value, str):
            value = {"dtype": value}
        known = [field.name for field in dataclasses.fields(cls)]
        for name in value:
            if name not in known:
                raise OptionError(f"option quantize: unknown option {name!r}: {hint(name, known)}")
        if "dtype" not in value:
            raise OptionError("option quantize: a dictionary of options needs 'dtype', such as {'dtype': 'int4'}")
        return cls(**value)
