"""Tiny speech models with random weights, and their packages: ``python speech_models.py ctc|voxtral|whisper PATH``."""

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
WHISPER_TEXT = 60  # tokens of text
WHISPER_STEPS = 100  # of time, in a window
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


def whisper_tokenizer() -> Any:
    """Characters, the special tokens of the prompt behind them, and the times behind those."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import WhisperTokenizer

    special = [
        "<|endoftext|>",
        "<|startoftranscript|>",
        "<|en|>",
        "<|de|>",
        "<|fr|>",
        "<|translate|>",
        "<|transcribe|>",
    ]
    special += ["<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: WHISPER_TEXT - 1]
    vocabulary = {character: i for i, character in enumerate(["\u0120", *(c for c in alphabet if c != "\u0120")])}
    vocabulary = dict(list(vocabulary.items())[:WHISPER_TEXT])
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in special])
    backend.add_tokens([AddedToken(f"<|{i * 0.02:.2f}|>", normalized=False) for i in range(WHISPER_STEPS + 1)])
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "tokenizer.json")
        backend.save(str(path))
        return WhisperTokenizer(tokenizer_file=str(path), vocab=vocabulary, merges=[])


def whisper_extractor() -> Any:
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=8, chunk_length=2)


def make_whisper() -> Any:
    """A window is 2 seconds: 200 frames of 8 mel bins, 100 steps of time."""
    import torch
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(0)
    end = WHISPER_TEXT
    config = WhisperConfig(
        vocab_size=end + 11 + WHISPER_STEPS + 1, num_mel_bins=8, max_source_positions=WHISPER_STEPS,
        max_target_positions=40, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, decoder_start_token_id=end + 1,
        eos_token_id=end, pad_token_id=end, bos_token_id=end, suppress_tokens=None, begin_suppress_tokens=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed_positions" not in name:
                parameter.normal_(0, 0.3)
        model.model.decoder.embed_positions.weight.normal_(0, 0.5)
        model.proj_out.weight[end].mul_(2.0)  # ends come
    generation = model.generation_config
    generation._from_model_config = False  # else a folder's file is not read
    generation.is_multilingual, generation.no_timestamps_token_id = True, end + 10
    generation.lang_to_id = {"<|en|>": end + 2, "<|de|>": end + 3, "<|fr|>": end + 4}
    generation.task_to_id = {"translate": end + 5, "transcribe": end + 6}
    generation.prev_sot_token_id, generation.max_initial_timestamp_index = end + 8, 20
    generation.suppress_tokens, generation.begin_suppress_tokens = [1, 2, *range(end + 1, end + 11)], [0, end]
    generation.eos_token_id = generation.pad_token_id = end
    generation.decoder_start_token_id = end + 1
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
    if kind == "whisper":
        speech_to_text(
            make_whisper(), path, feature_extractor=whisper_extractor(), tokenizer=whisper_tokenizer(), progress=False
        )
        return
    assert kind == "voxtral"
    model = make_voxtral()
    speech_to_text(
        model, path, feature_extractor=voxtral_extractor(model), tokenizer=voxtral_tokenizer(),
        language_model={"token_counts": (16,)}, progress=False,
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
