"""Tiny Hugging Face folders with random weights, one for each recipe's architectures, and inputs for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

__all__ = [
    "DIFFUSION", "FOLDERS", "difference", "diffusion_task", "expected_results", "inputs_for", "make_folder", "picture",
    "plain", "resize_without_torchvision", "run_without_torch",
]  # fmt: skip

LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "dog",
    "ran",
    "far",
    "##s",
    "##ed",
    "photo",
    "of",
    "this",
    "is",
    ".",
    ",",
]
QUERY = {"query": "the cat sat", "documents": ["a dog ran far", "the cat sat on a mat .", "photo of a cat", "mats"]}
TEXTS = ["the cat sat on a mats .", "dogs ran", "a unknownword is far , the dogs sat on this mat of a cat"]
MASKED = ["the cat [MASK] on a mat .", "a [MASK] ran far"]
CANDIDATES = ["cat", "dog", "mat"]
_TEXT = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 40, "pad_token_id": 0,
}  # fmt: skip
_IMAGE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 32,
    "patch_size": 8, "num_labels": 7,
}  # fmt: skip
_DISTIL = {"vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "max_position_embeddings": 40}
_ALBERT = {**_TEXT, "embedding_size": 16}
_T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "pad_token_id": 0}
_STAGES = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32], "num_labels": 7}
_RT_DETR = {
    "backbone_config": {
        "model_type": "rt_detr_resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 24], "depths": [1, 1, 1],
        "layer_type": "basic", "out_indices": [2, 3],
    },
    "encoder_in_channels": [16, 24], "feat_strides": [8, 16], "encode_proj_layers": [1], "encoder_hidden_dim": 16,
    "encoder_ffn_dim": 32, "encoder_attention_heads": 2, "d_model": 16, "decoder_in_channels": [16, 16],
    "num_feature_levels": 2, "decoder_ffn_dim": 32, "decoder_layers": 1, "decoder_attention_heads": 2,
    "decoder_n_points": 2, "num_queries": 6, "num_labels": 5, "num_denoising": 0,
}  # fmt: skip
_RT_DETR_V2 = {**_RT_DETR, "decoder_n_levels": 2, "decoder_layers": 2}
_D_FINE = {
    **_RT_DETR, "decoder_layers": 2, "num_feature_levels": 2, "decoder_n_points": [2, 2], "lqe_hidden_dim": 8,
    "backbone_config": {
        "model_type": "hgnet_v2", "stem_channels": [3, 8, 8], "stage_in_channels": [8, 8, 16, 16],
        "stage_mid_channels": [8, 8, 8, 8], "stage_out_channels": [8, 16, 16, 24], "stage_num_blocks": [1, 1, 1, 1],
        "stage_numb_of_layers": [2, 2, 2, 2], "hidden_sizes": [8, 16, 16, 24], "depths": [1, 1, 1, 1],
        "embedding_size": 8, "out_indices": [3, 4],
    },
    "encoder_in_channels": [16, 24], "feat_strides": [16, 32],
}  # fmt: skip
_RESNET = {"model_type": "resnet", **_STAGES, "embedding_size": 8, "layer_type": "basic", "out_features": ["stage4"]}
_DETR = {
    "backbone_config": _RESNET, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 6, "num_labels": 5,
}  # fmt: skip
_EDGES = {"size": {"shortest_edge": 96, "longest_edge": 160}}
_SWIN = {
    "model_type": "swin", "image_size": 64, "embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2],
    "window_size": 4, "out_features": ["stage1", "stage2", "stage3", "stage4"],
}  # fmt: skip
_TEXT_TASKS = ("text-classification", "token-classification", "fill-mask")
# name: (task, model class, config, processor class, its fields)
FOLDERS: dict[str, tuple[str, str, dict[str, Any], str, dict[str, Any]]] = {
    "bert": ("text-classification", "BertForSequenceClassification", {**_TEXT, "num_labels": 3}, "", {}),
    "distilbert": ("text-classification", "DistilBertForSequenceClassification", {**_DISTIL, "num_labels": 3}, "", {}),
    "roberta": ("text-classification", "RobertaForSequenceClassification", {**_TEXT, "num_labels": 1}, "", {}),
    "electra": ("token-classification", "ElectraForTokenClassification", {**_ALBERT, "num_labels": 5}, "", {}),
    "bert-ner": ("token-classification", "BertForTokenClassification", {**_TEXT, "num_labels": 5}, "", {}),
    "bert-mlm": ("fill-mask", "BertForMaskedLM", _TEXT, "", {}),
    "albert": ("fill-mask", "AlbertForMaskedLM", _ALBERT, "", {}),
    "minilm": ("text-embedding", "BertModel", _TEXT, "", {}),
    "labse": ("text-embedding", "BertModel", _TEXT, "", {}),
    "cross-encoder": ("reranking", "BertForSequenceClassification", {**_TEXT, "num_labels": 1}, "", {}),
    # With a Unigram tokenizer, as SentencePiece models have.
    "xlm-roberta": (
        "text-classification", "XLMRobertaForSequenceClassification", {**_TEXT, "num_labels": 3, "pad_token_id": 1}, "", {},
    ),
    "t5": ("text-embedding", "T5EncoderModel", _T5, "", {}),
    "mpnet": ("text-embedding", "MPNetModel", _TEXT, "", {}),
    "vit": (
        "image-classification", "ViTForImageClassification", _IMAGE, "ViTImageProcessor",
        {"size": {"height": 32, "width": 32}},
    ),
    "deit": (
        "image-classification", "DeiTForImageClassification", _IMAGE, "DeiTImageProcessor",
        {"size": {"height": 40, "width": 40}, "crop_size": {"height": 32, "width": 32}},
    ),
    "resnet": (
        "image-classification", "ResNetForImageClassification", {**_STAGES, "embedding_size": 8, "layer_type": "basic"},
        "ConvNextImageProcessor", {"size": {"shortest_edge": 32}},
    ),
    "convnext": (
        "image-classification", "ConvNextForImageClassification", _STAGES, "ConvNextImageProcessor",
        {"size": {"shortest_edge": 64}},
    ),
    "dinov2": (
        "image-classification", "Dinov2ForImageClassification", _IMAGE, "BitImageProcessor",
        {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}},
    ),
    "swin": (
        "image-classification", "SwinForImageClassification",
        {
            "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4,
            "num_labels": 7,
        },
        "ViTImageProcessor", {"size": {"height": 32, "width": 32}},
    ),
    "clip": (
        "zero-shot-image-classification", "CLIPModel",
        {
            "text_config": {**_TEXT, "eos_token_id": 3, "bos_token_id": 2, "projection_dim": 16},
            "vision_config": {**_IMAGE, "projection_dim": 16}, "projection_dim": 16,
        },
        "CLIPImageProcessor", {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
    ),
    "siglip": (
        "zero-shot-image-classification", "SiglipModel",
        {"text_config": {**_TEXT, "max_position_embeddings": 64}, "vision_config": _IMAGE},
        "SiglipImageProcessor", {"size": {"height": 32, "width": 32}},
    ),
    "detr": (
        "object-detection", "DetrForObjectDetection",
        {
            "use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False, "d_model": 32,
            "backbone_config": {
                "model_type": "resnet", **_STAGES, "embedding_size": 8, "layer_type": "basic",
                "out_features": ["stage4"],
            },
            "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
            "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 6, "num_labels": 5,
        },
        "DetrImageProcessor", {"size": {"shortest_edge": 96, "longest_edge": 160}},
    ),
    "yolos": (
        "object-detection", "YolosForObjectDetection",
        {**_IMAGE, "image_size": [64, 96], "patch_size": 16, "num_detection_tokens": 6, "num_labels": 5},
        "YolosImageProcessor", {"size": {"shortest_edge": 96, "longest_edge": 160}},
    ),
    "rt-detr": (
        "object-detection", "RTDetrForObjectDetection", _RT_DETR, "RTDetrImageProcessor",
        {"size": {"height": 64, "width": 64}},
    ),
    "rt-detr-v2": (
        "object-detection", "RTDetrV2ForObjectDetection", _RT_DETR_V2, "RTDetrImageProcessor",
        {"size": {"height": 64, "width": 64}},
    ),
    "d-fine": (
        "object-detection", "DFineForObjectDetection", _D_FINE, "RTDetrImageProcessor",
        {"size": {"height": 64, "width": 64}},
    ),
    "table-transformer": (
        "object-detection", "TableTransformerForObjectDetection", _DETR, "DetrImageProcessor", _EDGES,
    ),
    "conditional-detr": (
        "object-detection", "ConditionalDetrForObjectDetection", _DETR, "ConditionalDetrImageProcessor", _EDGES,
    ),
    "dab-detr": (
        "object-detection", "DabDetrForObjectDetection",
        {**{k: v for k, v in _DETR.items() if k != "d_model"}, "hidden_size": 32}, "ConditionalDetrImageProcessor",
        _EDGES,
    ),
    "segformer": (
        "image-segmentation", "SegformerForSemanticSegmentation",
        {
            "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2],
            "decoder_hidden_size": 16, "num_labels": 7,
        },
        "SegformerImageProcessor", {"size": {"height": 64, "width": 64}},
    ),
    "mask2former": (
        "image-segmentation", "Mask2FormerForUniversalSegmentation",
        {
            "backbone_config": _SWIN, "feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "encoder_layers": 1,
            "encoder_feedforward_dim": 32, "decoder_layers": 2, "dim_feedforward": 32, "num_attention_heads": 2,
            "num_queries": 6, "num_labels": 66,
        },
        "Mask2FormerImageProcessor", {"size": {"height": 64, "width": 64}},
    ),
    "maskformer": (
        "image-segmentation", "MaskFormerForInstanceSegmentation",
        {
            "backbone_config": _SWIN, "fpn_feature_size": 32, "mask_feature_size": 32, "num_labels": 66,
            "decoder_config": {
                "model_type": "detr", "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
                "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
                "num_queries": 6,
            },
        },
        "MaskFormerImageProcessor", {"size": {"height": 64, "width": 64}},
    ),
    "oneformer": (
        "image-segmentation", "OneFormerForUniversalSegmentation",
        {
            "backbone_config": _SWIN, "conv_dim": 32, "mask_dim": 32, "hidden_dim": 32, "encoder_layers": 1,
            "encoder_feedforward_dim": 32, "decoder_layers": 3, "dim_feedforward": 32, "num_attention_heads": 2,
            "num_queries": 6, "query_dec_layers": 1, "task_seq_len": 24, "num_labels": 66,
        },
        "OneFormerImageProcessor", {"size": {"height": 64, "width": 64}},
    ),
    "wav2vec2": (
        "audio-classification", "Wav2Vec2ForSequenceClassification",
        {
            **_TEXT, "conv_dim": [16, 16, 16], "conv_kernel": [10, 3, 3], "conv_stride": [20, 8, 2], "num_labels": 6,
            "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
        },
        "Wav2Vec2FeatureExtractor", {"do_normalize": True},
    ),
    # Of tests/speech_models.py, with their own configs, extractors and tokenizers.
    "ctc": ("automatic-speech-recognition", "Wav2Vec2ForCTC", {}, "", {}),
    "hubert": ("automatic-speech-recognition", "HubertForCTC", {}, "", {}),
    "whisper": ("automatic-speech-recognition", "WhisperForConditionalGeneration", {}, "", {}),
}  # fmt: skip
# Of tests/diffusion_models.py and tests/diffusion_transformers.py, by diffusers. name: the pipeline's class
DIFFUSION = {
    "stable-diffusion": "StableDiffusionPipeline", "stable-diffusion-xl": "StableDiffusionXLPipeline",
    "stable-diffusion-3": "StableDiffusion3Pipeline", "pixart-alpha": "PixArtAlphaPipeline",
    "pixart-sigma": "PixArtSigmaPipeline", "flux": "FluxPipeline", "dit": "DiTPipeline",
}  # fmt: skip


def make_tokenizer(more: Sequence[str] = ()) -> Any:
    """WordPiece over a handful of words."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *more]
    backend = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    from tokenizers import decoders

    backend.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_max_length=64,
    )  # fmt: skip


