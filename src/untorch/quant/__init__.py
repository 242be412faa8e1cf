"""Quantising on the build machine: int4 weights of linear layers, experts in NVFP4. Needs torch."""

from untorch.ops.int4_layout import pack_int4, unpack_int4
from untorch.quant.apply import quantize
from untorch.quant.linear import Int4Linear
from untorch.quant.moe import NVFP4MoE
from untorch.quant.report import LayerReport, QuantizationReport

__all__ = ["Int4Linear", "LayerReport", "NVFP4MoE", "QuantizationReport", "pack_int4", "quantize", "unpack_int4"]
