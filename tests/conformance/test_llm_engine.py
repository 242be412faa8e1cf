"""The engine on compiled packages in a process without torch: token for token what ``generate`` of transformers says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tests.conformance.language_models import CHOOSE, DEVICE, VOCABULARY, RoundedCache, greedy, make_model, tokenizer
from tests.unit.llm.test_structured import SCHEMAS, check
from untorch import InvalidArgumentError, load
from untorch.cli.app import app
from untorch.export import causal_lm
from untorch.llm import Engine, SamplingParams
from untorch.ops.kv_pages import KV_DTYPES

pytestmark = pytest.mark.filterwarnings("ignore")

NEW = 10
# Llama with two methods; Gemma 2 with windows, soft capping and the pages of two kinds of layers.
MODELS = {"Llama": (8, 48), "Gemma2": (16,)}
# Bytes of a block: of three layers, and of two with a window or one without. Positions where known prefixes may end.
BLOCKS, UNITS = {"Llama": 16 * 3 * 128, "Gemma2": 16 * 2 * 128}, {"Llama": 16, "Gemma2": 32}
SMALL = {"Llama": 4, "Gemma2": 5}
STOP = 257
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}bot:{% endif %}"
)

# A job of named generations in, their tokens out; and what only the engine's own process can see.
RUN = """
import asyncio, json, sys, threading, time
sys.modules["torch"] = None
from untorch.llm import Engine, SamplingParams
job = json.load(sys.stdin)
prompts, new, out = job["prompts"], job["new"], {}
GREEDY = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
def tokens(results):
    return [r.token_ids for r in results]
def options(**fields):
    return {"max_batch_tokens": 16, "max_sequences": 8, "kv_memory": "64MiB", **fields}

with Engine(job["path"], **options()) as engine:
    out["batched"] = tokens(engine.generate(prompts, GREEDY))
    before = engine.stats()
    again = engine.generate(prompts, GREEDY)
    out["again"], out["cached"] = tokens(again), [r.usage.cached_tokens for r in again]
    out["samples"] = [c.token_ids for c in engine.generate(
        prompts[0], SamplingParams(n=3, temperature=0, max_tokens=new, ignore_eos=True)).completions]
    seeded = [SamplingParams(temperature=1.5, seed=i, max_tokens=new, ignore_eos=True) for i in range(len(prompts))]
    out["seeded"] = tokens(engine.generate(prompts, seeded)) == [
        engine.generate(p, s).token_ids for p, s in zip(prompts, seeded)]
    logged = engine.generate(prompts[2], SamplingParams(prompt_logprobs=0, max_tokens=1, ignore_eos=True))
    out["logprobs"] = [item.logprob for item in logged.prompt_logprobs[1:]]
    real = engine._runner.run
    engine._runner.run = lambda *args: (time.sleep(0.01), real(*args))[1]  # else it may end before it is cancelled
    handle = engine.submit(prompts[0], SamplingParams(temperature=0, max_tokens=80, ignore_eos=True))
    chunks = iter(handle)
    for _ in range(3):
        next(chunks)
    handle.cancel()
    result = handle.result(30)
    engine._runner.run = real
    out["cancelled"] = [result.finish_reason, result.token_ids[:3], len(result.token_ids) < 80]
    out["long"] = engine.generate(prompts[1], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)).token_ids

    async def one(prompt):
        return [t async for chunk in engine.stream(prompt, GREEDY) for t in chunk.token_ids]
    async def many():
        return await asyncio.gather(*(one(prompts[i % len(prompts)]) for i in range(64)))
    out["streams"] = asyncio.run(many()) == [out["batched"][i % len(prompts)] for i in range(64)]
    threads = [threading.Thread(target=lambda i=i: out.setdefault(f"t{i}", engine.generate(prompts[i], GREEDY).token_ids))
               for i in range(len(prompts))]
    for t in threads: t.start()
    for t in threads: t.join()
    out["threads"] = [out.pop(f"t{i}") for i in range(len(prompts))]
    if job["schemas"]:
        results = engine.generate(["go"] * len(job["schemas"]), [
            SamplingParams(json_schema=s, max_tokens=100, seed=i, temperature=0.7) for i, s in enumerate(job["schemas"])])
        out["schemas"] = [[r.text, r.finish_reason] for r in results]
        chat = engine.chat([{"role": "user", "content": "hi"}], GREEDY)
        out["chat"] = [chat.prompt_token_ids, chat.token_ids]
        text = engine.generate("hello", GREEDY)
        out["text"] = [text.prompt_token_ids, text.token_ids, text.text]
    stats = engine.stats()
    out["free"] = [stats.blocks_free, stats.blocks]

