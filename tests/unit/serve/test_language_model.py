"""Language models by the Open Inference Protocol that embed or classify."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.unit.serve.openai.api import ScriptRunner
from untorch import InvalidArgumentError
from untorch.llm import Engine
from untorch.serve.errors import DeadlineError, NotReadyError
from untorch.serve.language_model import LanguageModel


def texts(*given: str) -> dict[str, Any]:
    array = np.empty(len(given), object)
    array[:] = [text.encode() for text in given]
    return {"text_input": array}


def infer(model: LanguageModel, *given: str, timeout: float | None = 5.0, **parameters: Any) -> dict[str, Any]:
    return asyncio.run(model.infer(texts(*given), parameters, timeout))


@pytest.mark.parametrize(("task", "port"), [("embed", "embedding"), ("classify", "scores")])
def test_vectors(task: str, port: str) -> None:
    runner = ScriptRunner("Hi", task=task, width=258, normalize=task == "embed")
    with Engine(runner, max_batch_tokens=64, max_sequences=8) as engine:
        model = LanguageModel("m", engine)
        assert [one.to_json() for one in model.outputs] == [{"name": port, "datatype": "FP32", "shape": [-1, 258]}]
        assert model.describe()["task"] == task
        found = infer(model, "ab", "c")[port]
        assert found.shape == (2, 258) and found.dtype == np.float32
        expected = engine.embed(["ab", "c"]) if task == "embed" else engine.classify(["ab", "c"])
        np.testing.assert_array_equal(found, expected)
        with pytest.raises(InvalidArgumentError, match="model 'm': parameter 'max_tokens': expected none"):
            infer(model, "ab", max_tokens=3)
        runner.pace = 0.2
        with pytest.raises(DeadlineError, match=r"model 'm': it was not computed within 0\.01 s"):
            infer(model, "x" * 200, timeout=0.01)  # in several steps


def test_text() -> None:
    with Engine(ScriptRunner("Hi"), max_batch_tokens=64, max_sequences=8) as engine:
        model = LanguageModel("m", engine)
        assert model.describe() == {"architecture": "", "task": "generate", "max_positions": 1000}
        assert infer(model, "ab", max_tokens=20)["text_output"].tolist() == ["Hi"]


@pytest.mark.parametrize("task", ["generate", "embed"])
def test_a_model_that_is_unloaded_meanwhile(task: str) -> None:
    """A part of a text is no answer."""
    runner = ScriptRunner("Hello, everybody", task=task, width=258)
    runner.pace = 0.05

    async def run(engine: Engine) -> None:
        call = asyncio.create_task(LanguageModel("m", engine).infer(texts("x" * 200), {}, 5.0))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(engine.close)
        what = "the text was generated" if task == "generate" else "it was computed"
        with pytest.raises(NotReadyError, match=f"model 'm' was unloaded before {what}"):
            await call

    with Engine(runner, max_batch_tokens=8, max_sequences=8) as engine:
        asyncio.run(run(engine))
