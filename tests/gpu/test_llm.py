"""Language models on the GPU: operators against their references, steps in CUDA graphs, the engine's tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

import untorch
from tests.native.state_batches import channel_decays, conv_batch, delta_batch, without_beta
from tests.native.test_paged_attention import KV, batch, special_rows
from untorch.ops.causal_conv1d import causal_conv1d
from untorch.ops.gated_delta_rule import gated_delta_rule
from untorch.ops.paged_attention import paged_attention

pytest.importorskip("triton")
pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),
]
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
ARCHITECTURES = (
    "Llama", "Qwen3", "Qwen3Moe", "Gemma2", "Gemma3", "Gemma4", "GptOss", "DeepseekV3", "Qwen3Next", "GraniteMoeHybrid",
    "Lfm2",
)  # fmt: skip
NEW = 12
PROMPTS = [[5, 17, 3, 8], [40, 2], [7], list(range(3, 60)), list(range(100, 140))]


def verify(given: dict[str, Any]) -> None:
    from untorch.ops.attention.paged_operator import paged_attention_triton

    reference = dict(given, pool=given["pool"].clone())
    expected = paged_attention(**reference)
    offset = given["offset"]
    placed = given | {"offset": torch.tensor([offset]), "aligned": offset % 16 == 0, "wgmma": False}
    placed = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in placed.items()}
    got = paged_attention_triton(**placed)
    tolerance = TOLERANCE[given["q"].dtype]
    torch.testing.assert_close(got.cpu(), expected, rtol=tolerance, atol=tolerance)
    pool = placed["pool"].cpu().view(torch.uint8)
    torch.testing.assert_close(pool, reference["pool"].view(torch.uint8), rtol=0, atol=0)


@hypothesis.settings(max_examples=80, deadline=None, derandomize=True)
@hypothesis.given(data=st.data())
def test_any_batch(data: st.DataObject) -> None:
    draw = data.draw
    lengths = []
    for _ in range(draw(st.integers(1, 6))):
        length = draw(st.integers(1, 900))
        lengths.append((draw(st.sampled_from([0, 1, 1, 2, 17, 200, length])), length))
    lengths = [(min(queries, length), length) for queries, length in lengths]
    heads_kv = draw(st.sampled_from([1, 2, 8]))
    given = batch(
        lengths, heads_kv * draw(st.sampled_from([1, 2, 4, 7, 16])), heads_kv,
        draw(st.sampled_from([16, 64, 80, 128, 192, 256])), draw(st.sampled_from([16, 64, 80, 128])),
        draw(st.sampled_from([16, 32, 128])), draw(st.sampled_from(list(TOLERANCE))), draw(st.integers(0, 3)),
        draw(st.sampled_from([0, 5, 64])), draw(st.integers(0, 1000)), draw(st.sampled_from(KV)),
    )  # fmt: skip
    heads = given["q"].shape[1]
    given["window"] = draw(st.sampled_from([0, 0, 1, 17, 300]))
    given["chunk"] = draw(st.sampled_from([0, 0, 16, 37]))
    given["softcap"] = draw(st.sampled_from([0.0, 2.5]))
    given["sinks"] = draw(st.sampled_from([None, torch.linspace(-2, 2, heads)]))
    given["alibi"] = draw(st.sampled_from([None, torch.linspace(0.01, 0.5, heads)]))
    if draw(st.booleans()):
        given["k"] = given["v"] = None
    verify(given)


@pytest.mark.parametrize("lengths", [[(1, 4000)] * 16, [(2000, 2000)], [(1, 30000)], [(1, 50)] * 300, [(0, 9), (5, 9)]])
@pytest.mark.parametrize("kv", KV)
def test_large_ones(lengths: list[tuple[int, int]], kv: torch.dtype | None) -> None:
    verify(batch(lengths, 32, 8, 128, 128, dtype=torch.bfloat16, kv=kv))


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_widths_of_latent_attention(dtype: torch.dtype, kv: torch.dtype | None) -> None:
    verify(batch([(1, 700), (30, 90)], 128, 1, 576, 512, dtype=dtype, kv=kv))


@pytest.mark.parametrize("kv", KV[1:])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_codes_of_special_rows(dtype: torch.dtype, kv: torch.dtype) -> None:
    """Bit for bit, as the GPU has no other codes than the CPU: ties, subnormal numbers, infinities and NaN."""
    from untorch.ops.attention.paged_operator import paged_attention_triton

    given = batch([(90, 90)], 2, 1, 24, 20, dtype=dtype, kv=kv)
    special_rows(given)
    reference = dict(given, pool=given["pool"].clone())
    paged_attention(**reference)
    placed = given | {"offset": torch.tensor([0]), "aligned": True, "wgmma": False}
    placed = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in placed.items()}
    paged_attention_triton(**placed)
    assert torch.equal(placed["pool"].cpu().view(torch.uint8), reference["pool"].view(torch.uint8))


def verify_states(given: dict[str, Any]) -> None:
    from untorch.ops.linear_attention.operators import causal_conv1d_triton, gated_delta_rule_triton

    reference = dict(given, states=given["states"].clone())
    is_conv = "x" in given
    expected = causal_conv1d(**reference) if is_conv else gated_delta_rule(**reference)
    placed = given | {"offset": torch.tensor([given["offset"]])}
    placed = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in placed.items()}
    got = causal_conv1d_triton(**placed) if is_conv else gated_delta_rule_triton(**placed)
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(got.cpu(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(placed["states"].cpu(), reference["states"], rtol=1e-4, atol=1e-4)


def draw_lengths(data: st.DataObject, most: int) -> list[tuple[int, int]]:
    lengths = []
    for _ in range(data.draw(st.integers(1, 6))):
        tokens = data.draw(st.sampled_from([0, 1, 1, 2, 17, most]))
        lengths.append((tokens, tokens + data.draw(st.sampled_from([0, 0, 1, 300]))))
    return lengths


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(data=st.data())
def test_any_causal_convolution(data: st.DataObject) -> None:
    draw = data.draw
    given = conv_batch(
        draw_lengths(data, 500), draw(st.sampled_from([8, 100, 8192])), draw(st.sampled_from([2, 3, 4])),
        draw(st.sampled_from(list(TOLERANCE))), draw(st.integers(0, 3)), draw(st.sampled_from([0, 64])),
        draw(st.integers(0, 1000)), draw(st.booleans()),
    )  # fmt: skip
    verify_states(given | {"silu": draw(st.booleans())})


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(data=st.data())
def test_any_delta_rule(data: st.DataObject) -> None:
    draw = data.draw
    heads_k = draw(st.sampled_from([1, 4]))
    given = delta_batch(
        draw_lengths(data, 90), heads_k * draw(st.sampled_from([1, 2, 8])), heads_k,
        draw(st.sampled_from([16, 64, 128, 256])), draw(st.sampled_from([16, 64, 100, 128])),
        draw(st.sampled_from(list(TOLERANCE))), draw(st.integers(0, 3)), draw(st.sampled_from([0, 64])),
        draw(st.integers(0, 1000)), draw(st.booleans()),
    )  # fmt: skip
    if draw(st.booleans()):
        given = channel_decays(given)
    if draw(st.booleans()):
        given = without_beta(given)
    verify_states(given)


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ARCHITECTURES]
)
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    from tests.conformance.language_models import make_model
    from untorch.export import causal_lm

    model = make_model(request.param)
    path = tmp_path_factory.mktemp("llm") / f"{request.param}.pt2"
    causal_lm(model, path, device="cuda", token_counts=(8, 48), progress=False)
    return path, model


# No torch.
RUN = """
import json, sys
sys.modules["torch"] = None
from untorch.llm import Engine, SamplingParams
path, prompts, new = json.load(sys.stdin)
params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
with Engine(path, kv_memory="4MiB", max_batch_tokens=16, max_sequences=8, text=False) as engine:
    batched = [output.completions[0].token_ids for output in engine.generate(prompts, params)]
    alone = [engine.generate([prompt], params)[0].completions[0].token_ids for prompt in prompts]
    several = engine.generate([prompts[0]], SamplingParams(temperature=0, n=3, max_tokens=new, ignore_eos=True))
