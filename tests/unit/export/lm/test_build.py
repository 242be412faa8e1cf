"""What causal_lm reads and refuses, and what it writes beside the code. Nothing is compiled."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.conformance.language_models import make_model, tokenizer
from untorch import ArgumentTypeError, FileMissingError, InvalidArgumentError, UnsupportedError
from untorch.export import CompileError, causal_lm
from untorch.export.lm import build
from untorch.export.tracing import export_program

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What would be compiled and written."""
    found: dict[str, Any] = {}

    def write(
        requests: Any, path: Any, device: str, arch: Any, options: Any, sections: Any, files: Any, checks: Any
    ) -> None:
        assert bool(checks) == (arch is not None)
        found.update(requests=requests, path=path, llm=sections["llm"], files=files, options=options)

    monkeypatch.setattr(build, "write_package", write)
    return found


@pytest.mark.slow
def test_a_module(written: dict[str, Any], tmp_path: Path) -> None:
    model = make_model("Gemma2", eos_token_id=7)
    model.train()
    causal_lm(model, tmp_path / "m.pt2", token_counts=(8, 64), pack_linears=False)
    section = written["llm"]
    assert section["format_version"] == 2
    assert section["architecture"] == "Gemma2ForCausalLM"
    assert (section["vocabulary"], section["max_positions"], section["stop_ids"]) == (258, 128, [7])
    assert (section["block_size"], section["block_elements"], section["dtype"]) == (16, 2 * 512, "float32")
    # Two layers with a window, and one with blocks of the same bytes for twice as many positions.
    assert section["groups"] == [
        {"block_size": 32, "window": 0, "chunk": 0}, {"block_size": 16, "window": 6, "chunk": 0},
    ]  # fmt: skip
    assert section["layers"][1:] == [
        {"heads_kv": 2, "width": 8, "width_v": 8, "window": 0, "chunk": 0, "offset": 0, "group": 0},
        {"heads_kv": 2, "width": 8, "width_v": 8, "window": 6, "chunk": 0, "offset": 512, "group": 1},
    ]
    assert [(layer["window"], layer["offset"]) for layer in section["layers"]] == [(6, 0), (0, 0), (6, 512)]
    tables, slots = written["requests"][0].method.args[3], written["requests"][0].method.args[6]
    assert [tuple(table.shape) for table in tables] == [(3, 2), (3, 2)] and [len(own) for own in slots] == [8, 8]
    assert section["methods"] == [{"name": "step_8", "tokens": 8}, {"name": "step_64", "tokens": 64}]
    assert [request.method.name for request in written["requests"]] == ["step_8", "step_64"]
    assert [len(request.method.args[0]) for request in written["requests"]] == [8, 64]
    assert written["files"] == {}
    assert written["options"].pack_linears is False
    json.dumps(section)
    # The model is what it was.
    assert model.training
    assert model.config._attn_implementation != "untorch_paged"
    assert model.config.use_cache is True


@pytest.mark.slow
def test_logits_in_one_piece(written: dict[str, Any], tmp_path: Path) -> None:
    """Inductor pads no GEMM of a step: the method that chooses tokens takes the logits as they are."""
    model = make_model("Llama")
    causal_lm(model, tmp_path / "m.pt2", device="cuda", arch="sm_90", inductor={"max_autotune": True})
    assert written["options"].inductor == {"shape_padding": False, "max_autotune": True}
    causal_lm(model, tmp_path / "m.pt2")
    assert written["options"].inductor == {}


@pytest.mark.slow
@pytest.mark.parametrize(("kv_dtype", "name"), [("int8", "int8"), ("fp8", "float8_e4m3fn")])
def test_quantised_pages(kv_dtype: str, name: str, written: dict[str, Any], tmp_path: Path) -> None:
    model = make_model("Llama", head_dim=64)
    causal_lm(model.to(torch.bfloat16), tmp_path / "m.pt2")
    floats = written["llm"]
    causal_lm(model, tmp_path / "m.pt2", kv_dtype=kv_dtype)
    section = written["llm"]
    assert section["dtype"] == name and floats["dtype"] == "bfloat16"
    # Bytes of a block: 64 codes and a scale of 2 bytes in the place of 64 elements of 2 bytes.
    assert section["block_elements"] / (2 * floats["block_elements"]) == 66 / 128
    assert [layer["offset"] for layer in section["layers"]] == [i * 16 * 2 * 2 * 66 for i in range(3)]
    assert {key: section[key] for key in section if key not in ("dtype", "block_elements", "layers")} == {
        key: floats[key] for key in floats if key not in ("dtype", "block_elements", "layers")
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kv_dtype"), [("Llama", None), ("Llama", "int8"), ("Llama", "fp8"), ("Gemma2", "int8")]
)  # fmt: skip
def test_examples_are_valid_calls(
    name: str, kv_dtype: str | None, written: dict[str, Any], tmp_path: Path
) -> None:  # fmt: skip
    causal_lm(make_model(name), tmp_path / "m.pt2", token_counts=(4, 40), kv_dtype=kv_dtype)
    for request in written["requests"]:
        step, args = request.method.model, request.method.args
        step.model.set_attn_implementation("untorch_paged")
        with torch.no_grad():
            assert step(*args).shape == (3, 258)


