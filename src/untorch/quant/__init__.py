"""Quantising on the build machine: linear layers in int4, int8, FP8 and NVFP4, experts in int4 and NVFP4.

Needs torch.
"""

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
from untorch.quant.embedding import Int4Embedding, Int8Embedding, W8Embedding
from untorch.quant.experts import ExpertsReport, Int4Experts, NVFP4Experts, quantize_experts
from untorch.quant.int8 import Int8Linear, quantize_int8
from untorch.quant.linear import Int4Linear
from untorch.quant.moe import NVFP4MoE
from untorch.quant.nvfp4 import NVFP4Weight, concatenate_nvfp4, quantize_nvfp4, reconcile_nvfp4
from untorch.quant.nvfp4_linear import NVFP4Linear
from untorch.quant.options import QuantizeOptions
from untorch.quant.recipe import read_recipe, write_recipe
from untorch.quant.report import LayerReport, QuantizationReport
from untorch.quant.rules import QuantizeRules
from untorch.quant.sensitivity import layer_sensitivity
from untorch.quant.w8a8 import W8A8Linear, quantize_fp8

__all__ = [
    "ExpertsReport", "Int4Embedding", "Int4Experts", "Int4Linear", "Int8Embedding", "Int8Linear", "LayerReport",
    "NVFP4Experts", "NVFP4Linear", "NVFP4MoE",
    "NVFP4Weight", "QuantizationReport", "QuantizeOptions", "QuantizeRules", "W8A8Linear", "W8Embedding",
    "concatenate_nvfp4", "dequantize_nvfp4", "layer_sensitivity", "pack_int4", "pack_int8", "pack_nvfp4",
    "pack_nvfp4_tiles", "quantize", "quantize_experts", "quantize_fp8", "quantize_int8", "quantize_nvfp4",
    "read_recipe", "reconcile_nvfp4", "unpack_int4", "unpack_int8", "unpack_nvfp4", "unpack_nvfp4_tiles",
    "write_recipe",
]  # fmt: skip