print(json.dumps([batched, alone, [c.token_ids for c in several[0].completions]]))
"""


def test_the_engine_says_what_generate_says(package: tuple[Path, Any]) -> None:
    from tests.conformance.language_models import greedy

    path, model = package
    done = subprocess.run(
        [sys.executable, "-c", RUN], input=json.dumps([str(path), PROMPTS, NEW]), capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    batched, alone, several = json.loads(done.stdout)
    expected = [greedy(model, prompt, NEW) for prompt in PROMPTS]
    assert batched == expected
    assert alone == expected
    assert several == [expected[0]] * 3


# No torch.
PROMPT_LOGPROBS = """
import json, sys
sys.modules["torch"] = None
from untorch.llm import Engine, SamplingParams
path, prompts = json.load(sys.stdin)
params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
with Engine(path, kv_memory="8MiB", max_batch_tokens=48, max_sequences=8, text=False) as engine:
    outputs = engine.generate(prompts, params)
print(json.dumps([[found.logprob for found in output.prompt_logprobs[1:]] for output in outputs]))
"""


@pytest.mark.parametrize("name", ["Llama", "GptOss", "Gemma3"])
def test_prompts_in_float16(name: str, tmp_path: Path) -> None:
    """In chunks of a step, by the kernels for halves, against eager PyTorch in float32 with the same weights.

    Or in float16: rounding chooses another expert for one token of gpt-oss (0.63 off, with eager PyTorch too).
    """
    from tests.conformance.language_models import make_model
    from untorch.export import causal_lm

    model = make_model(name).half().float()
    prompts = [[(7 * i * i + 3 * i + s) % 120 + 3 for i in range(n)] for s, n in enumerate((120, 61, 90))]
    expected: list[list[torch.Tensor]] = []
    for dtype in (torch.float32, torch.float16):
        model.to(dtype)
        with torch.no_grad():
            logprobs = [model(torch.tensor([prompt])).logits[0].float().log_softmax(-1) for prompt in prompts]
        expected.append(
            [p[torch.arange(len(prompt) - 1), prompt[1:]] for p, prompt in zip(logprobs, prompts, strict=True)]
        )
    path = tmp_path / "m.pt2"
    causal_lm(model, path, device="cuda", token_counts=(8, 48), progress=False)
    done = subprocess.run(
        [sys.executable, "-c", PROMPT_LOGPROBS], input=json.dumps([str(path), prompts]), capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for found, *wanted in zip(json.loads(done.stdout), *expected, strict=True):
        off = (torch.tensor(found) - torch.stack(wanted)).abs().amin(0)
        assert off.amax() < 0.06, off


# No torch. With each token its logprob and the best two.
TOP_TWO = """
import json, sys
sys.modules["torch"] = None
from untorch.llm import Engine, SamplingParams
path, prompts, new = json.load(sys.stdin)
params = SamplingParams(temperature=0, max_tokens=new, logprobs=2, ignore_eos=True)
with Engine(path, kv_memory="8MiB", max_batch_tokens=64, max_sequences=8, text=False) as engine:
    alone = [engine.generate([prompt], params)[0].completions[0] for prompt in prompts]
