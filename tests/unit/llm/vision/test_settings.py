"""A package's image encoder in its manifest."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.llm.vision.encoders import settings
from untorch.llm.vision.settings import read_vision
from untorch.runtime.errors import InvalidFileError, UnsupportedError

MADE = settings(tables=("axes", "windows"), window_side=4)


def test_through_the_manifest() -> None:
    assert read_vision({"vision": json.loads(json.dumps(MADE.to_json()))}, "a.pt2") == MADE
    assert read_vision({}, "a.pt2") is None


@pytest.mark.parametrize(
    "change",
    [
        {"patch_size": 0}, {"merge_size": 1 << 20}, {"max_pixels": 3}, {"deviation": [1, 0, 1]}, {"mean": [1]},
        {"window_side": 0}, {"grid_side": 3}, {"placeholder": -1}, {"resample": 9}, {"method": None, "rescale": "x"},
    ],
)  # fmt: skip
def test_damaged(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidFileError, match=r"^a\.pt2: the manifest's image encoder is damaged: "):
        read_vision({"vision": {**MADE.to_json(), **change}}, "a.pt2")


def test_of_a_newer_untorch() -> None:
    with pytest.raises(UnsupportedError) as caught:
        read_vision({"vision": {**MADE.to_json(), "tables": ["axes", "time"]}}, "a.pt2")
    assert str(caught.value) == (
        "a.pt2: its image encoder has format 1 and tables axes, time, this untorch reads 1 with axes, position_grid, "
        "windows: export it again, or upgrade untorch"
    )