@pytest.mark.slow
def test_a_model_with_states(written: dict[str, Any], tmp_path: Path) -> None:
    causal_lm(make_model("Qwen3Next"), tmp_path / "m.pt2", token_counts=(4, 40))
    assert written["llm"]["state_elements"] == 3 * (3 * 64 + 4 * 8 * 8)
    assert len(written["llm"]["layers"]) == 1  # of attention
    for request in written["requests"]:
        step, args = request.method.model, request.method.args
        slots, states = args[-2:]
        assert slots.tolist() == [2, 0, 1]
        assert states.shape == (4, step.state_elements)
        step.model.set_attn_implementation("untorch_paged")
        with torch.no_grad():
            assert step(*args).shape == (3, 258)
        assert (states != 0).any(1).tolist() == [True, True, True, False]
        states.zero_()
    causal_lm(make_model("Qwen3Next"), tmp_path / "m.pt2", token_counts=(4,), inputs_embeds=True)
    method = written["requests"][1].method
    assert method.name == "step_4_embeds"
    embeddings, mask, slots, states = method.args[8:]
    assert (embeddings.shape, mask.shape, slots.shape, states.shape[0]) == ((4, 32), (4,), (3,), 4)
    assert len(method.dynamic_shapes) == len(method.args) == 12
    method.model.model.set_attn_implementation("untorch_paged")
    with torch.no_grad():
        assert method.model(*method.args).shape == (3, 258)
    assert (states != 0).any(1).tolist() == [True, True, True, False]
    causal_lm(make_model("Llama"), tmp_path / "m.pt2")
    assert written["llm"]["state_elements"] == 0
    assert len(written["requests"][0].method.args) == 8


