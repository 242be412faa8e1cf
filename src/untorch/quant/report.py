"""What ``quantize`` says about a module: each layer with its error and its bytes, and what was left alone and why."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

__all__ = ["LayerReport", "QuantizationReport"]


@dataclass(frozen=True)
class LayerReport:
    """One weight that was quantised.

    names: the linear layers that use it, dotted; more than one if the weight is tied between them.
    shape: (out_features, in_features); ``packed_shape`` is (n, k) with the padding.
    dtype: the weight's before, which scales and zeros of int4 have as well.
    group_size: inputs that share a scale; in int8 and fp8 all of a layer's, or 128 in fp8 with scales of blocks.
    error: ‖W' − W‖ / ‖W‖, the relative Frobenius error of the weight; 0 for a weight of zeros. Not known (NaN) for
        what was read from a checkpoint.
    nbytes_before, nbytes_after: of the weight; after with scales, zeros and padding.
    kept_by: parameters that still need the weight in floating point, so that its bytes stay as well: an embedding that
        is tied to the layer, or a linear layer that is not quantised.
    rtn_error: the error that rounding to nearest would have, where another method chose and it is known; else None.
    prefill: how GPUs may compute GEMMs at large M, see ``quantize``.
    quantized_dtype: "int4", "int8", "fp8" or "nvfp4"; "" where that is not recorded.
    """

    names: tuple[str, ...]
    shape: tuple[int, int]
    packed_shape: tuple[int, int]
    dtype: str
    group_size: int
    method: str
    error: float
    nbytes_before: int
    nbytes_after: int
    kept_by: tuple[str, ...] = ()
    rtn_error: float | None = None
    prefill: str = "exact"
    quantized_dtype: str = ""

    @property
    def note(self) -> str:
        """What is not ordinary about this weight, in words; empty for most."""
        notes = []
        if len(self.names) > 1:
            notes.append(f"one weight, also in {', '.join(self.names[1:])}")
        if self.kept_by:
            notes.append(f"the {self.dtype} weight stays too: {', '.join(self.kept_by)} reads it")
        if self.prefill != "exact":
            notes.append(f"prefill in {self.prefill}")
        if self.packed_shape != self.shape:
            notes.append(f"padded to {self.packed_shape[0]} × {self.packed_shape[1]}")
        return "; ".join(notes)

    def to_json(self) -> dict[str, Any]:
        """As the command line prints it; an error that is not known is None."""
        return {
            "names": list(self.names), "shape": list(self.shape), "packed_shape": list(self.packed_shape),
            "dtype": self.dtype, "group_size": self.group_size, "method": self.method,
            "error": None if math.isnan(self.error) else self.error, "before_bytes": self.nbytes_before,
            "after_bytes": self.nbytes_after, "kept_by": list(self.kept_by), "note": self.note,
            "rtn_error": self.rtn_error, "prefill": self.prefill, "quantized_dtype": self.quantized_dtype,
        }  # fmt: skip


@dataclass(frozen=True)
class QuantizationReport:
    """What was quantised, layer by layer; ``skipped`` maps the linear layers that were left alone to the reason.

    ``module_nbytes_before`` and ``_after`` count all parameters and buffers of the module, shared ones once.
    """

    layers: tuple[LayerReport, ...]
    skipped: dict[str, str] = field(default_factory=dict)
    module_nbytes_before: int = 0
    module_nbytes_after: int = 0
    seconds: float = 0.0

    @property
    def nbytes_before(self) -> int:
        """The bytes of the quantised weights in floating point."""
        return sum(layer.nbytes_before for layer in self.layers)

    @property
    def nbytes_after(self) -> int:
        """Their bytes as they are stored, with scales and zeros; what ``kept_by`` keeps is not in it."""
        return sum(layer.nbytes_after for layer in self.layers)

    @property
    def worst(self) -> LayerReport:
        """The layer with the largest known error; the first, if none is known. ValueError if there is no layer."""
        return max(self.layers, key=lambda layer: -1.0 if math.isnan(layer.error) else layer.error)

    def table(self) -> str:
        """A table as text: a line for each layer, the sums, and what was left alone.

        Where a method other than rounding to nearest chose, and its error is known, that stands beside the error.
        Where layers have several dtypes, each line has its own.
        """
        header = ["layer", "shape", "group", "method", "error", "before", "after", "note"]
        rows = [
            [
                layer.names[0], f"{layer.shape[0]} × {layer.shape[1]}", str(layer.group_size), layer.method,
                "unknown" if math.isnan(layer.error) else f"{layer.error:.4f}", _mib(layer.nbytes_before),
                _mib(layer.nbytes_after), layer.note,
            ]
            for layer in self.layers
        ]  # fmt: skip
        rows.append(["sum", "", "", "", "", _mib(self.nbytes_before), _mib(self.nbytes_after), ""])
        rows.append(["module", "", "", "", "", _mib(self.module_nbytes_before), _mib(self.module_nbytes_after), ""])
        if any(layer.rtn_error is not None for layer in self.layers):
            errors = ["" if layer.rtn_error is None else f"{layer.rtn_error:.4f}" for layer in self.layers]
            for row, cell in zip([header, *rows], ["rtn error", *errors, "", ""], strict=True):
                row.insert(5, cell)
        mixed = len({layer.quantized_dtype for layer in self.layers}) > 1
        if mixed:
            dtypes = [layer.quantized_dtype for layer in self.layers]
            for row, cell in zip([header, *rows], ["dtype", *dtypes, "", ""], strict=True):
                row.insert(1, cell)
        first_number = 5 if mixed else 4
        widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
        lines = [
            "  ".join(
                cell.rjust(width) if first_number <= i < len(header) - 1 else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in (header, *rows)
        ]
        lines += [f"left alone: {name}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def to_json(self) -> dict[str, Any]:
        """As the command line prints it."""
        return {
            "layers": [layer.to_json() for layer in self.layers],
            "skipped": dict(self.skipped),
            "before_bytes": self.nbytes_before,
            "after_bytes": self.nbytes_after,
            "module_before_bytes": self.module_nbytes_before,
            "module_after_bytes": self.module_nbytes_after,
            "seconds": self.seconds,
        }


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB"
