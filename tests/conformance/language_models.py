"""Tiny causal language models of transformers, with weights large enough that attention decides what they say."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
import transformers

from tests.native.nvfp4_panels import packed_for_integers
from tests.unit.llm.fake import byte_tokenizer
from untorch.ops.int4_layout import unpack_int4
from untorch.ops.kv_pages import dequantize_rows, quantize_rows
from untorch.ops.w4a8 import W4A8_PART, quantize_parts
from untorch.ops.w4a8_layout import pack_w4a8
from untorch.quant import Int4Experts, Int4Linear, NVFP4Linear, NVFP4MoE

# What packages are for: "cuda" on machines with a GPU, `make test-gpu-llm`.
DEVICE = os.environ.get("UNTORCH_TEST_DEVICE", "cpu")
# The methods that choose tokens on a GPU.
CHOOSE = ["choose", "process_logits", "logprobs"] if DEVICE == "cuda" else []

VOCABULARY = 258  # bytes, <s> and </s>

_BASE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 128,
}  # fmt: skip
_HEADS = {**_BASE, "head_dim": 8}
_FULL = {key: value for key, value in _BASE.items() if key != "num_key_value_heads"}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}
_INDEX = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "q_lora_rank": 16,
    "qk_rope_head_dim": 8, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8,
}  # fmt: skip
_PER_LAYER = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}

# By model: the configuration's class where it is not <name>Config, and its fields.
SERVED: dict[str, tuple[str | None, dict[str, Any]]] = {
    "Llama": (None, _BASE),
    "Mistral": (None, {**_BASE, "sliding_window": 6}),
    "Qwen2": (None, _BASE),
    "Qwen3": (None, _HEADS),
    "Gemma": (None, _HEADS),
    "Gemma2": (None, {**_HEADS, "sliding_window": 6, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}),
    "Gemma3": ("Gemma3TextConfig", {**_HEADS, "num_hidden_layers": 7, "sliding_window": 6}),
    "Gemma3n": ("Gemma3nTextConfig", {
        **_HEADS, **_PER_LAYER, "num_hidden_layers": 10, "intermediate_size": [64] * 10, "sliding_window": 6,
        "num_kv_shared_layers": 5, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 10,
    }),
    "Gemma4": ("Gemma4TextConfig", {
        **_HEADS, **_PER_LAYER, "num_hidden_layers": 12, "sliding_window": 6, "num_kv_shared_layers": 6,
        "global_head_dim": 16,
    }),
    "Phi": (None, _BASE),
    "Phi3": (None, _BASE),
    "GPT2LMHead": ("GPT2Config", _GPT2),
    "GPTBigCode": (None, _GPT2),
    "GPTNeoX": (None, _FULL),
    "GPTJ": (None, {**_GPT2, "rotary_dim": 8}),
    "OPT": (None, {**_FULL, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    "StableLm": (None, _BASE),
    "Olmo2": (None, _BASE),
    "SmolLM3": (None, _BASE),
    "Cohere2": (None, {**_HEADS, "sliding_window": 6}),
    "Granite": (None, _BASE),
    "Glm4": (None, _HEADS),
    "Starcoder2": (None, _BASE),
    "DiffLlama": (None, _BASE),  # attends twice with the same keys, each time to half of the values
    "Mixtral": (None, {**_BASE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen3Moe": (None, {**_HEADS, **_EXPERTS}),
    "GptOss": (None, {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}),
    "Llama4": ("Llama4TextConfig", {
        **_HEADS, "intermediate_size_mlp": 64, "num_local_experts": 4, "attention_chunk_size": 8,
    }),
    "DeepseekV3": (None, {
        **_BASE, "num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "kv_lora_rank": 16, "q_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "first_k_dense_replace": 1,
    }),
    # With recurrent layers between those of attention.
    "Qwen3Next": (None, {
        **_HEADS, **_EXPERTS, **_LINEAR, "num_hidden_layers": 4, "shared_expert_intermediate_size": 16,
    }),
    "Qwen3_5": ("Qwen3_5TextConfig", {**_HEADS, **_LINEAR, "num_hidden_layers": 4}),
    "Qwen3_5Moe": ("Qwen3_5MoeTextConfig", {
        **_HEADS, **_EXPERTS, **_LINEAR, "num_hidden_layers": 4, "shared_expert_intermediate_size": 16,
    }),
    "OlmoHybrid": (None, {**_BASE, **_LINEAR, "num_hidden_layers": 4}),
    "KimiLinear": (None, {
        **_BASE, "num_key_value_heads": 4, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "linear_num_heads": 2,
        "linear_head_dim": 8, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
    }),
    "Lfm2": (None, {**_BASE, "layer_types": ["conv", "full_attention", "conv"]}),
    "Lfm2Moe": (None, {
        **_BASE, **_EXPERTS, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1,
    }),
    "Bamba": (None, {**_BASE, **_MAMBA2, "attn_layer_indices": [1]}),
    "FalconH1": (None, {**_BASE, **_MAMBA2, "mamba_d_ssm": 64}),
    "GraniteMoeHybrid": (None, {
        **_BASE, **_MAMBA2, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0,
        "shared_intermediate_size": 32,
    }),
    "NemotronH": (None, {
        **_HEADS, "num_hidden_layers": 4, "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
        "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 8,
    }),
    "Zamba2": (None, {
        **_FULL, "num_key_value_heads": 4, "num_hidden_layers": 4, "hybrid_layer_ids": [1, 3], "num_mem_blocks": 1,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "mamba_d_state": 8, "mamba_headdim": 16,
        "n_mamba_heads": 4, "mamba_ngroups": 1, "adapter_rank": 4,
    }),
}  # fmt: skip
_MIXTURE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# Others that need nothing of their own: their test is exhaustive.
MORE: dict[str, tuple[str | None, dict[str, Any]]] = {
    **dict.fromkeys((
        "Apertus", "Arcee", "BioGpt", "Cohere", "Ernie4_5", "Ernie4_5_Moe", "FlexOlmo", "Glm", "GraniteMoe",
        "GraniteMoeShared", "NanoChat", "Olmo", "Olmo3", "Olmoe", "Persimmon", "VaultGemma",
    ), (None, _FULL)),
    **dict.fromkeys((
        "BitNet", "Exaone4", "Helium", "HunYuanDenseV1", "HunYuanMoEV1", "JetMoe", "MiniMaxM2", "Ministral",
        "Ministral3", "Nemotron", "Phimoe", "Qwen2Moe", "SeedOss",
    ), (None, _HEADS)),
    "CodeGen": (None, {**_GPT2, "rotary_dim": 4, "n_ctx": 128}),
    "Glm4Moe": (None, {**_HEADS, **_MIXTURE, "n_shared_experts": 1}),
    "MiMoV2Flash": (None, {**_HEADS, **_MIXTURE}),
}  # fmt: skip
REFUSED: dict[str, tuple[str | None, dict[str, Any]]] = {
    "Bloom": (None, {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "Falcon": (None, _FULL),
    "Mamba": (None, {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}),
    "Mamba2": (None, {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16,
        "n_groups": 1, "state_size": 8,
    }),
    "Jamba": (None, {
        **_BASE, "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2,
        "mamba_d_state": 8, "mamba_dt_rank": 4,
    }),
    # Their layers choose among keys, or attend to compressed ones.
    "DeepseekV32": (None, {
        **_BASE, **_INDEX, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16,
        "qk_nope_head_dim": 8, "v_head_dim": 8,
    }),
    "DeepseekV4": (None, {
        **_HEADS, **_INDEX, "head_dim": 16, "max_position_embeddings": 512, "o_groups": 2, "o_lora_rank": 16,
        "sliding_window": 16, "layer_types": ["heavily_compressed_attention"] * 3,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    }),
}  # fmt: skip


def make_model(name: str, **changes: Any) -> Any:
    """Of SERVED, MORE or REFUSED; greedy, without stop tokens unless they are given."""
    config_name, fields = {**SERVED, **MORE, **REFUSED}[name]
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    # Its scaled_dot_product_attention leaves Gemma 2's softcap out in some versions.
    eager = {"attn_implementation": "eager"}
    config = getattr(transformers, config_name or f"{name}Config")(**{**fields, **ids, **eager, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model" if name == "GPT2LMHead" else f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.is_floating_point() and (parameter.dim() > 1 or parameter_name.endswith("sinks")):
                parameter.normal_(0, 0.25)
    return model


class RoundedCache(transformers.DynamicCache):
    """Of ``generate``: keys and values are what is left of them in pages of codes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def update(self, key_states: Any, value_states: Any, *args: Any, **named: Any) -> Any:
        rounded = (dequantize_rows(*quantize_rows(x, self.dtype)).to(x.dtype) for x in (key_states, value_states))
        return super().update(*rounded, *args, **named)


