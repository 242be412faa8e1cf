"""Every export option, once: one frozen dataclass with types that are checked when it is made."""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from untorch.export.host_cpu import Cpu
from untorch.export.passes.choose_attention import Attention
from untorch.export.passes.table import PASS_NAMES
from untorch.quant.options import QuantizeOptions
from untorch.quant.rules import QuantizeRules, is_rules
from untorch.validation import OptionError, check_option, hint

__all__ = ["ExportOptions", "Matmul", "OptimisationLevel", "resolve_options"]

Matmul = Literal["library", "auto"]
OptimisationLevel = Literal["O0", "O1", "O2", "O3"]

# What says nothing about the file.
_OF_THE_MACHINE = ("progress", "tuning", "record_tuning", "weights", "stream_weights")


@dataclass(frozen=True)
class ExportOptions:
    """How a model is exported.

    cpu: the oldest CPU that the file has to run on. "x86-64-v3" needs AVX2 and FMA, "x86-64-v4" AVX-512; "x86-64-v2"
        generates scalar code and is slow; "native" uses everything that the build machine has. "portable" is
        "x86-64-v3", and on other architectures what every CPU of them has. Several, ("x86-64-v3", "x86-64-v4"): the
        file has code for each, and load() takes the best that runs; for device="cpu" only.
    pack_linears: pack the weights of linear layers for the GEMM kernels.
    attention: what computes scaled dot-product attention. "triton": kernels that are compiled into the file (CUDA only;
        an error where they cannot serve a call); "native": PyTorch's fused operators, as the runtime has them; "math":
        GEMMs and a softmax; "auto": "triton" on CUDA where it can, else "native".
    matmul: what computes GEMMs on CUDA. "library": the runtime's operators (cuBLAS, and its own GEMV kernels for small
        M); "auto": those or Triton templates that are compiled into the file, whichever is the fastest: timed on the
        GPU, read from ``tuning``, or estimated for a cross-compilation target.
    quantize: how linear layers are quantised: "int4", "int8", "fp8", "nvfp4", QuantizeOptions, a dictionary of its
        fields ({"dtype": "int4", "group_size": 64}), patterns of layers' names with any of these or None, of which the
        first that matches decides ({"*.down_proj": "int8", "lm_head": None, "*": "int4"}), or a dictionary of methods
        with any of all these ({"decoder": "int4"}). Keys with * ? [ or a dot are patterns. A copy is quantised; the
        module stays as it is. Methods without a linear layer are left as they are, unless they are named.
    int8_activations: on CPUs, linear layers and experts in int4 and nvfp4 multiply in integers: activations are
        quantised to int8, in parts of 32 inputs with a scale each. At least twice as fast as with activations in
        floating point. None: for language models (causal_lm).
    bfloat16_attention: on CPUs, attention of float32 tensors rounds queries, keys, values and probabilities to
        bfloat16, with scores and sums in float32: 1.4 to 1.7 times as fast with AVX512_BF16, a tenth slower without.
    passes: which passes run, by name: {"fold_constants": False} leaves that one out. The names: <passes>.
    keep_weights: names of weights, or of the layers that have them, that the file keeps as they are, by name; patterns
        as in a shell ("*.q_proj"). merge_linears and compose_linears leave them apart.
    fold_limit: the largest result, in bytes, that fold_constants stores, and how much larger it may make a method.
    verify: run the written file in a process without torch and compare its results to eager's.
    verify_tolerance: the largest difference that verify accepts, relative to the largest value of each output.
    strict: use torch.export's strict mode.
    weights: a .safetensors file, an index of shards, a folder or a list of files that exists already: weights that are
        in it byte for byte are not stored again. The file has to be there when the package is loaded, beside it or
        where ``load(…, weights=…)`` says. What is packed, merged, converted or quantised is stored as ever.
    stream_weights: weights that are loaded from a folder, packed, merged or quantised lie in temporary files beside the
        file to write rather than in memory, so that a model may be larger than memory; its size is needed on the disk
        once more. For code on CPUs, and cross-compilation targets.
    keep_sources: pack the generated C++ as well, and for a GPU the kernels' sources, which `untorch tune FILE` times.
    tuning: for a cross-compilation target: a file of `untorch tune` with the fastest configurations of kernels on such
        a GPU. Kernels that it does not have are estimated.
    record_tuning: the file to add this export's kernel configurations to.
    outline_layers: compile equal layers of a model once, as a function that generated code calls for each of them.
        None: on CPUs, and for language models (causal_lm). False: all of them go through Inductor's passes, too.
    pdl: launch Triton kernels with programmatic dependent launch, so that each starts while the one before it ends.
        None: on sm_90 and newer, which have it.
    wrapper_optimisation: optimisation level of the code that calls the kernels; the kernels have their own.
    inductor: raw Inductor configuration, applied last; unsupported.
    progress: show the running step when stderr is a terminal.

    The number of threads is not an option: the machine that runs the file decides.
    """

    cpu: Cpu | Sequence[Cpu] = "portable"
    pack_linears: bool = True
    attention: Attention = "auto"
    matmul: Matmul = "library"
    quantize: str | QuantizeOptions | QuantizeRules | Mapping[str, Any] | None = None
    int8_activations: bool | None = None
    bfloat16_attention: bool = False
    passes: Mapping[str, bool] = field(default_factory=dict)
    keep_weights: str | Sequence[str] = ()
    fold_limit: int = 16 << 20
    verify: bool = False
    verify_tolerance: float = 1e-3
    strict: bool = False
    weights: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None
    stream_weights: bool = False
    keep_sources: bool = False
    tuning: str | os.PathLike[str] | None = None
    record_tuning: str | os.PathLike[str] | None = None
    outline_layers: bool | None = None
    pdl: bool | None = None
    wrapper_optimisation: OptimisationLevel = "O1"
    inductor: Mapping[str, Any] = field(default_factory=dict)
    progress: bool = True

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for option in dataclasses.fields(self):
            check_option(option.name, getattr(self, option.name), hints[option.name])
        _check_passes(self.passes)
        self._quantize()
        for pattern in self.kept_weights:
            if not isinstance(pattern, str):
                raise OptionError(
                    f"option keep_weights: expected names or patterns, got {type(pattern).__name__} ({pattern!r})"
                )
        if self.fold_limit < 0:
            raise OptionError(f"option fold_limit: expected a number of bytes, 0 or more, got {self.fold_limit!r}")
        if not self.verify_tolerance > 0:
            raise OptionError(f"option verify_tolerance: expected a number above 0, got {self.verify_tolerance!r}")

    @property
    def kept_weights(self) -> tuple[str, ...]:
        """``keep_weights`` as a tuple."""
        return (self.keep_weights,) if isinstance(self.keep_weights, str) else tuple(self.keep_weights)

    @property
    def quantizes_by_name(self) -> bool:
        """Whether ``quantize`` names the methods; else it is for all of them."""
        return isinstance(self._quantize(), dict) and self.quantize is not None

    def quantize_methods(self, names: Sequence[str]) -> dict[str, QuantizeOptions | QuantizeRules]:
        """Which of the methods are quantised, and how. Raises OptionError for an unknown method."""
        found = self._quantize()
        if isinstance(found, QuantizeOptions | QuantizeRules):
            return dict.fromkeys(names, found)
        for name in found:
            if name not in names:
                raise OptionError(f"option quantize: there is no method {name!r}: {hint(name, names)}")
        return {name: options for name, options in found.items() if options is not None}

    def _quantize(self) -> QuantizeOptions | QuantizeRules | dict[str, QuantizeOptions | QuantizeRules | None]:
        """One for all methods, or one for each that is named."""
        if self.quantize is None:
            return {}
        if not isinstance(self.quantize, Mapping) or "dtype" in self.quantize or is_rules(self.quantize):
            return _read_quantize(self.quantize)
        found: dict[str, QuantizeOptions | QuantizeRules | None] = {}
        for name, value in self.quantize.items():
            if not isinstance(value, str | Mapping | QuantizeOptions | QuantizeRules | None):
                raise OptionError(
                    f"option quantize: {name}: expected 'int4', 'int8', 'fp8', 'nvfp4', QuantizeOptions, a "
                    f"dictionary of options or None for the method, got {type(value).__name__} ({value!r}); a "
                    f"dictionary of options has the key 'dtype'"
                )
            found[name] = None if value is None else _read_quantize(value)
        return found

    def to_json(self) -> dict[str, Any]:
        """The options as the manifest records them; values that JSON does not have become their repr."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in _OF_THE_MACHINE}
        values["cpu"] = self.cpu if isinstance(self.cpu, str) else list(self.cpu)
        values["passes"] = dict(self.passes)
        values["keep_weights"] = list(self.kept_weights)
        values["inductor"] = {
            key: value if isinstance(value, bool | int | float | str | None) else repr(value)
            for key, value in self.inductor.items()
        }
        values["quantize"] = _plain(self.quantize)
        return values


if ExportOptions.__doc__ is not None:  # None under python -OO
    ExportOptions.__doc__ = ExportOptions.__doc__.replace("<passes>", ", ".join(PASS_NAMES))


def resolve_options(options: ExportOptions | None, fields: Mapping[str, Any]) -> ExportOptions:
    """``options`` (or the defaults) with ``fields`` replaced. An unknown field names the nearest known one."""
    if options is not None and not isinstance(options, ExportOptions):
        raise OptionError(f"options: expected ExportOptions, got {type(options).__name__}")
    known = [f.name for f in dataclasses.fields(ExportOptions)]
    for name in fields:
        if name not in known:
            raise OptionError(f"unknown option {name!r}: {hint(name, known)}")
    return dataclasses.replace(options or ExportOptions(), **fields)


def _read_quantize(value: str | Mapping[str, Any] | QuantizeOptions | QuantizeRules) -> QuantizeOptions | QuantizeRules:
    if isinstance(value, QuantizeRules):
        return value
    if isinstance(value, Mapping) and "dtype" not in value and is_rules(value):
        return QuantizeRules.read(value)
    return QuantizeOptions.read(value)


def _plain(value: Any) -> Any:
    """As JSON has it; what it does not have, such as a function, becomes its repr."""
    if isinstance(value, QuantizeRules):
        value = value.to_mapping()
    if isinstance(value, QuantizeOptions):
        unread = {"observer", "percentile"} if value.calibration is None else set()
        unread |= set() if value.embeddings else {"embeddings"}
        value = {
            f.name: v
            for f in dataclasses.fields(value)
            if (v := getattr(value, f.name)) is not None and f.name not in unread
        }
    if isinstance(value, Mapping):
        # Batches are data: their type says that there were some.
        return {
            str(key): type(item).__name__ if key == "calibration" and item is not None else _plain(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else repr(value)


def _check_passes(passes: Mapping[str, bool]) -> None:
    for name, value in passes.items():
        if name not in PASS_NAMES:
            raise OptionError(f"option passes: unknown pass {name!r}: {hint(name, PASS_NAMES)}")
        if not isinstance(value, bool):
            raise OptionError(f"option passes: {name}: expected bool, got {type(value).__name__} ({value!r})")
