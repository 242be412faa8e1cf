"""``QuantizeOptions``: how a method's linear layers are quantised, checked when it is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from untorch.validation import OptionError, check_option, hint

__all__ = ["QuantizeOptions"]

# The group sizes, the methods and the GEMMs for large M (prefill) of each dtype.
_CHOICES = {
    "int4": (Literal[32, 64, 128, 256], Literal["hqq", "rtn", "symmetric"], Literal["exact"]),
    "int8": (Literal[None], Literal["rtn"], Literal["exact"]),
    "fp8": (Literal[None], Literal["rtn"], Literal["exact"]),
    "nvfp4": (Literal[16], Literal["search", "rtn"], Literal["exact", "fp8", "fp4"]),
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "int4": {"group_size": 128, "method": "hqq"},
    "int8": {"group_size": None, "method": "rtn"},
    "fp8": {"group_size": None, "method": "rtn"},
    "nvfp4": {"group_size": 16, "method": "search"},
}


@dataclass(frozen=True)
class QuantizeOptions:
    """How the linear layers of a method are quantised: the arguments of ``untorch.quant.quantize``.

    dtype: "int4", "int8", "fp8" or "nvfp4". int8 and fp8 also quantise activations, a row at a time when the layer is
        called; fp8 is for GPUs, from sm_89 on.
    group_size: inputs that share a scale; None: 128 for int4, 16 for nvfp4. int8 and fp8 have no groups.
    method: "hqq", "rtn" or "symmetric" for int4, "rtn" for int8 and fp8, "search" or "rtn" for nvfp4; None: the first
        of these.
    include, exclude: the layers, by name or by a function, as ``untorch.quant.quantize`` takes them.
    prefill: for nvfp4, how GPUs may multiply at large M: "exact", "fp8" or "fp4".
    calibration: for int8 on CPUs, batches of inputs: the graph runs them, and convolutions and linear layers get static
        ranges of activations. An iterable that can be iterated for each method; each batch is a tensor, a tuple of
        arguments, or a dictionary of keyword arguments. None: linear layers quantise each row when they run, and
        convolutions stay in floating point.
    observer: how a range comes from the batches: "minmax", "percentile" or "mse" (``untorch.quant.observers``).
    percentile: for the observer of that name, the share of values in the range.
    smooth: with ``calibration``, the strength of SmoothQuant, 0 to 1: how much of the activations' range moves into the
        weights of linear layers. 0.5 is usual. None: nothing.
    embeddings: for int4 and int8, also tables of embeddings. A linear layer that is tied to one shares its tensors.

    Raises OptionError.
    """

    dtype: Literal["int4", "int8", "fp8", "nvfp4"]
    group_size: int | None = None
    method: str | None = None
    include: Any = None
    exclude: Any = None
    prefill: str = "exact"
    calibration: Any = None
    observer: Literal["minmax", "percentile", "mse"] = "minmax"
    percentile: float = 99.99
    embeddings: bool = False
    smooth: float | None = None

    def __post_init__(self) -> None:
        check_option("quantize: dtype", self.dtype, Literal["int4", "int8", "fp8", "nvfp4"])
        if self.dtype == "nvfp4" and self.group_size not in (None, 16):
            raise OptionError(
                f"option quantize: group_size: nvfp4 has blocks of 16, which cannot be chosen: leave it out, got "
                f"{self.group_size!r}"
            )
        if self.dtype in ("int8", "fp8") and self.group_size is not None:
            raise OptionError(
                f"option quantize: group_size: {self.dtype} has a scale an output, no groups: leave it out, got "
                f"{self.group_size!r}"
            )
        check_option("quantize: embeddings", self.embeddings, bool)
        if self.dtype in ("nvfp4", "fp8") and self.embeddings:
            raise OptionError(
                f"option quantize: embeddings: {self.dtype} is not for embeddings: take int8 or int4 for them"
            )
        if self.dtype != "nvfp4" and self.prefill != "exact":
            raise OptionError(
                f"option quantize: prefill: {self.dtype} has 'exact' alone, which need not be given; nvfp4 has others; "
                f"got {self.prefill!r}"
            )
        self._check_calibration()
        sizes, methods, prefills = _CHOICES[self.dtype]
        for name, kind in (("group_size", sizes), ("method", methods)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, _DEFAULTS[self.dtype][name])
            check_option(f"quantize: {name}", getattr(self, name), kind)
        check_option("quantize: prefill", self.prefill, prefills)

    def _check_calibration(self) -> None:
        check_option("quantize: observer", self.observer, Literal["minmax", "percentile", "mse"])
        if isinstance(self.percentile, bool) or not isinstance(self.percentile, int | float):
            raise OptionError(f"option quantize: percentile: expected a number, got {self.percentile!r}")
        if not 50 < self.percentile <= 100:
            raise OptionError(
                f"option quantize: percentile: expected above 50 and at most 100, got {self.percentile!r}"
            )
        if self.smooth is not None:
            if isinstance(self.smooth, bool) or not isinstance(self.smooth, int | float) or not 0 <= self.smooth <= 1:
                raise OptionError(f"option quantize: smooth: expected a number from 0 to 1, got {self.smooth!r}")
            if self.calibration is None:
                raise OptionError(
                    "option quantize: smooth: it needs batches of inputs, which show activations: give 'calibration'"
                )
        if self.calibration is None:
            return
        if self.dtype != "int8":
            raise OptionError(
                f"option quantize: calibration: it is for int8, whose activations are quantised: leave it out for "
                f"{self.dtype}"
            )
        batches = self.calibration
        if isinstance(batches, str | bytes | Mapping | torch.Tensor) or not isinstance(batches, Iterable):
            raise OptionError(
                f"option quantize: calibration: expected an iterable of batches, such as a list of tuples of "
                f"arguments, got {type(batches).__name__}"
            )
        if isinstance(batches, Iterator):
            raise OptionError(
                f"option quantize: calibration: expected an iterable that can be iterated for each method, got "
                f"{type(batches).__name__}: give a list"
            )

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
