"""A language model for CUDA in the engine, up to the kernel launches, with a fake driver: fake_driver.cpp."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.native.cuda.fake_gpu import found
from untorch.archive import ArchiveReader
from untorch.export import CompileError, causal_lm

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # torch's own


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.conformance.language_models import make_model

    pytest.importorskip("triton")
    path = tmp_path_factory.mktemp("llm") / "llama.pt2"
    causal_lm(
        make_model("Llama").to(torch.bfloat16), path, device="cuda", arch="sm_90", token_counts=(16,), keep_sources=True,
        progress=False,
    )  # fmt: skip
    return path


def test_the_pool_is_passed_straight_in_and_layers_share_kernels(package: Path) -> None:
    with ArchiveReader(package) as archive:
        manifest = archive.manifest()
        names = [entry.name for entry in archive if entry.name.endswith("wrapper.cpp") and "step_16" in entry.name]
        wrapper = archive.read(names[0]).decode()
    inputs = manifest["methods"]["step_16"]["inputs"]
    assert [entry["name"] for entry in inputs if entry.get("mutated")] == ["pool"]
    calls = [line.strip() for line in wrapper.splitlines() if line.strip().startswith("call_")]
    for kernel in ("rope_cache", "paged_decode", "paged_combine"):
        ours = [line for line in calls if kernel in line.partition("(")[0]]
        assert len(ours) == 3  # layers
        assert len({line.partition("(")[0] for line in ours}) == 1
    prompts = [line for line in wrapper.splitlines() if "CHECK(aoti_torch_cuda_paged_prefill(" in line]
    assert len(prompts) == 3 and not any("paged_prefill" in line for line in calls)
    # The pool is the last input, passed by its own handle: no copy, no view.
    pool = max(set(re.findall(r"\barg\d+_1\b", wrapper)), key=lambda name: int(name[3:-2]))
    readers = [line for line in calls if re.match("call_(rope_cache|paged_decode)", line)] + prompts
    assert len(readers) == 9 and all(f", {pool}, " in line for line in readers)


def test_the_engine(driver: Path, package: Path) -> None:
    """No kernel computes: logits are what the memory held, so tokens may be any."""
    script = """
from untorch.llm import Engine, SamplingParams
with Engine(path, kv_memory="64KiB", max_sequences=4, max_batch_tokens=16, text=False, cuda_graphs=False) as engine:
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    outputs = engine.generate([[1, 2, 3], list(range(1, 40)), [5]], params)
    found["counts"] = [len(output.completions[0].token_ids) for output in outputs]
    twice = engine.generate([[7] * 20], SamplingParams(max_tokens=3, n=2, temperature=1, ignore_eos=True))
    found["several"] = len(twice[0].completions)
launches = fake.fake_launches().decode()
found["kernels"] = {
    name: launches.count(name) for name in ("rope_cache", "paged_decode", "paged_combine", "paged_prefill")}
found["torch"] = "torch" in sys.modules
with Engine(path, max_sequences=2, text=False, cuda_graphs=False) as engine:
    found["free"] = engine.generate([[1]], SamplingParams(max_tokens=1))[0].completions[0].finish_reason
"""
    result = found(driver, package, script)
    assert result["counts"] == [3, 3, 3] and result["several"] == 2
    assert all(count > 0 and count % 3 == 0 for count in result["kernels"].values()), result
    assert result["kernels"]["rope_cache"] == result["kernels"]["paged_decode"] > result["kernels"]["paged_prefill"]
    assert not result["torch"] and result["free"] == "length"


def test_steps_that_decode_are_graphs(driver: Path, package: Path) -> None:
    """Two sequences are a graph of four: it is captured once, and its launches are replayed."""
    script = """
from untorch.llm import Engine, SamplingParams
seen = []
# With so many logprobs the host chooses: from what lies in the fake memory it may choose, as an id it may be no token.
params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=21)
with Engine(path, kv_memory="64KiB", max_sequences=4, max_batch_tokens=16, text=False, cuda_graphs=[4],
            progress=lambda done, of: seen.append((done, of))) as engine:
    captured = fake.fake_launches().decode().count("paged_decode")
    outputs = engine.generate([[1, 2, 3], [5]], params)
    found["counts"] = [len(output.completions[0].token_ids) for output in outputs]
    found["errors"] = [str(output.error) for output in outputs]
    found["launched"] = fake.fake_launches().decode().count("paged_decode") - captured
    chosen = fake.fake_launches().decode().count("choose_tokens")
    engine.generate([[1]], SamplingParams(max_tokens=1, temperature=0))
    found["chosen"] = fake.fake_launches().decode().count("choose_tokens") - chosen
