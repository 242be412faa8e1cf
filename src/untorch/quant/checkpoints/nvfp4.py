"""Checkpoints in NVFP4: what the tensors of a linear layer mean, and which layers the file leaves out.

| format | codes, uint8 [n, k / 2] | float8_e4m3fn [n, k / 16] | float32, one number |
|---|---|---|---|
| modelopt | weight | weight_scale | weight_scale_2, a multiplier |
| nvfp4-pack-quantized | weight_packed | weight_scale | weight_global_scale, a divisor |

Both have a scale for the activations as well, input_scale and input_global_scale, for GEMMs with two NVFP4 operands.
Here activations stay as they are, and it is not read.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable

import torch

from untorch.ops.nvfp4_layout import BLOCK_SIZE
from untorch.quant.checkpoints.files import Checkpoint
from untorch.quant.nvfp4 import NVFP4Weight
from untorch.runtime.errors import InvalidFileError, UnsupportedError

__all__ = ["MODELOPT", "NVFP4_FORMATS", "NVFP4_PACKED", "check_config", "excluded"]

MODELOPT = "modelopt"
NVFP4_PACKED = "nvfp4-pack-quantized"
# Where the configurations have the layers that are not quantised.
_EXCLUDES = ("exclude_modules", "ignore", "modules_to_not_convert")


def excluded(checkpoint: Checkpoint, name: str) -> str | None:
    """The pattern of the file's configuration that leaves the layer out, or None.

    Patterns are names of layers or of what they are in, with * for any text, or regular expressions after "re:".
    """
    for key in _EXCLUDES:
        patterns = checkpoint.config.get(key)
        for pattern in patterns if isinstance(patterns, list) else ():
            if isinstance(pattern, str) and _matches(name, pattern, checkpoint):
                return pattern
    return None


def _matches(name: str, pattern: str, checkpoint: Checkpoint) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], name) is not None
        except re.error as error:
            raise InvalidFileError(f"{checkpoint.path}: its pattern {pattern!r} cannot be read: {error}") from error
    return fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")


def check_config(checkpoint: Checkpoint) -> None:
    """Raises UnsupportedError if the configuration says that weights are something else than NVFP4."""
    groups = checkpoint.config.get("config_groups")
    stated: dict[str, object] = {"the configuration": {"group_size": checkpoint.config.get("group_size", BLOCK_SIZE)}}
    for name, group in groups.items() if isinstance(groups, dict) else ():
        stated[str(name)] = group.get("weights") if isinstance(group, dict) else None
    for name, weights in stated.items():
        for key, expected in (("num_bits", 4), ("type", "float"), ("group_size", BLOCK_SIZE)):
            if isinstance(weights, dict) and weights.get(key, expected) != expected:
                raise UnsupportedError(
                    f"{checkpoint.path}: {name}: expected {key} {expected!r} for NVFP4, it says {weights[key]!r}"
                )


def _modelopt(checkpoint: Checkpoint, name: str) -> NVFP4Weight:
    if f"{name}.pre_quant_scale" in checkpoint:
        raise UnsupportedError(
            f"{checkpoint.path}: {name}: its activations are scaled (pre_quant_scale), which is not read: take a "
            f"checkpoint with the algorithm NVFP4"
        )
    return _weight(checkpoint, name, "weight", _one_number(checkpoint, f"{name}.weight_scale_2"))


def _compressed_tensors(checkpoint: Checkpoint, name: str) -> NVFP4Weight:
    divisor = _one_number(checkpoint, f"{name}.weight_global_scale")
    scale = 1 / divisor
    if not bool(torch.isfinite(scale)):
        raise InvalidFileError(
            f"{checkpoint.path}: {name}.weight_global_scale: expected a divisor above 0, got {float(divisor):g}"
        )
    return _weight(checkpoint, name, "weight_packed", scale)


def _one_number(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """float32 [] or [1] that is finite and not negative, as []."""
    tensor = checkpoint.tensor(name)
    tensor = checkpoint.expect(name, (torch.float32,), () if tensor.dim() == 0 else (1,)).reshape(())
    if not bool(torch.isfinite(tensor)) or float(tensor) < 0:
        raise InvalidFileError(f"{checkpoint.path}: {name}: expected a finite number, 0 or more, got {float(tensor):g}")
    return tensor


def _weight(checkpoint: Checkpoint, name: str, codes: str, global_scale: torch.Tensor) -> NVFP4Weight:
    packed = checkpoint.expect(f"{name}.{codes}", (torch.uint8,), (None, None))
    n, k = packed.shape[0], 2 * packed.shape[1]
    if k % BLOCK_SIZE:
        raise InvalidFileError(
            f"{checkpoint.path}: {name}.{codes}: expected a multiple of {BLOCK_SIZE // 2} bytes an output, got uint8 "
            f"{list(packed.shape)}"
        )
    scale = checkpoint.expect(f"{name}.weight_scale", (torch.float8_e4m3fn,), (n, k // BLOCK_SIZE))
    if not bool((torch.isfinite(scale.float()) & (scale.float() >= 0)).all()):
        raise InvalidFileError(f"{checkpoint.path}: {name}: it has scales that are not finite, or negative")
    return NVFP4Weight(packed, scale, global_scale)


NVFP4_FORMATS: dict[str, Callable[[Checkpoint, str], NVFP4Weight]] = {
    MODELOPT: _modelopt,
    NVFP4_PACKED: _compressed_tensors,
}