def make_unigram_tokenizer(pad: int) -> Any:
    """Unigram with Metaspace and a byte of noise, as a SentencePiece model is converted to; ids as XLM-R's or T5's."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "</s>", "<unk>", "<s>"] if pad == 0 else ["<s>", "<pad>", "</s>", "<unk>"]
    letters = "abcdefghijklmnopqrstuvwxyz.,"
    pieces = [(token, 0.0) for token in special] + [
        ("\u2581" + word, -3.0 - i / 10) for i, word in enumerate(WORDS[:12])
    ]
    pieces += [(letter, -9.0 - i / 50) for i, letter in enumerate(letters)] + [
        ("\u2581", -8.0),
        ("at", -6.5),
        ("og", -6.7),
    ]
    backend = Tokenizer(models.Unigram(pieces, unk_id=special.index("<unk>"), byte_fallback=False))
    backend.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()])
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    ends = [("<s>", special.index("<s>")), ("</s>", special.index("</s>"))]
    single = "$A </s>" if pad == 0 else "<s> $A </s>"
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=ends)
    found = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", eos_token="</s>", bos_token="<s>",
        model_max_length=64,
    )  # fmt: skip
    found.model_input_names = ["input_ids", "attention_mask"]
    return found


def make_folder(name: str, folder: Path) -> str:
    """Writes the folder of this name; its task."""
    import torch
    import transformers

    if name in DIFFUSION:
        from tests import diffusion_models, diffusion_transformers

        torch.manual_seed(0)
        unet = diffusion_models.make_xl_folder if name.endswith("-xl") else diffusion_models.make_folder
        make = diffusion_transformers.MAKERS.get(DIFFUSION[name], unet)
        make(diffusion_models.import_diffusers(), folder)
        return diffusion_task(name)
    torch.manual_seed(0)
    task, kind, fields, processor, settings = FOLDERS[name]
    if task == "automatic-speech-recognition":
        make_speech_folder(kind, folder)
        return task
    model_class = getattr(transformers, kind)
    config = model_class.config_class(**fields)
    if task == "token-classification":
        config.id2label = dict(enumerate(LABELS))
    model = model_class(config).eval()
    with torch.no_grad():  # random models say much the same of every input
        for part, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(4 if "classifier" in part or "embeddings" in part else 1.5)
            if any(
                name in part
                for name in (
                    "detection_tokens",
                    "query_position",
                    "refpoint",
                    "labels_classifier",
                    "bbox",
                    "class_embed",
                )
            ):
                parameter.normal_(0, 0.4)
            if "class_predictor" in part:  # scores above the default threshold
                parameter.normal_(0, 2)
            if kind.startswith("OneFormer") and parameter.ndim > 1:  # masks differ by query
                if "query_embed" in part or "queries_embedder" in part:
                    parameter.normal_(0, 1)
                if "mask_embed" in part:
                    parameter.normal_(0, 0.6)
                if "decoder.class_embed" in part:
                    parameter.normal_(0, 1.5)
                if "task_mlp" in part:
                    parameter.mul_(0.2)
        for layer in model.modules():  # RT-DETR's are all but zero: every place would look the same
            if kind.startswith(("RTDetr", "DFine")) and hasattr(layer, "running_var"):
                layer.weight.fill_(1)
            if kind.startswith("DFine") and isinstance(layer, torch.nn.Conv2d):
                torch.nn.init.kaiming_normal_(layer.weight)
    model.save_pretrained(folder)
    if processor:
        getattr(transformers, processor)(**settings).save_pretrained(folder)
    if name == "oneformer":
        make_tokenizer(["task", "is", "panoptic", "instance", "semantic"]).save_pretrained(folder)
        (folder / "classes.json").write_text(json.dumps({"0": {"name": "cat", "isthing": True}}))
        names = {"repo_path": str(folder), "class_info_file": "classes.json"}
        change_config(folder, "preprocessor_config.json", **names)
    if name in ("xlm-roberta", "t5"):
        make_unigram_tokenizer(config.pad_token_id).save_pretrained(folder)
    elif task in (*_TEXT_TASKS, "text-embedding", "reranking") or "zero" in task:
        tokenizer = make_tokenizer()
        if name in ("clip", "roberta", "distilbert"):
            tokenizer.model_input_names = ["input_ids", "attention_mask"]
        if name == "siglip":
            tokenizer.model_input_names = ["input_ids"]
        tokenizer.save_pretrained(folder)
    if name == "cross-encoder":
        change_config(folder, sentence_transformers={"activation_fn": "torch.nn.modules.activation.Sigmoid"})
    if name == "labse":
        make_modules(folder)
    if name == "minilm":
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
        modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
        (folder / "modules.json").write_text(
            json.dumps([{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in modules])
        )
    return task


def change_config(folder: Path, file: str = "config.json", **fields: Any) -> None:
    config = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**config, **fields}))


def resize_without_torchvision() -> None:
    """OneFormer's image processor has torchvision's alone to resize masks."""
    import torch
    from transformers.models.oneformer import image_processing_pil_oneformer as module

    def resize(masks: Any, size: Any, interpolation: Any) -> Any:
        return torch.nn.functional.interpolate(masks, size=size, mode="bilinear", antialias=True)

    if not hasattr(module, "tvF"):
        bilinear = SimpleNamespace(BILINEAR="bilinear")
        setattr(module, "tvF", SimpleNamespace(resize=resize, InterpolationMode=bilinear))  # noqa: B010


def make_modules(folder: Path) -> None:
    """CLS and mean, a dense layer, normalised; a prompt by default."""
    import torch
    from safetensors.torch import save_file

    names = ["Transformer", "1_Pooling", "2_Dense", "3_Normalize"]
    for name in names[1:]:
        (folder / name).mkdir()
    flags = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}
    (folder / "1_Pooling/config.json").write_text(json.dumps(flags))
    dense = {
        "in_features": 64,
        "out_features": 8,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    (folder / "2_Dense/config.json").write_text(json.dumps(dense))
    weights = {"linear.weight": torch.randn(8, 64) / 2, "linear.bias": torch.randn(8)}
    save_file(weights, folder / "2_Dense/model.safetensors")
    kinds = [{"path": name, "type": f"sentence_transformers.models.{name[2:]}"} for name in names[1:]]
    kinds.insert(0, {"path": "", "type": "sentence_transformers.models.Transformer"})
    (folder / "modules.json").write_text(json.dumps(kinds))
    prompts = {"prompts": {"query": "photo of ", "none": ""}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))


def make_speech_folder(kind: str, folder: Path) -> None:
    from tests import speech_models

    if kind.startswith("Whisper"):
        parts = [speech_models.make_whisper(), speech_models.whisper_extractor(), speech_models.whisper_tokenizer()]
    else:
        model = speech_models.make_ctc(kind.removesuffix("ForCTC"))
        parts = [model, speech_models.ctc_extractor(), speech_models.ctc_tokenizer()]
    for part in parts:
        part.save_pretrained(folder)


def picture(seed: int, height: int = 61, width: int = 90) -> np.ndarray:
    """Smooth, with edges: uint8 [height, width, 3]."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:height, :width] / 20
    waves = np.stack([np.sin(rows * a + columns * b) for a, b in rng.uniform(0.5, 3, (3, 2))], -1)
    return np.uint8(127 + 120 * waves * np.sign(columns - 2)[..., None])


