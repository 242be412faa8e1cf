"""Weights that others have quantised to int4, NVFP4, int8 and FP8, into our layouts without another rounding."""

from untorch.quant.checkpoints.load import load_checkpoint
from untorch.quant.checkpoints.torchao import convert_torchao

__all__ = ["convert_torchao", "load_checkpoint"]