found["seen"], found["captured"] = seen, captured
"""
    result = found(driver, package, script, GRAPHS=1)
    assert result["seen"] == [[0, 1], [1, 1]] and result["captured"] > 0
    assert result["counts"] == [4, 4] and result["chosen"] == 1, result
    # Of four steps the first one is a prompt's, with three layers; the others are replays.
    assert result["launched"] == 3


def test_logits_are_processed_where_they_are(driver: Path, package: Path) -> None:
    script = """
from untorch.llm import Engine, SamplingParams
with Engine(path, kv_memory="64KiB", max_sequences=4, max_batch_tokens=16, text=False, cuda_graphs=False) as engine:
    before = fake.fake_launches().decode()
    for fields in ({}, {"repetition_penalty": 1.5}, {"logprobs": 5}):
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=1, temperature=0, **fields))
        after = fake.fake_launches().decode()
        found[str(fields)] = [after.count(name) - before.count(name) for name in (
            "choose_tokens", "index_put", "token_logprobs")]
        before = after
found["launches"] = before.splitlines()[-40:]
"""
    result = found(driver, package, script)
    assert result["{}"] == [1, 0, 0], result
    assert result["{'repetition_penalty': 1.5}"][0] == 1 and result["{'repetition_penalty': 1.5}"][1] > 0, result
    assert result["{'logprobs': 5}"] == [1, 0, 1], result


def test_memory_that_is_exhausted_in_a_step(driver: Path, package: Path) -> None:
    """It is an error of that step's requests alone; the engine goes on, and gives their pages to others."""
    script = """
from untorch.llm import Engine, SamplingParams
params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
with Engine(path, kv_memory="64KiB", max_sequences=4, max_batch_tokens=64, text=False, cuda_graphs=False) as engine:
    found["before"] = engine.generate([[1, 2, 3]], params)[0].finish_reason
    hogs, size = [], 1 << 30
    while size >= 512:  # until nothing is left that a step of more tokens could have
        try:
            hogs.append(untorch.empty((size,), "uint8", "cuda:0"))
        except untorch.OutOfMemoryError:
            size //= 2
    output = engine.generate([list(range(1, 60))], params)[0]
    found["error"], found["kind"] = str(output.error), type(output.error).__name__
    stats = engine.stats()
    found["free"] = stats.blocks_free == stats.blocks and not stats.running and not stats.waiting
    hogs.clear()
    found["after"] = [one.finish_reason for one in engine.generate([list(range(1, 60)), [5]], params)]
"""
    result = found(driver, package, script, MEMORY=64 << 20)
    assert result["before"] == "length"
    assert result["kind"] == "OutOfMemoryError"
    assert "out of memory on cuda:0: asked for" in result["error"]
    assert result["free"]
    assert result["after"] == ["length", "length"]


def test_copied_rows(driver: Path, package: Path) -> None:
    script = """
pool = untorch.empty((3, 16), "bfloat16", "cuda:1")
x = np.arange(48, dtype=np.uint16).reshape(3, 16)
data = (ctypes.c_uint16 * 48).from_address(address_in_use())
data[:] = x.ravel().tolist()
pool.copy_row(0, 2)
found["rows"] = list(data[:16]) == list(data[32:]) and list(data[16:32]) == list(range(16, 32))
host = untorch.zeros((2, 4), "int64")
host.numpy()[1] = 7
host.copy_row(1, 0)
found["host"] = host.numpy().tolist()
try:
    host.copy_row(0, 2)
except untorch.InvalidArgumentError as error:
    found["error"] = str(error)
"""
    address = """
def address_in_use():
    data = ctypes.c_void_p()
    assert fake.fake_block(1, 0, ctypes.byref(data))
    return data.value
"""
    result = found(driver, package, address + script)
    assert result["rows"] and result["host"] == [[7] * 4] * 2
    assert "expected rows from 0 to 1, got 2" in result["error"]


