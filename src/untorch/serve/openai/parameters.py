"""Every parameter of the API by endpoint: served, accepted without effect, or refused with the reason.

docs/openai-api.md has the same tables; a test compares them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from untorch.serve.openai.errors import not_served
from untorch.serve.openai.fields import Fields

__all__ = [
    "CHAT", "COMPLETIONS", "EMBEDDINGS", "TRANSCRIPTIONS", "TRANSLATIONS", "Parameter", "check_parameters",
]  # fmt: skip


@dataclass(frozen=True)
class Parameter:
    """reason: why it is refused. neutral: values of a refused one that ask for nothing."""

    how: Literal["served", "accepted", "refused"]
    reason: str = ""
    neutral: tuple[Any, ...] = ()


_SERVED = Parameter("served")
_ACCEPTED = Parameter("accepted")


def _served(*names: str) -> dict[str, Parameter]:
    return dict.fromkeys(names, _SERVED)


_SAMPLING = _served(
    "model", "n", "stop", "seed", "temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias",
    "max_tokens", "logprobs", "stream", "stream_options",
    # Not OpenAI's: as in vLLM.
    "top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "min_tokens", "skip_special_tokens",
    "include_stop_str_in_output", "structured_outputs", "priority",
)  # fmt: skip
_NO_EFFECT = {"user": _ACCEPTED}
_STORE = Parameter("refused", "nothing is stored", (False,))

CHAT: dict[str, Parameter] = {
    **_SAMPLING,
    **_served(
        "messages", "max_completion_tokens", "top_logprobs", "response_format", "tools", "tool_choice",
        "parallel_tool_calls", "reasoning_effort", "chat_template_kwargs",
    ),
    **_NO_EFFECT,
    **dict.fromkeys(
        ("metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",
         "prediction"), _ACCEPTED,
    ),
    "store": _STORE,
    "service_tier": Parameter("refused", "there is one tier", ("auto", "default")),
    "modalities": Parameter("refused", "the answer is text", (["text"],)),
    "verbosity": Parameter("refused", "the model has no such setting: say it in a message", ("medium",)),
    "audio": Parameter("refused", "the answer is text"),
    "functions": Parameter("refused", "use tools", ([],)),
    "function_call": Parameter("refused", "use tool_choice", ("none",)),
    "web_search_options": Parameter("refused", "there is no web search"),
    "moderation": Parameter("refused", "nothing is moderated"),
}  # fmt: skip
COMPLETIONS: dict[str, Parameter] = {
    **_SAMPLING,
    **_served("prompt", "best_of", "echo"),
    **_NO_EFFECT,
    "suffix": Parameter("refused", "text is continued at its end only", ("",)),
}
EMBEDDINGS: dict[str, Parameter] = {
    **_served("model", "input", "encoding_format", "dimensions"),
    **_NO_EFFECT,
}
TRANSLATIONS: dict[str, Parameter] = _served("file", "model", "prompt", "response_format", "temperature")
TRANSCRIPTIONS: dict[str, Parameter] = {
    **TRANSLATIONS,
    **_served("language", "stream", "timestamp_granularities"),
    "chunking_strategy": Parameter("refused", "the model decides how audio is cut", ("auto",)),
    "include": Parameter("refused", "there are no logprobs of transcriptions", ([],)),
    "keywords": Parameter("refused", "models are not told which words may come", ([],)),
    "known_speaker_names": Parameter("refused", "speakers are not told apart", ([],)),
    "known_speaker_references": Parameter("refused", "speakers are not told apart", ([],)),
    "languages": Parameter("refused", "say one language", ([],)),
}


def check_parameters(fields: Fields, table: dict[str, Parameter]) -> None:
    """Refuse what is unknown or not served. Raises ApiError."""
    fields.only(table)
    for name, value in fields.values.items():
        if value is None:
            continue
        parameter = table[name]
        if parameter.how == "refused" and value not in parameter.neutral:
            raise not_served(name, parameter.reason)
