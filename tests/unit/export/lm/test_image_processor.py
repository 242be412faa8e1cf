"""Image processors of transformers, as settings that need no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.vision_models import image_processor, make_model
from untorch import ArgumentTypeError, InvalidArgumentError
from untorch.export import CompileError
from untorch.export.lm.image_processor import read_image_processor, vision_settings
from untorch.llm.vision.patches import cut_patches

pytestmark = pytest.mark.filterwarnings("ignore")


def settings(processor: Any) -> Any:
    model = make_model("Qwen2_5_VL")
    return vision_settings(model, model.base_model.visual, processor, ("axes", "windows"))


def test_patches_are_those_of_transformers() -> None:
    processor = image_processor()
    made = settings(processor)
    assert (made.window_side, made.placeholder, made.min_pixels, made.max_pixels) == (2, 260, 64, 4096)
    rng = np.random.default_rng(0)
    for size in ((64, 64), (13, 200), (300, 171), (5, 4)):
        image = Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8))
        expected, found = processor(images=[image], return_tensors="np"), cut_patches(image, made)
        assert expected["image_grid_thw"].tolist() == [[1, 2 * found.rows, 2 * found.columns]]
        np.testing.assert_allclose(found.pixels.reshape(-1, 96), expected["pixel_values"], atol=1e-5)


def test_where_it_comes_from(tmp_path: Path) -> None:
    processor = image_processor()
    processor.save_pretrained(tmp_path)
    for given, folder in ((tmp_path, None), (str(tmp_path), None), (None, tmp_path)):
        assert read_image_processor(given, folder).size == processor.size
    assert read_image_processor(type("Processor", (), {"image_processor": processor})(), None) is processor
    with pytest.raises(InvalidArgumentError) as caught:
        read_image_processor(None, None)
    assert str(caught.value) == (
        "causal_lm: image_processor: expected one of transformers, or its folder, as the model is a module, got none"
    )
    with pytest.raises(ArgumentTypeError, match=r"^causal_lm: image_processor: expected a folder, or .*, got int$"):
        read_image_processor(5, None)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(InvalidArgumentError, match=r"^causal_lm: image_processor: .* has none: "):
        read_image_processor(None, tmp_path)


def test_sizes_of_another_model() -> None:
    processor = image_processor()
    processor.patch_size = 14
    with pytest.raises(InvalidArgumentError) as caught:
        settings(processor)
    assert str(caught.value) == "causal_lm: image_processor: patch_size: expected the model's 4, got 14"


def test_processors_that_do_something_else() -> None:
    processor = image_processor()
    processor.do_normalize = False
    with pytest.raises(CompileError, match=r"expected it to resize, rescale and normalise$"):
        settings(processor)

    class Mirrored(type(image_processor())):  # type: ignore[misc]
        def patchify(self, image: np.ndarray, *given: Any, **named: Any) -> Any:
            return super().patchify(image[..., ::-1], *given, **named)

    with pytest.raises(CompileError, match=r"the patches of Mirrored differ by .*: it does more than that$"):
        settings(Mirrored(**{name: getattr(image_processor(), name) for name in ("patch_size", "merge_size", "size")}))
