"""From logits to labels with scores."""

from __future__ import annotations

import numpy as np
import pytest

from untorch.pipeline.scores import activation_of, best, sigmoid, softmax
from untorch.pipeline.settings import Settings
from untorch.runtime.errors import InvalidArgumentError


def test_softmax_and_sigmoid_do_not_overflow() -> None:
    logits = np.array([[1000.0, 0.0], [1.0, 2.0]], np.float32)
    np.testing.assert_allclose(softmax(logits), [[1, 0], [0.26894143, 0.7310586]], rtol=1e-6)
    np.testing.assert_allclose(sigmoid(np.array([-1000.0, 0.0, 1000.0])), [0, 0.5, 1])


def test_best_falls() -> None:
    scores = np.array([0.2, 0.5, 0.3], np.float32)
    assert [one["label"] for one in best(scores, ["a", "b", "c"], 2)] == ["b", "c"]
    assert len(best(scores, ["a", "b", "c"], None)) == 3


@pytest.mark.parametrize("name", ["tanh", "", 0, np.array([1, 2]), ["softmax"]])
def test_an_unknown_activation(name: object) -> None:
    with pytest.raises(InvalidArgumentError, match="function_to_apply: expected softmax, sigmoid, none, got "):
        activation_of({"function_to_apply": name}, Settings({"activation": "softmax"}, "m.pt2"))


def test_the_models_activation() -> None:
    settings = Settings({"activation": "sigmoid"}, "m.pt2")
    assert activation_of({}, settings) == activation_of({"function_to_apply": None}, settings) == "sigmoid"
    assert activation_of({"function_to_apply": "none"}, settings) == "none"
