"""Tiny vision-language models with random weights, their processor, tokenizer, images and prompts."""

from __future__ import annotations

from typing import Any

import numpy as np

SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
START, END, IMAGE = 258, 259, 260
VOCABULARY = 256 + len(SPECIAL)
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
}  # fmt: skip
_VISION: dict[str, Any] = {
    "depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
_IDS = {
    "image_token_id": IMAGE, "video_token_id": 261, "vision_start_token_id": START, "vision_end_token_id": END,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
_LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_GRID = {"out_hidden_size": 32, "intermediate_size": 64, "num_position_embeddings": 36}
_INTERLEAVED = {**_TEXT, "rope_parameters": {
    **_TEXT["rope_parameters"], "mrope_interleaved": True, "partial_rotary_factor": 1.0,
}}  # fmt: skip
_DEEPSTACK = {**_VISION, **_GRID, "deepstack_visual_indexes": [0]}
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2VL": {"text_config": _TEXT, "vision_config": {**_VISION, "embed_dim": 32, "mlp_ratio": 2}},
    # Windows of 2 × 2 units in the first layer.
    "Qwen2_5_VL": {"text_config": _TEXT, "vision_config": {
        **_VISION, "out_hidden_size": 32, "intermediate_size": 64, "window_size": 16, "fullatt_block_indexes": [1]}},
    "Qwen3VL": {"text_config": _INTERLEAVED, "vision_config": _DEEPSTACK},
    "Qwen3VLMoe": {"text_config": {**_INTERLEAVED, **_EXPERTS}, "vision_config": _DEEPSTACK},
    # Recurrent layers beside those of attention.
    "Qwen3_5": {"text_config": {**_INTERLEAVED, **_LINEAR, "num_hidden_layers": 4}, "vision_config": {
        **_VISION, **_GRID}},
}  # fmt: skip


def make_model(name: str) -> Any:
    """…ForConditionalGeneration. It never generates a special token."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**CONFIGS[name], **_IDS)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
        model.lm_head.weight[256:] = 0
    model.generation_config.eos_token_id = None
    return model


def image_processor() -> Any:
    """From 1 to 64 units of 8 × 8 pixels."""
    from transformers import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 64, "longest_edge": 4096}
    )


def make_tokenizer() -> Any:
    """Bytes, with a chat template."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    words.add_special_tokens(SPECIAL)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, chat_template=TEMPLATE)


def make_images() -> list[np.ndarray]:
    """3 × 5, 6 × 2 and 4 × 4 units."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (*size, 3), np.uint8) for size in ((24, 40), (50, 17), (30, 34))]


def make_prompts() -> list[tuple[list[int], list[int]]]:
    """Tokens with a placeholder for each image, and which images they are."""
    rng = np.random.default_rng(1)
    before, after = rng.integers(30, 99, 12).tolist(), rng.integers(30, 99, 3).tolist()
    return [
        ([*before, START, IMAGE, END, *after], [0]),
        ([*before, START, IMAGE, END, *after], [1]),
        ([*before, *after], []),
        ([IMAGE, 40], [2]),  # behind an image at the very end, generate goes on from its last row and column
        ([IMAGE, *after, IMAGE, 40], [1, 0]),
        ([IMAGE, *after, IMAGE, 40], [0, 1]),
    ]


def generated(model: Any, tokens: list[int], images: list[np.ndarray], count: int) -> list[int]:
    """The most likely tokens, by ``generate`` of transformers."""
    import torch

    given: dict[str, Any] = {}
    units = iter(())
    if images:
        given = dict(image_processor()(images=images, return_tensors="pt"))
        units = iter((given["image_grid_thw"].prod(-1) // 4).tolist())
    ids = torch.tensor([[i for token in tokens for i in ([IMAGE] * next(units) if token == IMAGE else [token])]])
    if images:
        given["mm_token_type_ids"] = (ids == IMAGE).int()
    model.base_model.rope_deltas = None
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), **given, max_new_tokens=count, min_new_tokens=count,
        do_sample=False, pad_token_id=0,
    )  # fmt: skip
    found: list[int] = out[0, ids.shape[1] :].tolist()
    return found