@pytest.mark.slow
def test_a_folder(written: dict[str, Any], tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_buffer(tokenizer()), eos_token="</s>", bos_token="<s>"
    )
    words.chat_template = "{{ messages }}"
    words.save_pretrained(tmp_path / "hf")
    model = make_model("Llama", eos_token_id=9)
    model.generation_config = transformers.GenerationConfig(
        do_sample=True, temperature=0.6, top_k=20, eos_token_id=[9, 11]
    )
    model.save_pretrained(tmp_path / "hf")
    causal_lm(tmp_path / "hf", tmp_path / "m.pt2", dtype=torch.bfloat16, max_positions=64)
    section, files = written["llm"], written["files"]
    assert section["dtype"] == "bfloat16"
    assert section["max_positions"] == 64
    assert section["stop_ids"] == [9, 11, 257]
    assert section["special_tokens"] == {"bos_token": "<s>", "eos_token": "</s>"}
    assert section["generation"] == {"temperature": 0.6, "top_k": 20, "do_sample": True}
    assert files[section["tokenizer"]] == (tmp_path / "hf" / "tokenizer.json").read_bytes()
    assert files[section["chat_template"]] == b"{{ messages }}"
    causal_lm(make_model("Llama"), tmp_path / "m.pt2", tokenizer=tmp_path / "hf" / "tokenizer.json")
    assert set(written["files"]) == {"extra/llm/tokenizer.json"}


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"token_counts": (16, 8)}, InvalidArgumentError, "token_counts: expected ascending integers from 4 on, such "
                                                          "as (16, 1024), got (16, 8)"),
        ({"token_counts": ()}, InvalidArgumentError, "token_counts: expected ascending integers"),
        ({"token_counts": (2,)}, InvalidArgumentError, "token_counts: expected ascending integers"),
        ({"block_size": 8}, InvalidArgumentError, "block_size: expected a multiple of 16, got 8"),
        ({"kv_dtype": "int4"}, InvalidArgumentError, "kv_dtype: expected 'int8', 'fp8' or None, got 'int4'"),
        ({"kv_dtype": torch.int8}, InvalidArgumentError, "kv_dtype: expected 'int8', 'fp8' or None, got torch.int8"),
        ({"max_positions": 0}, InvalidArgumentError, "max_positions: expected a positive integer, got 0"),
        ({"task": "chat"}, InvalidArgumentError, "task: expected one of 'generate', 'embed', 'classify', got 'chat'"),
        ({"inputs_embeds": 1}, ArgumentTypeError, "inputs_embeds: expected True or False, got 1"),
        ({"normalize": True}, InvalidArgumentError, "normalize: is for task=\"embed\": task='generate' pools nothing"),
        ({"device": "mps"}, UnsupportedError, "device: expected 'cpu' or 'cuda', got 'mps': paged attention has no "
                                              "kernel for it"),
        ({"tokenizer": 3}, ArgumentTypeError, "tokenizer: expected a folder, a tokenizer.json, a fast tokenizer"),
        ({"tokenizer": "/nowhere.json"}, FileMissingError, "tokenizer: there is no /nowhere.json"),
        ({"dtype": torch.float16}, InvalidArgumentError, "dtype: is for a folder; convert a module with"),
        ({"model": "/nowhere"}, FileMissingError, "model: there is no folder /nowhere"),
        ({"model": 3}, ArgumentTypeError, "model: expected a module or the path of a Hugging Face folder, got int"),
        ({"model": nn.Linear(2, 2)}, ArgumentTypeError, "model: expected a causal language model of transformers, got "
                                                        "Linear, which has no config"),
    ],
)  # fmt: skip
def test_refusals(
    options: dict[str, Any], error: type[Exception], text: str, written: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(error) as caught:
        causal_lm(**{"model": make_model("Llama"), "path": tmp_path / "m.pt2", **options})
    assert str(caught.value).startswith(f"causal_lm: {text}")
    assert not written


def other_models() -> dict[str, tuple[nn.Module, str]]:
    t5 = transformers.T5Config(d_model=32, d_ff=64, num_layers=1, num_heads=2, vocab_size=99)
    bert = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=99
    )
    return {
        "T5": (
            transformers.T5ForConditionalGeneration(t5),
            "model: expected a decoder alone, got T5ForConditionalGeneration, which has an encoder and a decoder",
        ),
        "BERT": (
            transformers.BertModel(bert),
            "model: BertModel has bidirectional attention, so it is an encoder: compile it with untorch.export.export",
        ),
    }


@pytest.mark.parametrize("name", ["T5", "BERT"])
def test_other_models_are_refused(name: str, written: dict[str, Any], tmp_path: Path) -> None:
    model, text = other_models()[name]
    with pytest.raises(CompileError) as caught:
        causal_lm(model, tmp_path / "m.pt2")
    assert str(caught.value).startswith(f"causal_lm: {text}")
    assert not written


def test_a_folder_of_another_model(written: dict[str, Any], tmp_path: Path) -> None:
    model, _ = other_models()["T5"]
    model.save_pretrained(tmp_path / "hf")  # type: ignore[operator]
    with pytest.raises(
        CompileError, match="hf is no causal language model of transformers: Unrecognized configuration"
    ):
        causal_lm(tmp_path / "hf", tmp_path / "m.pt2")
    assert not written


def test_embedding_models(written: dict[str, Any], tmp_path: Path) -> None:
    model = make_model("Qwen3").model
    model.train()
    causal_lm(model, tmp_path / "m.pt2", token_counts=(8,), device="cuda", arch="sm_90")
    section = written["llm"]
    assert section["architecture"] == "Qwen3Model"
    assert {name: section[name] for name in ("task", "pooling", "normalize", "width")} == {
        "task": "embed", "pooling": "last", "normalize": True, "width": 32,
    }  # fmt: skip
    assert "choose" not in section
    assert [request.method.name for request in written["requests"]] == ["step_8"]
    assert model.training
    assert model.config._attn_implementation != "untorch_paged"
    # A causal language model, without its head.
    causal_lm(make_model("Qwen3"), tmp_path / "m.pt2", task="embed", pooling="mean", normalize=False, token_counts=(8,))
    section = written["llm"]
    assert (section["architecture"], section["pooling"], section["normalize"]) == ("Qwen3ForCausalLM", "mean", False)
    json.dumps(section)


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["lasttoken", "mean_tokens"])
def test_a_folder_of_sentence_transformers(pooling: str, written: dict[str, Any], tmp_path: Path) -> None:
    from tests.unit.export.lm.test_pooled import folder

    make_model("Qwen3").save_pretrained(tmp_path / "hf")
    dense = {"in_features": 32, "out_features": 5, "bias": False}
    folder(
        tmp_path / "hf", **{"1_Pooling__config": {f"pooling_mode_{pooling}": True}, "2_Dense__config": dense},
        sentence_bert_config={"max_seq_length": 100}, config_sentence_transformers={"prompts": {"query": "Q: "}},
    )  # fmt: skip
    torch.save({"linear.weight": torch.ones(5, 32)}, tmp_path / "hf" / "2_Dense" / "pytorch_model.bin")
    causal_lm(tmp_path / "hf", tmp_path / "m.pt2", token_counts=(8,))
    section, names = written["llm"], [request.method.name for request in written["requests"]]
    assert (section["task"], section["max_positions"]) == ("embed", 100)
    assert (section["prompts"], section["default_prompt"]) == ({"query": "Q: "}, None)
    # One row goes through the layer in the step; a mean does when it is there.
    if pooling == "lasttoken":
        assert (section["width"], section.get("dense"), names) == (5, None, ["step_8"])
    else:
        assert (section["width"], section.get("dense"), names) == (5, "dense", ["step_8", "dense"])
    causal_lm(tmp_path / "hf", tmp_path / "m.pt2", task="generate", token_counts=(8,))
    assert "task" not in written["llm"]
    assert written["llm"]["max_positions"] == 128


