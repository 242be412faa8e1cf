"""The runtimes of cpu_llm.py behind one face: a model that generates greedily, and gives the logits behind a prompt.

Each runtime is imported when it is opened. As a script it writes OpenVINO's IR beside the GGUF file that it is given.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy
from runtimes import import_openvino

Array: TypeAlias = "numpy.ndarray[Any, Any]"
# A pass over the array of Reader: many times a cache.
READ_BYTES = int(os.environ.get("UNTORCH_BENCH_READ_BYTES", 1 << 30))
IR = "openvino_model.xml"
POSITIONS = 1024  # of a sequence: prompt and answer


class Model(ABC):
    """A model in a runtime."""

    @abstractmethod
    def generate(self, prompt: Sequence[int], count: int) -> list[float]:
        """Generate that many tokens behind the prompt, the most likely ones: seconds from the start to each token."""

    @abstractmethod
    def logits(self, prompt: Sequence[int]) -> Array:
        """Of the token behind the prompt, float32 [vocabulary], up to a constant."""


class Untorch(Model):
    """untorch's engine, without its prefix cache."""

    def __init__(self, file: str, threads: int) -> None:
        from untorch.llm import Engine

        self._engine = Engine(file, num_threads=threads, text=False, max_sequences=1, prefix_cache=False)
        if "torch" in sys.modules:
            raise SystemExit("untorch.llm imported torch")

    def generate(self, prompt: Sequence[int], count: int) -> list[float]:
        """By the engine, as a stream."""
        from untorch.llm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        begin = time.perf_counter()
        times: list[float] = []
        for chunk in self._engine.submit(prompt, params):
            times += [time.perf_counter() - begin] * len(chunk.token_ids)
        return times

    def logits(self, prompt: Sequence[int]) -> Array:
        """By the logprobs of all tokens."""
        from untorch.llm import SamplingParams

        width = self._engine.settings.vocabulary
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=width, ignore_eos=True)
        logprobs = self._engine.generate(prompt, params).logprobs
        assert logprobs is not None
        found = numpy.full(width, numpy.nan, numpy.float32)
        for token, value in logprobs[0].top:
            found[token] = value
        return found


class LlamaCpp(Model):
    """llama.cpp with its defaults: memory-mapped, weights repacked for the CPU, keys and values in float16."""

    def __init__(self, file: str, threads: int) -> None:
        import llama_cpp  # type: ignore[import-untyped,import-not-found,unused-ignore]

        self._library = llama_cpp
        self._model = llama_cpp.Llama(
            file, n_ctx=POSITIONS, n_batch=512, n_ubatch=512, n_threads=threads, n_threads_batch=threads, verbose=False
        )

    def generate(self, prompt: Sequence[int], count: int) -> list[float]:
        """By ``Llama.generate``, as an application would."""
        begin = time.perf_counter()
        times: list[float] = []
        for _ in self._model.generate(prompt, temp=0.0):
            times.append(time.perf_counter() - begin)
            if len(times) == count:
                break
        return times

    def logits(self, prompt: Sequence[int]) -> Array:
        """As the library has them after the prompt."""
        self._model.reset()
        self._model.eval(prompt)
        pointer = self._library.llama_get_logits(self._model.ctx)
        width = self._model.n_vocab()
        return numpy.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (width,)).copy()


class OpenVino(Model):
    """OpenVINO with its defaults, tuned for latency, over the stateful IR that OpenVINO GenAI made of a GGUF file.

    Not by GenAI's pipeline: that of 2026.4 does not compile these graphs ("ReadValue contains dead weak ptr"). As the
    pipeline does, the last layer gets the last token alone.
    """

    def __init__(self, folder: str, threads: int) -> None:
        openvino = import_openvino()
        opset = openvino.opset13
        core = openvino.Core()
        model = core.read_model(str(pathlib.Path(folder) / IR))
        node = model.get_results()[0]
        while node.get_type_name() != "MatMul":
            node = node.input(0).get_source_output().get_node()
        hidden = node.input(0).get_source_output()
        last = opset.slice(hidden, [-1], [numpy.iinfo(numpy.int64).max], [1], [1])
        node.input(0).replace_source_output(last.output(0))
        model.validate_nodes_and_infer_types()
        properties = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
        self._request = core.compile_model(model, "CPU", properties).create_infer_request()

    def generate(self, prompt: Sequence[int], count: int) -> list[float]:
        """A loop over the stateful request, with the most likely token."""
        begin = time.perf_counter()
        times: list[float] = []
        self._request.reset_state()
        tokens, past = list(prompt), 0
        while len(times) < count:
            row = self._step(tokens, past)
            past += len(tokens)
            tokens = [int(row.argmax())]
            times.append(time.perf_counter() - begin)
        return times

    def logits(self, prompt: Sequence[int]) -> Array:
        """Of the last token."""
        self._request.reset_state()
        return self._step(prompt, 0).copy()

    def _step(self, tokens: Sequence[int], past: int) -> Array:
        feed = {
            "input_ids": numpy.array([tokens], numpy.int64),
            "attention_mask": numpy.ones((1, past + len(tokens)), numpy.int64),
            "position_ids": numpy.arange(past, past + len(tokens), dtype=numpy.int64)[None],
            "beam_idx": numpy.zeros(1, numpy.int32),
        }
        row: Array = self._request.infer(feed, share_inputs=True, share_outputs=True)[0][0, -1]
        return row


class Reader(Model):
    """No model: every token is a pass over an array that no cache holds, to find the bandwidth of reading."""

    def __init__(self, file: str, threads: int) -> None:
        words = numpy.ones(READ_BYTES // 8, numpy.int64)
        self._parts = numpy.array_split(words, threads)
        self._pool = ThreadPoolExecutor(threads)

    def generate(self, prompt: Sequence[int], count: int) -> list[float]:
        """A pass for each token."""
        begin = time.perf_counter()
        times = []
        for _ in range(count):
            list(self._pool.map(numpy.bitwise_or.reduce, self._parts))
            times.append(time.perf_counter() - begin)
        return times

    def logits(self, prompt: Sequence[int]) -> Array:
        """There are none."""
        raise NotImplementedError("the reader has no logits")


OPEN: dict[str, Callable[[str, int], Model]] = {
    "untorch": Untorch,
    "llama.cpp": LlamaCpp,
    "openvino": OpenVino,
    "read": Reader,
}


def convert(file: str) -> None:
    """OpenVINO's IR of a GGUF file, in its folder, by OpenVINO GenAI."""
    import_openvino()
    import openvino_genai  # type: ignore[import-untyped,import-not-found,unused-ignore]

    try:
        openvino_genai.LLMPipeline(file, "CPU", enable_save_ov_model=True)
    except RuntimeError as error:  # it compiles the graph behind writing it
        if "dead weak ptr" not in str(error):
            raise
    if not (pathlib.Path(file).parent / IR).exists():
        raise SystemExit(f"{file}: OpenVINO GenAI wrote no {IR}")


if __name__ == "__main__":
    convert(sys.argv[1])
