"""``untorch generate``: a language model goes on from a prompt."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from untorch.cli.language_model import (
    FrequencyPenaltyOption,
    GrammarOption,
    IgnoreEosOption,
    JsonSchemaOption,
    KvMemoryOption,
    LogprobsOption,
    LoraOption,
    MaxSequencesOption,
    MaxTokensOption,
    MinPOption,
    NumSpeculativeTokensOption,
    PresencePenaltyOption,
    PromptLookupMaxOption,
    PromptLookupMinOption,
    RegexOption,
    RepetitionPenaltyOption,
    SamplingSeedOption,
    SnapshotMemoryOption,
    SpeculativeOption,
    StopOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    has_wrong_bytes,
    keep_wrong_bytes,
    open_engine,
    sampling_params,
)
from untorch.cli.options import DebugOption, FileArgument, JsonOption, NumThreadsOption, TrustOption
from untorch.cli.output import emit
from untorch.runtime.errors import InvalidArgumentError
from untorch.runtime.text import escape_controls

if TYPE_CHECKING:
    from untorch.llm.sampler import TokenLogprobs

__all__ = ["generate"]


def generate(
    file: FileArgument,
    prompt: Annotated[
        str,
        typer.Argument(
            metavar="PROMPT",
            help="The text to go on from; -: standard input; ids:5,17,3: token ids.",
            show_default=False,
        ),
    ],
    images: Annotated[
        list[str] | None,
        typer.Option(
            "--image",
            metavar="FILE",
            help="An image in the place of the next placeholder in the prompt, such as <|image_pad|>, repeatable.",
        ),
    ] = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    min_p: MinPOption = None,
    presence_penalty: PresencePenaltyOption = None,
    frequency_penalty: FrequencyPenaltyOption = None,
    repetition_penalty: RepetitionPenaltyOption = None,
    sampling_seed: SamplingSeedOption = None,
    stop: StopOption = None,
    ignore_eos: IgnoreEosOption = False,
    json_schema: JsonSchemaOption = None,
    regex: RegexOption = None,
    grammar: GrammarOption = None,
    logprobs: LogprobsOption = None,
    samples: Annotated[int, typer.Option("--samples", metavar="N", min=1, help="Completions of the prompt.")] = 1,
    lora: LoraOption = None,
    kv_memory: KvMemoryOption = None,
    snapshot_memory: SnapshotMemoryOption = None,
    max_sequences: MaxSequencesOption = None,
    speculative: SpeculativeOption = None,
    num_speculative_tokens: NumSpeculativeTokensOption = None,
    prompt_lookup_min: PromptLookupMinOption = None,
    prompt_lookup_max: PromptLookupMaxOption = None,
    num_threads: NumThreadsOption = 0,
    trust: TrustOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Generate text with a language model's package. Without --json, one completion is printed as it comes.

    Where the package has no tokenizer, prompt and result are token ids.
    """  # fmt: skip
    keep_wrong_bytes(sys.stdin)
    given: Any = sys.stdin.read() if prompt == "-" else prompt
    if has_wrong_bytes(given):  # of arguments, too
        raise InvalidArgumentError("PROMPT: expected text in UTF-8")
    if isinstance(given, str) and given.startswith("ids:"):
        given = _ids(given[4:])
    from untorch.llm import Prompt

    if logprobs is not None and not json:
        raise InvalidArgumentError("--logprobs: expected --json, too, which prints them")
    with open_engine(
        file, kv_memory=kv_memory, snapshot_memory=snapshot_memory, max_sequences=max_sequences,
        num_threads=num_threads, trust=trust, speculative=speculative,
        num_speculative_tokens=num_speculative_tokens, prompt_lookup_min=prompt_lookup_min,
        prompt_lookup_max=prompt_lookup_max, loras=None if lora is None else {"lora": lora},
    ) as engine:  # fmt: skip
        params = sampling_params(
            engine, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p,
            presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
            repetition_penalty=repetition_penalty, seed=sampling_seed, stop=stop, ignore_eos=ignore_eos,
            json_schema=json_schema, regex=regex, grammar=grammar, logprobs=logprobs, n=samples,
        )  # fmt: skip
        if images:
            given = Prompt(given, images=images)
        has_text = engine.tokenizer is not None
        handle = engine.submit(given, params, lora=None if lora is None else "lora")
        try:
            if not json and samples == 1:
                comma = ""
                for chunk in handle:
                    text = chunk.text if has_text else "".join(f"{',' * bool(comma)}{i}" for i in chunk.token_ids)
                    comma = comma or text
                    sys.stdout.write(escape_controls(text) if sys.stdout.isatty() else text)
                    sys.stdout.flush()
                sys.stdout.write("\n")
                handle.result()
                return
            output = handle.result()
        except KeyboardInterrupt:
            handle.cancel()
            raise
    document = {
        "file": str(file),
        "prompt_tokens": output.usage.prompt_tokens,
        "completion_tokens": output.usage.completion_tokens,
        **(
            {}
            if speculative is None
            else {"draft_tokens": output.usage.draft_tokens, "accepted_tokens": output.usage.accepted_tokens}
        ),
        "completions": [
            {
                "text": item.text if has_text else None,
                "token_ids": item.token_ids,
                "finish_reason": item.finish_reason,
                "stop_reason": item.stop_reason,
                **({} if item.logprobs is None else {"logprobs": [_logprobs(one) for one in item.logprobs]}),
            }
            for item in output.completions
        ],
    }
    emit(document, json, lambda console: _render(console, document))


def _render(console: Any, document: dict[str, Any]) -> None:
    for item in document["completions"]:
        text = item["text"] if item["text"] is not None else ",".join(map(str, item["token_ids"]))
        console.print(text, soft_wrap=True)


def _logprobs(item: TokenLogprobs) -> dict[str, Any]:
    return {
        "token_id": item.token,
        "logprob": item.logprob,
        "rank": item.rank,
        "top": [{"token_id": token, "logprob": logprob} for token, logprob in item.top],
    }


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidArgumentError(f"PROMPT: expected token ids such as ids:5,17,3, got ids:{text}") from None
