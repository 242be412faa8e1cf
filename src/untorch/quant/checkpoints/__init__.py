"""Weights that others have quantised to four bits, into our layout without another rounding."""

from untorch.quant.checkpoints.load import load_checkpoint
from untorch.quant.checkpoints.torchao import convert_torchao

__all__ = ["convert_torchao", "load_checkpoint"]
