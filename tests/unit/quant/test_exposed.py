"""Linear layers that modules hold in another form: exposed, quantised, and put back where nothing was quantised."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from untorch.quant import Int8Linear, quantize
from untorch.quant.attention import ProjectedAttention
from untorch.quant.exposed import expose_linears, has_hidden_linears, restore_plain


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval()


def decoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(64, 4, 128, batch_first=True), 2).eval()


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=4, vocab_size=99, bos_token_id=0, eos_token_id=0, use_cache=False
    )  # fmt: skip
    return transformers.GPT2Model(config).eval()


def call(model: nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        if isinstance(model, transformers.GPT2Model):
            out: torch.Tensor = model(torch.arange(20).reshape(2, 10)).last_hidden_state
        elif isinstance(model, nn.TransformerDecoder):
            out = model(torch.randn(2, 9, 64, generator=generator), torch.randn(2, 7, 64, generator=generator))
        else:
            out = model(torch.randn(2, 9, 64, generator=generator))
    return out


@pytest.mark.parametrize(("make", "count"), [(encoder, 12), (decoder, 20), (gpt2, 8)])
def test_every_layer_is_quantised(make: Callable[[], nn.Module], count: int) -> None:
    model = make()
    expected = call(model)
    report = quantize(model, "int8", progress=False)
    assert len(report.layers) == count and not report.skipped
    assert sum(isinstance(part, Int8Linear) for part in model.modules()) == count
    assert not any(isinstance(part, nn.Linear | Conv1D) for part in model.modules())
    assert report.module_nbytes_after < 0.5 * report.module_nbytes_before or make is gpt2  # its table is the most
    torch.testing.assert_close(call(model), expected, rtol=0, atol=0.1)


@pytest.mark.parametrize("make", [encoder, decoder, gpt2])
def test_exposing_changes_no_result_and_no_parameter(make: Callable[[], nn.Module]) -> None:
    model = make()
    expected, nbytes = call(model), {p.untyped_storage()._cdata for p in model.parameters()}
    exposed = expose_linears(copy.deepcopy(model, {id(p): p for p in model.parameters()}))
    assert {p.untyped_storage()._cdata for p in exposed.parameters()} == nbytes
    assert not has_hidden_linears(exposed)
    torch.testing.assert_close(call(exposed), expected)
    # A copy of it can be put back as well.
    restored = restore_plain(copy.deepcopy(exposed, {id(p): p for p in exposed.parameters()}))
    assert has_hidden_linears(restored) and not any(isinstance(p, ProjectedAttention) for p in restored.modules())
    assert {id(p) for p in restored.parameters()} == {id(p) for p in model.parameters()}
    assert torch.equal(call(restored), expected)


def test_what_is_excluded_is_put_back() -> None:
    model = encoder()
    first = model.layers[0]
    attention, flag = first.self_attn, first.activation_relu_or_gelu
    report = quantize(model, "int8", exclude="layers.0.*", progress=False)
    assert len(report.layers) == 6
    assert model.layers[0].self_attn is attention and first.activation_relu_or_gelu == flag != 0
    assert model.layers[1].activation_relu_or_gelu == 0 and not model.use_nested_tensor
    call(model)
    quantize(other := encoder(), "int8", include="*.q_proj", progress=False)
    assert type(other.layers[0].self_attn.k_proj) is nn.Linear
    torch.testing.assert_close(call(other), call(encoder()), rtol=0, atol=0.1)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_padding_mask_takes_the_same_path() -> None:
    model, x = encoder(), torch.randn(2, 6, 64)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)
        quantize(model, "int8", progress=False)
        out = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(out[~padding], expected[~padding], rtol=0, atol=0.1)


def test_patterns_name_the_projections() -> None:
    model = encoder()
    report = quantize(model, {"*.out_proj": None, "*.self_attn.*": "int8", "*": "int4"}, progress=False)
    kinds = {name: layer.quantized_dtype for layer in report.layers for name in layer.names}
    assert kinds["layers.0.self_attn.q_proj"] == "int8" and kinds["layers.1.linear1"] == "int4"
    assert report.skipped["layers.0.self_attn.out_proj"] == "'*.out_proj' leaves it in floating point"
    assert type(model.layers[0].self_attn.out_proj) is nn.Linear


def test_a_module_that_is_attention_itself() -> None:
    attention = nn.MultiheadAttention(64, 4)
    assert isinstance(exposed := expose_linears(attention), ProjectedAttention)
    assert restore_plain(exposed) is attention
    assert expose_linears(attention, in_place=True) is attention


def test_computed_weights_and_hooks_stay() -> None:
    with pytest.warns(FutureWarning):
        normed = nn.utils.weight_norm(Conv1D(8, 16))
    hooked = nn.MultiheadAttention(64, 4)
    hooked.out_proj.register_forward_hook(lambda *_: None)
    parametrised = nn.MultiheadAttention(64, 4)
    nn.utils.parametrizations.orthogonal(parametrised, "in_proj_weight")
    for part in (normed, hooked, parametrised):
        assert not has_hidden_linears(nn.Sequential(part))
