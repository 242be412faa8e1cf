"""Quantising on the build machine: linear layers in int4, int8 and NVFP4, experts in NVFP4. Needs torch."""

from untorch.ops.int4_layout import pack_int4, unpack_int4
from untorch.ops.int8_layout import pack_int8, unpack_int8
from untorch.ops.nvfp4_layout import (
    dequantize_nvfp4,
    pack_nvfp4,
    pack_nvfp4_tiles,
    unpack_nvfp4,
    unpack_nvfp4_tiles,
)
from untorch.quant.apply import quantize
from untorch.quant.experts import ExpertsReport, NVFP4Experts, quantize_experts
from untorch.quant.int8 import Int8Linear, quantize_int8
from untorch.quant.linear import Int4Linear
from untorch.quant.moe import NVFP4MoE
from untorch.quant.nvfp4 import NVFP4Weight, concatenate_nvfp4, quantize_nvfp4, reconcile_nvfp4
from untorch.quant.nvfp4_linear import NVFP4Linear
from untorch.quant.options import QuantizeOptions
from untorch.quant.report import LayerReport, QuantizationReport

__all__ = [
    "ExpertsReport", "Int4Linear", "Int8Linear", "LayerReport", "NVFP4Experts", "NVFP4Linear", "NVFP4MoE",
    "NVFP4Weight", "QuantizationReport", "QuantizeOptions", "concatenate_nvfp4", "dequantize_nvfp4", "pack_int4",
    "pack_int8", "pack_nvfp4", "pack_nvfp4_tiles", "quantize", "quantize_experts", "quantize_int8", "quantize_nvfp4",
    "reconcile_nvfp4", "unpack_int4", "unpack_int8", "unpack_nvfp4", "unpack_nvfp4_tiles",
]  # fmt: skip
