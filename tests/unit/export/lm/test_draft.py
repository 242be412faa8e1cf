"""A draft model beside a language model: what is written, and what does not fit. Nothing is compiled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.conformance.language_models import make_model, tokenizer
from untorch import ArgumentTypeError, FileMissingError, InvalidArgumentError
from untorch.export import CompileError, causal_lm
from untorch.export.lm import build
from untorch.llm.settings import DraftSettings, read_settings

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What would be compiled and written."""
    found: dict[str, Any] = {}

    def write(requests: Any, path: Any, device: str, arch: Any, options: Any, sections: Any, *others: Any) -> None:
        found.update(names=[request.method.name for request in requests], llm=sections["llm"])

    monkeypatch.setattr(build, "write_package", write)
    return found


def folder(path: Path, model: Any, vocabulary: bytes | None) -> Path:
    model.save_pretrained(path)
    if vocabulary is not None:
        (path / "tokenizer.json").write_bytes(vocabulary)
    return path


@pytest.mark.slow
def test_methods_and_pages_of_its_own(written: dict[str, Any], tmp_path: Path) -> None:
    model, draft = make_model("Llama"), make_model("Gemma2")
    causal_lm(
        model, tmp_path / "m.pt2", draft=draft, token_counts=(8, 64), kv_dtype="int8", device="cuda", arch="sm_90"
    )
    assert written["names"] == [
        "step_8", "step_64", "choose", "process_logits", "logprobs", "draft_step_8", "draft_step_64", "draft_choose",
    ]  # fmt: skip
    section = written["llm"]["draft"]
    json.dumps(section)
    assert [layer["heads_kv"] for layer in section["layers"]] == [2, 2, 2]
    settings = read_settings({"llm": written["llm"]}, "m.pt2")
    assert settings.draft == DraftSettings(
        258, section["block_elements"], "int8", ((8, "draft_step_8"), (64, "draft_step_64")), "draft_choose",
        "Gemma2ForCausalLM",
    )  # fmt: skip
    assert draft.config._attn_implementation != "untorch_paged"
    causal_lm(model, tmp_path / "m.pt2", token_counts=(8,))
    assert "draft" not in written["llm"]


@pytest.mark.slow
def test_vocabularies_by_the_tokenizer(written: dict[str, Any], tmp_path: Path) -> None:
    words = tokenizer()
    model = folder(tmp_path / "model", make_model("Llama"), words)
    small = folder(tmp_path / "small", make_model("Llama", vocab_size=300), words)
    causal_lm(model, tmp_path / "m.pt2", draft=small, token_counts=(8,))
    assert written["llm"]["draft"]["vocabulary"] == 300
    document = json.loads(words)
    vocabulary = document["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    other = folder(tmp_path / "other", make_model("Llama"), json.dumps(document).encode())
    with pytest.raises(InvalidArgumentError) as caught:
        causal_lm(model, tmp_path / "m.pt2", draft=other, token_counts=(8,))
    assert str(caught.value) == (
        "causal_lm: draft: expected the model's tokenizer, got another one with LlamaForCausalLM: its tokens would mean "
        "something else"
    )


@pytest.mark.slow
def test_models_that_do_not_fit(written: dict[str, Any], tmp_path: Path) -> None:
    def refused(draft: Any, kind: type[Exception] = InvalidArgumentError, model: Any = None, **fields: Any) -> str:
        with pytest.raises(kind) as caught:
            causal_lm(model or make_model("Llama"), tmp_path / "m.pt2", draft=draft, token_counts=(8,), **fields)
        return str(caught.value)

    assert refused(make_model("Llama", vocab_size=300)) == (
        "causal_lm: draft: expected the model's vocabulary of 258, got 300 of LlamaForCausalLM: sizes may differ if both "
        "folders have the same tokenizer"
    )
    assert refused(make_model("Llama", max_position_embeddings=64)) == (
        "causal_lm: draft: expected a model for at least 128 positions, got 64 of LlamaForCausalLM: limit the package "
        "with max_positions=64"
    )
    assert refused(tmp_path, FileMissingError) == f"causal_lm: draft: {tmp_path} has no config.json"
    assert refused(nn.Linear(2, 2), ArgumentTypeError).startswith("causal_lm: draft: expected a causal language model")
    text = "has recurrent layers, whose states cannot be taken back when a token is rejected"
    assert refused(make_model("Llama"), CompileError, make_model("Bamba")) == (
        f"causal_lm: draft: the model, BambaForCausalLM, {text}"
    )
    assert refused(make_model("Bamba"), CompileError) == f"causal_lm: draft: BambaForCausalLM {text}"
    assert refused(make_model("Llama"), inputs_embeds=True) == (
        "causal_lm: draft: expected None with inputs_embeds, which it could not read"
    )
    base = make_model("Llama").model
    assert refused(make_model("Llama"), model=base) == (
        "causal_lm: draft: expected None, as the model does not generate: it is to embed"
    )
