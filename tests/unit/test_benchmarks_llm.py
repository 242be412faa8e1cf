"""cpu_llm.py: how a language model's process measures and compares, and what the files of one size share."""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import sys
import types
from collections.abc import Iterator, Sequence

import numpy
import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
MODULES = ("common", "models", "runtimes", "llm_models", "llm_runtimes", "llm_worker", "cpu_llm")


@pytest.fixture
def load(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """The modules, with a working folder of their own."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    modules = {name: importlib.import_module(name) for name in MODULES}
    for name in ("common", "llm_models"):
        monkeypatch.setattr(modules[name], "WORK", tmp_path)
    yield types.SimpleNamespace(**modules)
    for name in MODULES:
        sys.modules.pop(name, None)


class Clock:
    """A model whose tokens come at times that are known. Keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int]] = []

    def generate(self, prompt: Sequence[int], count: int) -> list[float]:
        self.asked.append((list(prompt), count))
        return [3.0 + i for i in range(count)]

    def logits(self, prompt: Sequence[int]) -> numpy.ndarray:
        return numpy.array([1.0, 2.0, 4.0], numpy.float32)


def test_decoding_is_timed_between_tokens(load: types.SimpleNamespace) -> None:
    model = Clock()
    assert load.llm_worker.measure(model, list(range(32)), 4, 0.0) == [1.0, 1.0, 1.0]
    assert model.asked == [(list(range(16, 32)), 2), ([*range(1, 32), 0], 4)]


def test_a_prompt_is_timed_to_its_first_token(load: types.SimpleNamespace) -> None:
    assert load.llm_worker.measure(Clock(), [1, 2, 3], 1, 0.0) == [3.0]


def test_an_answer_that_is_too_short_ends_the_process(load: types.SimpleNamespace) -> None:
    model = Clock()
    model.generate = lambda prompt, count: [1.0]  # type: ignore[method-assign]
    with pytest.raises(SystemExit, match="expected 3 tokens, got 1"):
        load.llm_worker.measure(model, [1], 3, 0.0)


def test_distance_ignores_what_a_softmax_does_not_see(load: types.SimpleNamespace) -> None:
    distance = load.llm_worker.cosine_distance
    row = numpy.array([1.0, 2.0, 4.0], numpy.float32)
    assert distance(row + 7, row) == pytest.approx(0, abs=1e-12)
    assert distance(-row, row) == pytest.approx(2)
    assert distance(numpy.array([1.0, -2.0, 1.0]), numpy.array([1.0, 0.0, -1.0])) == pytest.approx(1)
    assert not distance(numpy.array([1.0, numpy.nan, 2.0]), row) <= 1


def test_logits_are_compared_with_those_of_the_case(load: types.SimpleNamespace, tmp_path: pathlib.Path) -> None:
    numpy.savez(tmp_path / "logits.npz", decode=[1.0, 2.0, 4.0], prefill=[-1.0, -2.0, -4.0])
    reference = str(tmp_path / "logits.npz")
    difference = load.llm_worker.difference
    assert difference(Clock(), "llm_a_decode.npz", [1], reference) == pytest.approx(0, abs=1e-12)
    assert difference(Clock(), "llm_a_prefill.npz", [1], reference) == pytest.approx(2)
    assert difference(Clock(), "llm_a_prefill.npz", [1], None) == 0.0


