"""``causal_lm``: a causal language model of transformers into one package that ``untorch.llm.Engine`` serves."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from untorch.export.errors import CompileError
from untorch.export.exporter import ExportReport, write_package
from untorch.export.lm import choose
from untorch.export.lm.check import check_chunks, check_model
from untorch.export.lm.draft import draft_methods, read_draft
from untorch.export.lm.embeddings import EmbeddingStep, embedding_method
from untorch.export.lm.images import read_images
from untorch.export.lm.lora import LoraStep, find_lora_layers, lora_method, lora_section
from untorch.export.lm.pooled import PoolingPlan, dense_method, read_pooling
from untorch.export.lm.rotary import fix_rotary_embeddings
from untorch.export.lm.source import load_model, read_settings, read_task, read_tokenizer
from untorch.export.lm.step import Step
from untorch.export.lm.step_methods import keeps_latents, pages_section, step_method, unchanged
from untorch.export.lm.text import check_embeddings, check_outputs, position_rows, take_text_model
from untorch.export.methods import read_methods, read_path
from untorch.export.options import ExportOptions, resolve_options
from untorch.export.quantized_folder import dequantize_layers_for_gpus, refuse_layers_for_gpus
from untorch.export.streaming import with_streamed_weights
from untorch.llm.settings import FORMAT_VERSION, GROUPS_VERSION, ROW_POOLINGS, TASKS
from untorch.ops.kv_pages import KV_DTYPES
from untorch.ops.paged_attention import BLOCK_UNIT
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError, UnsupportedError

__all__ = ["Addition", "causal_lm", "write_language_model"]


@with_streamed_weights
def causal_lm(
    model: nn.Module | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    task: str | None = None,
    pooling: str | None = None,
    normalize: bool | None = None,
    images: bool = False,
    image_processor: Any = None,
    inputs_embeds: bool = False,
    lora: bool | Sequence[str] = False,
    draft: nn.Module | str | os.PathLike[str] | None = None,
    tokenizer: Any = None,
    max_positions: int | None = None,
    block_size: int = 16,
    kv_dtype: str | None = None,
    token_counts: Sequence[int] = (16, 1024),
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    arch: str | Sequence[str] | None = None,
    options: ExportOptions | None = None,
    **option_fields: Any,
) -> ExportReport:
    """Compile a causal language model, in evaluation mode, and write it to ``path`` with what an engine needs.

    The package has one method for each of ``token_counts``, over the same weights: a step over ragged tokens of many
    sequences, with keys and values in the pages of a pool that the caller gives.

    Args:
        model: A causal language model of transformers, or a local folder with one. Of a multimodal one the text model
            is taken out. A folder may be quantised as ``load_checkpoint`` reads it: in int4, NVFP4, and for GPUs in
            int8 and FP8. For CPUs weights in int8 and FP8 are rounded anew, by ``quantize``.
        path: The file to write.
        task: "generate", "embed" or "classify". Default: a …ForCausalLM generates, a base model (AutoModel) or a folder
            of sentence-transformers embeds, a …ForSequenceClassification classifies.
        pooling: For "embed": which hidden states make the embedding: "last", "cls" (the first), "mean", "max",
            "weighted_mean" or "mean_sqrt_len". Default: what the folder of sentence-transformers says, else "last".
        normalize: For "embed": whether embeddings have length 1. Default: what the folder says, else True.
        images: Prompts may have images, of any size: the image encoder is a method of the package, and
            ``inputs_embeds`` is implied. For Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5 and models like them.
        image_processor: With images: of transformers, or a folder. Default: the model's folder's. Its
            size["longest_edge"] bounds the pixels, and with them the tokens, of an image.
        inputs_embeds: Prompts may have embeddings in the place of tokens (images, audio): a second method for each of
            ``token_counts``.
        lora: Adapters can be loaded beside the weights, ``Engine(…, loras={"name": folder})``: a second method for each
            of ``token_counts``. True: for all linear layers that every token goes through; or names of layers, as
            PEFT's target_modules, ["q_proj", "v_proj"]. Ranks and the number of adapters need not be known.
        draft: A smaller causal language model with the same tokenizer, a module or a folder, for speculative decoding:
            ``Engine(…, speculative="draft")``.
        tokenizer: A folder, a tokenizer.json, or a fast tokenizer. Default: the model's folder's, if it has one.
        max_positions: The longest sequence. Default: what the config says. LongRoPE's factors are fixed for it.
        block_size: Positions a page, a multiple of 16. Where layers with windows lie beside others, each kind has
            pages of its own, of the same bytes: the kind that keeps most a token has block_size positions a page.
            On sm_90 long prompts attend 11 and 20 % faster over pages of 32 with heads of 64 and 96.
        kv_dtype: What pages hold: "int8" or "fp8" (E4M3), with a scale for each token and KV head, or None: the model's
            dtype. On GPUs, "fp8" needs sm_89 or newer.
        token_counts: The numbers of tokens a step that methods are tuned for, ascending: decode, prefill.
        dtype: What the weights of a folder are converted to. Default: what its config says.
        device: "cpu" or "cuda". The model itself is on the CPU.
        arch: As for ``export``: GPUs to cross-compile for, "sm_90".
        options: As for ``export``.
        option_fields: Fields of ExportOptions that replace those in ``options``.

    Raises:
        CompileError: The model's attention or state cannot be paged, or what ``export`` raises.
        InvalidArgumentError: An argument is wrong. Also a ValueError.
        UnsupportedError: Paged attention has no kernel for the device.
    """
    return write_language_model(
        model, path, Addition(), task=task, pooling=pooling, normalize=normalize, images=images,
        image_processor=image_processor, inputs_embeds=inputs_embeds, lora=lora, draft=draft, tokenizer=tokenizer,
        max_positions=max_positions, block_size=block_size, kv_dtype=kv_dtype, token_counts=token_counts, dtype=dtype,
        device=device, arch=arch, options=options, option_fields=option_fields,
    )  # fmt: skip


@dataclass(frozen=True)
class Addition:
    """What a package has beside its language model: methods as ``export`` takes them, manifest sections, files."""

    methods: Mapping[str, Any] = field(default_factory=dict)
    sections: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)


def write_language_model(
    model: nn.Module | str | os.PathLike[str],
    path: str | os.PathLike[str],
    addition: Addition,
    *,
    task: str | None = None,
    pooling: str | None = None,
    normalize: bool | None = None,
    images: bool = False,
    image_processor: Any = None,
    inputs_embeds: bool = False,
    lora: bool | Sequence[str] = False,
    draft: nn.Module | str | os.PathLike[str] | None = None,
    tokenizer: Any = None,
    max_positions: int | None = None,
    block_size: int = 16,
    kv_dtype: str | None = None,
    token_counts: Sequence[int] = (16, 1024),
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    arch: str | Sequence[str] | None = None,
    options: ExportOptions | None = None,
    option_fields: Mapping[str, Any],
) -> ExportReport:
    """What ``causal_lm`` does, with more in the package. Raises the same."""
    resolved, target = _read_options(options, option_fields, str(device)), read_path(path)
    counts = _read_counts(token_counts)
    if not isinstance(block_size, int) or block_size < 1 or block_size % BLOCK_UNIT:
        raise InvalidArgumentError(
            f"causal_lm: block_size: expected a multiple of {BLOCK_UNIT}, got {block_size!r}"
        )  # fmt: skip
    if kv_dtype is not None and (not isinstance(kv_dtype, str) or kv_dtype not in KV_DTYPES):
        raise InvalidArgumentError(
            f"causal_lm: kv_dtype: expected 'int8', 'fp8' or None, got {kv_dtype!r}"
        )  # fmt: skip
    if device != "cpu" and not re.fullmatch(r"cuda(:\d+)?", str(device)):
        raise UnsupportedError(
            f"causal_lm: device: expected 'cpu' or 'cuda', got {device!r}: paged attention has no kernel for it"
        )
    if not isinstance(inputs_embeds, bool):
        raise ArgumentTypeError(f"causal_lm: inputs_embeds: expected True or False, got {inputs_embeds!r}")
    if not isinstance(images, bool):
        raise ArgumentTypeError(f"causal_lm: images: expected True or False, got {images!r}")
    if image_processor is not None and not images:
        raise InvalidArgumentError("causal_lm: image_processor: is for images=True")
    inputs_embeds = inputs_embeds or images
    if lora is not False and inputs_embeds:
        raise InvalidArgumentError("causal_lm: lora: expected False with inputs_embeds: a step takes one of the two")
    if draft is not None and inputs_embeds:
        raise InvalidArgumentError("causal_lm: draft: expected None with inputs_embeds, which it could not read")
    if task is not None and task not in TASKS:
        raise InvalidArgumentError(f"causal_lm: task: expected one of {', '.join(map(repr, TASKS))}, got {task!r}")
    # With ``quantize`` weights in eight bits are rounded anew.
    as_they_are = device == "cpu" and resolved.quantize is None
    whole, folder = load_model(model, dtype, task, target="cpu" if as_they_are else "cuda")
    if device == "cpu":
        if folder is not None and resolved.quantize is not None:
            dequantize_layers_for_gpus(whole)
        refuse_layers_for_gpus(whole, "causal_lm: model")
    task = read_task(whole, task)
    if draft is not None and task != "generate":
        raise InvalidArgumentError(f"causal_lm: draft: expected None, as the model does not generate: it is to {task}")
    if lora is not False and task != "generate":
        raise InvalidArgumentError(f"causal_lm: lora: expected False, as the model does not generate: it is to {task}")
    weights = next((p.dtype for p in whole.parameters() if p.is_floating_point()), torch.float32)
    plan = read_pooling(task, folder, pooling, normalize, weights)
    # Layers behind the pooling are in the step where it is one token's row.
    in_step = plan.dense if plan.pooling in ROW_POOLINGS else None
    module = take_text_model(whole, task, in_step, inputs_embeds)
    if elsewhere := {str(parameter.device) for parameter in module.parameters()} - {"cpu"}:
        raise InvalidArgumentError(
            f"causal_lm: model: expected its parameters on the CPU, got {', '.join(sorted(elsewhere))}: use model.cpu()"
        )
    rows = position_rows(whole) if inputs_embeds else 1
    files = read_tokenizer(tokenizer, folder, task)
    settings = read_settings(module, files, max_positions, plan.max_positions)
    check_outputs(whole, module, task)
    if inputs_embeds:
        check_embeddings(module)
    hidden = int(module.get_input_embeddings().embedding_dim) if inputs_embeds else 0
    part = read_images(whole, image_processor, folder, hidden, settings["vocabulary"]) if images else None
    with ExitStack() as stack:
        stack.enter_context(unchanged(module))
        if part is not None:
            stack.enter_context(part.attention())
        fix_rotary_embeddings(module, settings["max_positions"])
        latent = keeps_latents(module, device, weights)
        step = Step(module, block_size, latent, settings["max_positions"], position_rows=rows)
        sizes = settings["vocabulary"], settings["max_positions"]
        # While other processes compile, this one has time. Pages of codes have the model's logits no more then.
        later = arch is not None and kv_dtype is None
        checks = [partial(check_chunks, step, sizes[0]), partial(check_model, step, *sizes, long=True)] if later else []
        if not later:
            check_chunks(step, sizes[0])
        check_model(step, *sizes, long=False if later else None)
        if part is not None:
            part.check(EmbeddingStep(step, part.levels))
        if kv_dtype is not None:
            step.quantize_pages(KV_DTYPES[kv_dtype])
            check_chunks(step, settings["vocabulary"])
        methods = {f"step_{count}": step_method(step, count) for count in counts}
        section = {
            "format_version": FORMAT_VERSION if len(step.groups) == 1 else GROUPS_VERSION,
            **settings,
            "block_size": min(group.size for group in step.groups),
            "state_elements": step.state_elements,
            **pages_section(step),
            "methods": [{"name": f"step_{count}", "tokens": count} for count in counts],
        }
        if inputs_embeds:
            twin = EmbeddingStep(step, 0 if part is None else part.levels)
            hidden *= twin.levels + 1
            for count in counts:
                methods[f"step_{count}_embeds"] = embedding_method(twin, methods[f"step_{count}"], hidden)
            section["hidden"], section["position_rows"] = hidden, rows
            section["embeds"] = [{"name": f"step_{count}_embeds", "tokens": count} for count in counts]
        if lora is not False:
            layers = find_lora_layers(step, lora)
            adapted = LoraStep(step, layers)
            for count in counts:
                methods[f"step_{count}_lora"] = lora_method(adapted, methods[f"step_{count}"], weights)
            section["lora"] = lora_section(layers, weights, counts)
        if task != "generate":
            width = step.width
            if plan.dense is not None and in_step is None:
                methods["dense"] = dense_method(plan.dense, width, weights)
                section["dense"] = "dense"
                with torch.no_grad():
                    width = plan.dense(torch.zeros(1, width, dtype=weights)).shape[1]
            section |= _pooled_section(task, plan, width, whole)
        if task == "generate" and str(device) != "cpu":  # there the engine chooses on the host
            for name, make in (
                (choose.NAME, choose.choose_method),
                (choose.PROCESS_NAME, choose.process_method),
                (choose.LOGPROBS_NAME, choose.logprobs_method),
            ):
                methods[name] = make(settings["vocabulary"], step.width)
                section[name] = name
        if draft is not None:
            if step.state_elements:
                raise CompileError(
                    f"causal_lm: draft: the model, {step.architecture}, has recurrent layers, whose states cannot be "
                    "taken back when a token is rejected"
                )
            small = read_draft(draft, dtype, settings, files.tokenizer)
            stack.enter_context(unchanged(small.model))
            own, section["draft"] = draft_methods(small, settings, counts, step.groups[0].size, kv_dtype, device)
            methods |= own
        entries = dict(addition.files)
        sections = {"llm": section, **addition.sections}
        methods |= addition.methods
        if part is not None:
            methods |= part.methods
            sections["vision"] = part.settings.to_json()
        if files.tokenizer is not None:
            section["tokenizer"] = "extra/llm/tokenizer.json"
            entries[section["tokenizer"]] = files.tokenizer
        if files.chat_template is not None:
            section["chat_template"] = "extra/llm/chat_template.jinja"
            entries[section["chat_template"]] = files.chat_template.encode()
        # Llama 4's experts make torch.export guess a relation between sizes that always holds.
        requests = [
            replace(request, method=replace(request.method, defers_guards=True))
            for request in read_methods(methods=methods)
        ]
        if resolved.outline_layers is None:
            resolved = replace(resolved, outline_layers=True)
        if resolved.int8_activations is None:
            resolved = replace(resolved, int8_activations=device == "cpu")
        return write_package(requests, target, device, arch, resolved, sections, entries, checks)


def _pooled_section(task: str, plan: PoolingPlan, width: int, model: Any) -> dict[str, Any]:
    """Of the manifest. width: of embeddings or scores."""
    section: dict[str, Any] = {"task": task, "pooling": plan.pooling, "normalize": plan.normalize, "width": width}
    if task == "classify":
        labels = model.config.id2label or {}
        section["labels"] = [str(labels.get(i, f"LABEL_{i}")) for i in range(width)]
    if plan.prompts:
        section |= {"prompts": plan.prompts, "default_prompt": plan.default_prompt}
    return section


def _read_options(options: ExportOptions | None, fields: Mapping[str, Any], device: str) -> ExportOptions:
    """Logits lie in one piece, as the method that chooses tokens takes them.

    On a GPU of the build machine Inductor may pad a GEMM's columns, if that is faster at that moment, and gives a part
    of the padded result.
    """
    resolved = resolve_options(options, fields)
    if device == "cpu":
        return resolved
    return dataclasses.replace(resolved, inductor={"shape_padding": False} | dict(resolved.inductor))


def _read_counts(given: Any) -> list[int]:
    text = f"causal_lm: token_counts: expected ascending integers from 4 on, such as (16, 1024), got {given!r}"
    if not isinstance(given, Sequence) or not given or not all(isinstance(count, int) for count in given):
        raise InvalidArgumentError(text)
    if given[0] < 4 or any(a >= b for a, b in itertools.pairwise(given)):
        raise InvalidArgumentError(text)
    return list(given)
