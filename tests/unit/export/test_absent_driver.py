"""What torch does while it compiles for a GPU that is not there; test_absent_gpu.py has what comes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from untorch.export import export
from untorch.export.absent_driver import pretend
from untorch.export.gpus import find_gpu

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own


class Masked(nn.Module):
    """Where everything is kept, by a mask that is one value everywhere."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.full((), True, device=x.device).expand(x.shape[0], 1).logical_not().to(x.dtype)
        return torch.where(mask == 0, x * 2, mask)


def test_values_that_are_known_beforehand(tmp_path: Path) -> None:
    """What torch works out while it compiles must not need the GPU."""
    report = export(Masked(), (torch.ones(4, 8),), tmp_path / "a.pt2", device="cuda", arch="sm_90", progress=False)
    assert not {"aoti_torch_cuda_full", "aoti_torch_cuda_where"} & set(report.methods["forward"].operators)


def test_copies_that_are_contiguous() -> None:
    """torch's own method asks for the current device, which only a GPU that is there has."""
    own = torch.Tensor.contiguous
    image = torch.arange(24.0).reshape(1, 2, 3, 4)
    with pretend(find_gpu("sm_90"), {}, {}):
        assert torch.Tensor.contiguous is not own
        turned = image.mT.contiguous()
        last = image.contiguous(memory_format=torch.channels_last)
        assert image.contiguous() is image
    assert torch.Tensor.contiguous is own
    assert turned.is_contiguous()
    assert torch.equal(turned, image.mT)
    assert last.stride() == (24, 1, 8, 2)
    assert torch.equal(last, image)