def test_the_reader_takes_turns_in_a_process_of_its_own(
    load: types.SimpleNamespace, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNTORCH_BENCH_READ_BYTES", str(1 << 20))
    monkeypatch.setattr(load.llm_runtimes, "READ_BYTES", 1 << 20)
    reader = load.llm_runtimes.Reader("", 2)
    assert sum(part.nbytes for part in reader._parts) == 1 << 20
    assert len(reader.generate([], 3)) == 3
    numpy.savez(tmp_path / "llm_a_decode.npz", prompt=[1, 2], tokens=3)
    entry = load.common.Contestant("read", "reader", "read", "", {}, "llm_worker.py")
    with load.common.Workers([entry], 1) as workers:
        assert workers.check(["llm_a_decode"], 0.0) == {"read": {"llm_a_decode": 0.0}}
        times = workers.rounds(["llm_a_decode"], 1, 0.0)["read"]["llm_a_decode"]
    assert len(times[0]) == 2
    assert min(times[0]) > 0


def test_a_runtime_that_is_not_installed_is_left_out(
    load: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load.llm_models, "has_module", lambda name: name == "llama_cpp")
    without = load.cpu_llm.missing()
    assert list(without) == ["openvino"]
    assert without["openvino"].endswith("has no module openvino_genai")
    found = load.cpu_llm.contestants("qwen3_0.6b", without)
    assert [key for key in found if not key.startswith("untorch_")] == ["llama.cpp_q4_0", "llama.cpp_q8_0", "read"]
    assert all(contestant.worker == "llm_worker.py" for contestant, _ in found.values())


def test_an_unknown_size_is_refused(load: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNTORCH_BENCH_MODELS", "qwen3_0.6b other")
    with pytest.raises(
        SystemExit, match=r"UNTORCH_BENCH_MODELS: expected names of qwen3_0.6b, llama3.2_1b, qwen3_moe, got other"
    ):
        load.llm_models.wanted()


def test_rotary_pairs_of_llama_are_permuted_and_back(load: types.SimpleNamespace) -> None:
    builder = load.llm_models.Builder("llama3.2_1b", None, {}, {})
    values = numpy.arange(128 * 2).reshape(128, 2)  # two heads of 64
    permuted = builder._permute("layers.0.q_proj.weight", values)
    # Pairs (i, i + 32) of a head lie side by side.
    assert permuted[:4, 0].tolist() == [0, 64, 2, 66]
    assert permuted[64:68, 0].tolist() == [128, 192, 130, 194]
    numpy.testing.assert_array_equal(builder._permute("layers.0.q_proj.weight", permuted, back=True), values)
    assert builder._permute("layers.0.v_proj.weight", values) is values
    assert load.llm_models.Builder("qwen3_0.6b", None, {}, {})._permute("q_proj.weight", values) is values


def test_every_size_and_variant_has_files_of_its_own(load: types.SimpleNamespace) -> None:
    models = load.llm_models
    files = [models.package_file(size, name) for size in models.SIZES for name in models.VARIANTS]
    files += [models.gguf_file(size, form) for size in models.SIZES for form in models.GGUF]
    assert len(set(files)) == len(files)
    labels = [variant.label for variant in models.VARIANTS.values()]
    assert len(set(labels)) == len(labels)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="gguf is not installed")
@pytest.mark.parametrize("size", ["qwen3_0.6b", "llama3.2_1b"])
def test_a_gguf_file_of_a_tiny_model_has_its_weights(
    load: types.SimpleNamespace, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("transformers")
    models = load.llm_models
    tiny = {
        "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    }  # fmt: skip
    spec = models.SIZES[size]
    monkeypatch.setitem(models.SIZES, size, models.Size("Tiny", spec.kind, {**spec.config, **tiny}))
    builder = models.Builder.make(size)
    builder.facts = builder.count()
    builder.refer("float32")
    builder.gguf("q8_0")
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / models.gguf_file(size, "q8_0")).tensors}
    value = builder.kept["model.layers.1.self_attn.v_proj.weight"].float().numpy()
    stored = gguf.quants.dequantize(tensors["blk.1.attn_v.weight"].data, tensors["blk.1.attn_v.weight"].tensor_type)
    assert numpy.abs(stored - value).max() < 0.005 * numpy.abs(value).max()
    assert ("blk.1.attn_q_norm.weight" in tensors) == (spec.kind == "qwen3")
    assert sum(t.n_bytes for t in tensors.values()) == builder.facts["bytes"]["q8_0"]
    for variant in models.VARIANTS:
        builder.refer_to_variant(variant)
    # Rounding the weights changes the logits, the more the fewer bits.
    lost = {name: load.cpu_llm.lost(size, name) for name in ("q8_0", "int8", "int4")}
    assert 0 < lost["q8_0"] < lost["int4"] < 0.2
    assert 0 < lost["int8"] < lost["int4"]
