"""Hugging Face folders whose linear layers are quantised: the model with those layers as ours, without transformers'.

transformers loads everything else, as from a folder in floating point, and ``load_checkpoint`` the quantised layers.
transformers' own layers for such a folder need its quantisation packages, or dequantise on a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from untorch.export.streaming import load_weights
from untorch.quant.checkpoints.files import open_checkpoint, read_configuration
from untorch.quant.checkpoints.formats import METHODS, find_format, layer_names
from untorch.quant.checkpoints.load import load_checkpoint
from untorch.quant.modules import replace_modules
from untorch.quant.schemes import Target
from untorch.quant.w8a8 import W8A8Linear
from untorch.runtime.errors import InvalidFileError, UnsupportedError

__all__ = ["dequantize_layers_for_gpus", "from_pretrained", "refuse_layers_for_gpus"]


def from_pretrained(kind: Any, folder: Path, dtype: torch.dtype | None, target: Target = "cuda") -> nn.Module:
    """``kind.from_pretrained(folder)`` with ``Int4Linear``, ``Int8Linear``, ``NVFP4Linear`` or ``W8A8Linear`` where the
    folder's config names a quantisation that ``load_checkpoint`` reads. Other quantisations are transformers' to load.

    dtype: of what is not quantised; None: what the config says. target: what layers in eight bits are for. Raises what
    both raise, InvalidFileError for weights that the folder lacks, and UnsupportedError for quantised experts.
    """
    if str(read_configuration(folder).get("quant_method", "")) not in METHODS:
        model: nn.Module = load_weights(
            lambda: kind.from_pretrained(folder, dtype=dtype or "auto", local_files_only=True)
        )
        return model
    return load_weights(lambda: _from_quantized(kind, folder, dtype, target))


def _from_quantized(kind: Any, folder: Path, dtype: torch.dtype | None, target: Target) -> nn.Module:
    import transformers

    config: Any = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    # "auto" may find the dtype of quantised values.
    dtype = dtype or getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    with _quiet(transformers):
        loaded: tuple[nn.Module, dict[str, Any]] = kind.from_pretrained(
            folder, config=config, dtype=dtype or torch.bfloat16, local_files_only=True, output_loading_info=True,
            ignore_mismatched_sizes=True,
        )  # fmt: skip
    model, info = loaded
    checkpoint = open_checkpoint(folder)
    form = find_format(checkpoint)
    names = layer_names(checkpoint, form)
    known = dict(model.named_modules())
    prefix = f"{model.base_model_prefix}."
    if not names or names[0] in known or not names[0].startswith(prefix):
        prefix = ""
    if experts := [name for name in names if name.removeprefix(prefix) not in known and ".experts." in name]:
        raise UnsupportedError(
            f"{folder}: {experts[0]}: the file's experts are quantised ({form}), and linear layers alone are read: "
            "export the model in floating point, with quantize='nvfp4' or, for CPUs, 'int4'"
        )
    load_checkpoint(model, folder, prefix=prefix, target=target, progress=False)
    read = {f"{name.removeprefix(prefix)}.weight" for name in names}
    lost = [*info["missing_keys"], *(entry[0] for entry in info["mismatched_keys"])]
    if lost := sorted(set(lost) - read):
        raise InvalidFileError(
            f"{folder}: it lacks {', '.join(lost[:3])}{' …' if len(lost) > 3 else ''}, or has another shape"
        )
    return model


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without a list of the tensors that transformers does not know: they are the quantised layers'."""
    logging = transformers.utils.logging
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def refuse_layers_for_gpus(model: nn.Module, where: str) -> None:
    """Raises UnsupportedError where the model has layers that only GPUs have kernels for."""
    for name, part in model.named_modules():
        if isinstance(part, W8A8Linear):
            raise UnsupportedError(
                f"{where}: {name} is in {part.dtype} for GPUs (W8A8Linear), which has no kernel for CPUs: export it "
                "with device='cuda', or give a folder and quantize='int8' or 'int4', which round its weights anew"
            )


def dequantize_layers_for_gpus(model: nn.Module) -> None:
    """Replaces them by nn.Linear, in place and in the dtype of the model's embeddings: to be quantised for CPUs."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    replacements: dict[int, nn.Module] = {}
    for part in list(model.modules()):
        if isinstance(part, W8A8Linear):
            linear = nn.Linear(part.in_features, part.out_features, part.bias is not None, device="meta", dtype=dtype)
            linear.weight = nn.Parameter(part.dequantize(torch.float32).to(dtype), requires_grad=False)
            if part.bias is not None:
                linear.bias = nn.Parameter(part.bias[: part.out_features].to(dtype), requires_grad=False)
            replacements[id(part)] = linear.train(part.training)
    replace_modules(model, replacements)
