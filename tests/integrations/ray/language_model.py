"""Compiles a small language model with a tokenizer of bytes: ``python language_model.py lm PATH``."""

from __future__ import annotations

import sys

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

from untorch.export import causal_lm


def main(path: str) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=258, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=512, bos_token_id=256, eos_token_id=257,
    )  # fmt: skip
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    words.add_special_tokens(["<s>", "</s>"])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    causal_lm(transformers.LlamaForCausalLM(config), path, tokenizer=tokenizer, token_counts=(16,))


if __name__ == "__main__":
    main(sys.argv[2])