def test_copies_that_go_on_meanwhile(driver: Path, package: Path) -> None:
    script = """
x = untorch.zeros(6, "int64", "cuda:1")
data = (ctypes.c_int64 * 6).from_address(address_in_use())
data[:] = range(6)
x.copy_to_host_async()
data[:] = [9] * 6
x.copy_to_host_async()  # there is a copy already
found["first"] = x.numpy().tolist()  # of the time when it began
found["second"] = x.numpy().tolist()
x.copy_to_host_async()
del x  # waits for the copy that nobody took
host = untorch.zeros(2, "int64")
host.copy_to_host_async()
found["host"] = host.numpy().tolist()
"""
    address = """
def address_in_use():
    data = ctypes.c_void_p()
    assert fake.fake_block(1, 0, ctypes.byref(data))
    return data.value
"""
    result = found(driver, package, address + script)
    assert result["first"] == [0, 1, 2, 3, 4, 5] and result["second"] == [9] * 6 and result["host"] == [0, 0]


def test_heads_that_do_not_fit(tmp_path: Path) -> None:
    from tests.conformance.language_models import make_model

    model = make_model("Llama", head_dim=320)
    with pytest.raises(
        CompileError, match=r"expected heads of at most 256 for keys and 256 for values on a GPU in float"
    ):
        causal_lm(model, tmp_path / "m.pt2", device="cuda", arch="sm_80", token_counts=(16,), progress=False)


def test_the_layers_between_two_attentions(driver: Path, tmp_path: Path) -> None:
    """One operator a layer; for several tokens its kernels are those of the layers, with one between two of them."""
    from tests.conformance.language_models import make_model
    from untorch.quant import quantize

    pytest.importorskip("triton")
    model = make_model("Qwen2", hidden_size=256, intermediate_size=512).to(torch.bfloat16)
    quantize(model, dtype="int4", method="rtn", group_size=64, target="cuda", progress=False)
    path = tmp_path / "m.pt2"
    report = causal_lm(model, path, device="cuda", arch="sm_90", token_counts=(16,), keep_sources=True, progress=False)
    [entry] = [entry for entry in report.methods["step_16"].passes if entry.name == "fuse_decoder_linears"]
    assert len(entry.changed) == 3 and not entry.skipped
    with ArchiveReader(path) as archive:
        manifest = archive.manifest()
        [name] = [e.name for e in archive if e.name.endswith("wrapper.cpp") and "step_16" in e.name]
        body = archive.read(name).decode().partition("run_impl(")[2]
    functions = re.findall(r"ERROR_CODE_CHECK\((aoti_torch_cuda_\w+)\(", body)
    counts = {name.removeprefix("aoti_torch_cuda_"): functions.count(name) for name in functions}
    # The first q, k and v, with a bias, and the head.
    assert counts == {"decoder_linears": 3, "paged_prefill_decode": 3, "int4_linear": 2}
    kernels = [line for line in body.splitlines() if line.strip().startswith("call_triton_")]
    assert len(kernels) <= 8, kernels  # of the embedding, the first norm, the tables and the rows
    quantised = manifest["methods"]["step_16"]["quantization"]
    assert {entry["operator"] for entry in quantised} == {"int4_linear"}
    assert len(quantised) == 4 * 3 + 1
    script = """
from untorch.llm import Engine, SamplingParams
with Engine(path, kv_memory="256KiB", max_sequences=4, max_batch_tokens=16, text=False, cuda_graphs=False) as engine:
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    outputs = engine.generate([[1, 2, 3], list(range(1, 40)), [5]], params)
    found["counts"] = [len(output.completions[0].token_ids) for output in outputs]
launches = fake.fake_launches().decode()
found["swiglu"], found["norms"] = launches.count("silu_and_mul_kernel"), launches.count("normalise")
found["decodes"] = launches.count("paged_decode")
def decoding():
    names = fake.fake_launches().decode().split()
    return sum("paged_decode_kernel" in name for name in names), names.count("paged_decode")
found["few"] = decoding()
with Engine(path, kv_memory="1MiB", max_sequences=16, max_batch_tokens=32, text=False, cuda_graphs=False) as engine:
    engine.generate([[i] * 3 for i in range(12)], params)
found["many"] = decoding()
"""
    result = found(driver, path, script)
    assert result["counts"] == [3, 3, 3]
    # One kernel decodes for few sequences; for more than it has clusters for, Triton's do.
    assert result["few"][0] > 0 and result["few"][1] == 0 and result["many"][1] > 0
    assert result["swiglu"] > 0 and result["swiglu"] % 3 == 0 and result["norms"] == 2 * result["swiglu"]
    assert result["swiglu"] <= result["decodes"]
