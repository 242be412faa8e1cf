"""SamplingParams of a request's fields: ranges of the API, defaults of the model's authors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from untorch.llm import Engine, SamplingParams
from untorch.serve.openai.errors import expected, from_exception, invalid
from untorch.serve.openai.fields import Fields

__all__ = ["MOST_LOGPROBS", "make_params", "read_max_tokens", "read_sampling", "read_structure"]

MOST_LOGPROBS = 20
_MOST_TOKENS = 1 << 40
# What each step of all requests would wait for.
_MOST_CHOICES, _MOST_STOPS, _MOST_BIASES = 1000, 64, 1024
_RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def read_sampling(fields: Fields, engine: Engine) -> dict[str, Any]:
    """The arguments of SamplingParams that both endpoints have. Raises ApiError."""
    found: dict[str, Any] = {
        "n": fields.integer("n", 1, 128),
        "temperature": fields.number("temperature", 0, 2),
        "top_p": fields.number("top_p", 0, 1, above=True),
        "min_p": fields.number("min_p", 0, 1),
        "top_k": _top_k(fields, engine),
        "presence_penalty": fields.number("presence_penalty", -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", -2, 2),
        "repetition_penalty": fields.number("repetition_penalty", 0, math.inf, above=True),
        "seed": _seed(fields),
        "stop": _stop(fields),
        "stop_token_ids": fields.array("stop_token_ids"),
        "logit_bias": _logit_bias(fields),
        "min_tokens": fields.integer("min_tokens", 0, _MOST_TOKENS),
        "ignore_eos": fields.boolean("ignore_eos"),
        "skip_special_tokens": fields.boolean("skip_special_tokens", True),
        "include_stop_str_in_output": fields.boolean("include_stop_str_in_output"),
    }
    return {**_defaults(engine), **{name: value for name, value in found.items() if value is not None}}


def make_params(given: Mapping[str, Any], names: Mapping[str, str]) -> SamplingParams:
    """names: the request's parameters by SamplingParams' names, where they differ. Raises ApiError."""
    try:
        return SamplingParams(**given)
    except ValueError as error:
        raise from_exception(error, names) from None


def read_structure(fields: Fields) -> dict[str, Any]:
    """``structured_outputs``, as vLLM has it: one of json, json_object, regex, choice and grammar. Raises ApiError."""
    inner = fields.object("structured_outputs")
    if inner is None:
        return {}
    inner.only(("json", "json_object", "regex", "choice", "grammar"))
    given = [name for name, value in inner.values.items() if value is not None and value is not False]
    if len(given) != 1:
        raise expected(inner.path, "one of json, json_object, regex, choice and grammar", given)
    if "json" in given:
        schema = inner.get("json")
        if not isinstance(schema, dict | str):
            raise expected(inner.param("json"), "a JSON schema", schema, "invalid_type")
        return {"json_schema": schema}
    if "json_object" in given:
        inner.boolean("json_object")
        return {"json_schema": {"type": "object"}}
    if "choice" in given:
        choices = inner.array("choice")
        if not choices or not all(isinstance(one, str) and one for one in choices):
            raise expected(inner.param("choice"), "an array of strings that are not empty", choices)
        if len(choices) > _MOST_CHOICES:
            raise expected(inner.param("choice"), f"at most {_MOST_CHOICES} strings", len(choices))
        return {"grammar": "start: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in choices)}
    return {given[0]: inner.string(given[0])}


def read_max_tokens(fields: Fields, *names: str, least: int = 1) -> int | None:
    """The parameter, which may have several names. Raises ApiError."""
    values = {name: value for name in names if (value := fields.integer(name, least, _MOST_TOKENS)) is not None}
    if len(set(values.values())) > 1:
        raise invalid(names[0], f"expected the same as {names[1]} ({values[names[1]]}), got {values[names[0]]}")
    return next(iter(values.values()), None)


def _defaults(engine: Engine) -> dict[str, Any]:
    """The authors' recommendation; where there is none, OpenAI's temperature of 1."""
    given = engine.settings.generation
    if not any(name in given for name in (*_RECOMMENDED, "do_sample")):
        return {}
    params = engine.default_params
    return {name: getattr(params, name) for name in _RECOMMENDED}


def _top_k(fields: Fields, engine: Engine) -> int | None:
    top_k = fields.integer("top_k", -1)
    return None if top_k is None else min(top_k, engine.settings.vocabulary)


def _seed(fields: Fields) -> int | None:
    """OpenAI's seeds are signed; the engine's are not."""
    seed = fields.integer("seed", -(1 << 63), (1 << 64) - 1)
    return None if seed is None else seed % (1 << 64)


def _stop(fields: Fields) -> list[str] | None:
    stop = fields.get("stop")
    strings = [stop] if isinstance(stop, str) else stop
    if strings is None:
        return None
    if not isinstance(strings, list) or not all(isinstance(one, str) for one in strings):
        raise expected("stop", "a string or an array of strings", stop, "invalid_type")
    if len(strings) > _MOST_STOPS:
        raise expected("stop", f"at most {_MOST_STOPS} strings", len(strings))
    if "" in strings:
        raise expected("stop", "strings that are not empty", stop)
    return strings


def _logit_bias(fields: Fields) -> dict[int, float] | None:
    inner = fields.object("logit_bias")
    if inner is None:
        return None
    if len(inner.values) > _MOST_BIASES:
        raise expected("logit_bias", f"at most {_MOST_BIASES} tokens", len(inner.values))
    found = {}
    for key in inner.values:
        if not key.isascii() or not key.isdigit() or len(key) > 12:
            raise expected("logit_bias", "an object of numbers by token id", key)
        bias = inner.number(key, -100, 100)
        if bias is not None:
            found[int(key)] = bias
    return found
