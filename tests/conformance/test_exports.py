"""Exports with options, from end to end: checked against eager by export itself, for an older CPU, several methods."""

from __future__ import annotations

import pathlib
import platform

import numpy
import pytest
import torch
from torch import nn

import untorch
from untorch.export import export

from .test_conformance import FAST_BUILD

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while it exports


class Encoder(nn.Module):
    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table, self.mix = table, nn.Linear(24, 24)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.mix(self.table(ids))).mean(1)


class Decoder(nn.Module):
    """Gives a score to each word: the encoder's table, used the other way round."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table = table

    def forward(self, code: torch.Tensor) -> torch.Tensor:
        return torch.softmax(code @ self.table.weight.T, -1)


def test_two_methods_share_a_weight_and_run_on_an_older_cpu(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    table = nn.Embedding(500, 24)
    encoder, decoder = Encoder(table).eval(), Decoder(table).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    path = tmp_path / "model.pt2"
    report = export(
        methods={
            "encode": {
                "model": encoder,
                "args": (torch.randint(0, 500, (2, 7)),),
                "dynamic_shapes": ({0: batch},),
            },
            "decode": {"model": decoder, "args": (torch.randn(2, 24),), "dynamic_shapes": ({0: batch},)},
        },
        path=path,
        cpu="x86-64-v3",
        verify=True,
        progress=False,
    )
    assert all(d.max_rel < 1e-5 for method in report.methods.values() for d in method.differences)
    # The table of 48,000 bytes is stored once.
    assert 48_000 <= report.weight_nbytes < 2 * 48_000
    ids = torch.randint(0, 500, (5, 7))
    with torch.no_grad():
        code = encoder(ids)
        scores = decoder(code)
    with untorch.load(path) as program:
        methods = program.manifest["methods"]
        used = [{c["weight"] for c in methods[name]["constants"]} for name in ("encode", "decode")]
        assert len(used[0] & used[1]) == 1
        assert methods["encode"]["cpu"]["target"] == "x86-64-v3"
        assert not any(feature.startswith("avx512") for feature in methods["encode"]["cpu"]["features"])
        got = program.encode(ids.numpy())
        numpy.testing.assert_allclose(got, code.numpy(), rtol=1e-5, atol=1e-6)
        numpy.testing.assert_allclose(program.decode(got), scores.numpy(), rtol=1e-5, atol=1e-7)


def test_verify_keeps_the_inputs_strides(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(4, 8, 3, padding=1).to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 9, 9).to(memory_format=torch.channels_last)
    report = export(model, (x,), tmp_path / "model.pt2", verify=True, progress=False, inductor=FAST_BUILD)
    assert report.methods["forward"].differences[0].max_rel < 1e-5


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="levels of x86-64")
def test_code_for_two_levels_of_cpus(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 16)).eval()
    levels, path, x = ("x86-64-v3", "x86-64-v4"), tmp_path / "model.pt2", torch.randn(3, 64)
    report = export(model, (x,), path, cpu=levels, progress=False, inductor=FAST_BUILD)
    assert report.weight_nbytes < 1.1 * sum(p.numel() * 4 for p in model.parameters())  # stored once
    program = untorch.load(path)
    assert program.manifest is not None
    method = program.manifest["methods"]["forward"]
    codes = [method, *method["variants"]]
    assert [code["cpu"]["target"] for code in codes] == list(levels)
    assert ["avx512f" in code["cpu"]["features"] for code in codes] == [False, True]
    assert method["library"].startswith("data/aotinductor/forward/")
    assert codes[1]["library"].startswith("data/aotinductor/forward.x86-64-v4/")
    with torch.no_grad():
        expected = model(x)
    numpy.testing.assert_allclose(program.forward(x.numpy()), expected, rtol=1e-5, atol=1e-5)


class Sequences(nn.Module):
    """Sequences of several lengths, packed and padded again."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(6, 20, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, (h, _) = self.cell(packed)
        return nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0], h


@pytest.mark.slow
def test_recurrent_modules_of_any_length(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    length, batch = torch.export.Dim("length", min=2, max=500), torch.export.Dim("batch", min=1, max=64)
    plain, packed = nn.GRU(6, 20, num_layers=2, batch_first=True).eval(), Sequences().eval()
    path = tmp_path / "model.pt2"
    export(
        methods={
            "plain": {"model": plain, "args": (torch.randn(3, 7, 6),), "dynamic_shapes": ({0: batch, 1: length},)},
            "packed": {
                "model": packed,
                "args": (torch.randn(3, 7, 6), torch.tensor([4, 7, 1])),
                "dynamic_shapes": ({1: length}, None),
            },
        },
        path=path,
        progress=False,
        inductor=FAST_BUILD,
    )
    program = untorch.load(path)
    with torch.no_grad():
        for shape in ((1, 2, 6), (5, 31, 6)):
            x = torch.randn(shape)
            for got, expected in zip(program["plain"](x.numpy()), plain(x), strict=True):
                numpy.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
        for lengths in ([31, 30, 2], [1, 1, 5]):
            x, ends = torch.randn(3, 31, 6), torch.tensor(lengths)
            for got, expected in zip(program["packed"](x.numpy(), ends.numpy()), packed(x, ends), strict=True):
                numpy.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