def diffusion_task(name: str) -> str:
    return "class-to-image" if DIFFUSION[name] == "DiTPipeline" else "text-to-image"


def latents_of(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def takes_images(task: str) -> bool:
    return "image" in task or task == "object-detection"


def inputs_for(task: str) -> tuple[list[Any], dict[str, Any]]:
    """Inputs of a call, and its options."""
    if task == "reranking":
        return [QUERY, {**QUERY, "query": "dogs"}], {}
    if task == "fill-mask":
        return MASKED, {}
    if task in ("text-to-image", "class-to-image"):
        options = {"num_inference_steps": 4, "latents": latents_of(4, 8, 8), "output_type": "np"}
        return ["a photo of a cat", "the red dog"] if task == "text-to-image" else ["white shark", 1], options
    if takes_images(task):
        by_task: dict[str, dict[str, Any]] = {
            "zero-shot-image-classification": {"candidate_labels": CANDIDATES}, "object-detection": {"threshold": 0.1},
            "image-classification": {"top_k": 7},
        }  # fmt: skip
        return [picture(0), picture(1, 40, 33), picture(2, 100, 64)], by_task.get(task, {})
    if task in ("audio-classification", "automatic-speech-recognition"):
        options = {"top_k": 6} if task == "audio-classification" else {}
        return [np.sin(np.arange(n) ** 1.3 / 50).astype(np.float32) for n in (16000, 9000)], options
    return TEXTS, {"aggregation_strategy": "none"} if task == "token-classification" else {}


def expected_ranking(folder: Path, given: dict[str, Any]) -> list[dict[str, Any]]:
    """As sentence-transformers' CrossEncoder.rank: sigmoids, the best first."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    scores = []
    for document in given["documents"]:
        with torch.no_grad():
            scores.append(float(model(**tokenizer(given["query"], document, return_tensors="pt")).logits.sigmoid()))
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    return [{"index": i, "score": scores[i], "document": given["documents"][i]} for i in order]


def expected_dense(folder: Path, texts: list[str], prompt_name: str = "query") -> list[list[float]]:
    """Of ``make_modules``, one text at a time."""
    import torch
    import transformers
    from safetensors.torch import load_file

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model, dense = (
        transformers.AutoModel.from_pretrained(folder).eval(),
        load_file(folder / "2_Dense/model.safetensors"),
    )
    found = []
    for text in texts:
        with torch.no_grad():
            given = tokenizer({"query": "photo of ", "none": ""}[prompt_name] + text, return_tensors="pt")
            hidden = model(**given).last_hidden_state[0]
            pooled = torch.cat([hidden[0], hidden.mean(0)])
            vector = (dense["linear.weight"] @ pooled + dense["linear.bias"]).tanh()
        found.append(torch.nn.functional.normalize(vector, dim=0).tolist())
    return found


def expected_results(folder: Path, task: str, **changes: Any) -> Any:
    """What transformers' pipeline gives, or diffusers'; of embeddings, the mean over the tokens, normalised."""
    import torch
    import transformers
    from PIL import Image

    inputs, options = inputs_for(task)
    options |= changes
    if task in ("text-to-image", "class-to-image"):
        from tests import diffusion_models, diffusion_transformers

        diffusers = diffusion_models.import_diffusers()
        if (folder / "transformer").is_dir():
            del options["output_type"]
            options["latents"] = latents_of(*diffusion_transformers.latent_shape(folder))
            call = diffusion_transformers.load_pipeline(diffusers, folder)
            return [call(text, **options) for text in inputs]
        eager = diffusion_models.make_pipeline(diffusers, folder)
        options["latents"] = torch.from_numpy(options["latents"])[None]
        return [eager(text, **options).images[0] for text in inputs]
    if task == "reranking":
        return [expected_ranking(folder, given) for given in inputs]
    if (folder / "2_Dense").is_dir():
        return expected_dense(folder, inputs, **options)
    if task == "text-embedding":
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        kind = json.loads((folder / "config.json").read_text())["architectures"][0]
        model = getattr(transformers, kind).from_pretrained(folder).eval()
        given = tokenizer(inputs, padding=True, return_tensors="pt")
        if "MPNet" in type(model).__name__:
            given.pop("token_type_ids", None)
        with torch.no_grad():
            hidden, mask = model(**given).last_hidden_state, given["attention_mask"][..., None]
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1)).tolist()
    given = [Image.fromarray(array) for array in inputs] if takes_images(task) else inputs
    if task in ("audio-classification", "automatic-speech-recognition"):
        given = [{"raw": array, "sampling_rate": 16000} for array in inputs]
    keywords: dict[str, Any] = {}
    if (folder / "generation_config.json").is_file() and task == "automatic-speech-recognition":
        # Greedy, up to the decoder's last position, without times that were not asked for.
        own = json.loads((folder / "generation_config.json").read_text())
        size = json.loads((folder / "config.json").read_text())["vocab_size"]
        never = [*own["suppress_tokens"], *range(own["no_timestamps_token_id"] + 1, size)]
        greedy = {"num_beams": 1, "task": "transcribe", "max_new_tokens": 36, "suppress_tokens": never}
        options["generate_kwargs"] = greedy
    if (folder / "classes.json").is_file():
        resize_without_torchvision()
    if takes_images(task):
        keywords = {"image_processor": transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")}
    return transformers.pipeline(task, model=str(folder), device="cpu", **keywords)(given, **options)


def difference(expected: Any, found: Any) -> float:
    """The largest difference of two numbers at the same place; infinity if anything else differs."""
    if isinstance(expected, dict) and isinstance(found, dict) and expected.keys() == found.keys():
        compare = {"mask": mask_difference}
        gaps = (compare.get(key, difference)(value, found[key]) for key, value in expected.items())
        return max(gaps, default=0.0)
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        return max((difference(one, other) for one, other in zip(expected, found, strict=True)), default=0.0)
    if isinstance(expected, float) and isinstance(found, float):
        return abs(expected - found)
    return 0.0 if expected == found and type(expected) is type(found) else float("inf")


def mask_difference(expected: Any, found: Any) -> float:
    """Where two labels or queries are as likely, rounding decides: up to a thousandth of the pixels may differ."""
    first, second = np.asarray(expected), np.asarray(found)
    if first.shape != second.shape:
        return float("inf")
    share = float((first != second).mean())
    return 0.0 if share <= 1e-3 else float("inf")


def plain(value: Any) -> Any:
    """With lists and numbers of Python alone, as JSON has them."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "getdata"):  # an image
        return np.asarray(value).tolist()
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def run_without_torch(package: Path, task: str, **changes: Any) -> Any:
    """The pipeline's results in a process of UNTORCH_RUN_PYTHON, if it is set, in which torch cannot be imported."""
    command = [os.environ.get("UNTORCH_RUN_PYTHON", sys.executable), __file__, str(package), task, json.dumps(changes)]
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(root)])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]  # an import of it is an error
    import untorch

    values, keywords = inputs_for(sys.argv[2])
    with untorch.pipeline(sys.argv[1]) as pipeline:
        if "latents" in keywords:
            keywords["latents"] = latents_of(*pipeline.settings.get("latent_shape", list))
        print(json.dumps(plain(pipeline(values, **{**keywords, **json.loads(sys.argv[3])}))))
