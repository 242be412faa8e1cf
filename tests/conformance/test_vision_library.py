"""Models of timm and torchvision by name: labels and scores equal to their own, with their preprocessing, torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import recipe_models
from tests.warm_process import run_warm

ROOT = Path(__file__).parents[2]
TIMM = ROOT / "build" / "timm"
# The first is of a size whose crop has half a pixel.
MODELS = {"timm": "test_vit", "torchvision": "squeezenet1_1"}

# torchvision is there for this process alone, with operators in Python.
MAKE = """
import json, pathlib, warnings
warnings.simplefilter("ignore")
from tests import recipe_models
from tests.torchvision_ops import import_torchvision
torchvision = import_torchvision()
sys.path.insert(0, sys.argv[1])
import torch
from PIL import Image
library, name, folder = sys.argv[2], sys.argv[3], pathlib.Path(sys.argv[4])
torch.manual_seed(0)
if library == "timm":
    import timm
    model = timm.create_model(name)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
else:
    model = torchvision.models.get_model(name)
    transform = torchvision.models.get_model_weights(name).DEFAULT.transforms()
with torch.no_grad():
    for part, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.mul_(1.5)
torch.save(model.state_dict(), folder / "weights.pth")
scores = []
for picture in recipe_models.inputs_for("image-classification")[0]:
    with torch.no_grad():
        scores.append(model.eval()(transform(Image.fromarray(picture))[None]).softmax(-1)[0].topk(7))
from untorch.export import CompileError, export_folder
report = export_folder(f"{library}/{name}", folder / "model.pt2", state_dict=folder / "weights.pth", progress=False)
torch.save({"a": torch.zeros(1)}, folder / "wrong.pth")
errors = []
for given, weights in ((f"{library}/{name}_", "random"), (f"{library}/{name}", folder / "none.pth"),
                       (f"{library}/{name}", folder / "wrong.pth")):
    try:
        export_folder(given, folder / "other.pt2", state_dict=weights, progress=False)
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")
print(json.dumps({"scores": [s.values.tolist() for s in scores], "indices": [s.indices.tolist() for s in scores],
                  "errors": errors}))
"""


@pytest.mark.parametrize("library", MODELS)
def test_scores_equal_the_librarys(library: str, tmp_path: Path) -> None:
    if not (ROOT / "build" / "torchvision").is_dir() or (library == "timm" and not TIMM.is_dir()):
        pytest.skip("make puts timm and torchvision into build/")
    script = tmp_path / "make.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{MAKE}")
    done = run_warm([script, TIMM, library, MODELS[library], tmp_path], timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    wanted: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found = recipe_models.run_without_torch(tmp_path / "model.pt2", "image-classification")
    for row, scores in zip(found, wanted["scores"], strict=True):
        assert [one["score"] for one in row] == pytest.approx(scores, abs=1e-5)
    labels = {index: one["label"] for row, indices in zip(found, wanted["indices"], strict=True)
              for index, one in zip(indices, row, strict=True)}  # fmt: skip
    assert len(labels) > 7, "what is seen matters"
    assert all(labels.values())
    unknown, missing, wrong = wanted["errors"]
    assert unknown.startswith(f"CompileError: export_folder: {library}/{MODELS[library]}_: {library} has no model for")
    assert MODELS[library] in unknown.partition("such as")[2]
    assert missing.startswith("FileMissingError: export_folder: state_dict: there is no file")
    assert wrong.startswith("InvalidArgumentError: export_folder: state_dict: ")
    assert "expected a state dict of" in wrong