@pytest.mark.slow
def test_rerankers(written: dict[str, Any], tmp_path: Path) -> None:
    config = make_model("Qwen3").config
    config.id2label, config.label2id = {0: "no", 1: "yes"}, {"no": 0, "yes": 1}
    transformers.Qwen3ForSequenceClassification(config).save_pretrained(tmp_path / "hf")
    causal_lm(tmp_path / "hf", tmp_path / "m.pt2", token_counts=(8,))
    section = written["llm"]
    assert {name: section[name] for name in ("task", "pooling", "normalize", "width", "labels")} == {
        "task": "classify", "pooling": "last", "normalize": False, "width": 2, "labels": ["no", "yes"],
    }  # fmt: skip
    assert section["architecture"] == "Qwen3ForSequenceClassification"


def test_multimodal_models(written: dict[str, Any], tmp_path: Path) -> None:
    from tests.unit.export.lm.test_text import make

    model = make("Llava")
    model.save_pretrained(tmp_path / "hf")
    causal_lm(tmp_path / "hf", tmp_path / "m.pt2", token_counts=(8, 20), inputs_embeds=True)
    section = written["llm"]
    assert section["architecture"] == "LlavaForConditionalGeneration"
    assert section["hidden"] == 32
    assert section["embeds"] == [{"name": "step_8_embeds", "tokens": 8}, {"name": "step_20_embeds", "tokens": 20}]
    assert [request.method.name for request in written["requests"]] == [
        "step_8", "step_20", "step_8_embeds", "step_20_embeds",
    ]  # fmt: skip
    for request in written["requests"]:
        step = request.method.model
        assert not [name for name, _ in step.named_parameters() if "vision" in name]
        step.model.set_attn_implementation("untorch_paged")
        with torch.no_grad():
            assert step(*request.method.args).shape == (3, 99)
    causal_lm(model, tmp_path / "m.pt2", token_counts=(8,))
    assert "embeds" not in written["llm"]


@pytest.mark.slow
def test_guards_are_deferred(written: dict[str, Any], tmp_path: Path) -> None:
    """Llama 4's experts: torch.export takes a relation between sizes, which always holds, for a constraint."""
    model = make_model("Llama4")
    causal_lm(model, tmp_path / "m.pt2", token_counts=(16,))
    method = written["requests"][0].method
    model.set_attn_implementation("untorch_paged")
    with pytest.raises(CompileError, match="Constraints violated"):
        export_program(replace(method, defers_guards=False), False)
    assert export_program(method, False).program is not None


def test_a_model_elsewhere(written: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        causal_lm(make_model("Llama").to("meta"), tmp_path / "m.pt2")
    assert str(caught.value) == "causal_lm: model: expected its parameters on the CPU, got meta: use model.cpu()"


def test_a_model_that_is_refused_is_what_it_was(written: dict[str, Any], tmp_path: Path) -> None:
    model = make_model("Jamba")
    before = model.config._attn_implementation
    with pytest.raises(CompileError) as caught:
        causal_lm(model, tmp_path / "m.pt2")
    assert "JambaForCausalLM: 12 tokens as a whole and in chunks of 5, 4, 1, 1, 1 differ by" in str(caught.value)
    assert "this family keeps state that pages cannot hold" in str(caught.value)
    assert model.config._attn_implementation == before
