"""Tool calls in the texts of models: one file a format, and the table of them."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from untorch.serve.openai.tools.base import Tool, ToolParser
from untorch.serve.openai.tools.grammar import CallGrammar
from untorch.serve.openai.tools.hermes import HermesParser, hermes_grammar
from untorch.serve.openai.tools.llama import LlamaParser, llama_grammar
from untorch.serve.openai.tools.mistral import MistralParser, mistral_grammar
from untorch.serve.openai.tools.qwen_coder import QwenCoderParser, qwen_coder_grammar

__all__ = ["FORMATS", "ToolFormat", "find_format", "new_call_id"]

_CHARACTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes calls.

    Attributes:
        parser: Of a text, for these tools.
        grammar: Of calls; its argument gives an added token of the tokenizer as the grammar names it, or None.
        detect: Whether a chat template is one of this family.
        shows_special: Whether the markers are special tokens, which the text must then show.
        marker: The added token that a tokenizer of this family has, where the template does not show it.
        id_length: Of a call's id; 0: OpenAI's form.
    """

    parser: Callable[[Sequence[Tool]], ToolParser]
    grammar: Callable[[Callable[[str], str | None]], CallGrammar]
    detect: Callable[[str], bool]
    shows_special: bool = False
    marker: str | None = None
    id_length: int = 0


def _is_llama(template: str) -> bool:
    return "<|python_tag|>" in template or ("<|start_header_id|>" in template and "ipython" in template)


# The first one that a template is of. Mistral's own templates refuse ids of another length.
FORMATS: dict[str, ToolFormat] = {
    "mistral": ToolFormat(MistralParser, mistral_grammar, lambda it: "[TOOL_CALLS]" in it, True, "[TOOL_CALLS]", 9),
    "qwen3_coder": ToolFormat(
        QwenCoderParser, qwen_coder_grammar, lambda it: "<tool_call>" in it and "<function=" in it
    ),
    "hermes": ToolFormat(HermesParser, hermes_grammar, lambda it: "<tool_call>" in it, marker="<tool_call>"),
    "llama3": ToolFormat(LlamaParser, llama_grammar, _is_llama, True, "<|python_tag|>"),
}  # fmt: skip


def find_format(template: str, has_token: Callable[[str], bool] = lambda _: False) -> str | None:
    """The name of the format that the chat template is of, or else the tokenizer by its added tokens."""
    seen = (name for name, one in FORMATS.items() if one.detect(template))
    told = (name for name, one in FORMATS.items() if one.marker is not None and has_token(one.marker))
    return next(chain(seen, told), None)


def new_call_id(form: ToolFormat) -> str:
    """For a new call."""
    if form.id_length:
        return "".join(secrets.choice(_CHARACTERS) for _ in range(form.id_length))
    return f"call_{secrets.token_hex(12)}"
