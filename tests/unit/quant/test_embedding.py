"""Quantised tables of embeddings: rows beside the dequantised table, ties to linear layers, and a file from end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import untorch
from untorch.export import export
from untorch.quant import Int4Embedding, Int8Embedding, quantize
from untorch.runtime.errors import InvalidArgumentError

from .test_apply import NAMES, Model

WAYS = ({"dtype": "int8"}, {"dtype": "int4", "group_size": 32}, {"dtype": "int4", "group_size": 256, "method": "rtn"})


def table(rows: int, width: int, dtype: torch.dtype = torch.float32) -> nn.ModuleDict:
    torch.manual_seed(rows + width)
    return nn.ModuleDict({"table": nn.Embedding(rows, width, dtype=dtype)})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(16, 128), (37, 384), (5, 200), (129, 1000)])
def test_rows_are_those_of_the_dequantised_table(
    way: dict[str, Any], dtype: torch.dtype, rows: int, width: int
) -> None:
    module = table(rows, width, dtype)
    before = module["table"].weight.detach().float()  # type: ignore[union-attr, operator]
    [layer] = quantize(module, **way, include="table", embeddings=True, progress=False).layers
    part = module["table"]
    assert isinstance(part, Int8Embedding | Int4Embedding)
    assert layer.shape == (rows, width)
    assert layer.quantized_dtype == way["dtype"]
    for ids in (torch.arange(rows), torch.randint(0, rows, (2, 3)), torch.zeros((), dtype=torch.int32)):
        found = part(ids)
        assert found.dtype == dtype
        assert found.shape == (*ids.shape, width)
        torch.testing.assert_close(found.float(), part.dequantize(dtype)[ids.long()].float(), rtol=2e-2, atol=2e-2)
        if dtype == torch.float32:
            torch.testing.assert_close(found, part.dequantize()[ids.long()], rtol=1e-6, atol=1e-6)
    error = float((part(torch.arange(rows)).float() - before).norm() / before.norm())
    assert error == pytest.approx(layer.error, rel=0.05)
    assert error < (0.01 if way["dtype"] == "int8" else 0.15)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrong", [-1, 37, 39, 4000])
def test_ids_that_the_table_does_not_have(way: dict[str, Any], wrong: int) -> None:
    module = table(37, 256)
    quantize(module, **way, include="table", embeddings=True, progress=False)
    with pytest.raises(IndexError):
        module["table"](torch.tensor([1, wrong]))


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_tied_head_shares_the_tensors(dtype: str) -> None:
    model = Model(tied=True).eval()
    before = Model(tied=True).eval()
    report = quantize(model, dtype, embeddings=True, progress=False)
    assert [layer.names for layer in report.layers] == [*((name,) for name in NAMES[:-1]), ("head", "embed")]
    assert all(layer.kept_by == () for layer in report.layers)
    assert model.embed.packed_weight is model.head.packed_weight
    assert report.module_nbytes_after < report.module_nbytes_before / 3
    ids = torch.randint(0, 100, (2, 7))
    with torch.no_grad():
        assert (model(ids) - before(ids)).norm() / before(ids).norm() < (0.03 if dtype == "int8" else 0.3)


def test_to_another_dtype() -> None:
    for way in WAYS:
        module = table(16, 128)
        quantize(module, **way, include="table", embeddings=True, progress=False)
        assert module.half()["table"](torch.arange(3)).dtype == torch.float16
        assert "method=" in repr(module["table"])
    module = table(16, 128)
    quantize(module, "int8", embeddings=True, progress=False)
    assert module.bfloat16()["table"].scale.dtype == torch.float32


def test_what_is_left_alone() -> None:
    class Scaled(nn.Embedding):
        pass

    model = nn.ModuleDict({
        "a": nn.Linear(256, 64), "scaled": Scaled(64, 256), "norm": nn.Embedding(64, 256, max_norm=1.0),
        "narrow": nn.Embedding(9, 1), "good": nn.Embedding(64, 256),
    })  # fmt: skip
    report = quantize(model, "int8", embeddings=True, progress=False)
    assert isinstance(model["good"], Int8Embedding)
    assert report.skipped == {
        "scaled": "it is a Scaled, not an nn.Embedding: something may extend its forward",
        "norm": "it has max_norm, which changes its rows when it is called",
        "narrow": "it would grow from 36 to 192 bytes",
    }
    with pytest.raises(InvalidArgumentError, match="nvfp4 is not for embeddings: take int8 or int4"):
        quantize(table(16, 128), "nvfp4", embeddings=True, progress=False)
    assert quantize(Model(), "int8", progress=False).layers[-1].names == ("head",)  # not asked for


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, while it exports
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_file_has_the_tied_table_once(dtype: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model(tied=True).eval()
    ids = torch.randint(0, 100, (2, 7))
    path = tmp_path / "tied.pt2"
    report = export(
        model, (ids,), path, quantize={"dtype": dtype, "embeddings": True}, verify=True, progress=False,
        dynamic_shapes=({1: torch.export.Dim("tokens", min=1, max=64)},),
    )  # fmt: skip
    quantization = report.methods["forward"].quantization
    assert quantization is not None
    assert report.weight_nbytes < quantization.module_nbytes_after + 4096
    quantize(model, dtype, embeddings=True, progress=False)
    program = untorch.load(path)
    for count in (1, 7, 33):
        ids = torch.randint(0, 100, (2, count))
        with torch.no_grad():
            expected = model(ids).numpy()
        numpy.testing.assert_allclose(program(ids.numpy()), expected, rtol=1e-4, atol=1e-4)
