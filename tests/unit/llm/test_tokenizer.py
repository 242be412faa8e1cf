"""The package's tokenizer and chat template."""

from __future__ import annotations

import random

import pytest
from tokenizers import decoders

from tests.unit.llm.fake import byte_tokenizer
from untorch import InvalidArgumentError, InvalidFileError, UnsupportedError
from untorch.llm.detokenizer import ByteDetokenizer, Detokenizer
from untorch.llm.tokenizer import ChatTemplate, Tokenizer

TEMPLATE = """{{ bos_token }}{% for message in messages %}
  {%- if message.role not in ('user', 'assistant') %}{{ raise_exception('no role ' + message.role) }}{% endif %}
<{{ message.role }}>{{ message.content }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}{{ tools | tojson if tools }}"""


def test_a_round_trip() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    ids = tokenizer.encode("<s>größe 🌍")
    assert ids[0] == 256
    assert len(ids) == 1 + len("größe 🌍".encode())
    assert tokenizer.decode(ids) == "größe 🌍"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>größe 🌍"
    assert tokenizer.decode(ids[:-1]) == "größe \ufffd"


def test_texts_that_are_too_long_to_be_read() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    tokenizer.max_characters = 4
    assert len(tokenizer.encode("aaaa")) == 4
    for call in (lambda: tokenizer.encode("a" * 5), lambda: tokenizer.encode_pair("aaa", "aa")):
        with pytest.raises(InvalidArgumentError, match="prompt: expected at most 4 characters, got 5"):
            call()


@pytest.mark.parametrize("skip", [True, False])
def test_streamed_text_is_the_decoders(skip: bool) -> None:
    tokenizer = Tokenizer(byte_tokenizer(["<s>", "größe\u0120"]))  # in part of the byte alphabet, and not
    for seed in range(50):
        ids = random.Random(seed).choices(range(260), k=60)  # 258 and 259 are no tokens
        made = tokenizer.detokenizer([], skip)
        assert isinstance(made, ByteDetokenizer)
        assert "".join(map(made.append, ids)) + made.finish() == tokenizer.decode(ids, skip)
    plain = Tokenizer(byte_tokenizer())
    plain._tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip("a", 1, 0)])
    made = Tokenizer(plain._tokenizer.to_str().encode()).detokenizer([], skip)
    assert isinstance(made, Detokenizer)
    assert "".join(map(made.append, plain.encode("aab"))) + made.finish() == "ab"


def test_pairs_are_joined_by_the_post_processor() -> None:
    from tokenizers import processors

    plain = Tokenizer(byte_tokenizer())
    assert plain.decode(plain.encode_pair("ab", "c")) == "abc"
    inner = plain._tokenizer
    inner.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 256), ("</s>", 257)]
    )
    joined = Tokenizer(inner.to_str().encode())
    assert joined.decode(joined.encode_pair("ab", "c"), skip_special_tokens=False) == "<s>ab</s>c</s>"
    assert joined.decode(joined.encode("ab"), skip_special_tokens=False) == "ab</s>"


def test_text_that_is_not_unicode() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    for call in (lambda: tokenizer.encode("ok\ud800"), lambda: tokenizer.encode_pair("ok", "ok\ud800")):
        with pytest.raises(InvalidArgumentError) as caught:
            call()
        assert str(caught.value) == (
            "prompt: expected Unicode text, got a lone surrogate, '\\ud800', at 2: decode bytes with errors=\"replace\""
        )


def test_a_damaged_tokenizer() -> None:
    with pytest.raises(InvalidFileError, match=r"the package's tokenizer\.json is damaged"):
        Tokenizer(b"{}")


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(UnsupportedError) as caught:
        Tokenizer(b"{}")
    assert str(caught.value) == "text instead of token ids needs the package tokenizers: pip install 'untorch[llm]'"


def test_chat_template() -> None:
    made = ChatTemplate(TEMPLATE, {"bos_token": "<s>"})
    messages = [{"role": "user", "content": "a < b"}, {"role": "assistant", "content": "no"}]
    assert made.render(messages) == "<s><user>a < b\n<assistant>no\n<assistant>"
    assert made.render(messages[:1], add_generation_prompt=False) == "<s><user>a < b\n"
    assert made.render(messages[:1], tools=[{"a": "é<"}]).endswith('[{"a": "é<"}]')


def test_what_the_template_refuses() -> None:
    made = ChatTemplate(TEMPLATE, {})
    with pytest.raises(InvalidArgumentError) as caught:
        made.render([{"role": "system", "content": ""}])
    assert str(caught.value) == "chat: the chat template refuses the messages: no role system"
    with pytest.raises(InvalidArgumentError, match="messages: expected a list of dictionaries"):
        made.render("hello")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="refuses the messages"):
        made.render([{}])


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% for i in range(10000000) %}x{% endfor %}"],
)
def test_a_template_runs_in_a_sandbox(source: str) -> None:
    with pytest.raises(InvalidArgumentError, match="refuses the messages"):
        ChatTemplate(source, {}).render([])


def test_a_damaged_template() -> None:
    with pytest.raises(InvalidFileError, match="the package's chat template is damaged"):
        ChatTemplate("{% if %}", {}).render([])