def greedy(model: Any, prompt: list[int], count: int, cache: RoundedCache | None = None) -> list[int]:
    """What ``generate`` of transformers says."""
    more = {} if cache is None else {"past_key_values": copy.deepcopy(cache)}
    with torch.no_grad():
        tokens = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0,
            **more,
        )  # fmt: skip
    found: list[int] = tokens[0, len(prompt) :].tolist()
    return found


def round_inputs(model: Any) -> None:
    """Layers of four bits take activations rounded to int8, as ``int8_activations`` multiplies them."""

    def rounding(multiply: Any) -> Any:
        def forward(x: torch.Tensor) -> torch.Tensor:
            values, scale = quantize_parts(x, -(-x.shape[-1] // W4A8_PART) * W4A8_PART)
            result: torch.Tensor = multiply((values * scale).flatten(-2)[..., : x.shape[-1]].to(x.dtype))
            return result

        return forward

    for layer in model.modules():
        if isinstance(layer, Int4Linear | NVFP4Linear):
            layer.forward = rounding(layer.forward)  # type: ignore[method-assign]
        elif isinstance(layer, Int4Experts):  # the operator rounds, for weights in this layout
            for name in ("w13", "w2"):
                inputs = layer.hidden_size if name == "w13" else layer.intermediate_size
                k = -(-inputs // layer.group_size) * layer.group_size
                values = unpack_int4(getattr(layer, name))[:, :k]
                scales = getattr(layer, f"{name}_scale_and_zero")[: k // layer.group_size]
                packed, packed_scales = pack_w4a8(values, scales)
                setattr(layer, name, packed)
                setattr(layer, f"{name}_scale_and_zero", packed_scales)
        elif isinstance(layer, NVFP4MoE):  # likewise
            names = ("w13", "w13_scale", "w2", "w2_scale", "w13_global", "w2_global")
            for name, part in zip(
                names, packed_for_integers(tuple(getattr(layer, name) for name in names)), strict=True
            ):
                setattr(layer, name, part)


def tokenizer() -> bytes:
    """tokenizer.json of one token a byte, <s> and </s>."""
    return byte_tokenizer()
