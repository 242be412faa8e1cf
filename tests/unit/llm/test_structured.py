"""Structured output from a model that says anything: what the grammar asks for comes out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.unit.llm.fake import FakeRunner, byte_tokenizer
from untorch import InvalidArgumentError, UnsupportedError
from untorch.llm import Engine, SamplingParams
from untorch.llm.logits import Logits
from untorch.llm.tokenizer import Tokenizer

pytest.importorskip("tokenizers")
pytest.importorskip("llguidance")

SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"enum": ["red", "green", 3, None]},
    {"type": "string", "maxLength": 8},
    {"type": "string", "pattern": "^[a-f]{3}-[0-9]{2}$"},
    {"type": "number", "minimum": 1, "maximum": 9},
    {"type": "integer", "minimum": 10, "maximum": 99},
    {"const": {"x": [1, 2]}},
    {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3},
            "inner": {
                "type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "tags", "inner"],
        "additionalProperties": False,
    },
    {
        "$defs": {"leaf": {"type": "object", "properties": {"v": {"enum": [0, 1]}}, "required": ["v"],
                           "additionalProperties": False}},
        "type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 2,
    },
]  # fmt: skip


class Chatter(FakeRunner):
    """Random logits over bytes. likes: characters that get more than others."""

    def __init__(self, likes: str = "", gpu: bool = False) -> None:
        self.likes = Tokenizer(byte_tokenizer()).encode(likes)
        super().__init__(
            files={"tokenizer.json": byte_tokenizer()}, vocabulary=258, tokenizer="tokenizer.json", stop_ids=(257,),
            max_positions=2000, blocks=2000, gpu=gpu,
        )  # fmt: skip

    def run(self, plan: Any, rows: Any, tokens: Any = None) -> Logits:
        logits = np.random.default_rng(len(self.plans)).standard_normal((len(rows), 258)).astype(np.float32)
        logits[:, self.likes] += 10
        self.plans.append([])
        return self._logits(logits, len(self.plans) - 1)


@pytest.fixture(scope="module", params=["host", "gpu"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    runner = Chatter(gpu=request.param == "gpu")
    with Engine(runner, max_batch_tokens=64, max_sequences=16) as made:
        yield made
    assert not runner.fetched


def check(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> None:
    """Of JSON schema what SCHEMAS use."""
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rsplit("/", 1)[1]]
    if "enum" in schema:
        assert value in schema["enum"]
    if "const" in schema:
        assert value == schema["const"]
    if "anyOf" in schema:
        assert value is None or isinstance(value, bool)
    kind = schema.get("type")
    if kind == "object":
        assert isinstance(value, dict)
        assert set(schema["required"]) <= set(value) <= set(schema["properties"])
        for key, item in value.items():
            check(item, schema["properties"][key], root)
    elif kind == "array":
        assert schema.get("minItems", 0) <= len(value) <= schema["maxItems"]
        for item in value:
            check(item, schema["items"], root)
    elif kind in ("integer", "number"):
        assert isinstance(value, int if kind == "integer" else int | float)
        assert schema.get("minimum", value) <= value <= schema.get("maximum", value)
    elif kind == "string":
        assert len(value) <= schema.get("maxLength", len(value))
        assert re.search(schema.get("pattern", ""), value)
    elif kind == "boolean":
        assert isinstance(value, bool)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_schema(engine: Engine, temperature: float) -> None:
    schemas = [schema for schema in SCHEMAS for _ in range(3)]
    params = [
        SamplingParams(json_schema=schema, max_tokens=100, temperature=temperature, seed=i)
        for i, schema in enumerate(schemas)
    ]
    for schema, result in zip(schemas, engine.generate(["go"] * len(schemas), params), strict=True):
        assert result.finish_reason == "stop", (schema, result.text[-200:])
        check(json.loads(result.text), schema, schema)


def test_models_that_prefer_white_space() -> None:
    """Of the most likely tokens alone, with any length of white space, no object would ever end."""
    with Engine(Chatter(likes=" \n\t"), max_batch_tokens=64, max_sequences=16) as made:
        params = [SamplingParams(json_schema=schema, max_tokens=100, temperature=0) for schema in SCHEMAS]
        for schema, result in zip(SCHEMAS, made.generate(["go"] * len(SCHEMAS), params), strict=True):
            assert result.finish_reason == "stop", (schema, result.text)
            check(json.loads(result.text), schema, schema)
            assert "\n" not in result.text
        flexible = {"x-guidance": {"whitespace_flexible": True}, **SCHEMAS[0]}
        text = made.generate("go", SamplingParams(json_schema=flexible, max_tokens=100, temperature=0)).text
        assert text[:1] == "{"
        assert set(text[1:]) <= set(" \n\t")


@pytest.mark.parametrize("schema", [{}, "true", '{"type": "object"}'])
def test_schemas_of_anything(engine: Engine, schema: Any) -> None:
    output = engine.generate("go", SamplingParams(json_schema=schema, max_tokens=100, temperature=0))
    assert "\n" not in output.text


def test_regex_and_grammar(engine: Engine) -> None:
    output = engine.generate("go", SamplingParams(regex="(ab|cd){2,5}[0-9]", max_tokens=100))
    assert re.fullmatch("(ab|cd){2,5}[0-9]", output.text)
    grammar = 'start: "<" word ">"\nword: /[xyz]{1,4}/'
    output = engine.generate("go", SamplingParams(grammar=grammar, max_tokens=100))
    assert re.fullmatch("<[xyz]{1,4}>", output.text)


def test_samples_have_grammars_of_their_own(engine: Engine) -> None:
    output = engine.generate("go", SamplingParams(regex="[0-9]{5}", n=4, max_tokens=20))
    assert all(re.fullmatch("[0-9]{5}", item.text) for item in output.completions)
    assert len({item.text for item in output.completions}) > 1


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"regex": "("}, "SamplingParams: regex: "),
        ({"grammar": "start: nothing"}, "SamplingParams: grammar: "),
        ({"json_schema": "{"}, "SamplingParams: json_schema: "),
        ({"json_schema": {"type": "nothing"}}, "SamplingParams: json_schema: "),
    ],
)
def test_wrong_descriptions(engine: Engine, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        engine.submit("go", SamplingParams(**fields))
    assert str(caught.value).startswith(text)


def test_a_tokenizer_that_does_not_fit() -> None:
    runner = Chatter()
    runner.settings = replace(runner.settings, vocabulary=100, stop_ids=(99,))
    with Engine(runner, max_batch_tokens=64, max_sequences=16) as made:
        with pytest.raises(UnsupportedError) as caught:
            made.submit([1], SamplingParams(regex="a"))
        assert str(caught.value).startswith("SamplingParams: regex: llguidance cannot use the package's tokenizer: ")


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with Engine(Chatter(), max_batch_tokens=64, max_sequences=16) as made:
        with pytest.raises(UnsupportedError) as caught:
            made.submit("go", SamplingParams(regex="a"))
        assert str(caught.value) == (
            "SamplingParams: regex needs the package llguidance: pip install 'untorch[llm]'"
        )  # fmt: skip


def chain(count: int) -> dict[str, Any]:
    links = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(count - 1)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{count - 1}": {"type": "null"}}}


def test_chains_that_would_overflow_the_stack_are_refused(engine: Engine) -> None:
    rules = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(998)) + '\nr998: "a"'
    engine.submit("go", SamplingParams(json_schema=chain(500), max_tokens=1)).result()
    engine.submit("go", SamplingParams(grammar=rules, max_tokens=1)).result()
    escaped = json.dumps(chain(501)).replace("$ref", "\\u0024ref")
    for schema in (chain(501), json.dumps(chain(501)), escaped):
        with pytest.raises(
            InvalidArgumentError, match="SamplingParams: json_schema: expected at most 500 references, got 501"
        ):
            engine.submit("go", SamplingParams(json_schema=schema))
    with pytest.raises(InvalidArgumentError, match="SamplingParams: grammar: expected at most 500 references, got 501"):
        engine.submit("go", SamplingParams(grammar=f"start: %json {escaped}"))
    with pytest.raises(InvalidArgumentError, match="SamplingParams: grammar: expected at most 1000 rules, got 1001"):
        engine.submit("go", SamplingParams(grammar=f'{rules}\nother: "b"'))