with Engine(job["path"], **options(kv_memory=job["small"])) as engine:
    out["preempted"] = tokens(engine.generate(prompts, GREEDY))
    out["preemptions"], out["small"] = engine.stats().preemptions, engine.stats().blocks
    end = engine.generate(prompts[1], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    out["full"] = [end.finish_reason, end.token_ids]
out["modules"] = sorted({name.partition(".")[0] for name, module in sys.modules.items() if module})
print(json.dumps(out))
"""


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, int(n)).tolist() for n in (19, 2, 40, 7, 33, 1)]


@pytest.fixture(scope="module", params=MODELS)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    name: str = request.param
    model = make_model(name)
    model.generation_config.eos_token_id = STOP
    path = tmp_path_factory.mktemp(name) / "model.pt2"
    has_text = name == "Llama"
    if has_text:
        from tokenizers import Tokenizer
        from transformers import PreTrainedTokenizerFast

        words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_buffer(tokenizer()), eos_token="</s>")
        words.chat_template = TEMPLATE
        report = causal_lm(model, path, tokenizer=words, token_counts=MODELS[name], device=DEVICE, progress=False)
    else:
        report = causal_lm(model, path, token_counts=MODELS[name], device=DEVICE, progress=False)
    assert list(report.methods) == [*(f"step_{count}" for count in MODELS[name]), *CHOOSE]
    assert model.config._attn_implementation != "untorch_paged"
    job = {
        "path": str(path), "prompts": prompts(), "new": NEW, "small": SMALL[name] * BLOCKS[name],
        "schemas": SCHEMAS[:6] if has_text else [],
    }  # fmt: skip
    done = subprocess.run(
        [os.environ.get("UNTORCH_RUN_PYTHON", sys.executable), "-c", RUN], input=json.dumps(job), capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    model.generation_config.eos_token_id = None
    out: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {
        **out,
        "name": name,
        "path": path,
        "model": model,
        "expected": [greedy(model, prompt, NEW) for prompt in prompts()],
    }


def test_continuous_batching(found: dict[str, Any]) -> None:
    assert found["batched"] == found["expected"]
    assert found["threads"] == found["expected"]
    assert found["samples"] == [found["expected"][0]] * 3
    assert found["streams"] is True
    assert found["seeded"] is True
    assert not {"torch", "transformers", "scipy"} & set(found["modules"])
    assert found["free"][0] == found["free"][1]


def test_logprobs(found: dict[str, Any]) -> None:
    prompt = torch.tensor([prompts()[2]])
    with torch.no_grad():
        expected = found["model"](prompt).logits[0, :-1].log_softmax(-1).gather(1, prompt[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found["logprobs"]), expected, rtol=1e-4, atol=1e-4)


def test_known_prefixes(found: dict[str, Any]) -> None:
    assert found["again"] == found["expected"]
    unit = UNITS[found["name"]]
    assert found["cached"] == [(len(prompt) - 1) // unit * unit for prompt in prompts()]


def test_preemption(found: dict[str, Any]) -> None:
    assert found["small"] == SMALL[found["name"]]
    assert found["preempted"] == found["expected"]
    # Which requests meet depends on times: on a GPU none may be preempted.
    assert found["preemptions"] > 0 or DEVICE != "cpu"


def test_too_little_memory(found: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Engine(found["path"], kv_memory=100)
    expected = {
        "Llama": "6144 bytes, one block of 16 positions",
        "Gemma2": "8192 bytes, one block of 32 positions and one block of 16 positions",
    }
    assert str(caught.value) == f"Engine: kv_memory: expected at least {expected[found['name']]}, got 100"


def test_an_open_program(found: dict[str, Any]) -> None:
    with load(found["path"]) as program:
        for _ in range(2):
            with Engine(program, kv_memory="1MiB", text=False) as engine:
                params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
                assert engine.generate(prompts()[0], params).token_ids == found["expected"][0]


def test_ends(found: dict[str, Any]) -> None:
    reason, tokens, short = found["cancelled"]
    assert (reason, tokens, short) == ("cancelled", found["expected"][0][:3], True)
    assert len(found["long"]) == 128 - 2
    assert found["long"] == greedy(found["model"], prompts()[1], 126)
    reason, tokens = found["full"]
    assert reason == "length"
    # Four blocks hold 64 positions. Gemma 2's five hold 96: three of 32 without a window, two with one.
    assert len(tokens) == {"Llama": 4 * 16, "Gemma2": 3 * 32}[found["name"]] - 2 + 1
    assert tokens == found["long"][: len(tokens)]


def test_text(found: dict[str, Any]) -> None:
    if "schemas" not in found:
        return
    for schema, (text, reason) in zip(SCHEMAS, found["schemas"], strict=False):
        if reason == "stop":
            check(json.loads(text), schema, schema)
    assert sum(reason == "stop" for _, reason in found["schemas"]) >= 4
    from tokenizers import Tokenizer

    words = Tokenizer.from_buffer(tokenizer())
    prompt, tokens, text = found["text"]
    assert prompt == words.encode("hello").ids
    assert tokens == greedy(found["model"], prompt, NEW)
    assert text == words.decode(tokens)
    prompt, tokens = found["chat"]
    assert words.decode(prompt) == "user: hi\nbot:"
    assert tokens == greedy(found["model"], prompt, NEW)
    assert max(prompt) < VOCABULARY


def test_the_pipeline_and_the_command_say_the_same(found: dict[str, Any]) -> None:
    if "text" not in found:
        return
    import untorch

    done = CliRunner().invoke(app, ["generate", str(found["path"]), "hello", "--max-tokens", str(NEW)])
    assert done.exit_code == 0, done.output
    with untorch.pipeline(found["path"]) as pipeline:
        text = pipeline("hello", max_tokens=NEW)
        assert done.output == f"{text}\n"
        assert "".join(pipeline("hello", max_tokens=NEW, stream=True)) == text
        assert pipeline([{"role": "user", "content": "hi"}], max_tokens=NEW, ignore_eos=True) == (
            pipeline.engine.tokenizer.decode(found["chat"][1])
        )


# Chunks of prompts beside decoding; prefixes that are known; sequences that share a page until one writes it.
RUN_PAGES = """
import json, sys
sys.modules["torch"] = None
from untorch.llm import Engine, SamplingParams
job = json.load(sys.stdin)
out = {}
greedy = SamplingParams(temperature=0, max_tokens=job["new"], ignore_eos=True)
with Engine(job["path"], kv_memory="1MiB", max_batch_tokens=16, max_sequences=8, text=False) as engine:
    for name in ("batched", "again"):
        out[name] = [r.token_ids for r in engine.generate(job["prompts"], greedy)]
    several = SamplingParams(n=3, temperature=0, max_tokens=job["new"], ignore_eos=True)
    out["samples"] = [c.token_ids for c in engine.generate(job["prompts"][0], several).completions]
    out["blocks"] = engine.stats().blocks
with Engine(job["path"], kv_memory=job["small"], max_batch_tokens=16, max_sequences=8, text=False) as engine:
    out["preempted"] = [r.token_ids for r in engine.generate(job["prompts"], greedy)]
    out["preemptions"] = engine.stats().preemptions
print(json.dumps(out))
"""


@pytest.mark.parametrize("kv_dtype", ["int8", pytest.param("fp8", marks=pytest.mark.exhaustive)])
def test_quantised_pages(kv_dtype: str, tmp_path: Path) -> None:
    model, path = make_model("Llama"), tmp_path / "m.pt2"
    causal_lm(model, path, kv_dtype=kv_dtype, token_counts=(16,), device=DEVICE, progress=False)
    block = 3 * 2 * 16 * (8 + 8 + 2 + 2)  # bytes: of layers, KV heads and positions, codes and scales
    job = {"path": str(path), "prompts": prompts(), "new": NEW, "small": 4 * block}
    done = subprocess.run(
        [os.environ.get("UNTORCH_RUN_PYTHON", sys.executable), "-c", RUN_PAGES], input=json.dumps(job),
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    expected = [greedy(model, prompt, NEW, RoundedCache(KV_DTYPES[kv_dtype])) for prompt in prompts()]
    assert expected != [greedy(model, prompt, NEW) for prompt in prompts()]  # rounding is seen
    assert found["batched"] == found["again"] == found["preempted"] == expected
    assert found["samples"] == [expected[0]] * 3
    assert found["preemptions"] > 0
    assert found["blocks"] == (1 << 20) // block