print(json.dumps([[[one.token, [value for _, value in one.top]] for one in each.logprobs] for each in alone]))
"""


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3"])
def test_fused_layers_give_the_same_tokens(name: str, tmp_path: Path) -> None:
    """fuse_decoder_linears on and off, one sequence at a time. Roundings differ: so may a token where two are as likely."""
    from tests.conformance.language_models import make_model
    from untorch.export import causal_lm
    from untorch.quant import quantize

    model = make_model(name, hidden_size=256, intermediate_size=512, head_dim=64).half()
    quantize(model, dtype="int4", method="rtn", group_size=64, target="cuda", progress=False)
    runs = []
    for fuses in (False, True):
        path = tmp_path / f"{fuses}.pt2"
        report = causal_lm(
            model, path, device="cuda", token_counts=(8,), passes={"fuse_decoder_linears": fuses}, progress=False
        )
        [entry] = [entry for entry in report.methods["step_8"].passes if entry.name == "fuse_decoder_linears"]
        assert len(entry.changed) == (3 if fuses else 0)
        done = subprocess.run(
            [sys.executable, "-c", TOP_TWO], input=json.dumps([str(path), PROMPTS, NEW]), capture_output=True, text=True,
            timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        runs.append(json.loads(done.stdout))
    same = 0
    for apart, fused in zip(*runs, strict=True):
        for (token, (best, second)), (other, _) in zip(apart, fused, strict=True):
            if token != other:
                assert best - second < 0.1
                break
            same += 1
    assert same > 0.7 * NEW * len(PROMPTS)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_quantised_pages(name: str, kv_dtype: str, tmp_path: Path) -> None:
    from tests.conformance.language_models import RoundedCache, greedy, make_model
    from untorch.export import causal_lm
    from untorch.ops.kv_pages import KV_DTYPES

    model, path = make_model(name), tmp_path / "m.pt2"
    causal_lm(model, path, device="cuda", token_counts=(16,), kv_dtype=kv_dtype, progress=False)
    done = subprocess.run(
        [sys.executable, "-c", RUN], input=json.dumps([str(path), PROMPTS, NEW]), capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    batched, alone, several = json.loads(done.stdout)
    expected = [greedy(model, prompt, NEW, RoundedCache(KV_DTYPES[kv_dtype])) for prompt in PROMPTS]
    assert batched == expected
    assert alone == expected
    assert several == [expected[0]] * 3


# No torch. Prompts that repeat themselves; steps that verify are graphs, too.
SPECULATION = """
import json, sys
sys.modules["torch"] = None
from untorch.llm import Engine, SamplingParams
path, prompts, new = json.load(sys.stdin)
params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
found, accepted = [], []
for graphs in (False, [2, 8]):
    for speculative in (None, "ngram"):
        with Engine(path, kv_memory="4MiB", max_batch_tokens=64, max_sequences=8, text=False, cuda_graphs=graphs,
                    speculative=speculative) as engine:
            found.append([output.completions[0].token_ids for output in engine.generate(prompts, params)])
            accepted.append(engine.stats().accepted_tokens)
