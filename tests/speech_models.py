"""Tiny speech models with random weights, and their packages: ``python speech_models.py ctc|voxtral PATH``."""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
import warnings
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
CHUNK_SECONDS = 3.0  # of the CTC package
LETTERS = "ETAONIHSRDLUMWCFGYPBVK'XJQZ"
VOXTRAL_WORDS = [*"abcdefghijklmnopqrstuvwxyz :", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"]


def speech(seconds: float, rate: int = 16000, seed: int = 0) -> np.ndarray:
    """Something with a spectrum that changes: tones, noise and silence. float32 [n], from -1 to 1."""
    rng = np.random.default_rng(seed)
    time = np.arange(round(seconds * rate)) / rate
    tone = np.sin(2 * np.pi * (200 + 90 * seed + 300 * time) * time) * (1 + np.sin(7 * time)) / 2
    noise = rng.normal(0, 0.1, len(time)) * (np.sin(3 * time) > 0)
    return (0.4 * tone + noise).clip(-1, 1).astype(np.float32)


def ctc_tokenizer() -> Any:
    """Of wav2vec2-base-960h's kind."""
    from transformers import Wav2Vec2CTCTokenizer

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "|": 4}
    vocabulary |= {letter: 5 + i for i, letter in enumerate(LETTERS)}
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "vocab.json")
        path.write_text(json.dumps(vocabulary))
        return Wav2Vec2CTCTokenizer(str(path))


def ctc_extractor() -> Any:
    from transformers import Wav2Vec2FeatureExtractor

    return Wav2Vec2FeatureExtractor(do_normalize=True)


def make_ctc(kind: str = "Wav2Vec2") -> Any:
    """A frame every 320 samples, as the published ones have."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        conv_dim=(16, 16, 16), conv_kernel=(10, 3, 3), conv_stride=(20, 8, 2), num_feat_extract_layers=3,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2,
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForCTC")(config).eval()
    with torch.no_grad():
        model.lm_head.weight.normal_(0, 1.0)
        model.lm_head.bias.zero_()
        model.lm_head.bias[0] = 1.0  # blanks
        model.lm_head.bias[4] = 0.7  # spaces
    return model


def voxtral_tokenizer() -> Any:
    """Characters, with the special tokens of the prompt at Voxtral's ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {1: "<s>", 2: "</s>", 3: "[INST]", 4: "[/INST]", 24: "[AUDIO]", 25: "[BEGIN_AUDIO]", 34: "[TRANSCRIBE]"}
    free = iter([i for i in range(99) if i not in special])
    vocabulary = {text: i for i, text in special.items()} | {text: next(free) for text in VOXTRAL_WORDS}
    vocabulary |= {f"<{i}>": i for i in free}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<0>"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    words.add_special_tokens([AddedToken(text, special=True) for text in special.values()])
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", bos_token="<s>")


def voxtral_extractor(model: Any) -> Any:
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=model.config.audio_config.num_mel_bins)


def make_voxtral() -> Any:
    """64 frames, 0.64 seconds, are a chunk of 8 tokens."""
    import torch

    sys.path.insert(0, str(ROOT / "benchmarks"))
    from voxtral_model import build_model

    model = build_model(tiny=True, dtype="float32")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    # Of random weights, one token would seldom come.
    model.generation_config.eos_token_id = [0, 2, 6, 40, 52, 63, 92]
    return model


def main(kind: str, path: str) -> None:
    """Compiles the package."""
    warnings.simplefilter("ignore")
    from untorch.export import speech_to_text

    if kind == "ctc":
        speech_to_text(
            make_ctc(), path, feature_extractor=ctc_extractor(), tokenizer=ctc_tokenizer(), languages="en",
            chunk_seconds=CHUNK_SECONDS, progress=False,
        )  # fmt: skip
        return
    assert kind == "voxtral"
    model = make_voxtral()
    speech_to_text(
        model, path, feature_extractor=voxtral_extractor(model), tokenizer=voxtral_tokenizer(),
        language_model={"token_counts": (16,)}, progress=False,
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
