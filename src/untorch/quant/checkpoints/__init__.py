"""Weights that others have quantised to int4 and NVFP4, into our layouts without another rounding."""

from untorch.quant.checkpoints.load import load_checkpoint
from untorch.quant.checkpoints.torchao import convert_torchao

__all__ = ["convert_torchao", "load_checkpoint"]