print(json.dumps([found, accepted]))
"""


@pytest.mark.parametrize("package", ["Llama", "Gemma2"], indirect=True)
def test_speculation_gives_the_same_tokens(package: tuple[Path, Any]) -> None:
    prompts = [[5, 6, 7] * 12, [3, 4] * 9, PROMPTS[4]]
    done = subprocess.run(
        [sys.executable, "-c", SPECULATION], input=json.dumps([str(package[0]), prompts, 40]), capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found, accepted = json.loads(done.stdout)
    assert found == [found[0]] * 4
    assert accepted[0] == accepted[2] == 0 and min(accepted[1], accepted[3]) > 0


# No torch. Batches of 1, 2 and 4 are graphs, one of 3 is padded, one of 5 is launched.
GRAPHS = """
import json, sys
sys.modules["torch"] = None
from untorch.llm import Engine, SamplingParams
path, prompts, new = json.load(sys.stdin)
made = [SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=i, max_tokens=new, ignore_eos=True) for i in range(5)]
found = []
for graphs in (False, [1, 2, 4]):
    with Engine(path, kv_memory="4MiB", max_batch_tokens=64, max_sequences=8, text=False, cuda_graphs=graphs) as engine:
        for count in (1, 2, 3, 4, 5):
            results = engine.generate(prompts[:count], made[:count])
            found.append([result.completions[0].token_ids for result in results])
        # One that wants so many logprobs takes all of its batch to the host.
        with_logprobs = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=1, max_tokens=new, ignore_eos=True, logprobs=21)
        results = engine.generate(prompts[:2], [made[0], with_logprobs])
        found.append([result.completions[0].token_ids for result in results])
