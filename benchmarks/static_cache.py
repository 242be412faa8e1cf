"""A causal language model with its cache in mutable buffers: two methods, a session a generation, no engine.

`prefill` takes the prompt, `decode` one token; both give the logits of what comes next. Keys, values and the position
are mutable buffers, so each session has its own copy: generations run concurrently on shared weights.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import untorch

TINY = {"llama": "Llama", "qwen3": "Qwen3", "gemma3": "Gemma3"}


def tiny_model(kind: str) -> Any:
    """A model of the architecture with random weights."""
    import torch
    import transformers

    name = TINY[kind] + ("Text" if kind == "gemma3" else "")
    config = getattr(transformers, f"{name}Config")(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=64, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    return getattr(transformers, f"{TINY[kind]}ForCausalLM")(config).eval()


def with_cache(model: Any, length: int) -> Any:
    """A module of tokens [1, n], or of their embeddings, to logits [1, vocabulary]; it keeps ``length`` positions."""
    import torch
    from transformers import StaticCache
    from transformers.cache_utils import StaticLayer

    text = model.config.get_text_config()

    class WithCache(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.cache = StaticCache(config=text, max_cache_len=length)
            # A sliding layer decides in Python where its window is; the mask does it for a whole one.
            self.cache.layers = [StaticLayer(length) for _ in self.cache.layers]
            heads, width = text.num_key_value_heads, getattr(text, "head_dim", None)
            width = width or text.hidden_size // text.num_attention_heads
            parameter = next(model.parameters())
            self.cache.early_initialization(1, heads, width, parameter.dtype, parameter.device)
            for i, layer in enumerate(self.cache.layers):
                self.register_buffer(f"keys_{i}", layer.keys)
                self.register_buffer(f"values_{i}", layer.values)
                self.register_buffer(f"position_{i}", layer.cumulative_length.clone())

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            for i, layer in enumerate(self.cache.layers):
                layer.keys, layer.values = getattr(self, f"keys_{i}"), getattr(self, f"values_{i}")
                layer.cumulative_length = getattr(self, f"position_{i}")
                layer.device = layer.keys.device  # where the exporter moved them
            name = "inputs_embeds" if tokens.is_floating_point() else "input_ids"
            out = self.model(**{name: tokens}, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
            return out.logits[:, -1].float()

    return WithCache().eval()


def build(model: Any, path: pathlib.Path, length: int, **options: Any) -> None:
    """Writes ``prefill`` and ``decode`` of a transformers model to one file."""
    import torch
    from torch.export import Dim

    from untorch.export import export

    module = with_cache(model, length)
    prompt, token = torch.ones(1, 7, dtype=torch.int64), torch.ones(1, 1, dtype=torch.int64)
    prefill = {"model": module, "args": (prompt,), "dynamic_shapes": ({1: Dim("n", min=2, max=length)},)}
    export(methods={"prefill": prefill, "decode": (module, (token,))}, path=path, **options)


def generate(session: untorch.Session, tokens: list[int], new: int) -> Iterator[int]:
    """Greedy decoding of ``new`` tokens in a session with the initial buffers."""
    import numpy

    for position in range(new):
        if position == 0 and len(tokens) > 1:
            logits = session.prefill(numpy.array([tokens]))
        else:
            logits = session.decode(numpy.array([tokens[-1:]]))
        if not isinstance(logits, numpy.ndarray):  # on a GPU
            logits = logits.numpy()
        tokens = [int(logits[0].argmax())]
        yield tokens[0]
