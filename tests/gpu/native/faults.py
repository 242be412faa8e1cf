"""Asynchronous errors: what a kernel reports about its values, raised by the next shim call."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from tests.native.shim import ShimError, call


def fault_of(name: str, *args: Any, returns: int = 0) -> str:
    """The report that a call leads to, here or in the next one; nothing is left of it afterwards."""
    probe = torch.ones(3, device="cuda")
    text = ""
    try:
        call(name, *args, returns=returns)  # copying a result out may find it already
        torch.cuda.synchronize()
        call("aoti_torch_cuda_abs", probe, returns=1)
    except ShimError as error:
        text = str(error)
    torch.cuda.synchronize()
    with contextlib.suppress(ShimError):  # several threads may report: one after the first was read
        call("aoti_torch_cuda_abs", probe, returns=1)
    assert torch.equal(call("aoti_torch_cuda_abs", probe, returns=1), probe)  # the device lives
    return text