print(json.dumps([found[: len(found) // 2], found[len(found) // 2 :]]))
"""


def test_graphs_and_sampling_give_the_same_tokens(package: tuple[Path, Any]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", GRAPHS], input=json.dumps([str(package[0]), PROMPTS, NEW]), capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    launched, replayed = json.loads(done.stdout)
    assert launched == replayed
    assert replayed[-1] == replayed[1]  # chosen on the host and on the GPU
    assert [one[0] for one in replayed[:5]] == [replayed[0][0]] * 5  # by seed, whatever is beside


# No torch. By the package's methods, and by the host.
PROCESSED = """
import json, sys
sys.modules["torch"] = None
from untorch.llm import Engine, SamplingParams
from untorch.llm.logits import DeviceLogits
path, prompts, new = json.load(sys.stdin)
fields = [
    {"temperature": 0, "repetition_penalty": 1.5, "logprobs": 5}, {"seed": 1, "frequency_penalty": 1.0, "top_p": 0.9},
    {"seed": 2, "logit_bias": {7: 5.0, 9: -100.0}, "logprobs": 20}, {"temperature": 0},
    {"seed": 3, "min_tokens": 6, "stop_token_ids": list(range(0, 100, 2))},
]
params = [SamplingParams(max_tokens=new, **own) for own in fields]
found = []
for can_process in (None, False):
    if can_process is not None:
        DeviceLogits.can_process = can_process
    for graphs in (False, [1, 2, 4]):
        with Engine(path, kv_memory="4MiB", max_batch_tokens=64, max_sequences=8, text=False, cuda_graphs=graphs) as engine:
            outputs = [handle.result() for handle in [engine.submit(*one) for one in zip(prompts, params)]]
            found.append([
                [one.token_ids, [[x.token, x.logprob, x.rank, x.top] for x in one.logprobs or ()]]
                for one in (output.completions[0] for output in outputs)
            ])
print(json.dumps(found))
"""


@pytest.mark.parametrize("package", ["Llama"], indirect=True)
def test_processing_logits_gives_the_tokens_of_the_host(package: tuple[Path, Any]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROCESSED], input=json.dumps([str(package[0]), PROMPTS, NEW]), capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *found, expected = json.loads(done.stdout)
    for one in found:
        for (tokens, logprobs), (of_host, logprobs_of_host) in zip(one, expected, strict=True):
            assert tokens == of_host
            for (token, value, rank, top), wanted in zip(logprobs, logprobs_of_host, strict=True):
                assert (token, rank) == (wanted[0], wanted[2])
                np.testing.assert_allclose(value, wanted[1], atol=1e-4)
                np.testing.assert_allclose([x for _, x in top], [x for _, x in wanted[3]], atol=1e-4)
    assert len(expected[0][1]) == NEW and len(expected[0][1][0][3]) == 5


@pytest.mark.parametrize("package", ["Llama"], indirect=True)
def test_masks_of_grammars(package: tuple[Path, Any]) -> None:
    from untorch.llm.processors import Changes, apply_changes

    rng = np.random.default_rng(0)
    with untorch.load(package[0]) as program:
        width, vocabulary = program["logprobs"].inputs[0].shape[1], program.manifest["llm"]["vocabulary"]
        logits = rng.standard_normal((5, width)).astype(np.float32)
        for rows in (1, 4):
            masks = rng.integers(-(1 << 31), 1 << 31, (3, -(-vocabulary // 32)), np.int64).astype(np.int32)
            at = rng.permutation(rows * width)[:50]
            factor, shift = rng.uniform(0.5, 2, 50).astype(np.float32), rng.standard_normal(50).astype(np.float32)
            changes = Changes(masks, rng.integers(0, 3, rows), at, factor, shift)
            masks[0] = -1
            which = rng.integers(0, 5, rows)
            expected = logits[which]
            apply_changes(expected, changes)
            found = np.asarray(program["process_logits"](logits, which, *changes.arrays(rows)))
            np.testing.assert_allclose(found[:, :vocabulary], expected[:, :vocabulary], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 130])
@pytest.mark.parametrize("width", [40, 5000, 151_936])
def test_logprobs(rows: int, width: int) -> None:
    from untorch.ops.sampling.operator import MOST_LOGPROBS, token_logprobs

    generator = torch.Generator().manual_seed(width + rows)
    logits = torch.randn(rows, width + 24, generator=generator) * 3
    logits[0, : width // 2] = 1.5
    given: list[Any] = [
        logits, torch.arange(rows).flip(0), torch.randint(-1, width, (rows,), generator=generator),
        torch.randint(0, MOST_LOGPROBS + 1, (rows,), generator=generator),
    ]  # fmt: skip
    for got, expected in zip(
        token_logprobs(*(x.cuda() for x in given), width), token_logprobs(*given, width), strict=True
    ):
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 130])
@pytest.mark.parametrize("width", [40, 5000, 151_936])
def test_choosing_tokens(rows: int, width: int) -> None:
    from untorch.ops.sampling.operator import choose_tokens

    generator = torch.Generator().manual_seed(width + rows)
    logits = torch.randn(rows, width + 24, generator=generator) * 3
    logits[0, : width // 2] = 1.5
    pick = torch.randint(0, 4, (4, rows), generator=generator)
    given: list[Any] = [
        logits, torch.arange(rows).flip(0), torch.tensor([0.0, 0.5, 1.0, 2.0])[pick[0]],
        torch.tensor([0, 1, 40, 1 << 40])[pick[1]], torch.tensor([1.0, 0.95, 0.5, 1e-4])[pick[2]],
        torch.tensor([0.0, 0.0, 0.1, 1.0])[pick[3]], torch.rand(rows, generator=generator),
    ]  # fmt: skip
    expected = choose_tokens(*given, width)
    got = choose_tokens(*(x.cuda() for x in given), width).cpu()
    # Rounding decides at the border of two tokens.
    assert (got != expected).sum() <= max(1, rows // 40)
    assert got.max() < width and got.min() >= 0


def test_a_graph_of_a_step_serves_other_lengths(package: tuple[Path, Any]) -> None:
    """Eight sequences of one token: the graph is captured with some lengths and replayed with others."""
    path, _ = package
    rng = np.random.default_rng(0)
    with untorch.load(path) as program:
        section = program.manifest["llm"]
        if section["state_elements"]:
            pytest.skip("each call goes on with the states that the last one left")
        block, columns = section["block_size"], 4
        sizes = [group["block_size"] for group in section.get("groups", [section])]  # of each block table
        step = program[section["methods"][0]["name"]]
        pages = 8 * columns * len(sizes)
        pool = untorch.zeros((pages + 1, section["block_elements"]), section["dtype"], "cuda")
        tables = tuple(rng.permutation(pages).astype(np.int32).reshape(len(sizes), 8, columns))

        def arguments(lengths: list[int]) -> tuple[Any, ...]:
            last = np.array(lengths) - 1
            slots = tuple(
                table[np.arange(8), last // size].astype(np.int64) * size + last % size
                for table, size in zip(tables, sizes, strict=True)
            )
            given = (tables, slots) if len(sizes) > 1 else (tables[0], slots[0])
            return (
                rng.integers(0, 250, 8), last.astype(np.int64), np.arange(8), given[0], np.arange(9, dtype=np.int32),
                np.array(lengths, np.int32), given[1],
            )  # fmt: skip

        graph = step.graph(*arguments([1] * 8), pool)
        for length in range(1, 3 * block):
            given = arguments([max(1, length - i) for i in range(8)])
            expected = step(*given, pool).numpy()
            before = pool.numpy()
            got = graph(*given, pool)
            got = got if isinstance(got, np.ndarray) else got.numpy()
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
            np.testing.assert_array_equal(pool.numpy(), before)
        with pytest.raises(untorch.InvalidArgumentError, match="the model writes into it, so the graph was captured"):
            graph(*given, untorch.zeros(pool.shape, pool.dtype, "cuda"))
