"""The conformance models: small modules that between them use what Inductor does on a CPU.

Each case gives a module, example arguments, dynamic shapes where they matter, and further samples to run at. They are
exported by untorch and by PyTorch's own packager, run in a process without torch, and compared with eager.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

Args = tuple[Any, ...]
Sample = tuple[Args, dict[str, Any]]


@dataclass
class Case:
    """One model and how it is called. ``samples`` come after the example arguments, which are the first sample."""

    module: nn.Module
    args: Args
    kwargs: dict[str, Any] = field(default_factory=dict)
    dynamic_shapes: Any = None
    samples: list[Sample] = field(default_factory=list)
    rtol: float = 1e-5
    atol: float = 1e-5
    stateful: bool = False  # calls change buffers: run the samples in order on one instance
    random: bool = False  # outputs are random: shapes, dtypes and ranges are compared by ``check``
    check: Callable[[list[Any]], None] | None = None


CASES: dict[str, Callable[[], Case]] = {}


def case(fn: Callable[[], Case]) -> Callable[[], Case]:
    CASES[fn.__name__] = fn
    return fn


class Fn(nn.Module):
    """A function as a module."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 48), nn.SiLU(), nn.Linear(48, 10)).to(dtype)


@case
def mlp_static() -> Case:
    return Case(mlp(), (torch.randn(4, 32),))


@case
def mlp_dynamic_batch() -> Case:
    return Case(
        mlp(),
        (torch.randn(4, 32),),
        dynamic_shapes=({0: Dim("batch", min=1, max=512)},),
        samples=[((torch.randn(n, 32),), {}) for n in (1, 2, 7, 64, 333)],
    )


@case
def mlp_bfloat16() -> Case:
    return Case(mlp(torch.bfloat16), (torch.randn(4, 32, dtype=torch.bfloat16),), rtol=2e-2, atol=2e-2)


@case
def mlp_float16() -> Case:
    return Case(mlp(torch.float16), (torch.randn(4, 32, dtype=torch.float16),), rtol=5e-3, atol=5e-3)


@case
def mlp_float64() -> Case:
    return Case(mlp(torch.float64), (torch.randn(4, 32, dtype=torch.float64),), rtol=1e-10, atol=1e-10)


@case
def linear_without_bias_and_odd_sizes() -> Case:
    model = nn.Sequential(nn.Linear(13, 7, bias=False), nn.Tanh(), nn.Linear(7, 3))
    return Case(
        model,
        (torch.randn(2, 5, 13),),
        dynamic_shapes=({0: Dim("batch", min=1, max=64), 1: Dim("length", min=2, max=64)},),
        samples=[((torch.randn(3, 11, 13),), {})],
    )


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.up, self.down = nn.Linear(24, 64), nn.Linear(64, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))


@case
def residual_block() -> Case:
    return Case(
        Residual(), (torch.randn(5, 24),), dynamic_shapes=({0: Dim.AUTO},), samples=[((torch.randn(9, 24),), {})]
    )


@case
def norms() -> Case:
    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.group = nn.LayerNorm(12), nn.GroupNorm(3, 6)
            self.batch, self.instance = nn.BatchNorm1d(6), nn.InstanceNorm1d(6, affine=True)
            self.rms = nn.RMSNorm(12)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.layer(x), self.group(x), self.batch(x), self.instance(x), self.rms(x)

    return Case(Norms().eval(), (torch.randn(4, 6, 12),), rtol=1e-4, atol=1e-5)


@case
def conv2d_net() -> Case:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, stride=2), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip
    return Case(
        model.eval(),
        (torch.randn(2, 3, 20, 20),),
        dynamic_shapes=({0: Dim("batch", min=1, max=32)},),
        samples=[((torch.randn(n, 3, 20, 20),), {}) for n in (1, 5)],
        rtol=1e-4,
        atol=1e-5,
    )


@case
def conv1d_dilated_grouped() -> Case:
    model = nn.Sequential(nn.Conv1d(4, 8, 3, dilation=2, padding=2), nn.GELU(), nn.Conv1d(8, 8, 5, groups=4))
    return Case(
        model,
        (torch.randn(2, 4, 30),),
        dynamic_shapes=({2: Dim("length", min=10, max=200)},),
        samples=[((torch.randn(2, 4, 77),), {})],
    )


@case
def conv3d_net() -> Case:
    return Case(nn.Conv3d(2, 4, (3, 2, 3), padding=(1, 0, 1)), (torch.randn(1, 2, 5, 6, 7),))


@case
def conv_transposed() -> Case:
    model = nn.Sequential(nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2), nn.ReLU())
    return Case(model, (torch.randn(2, 4, 5, 6),))


@case
def conv_depthwise_channels_last() -> Case:
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8, padding=1), nn.Conv2d(8, 12, 1)).to(
        memory_format=torch.channels_last
    )
    return Case(model, (torch.randn(2, 8, 9, 9).to(memory_format=torch.channels_last),))


@case
def conv_bfloat16() -> Case:
    return Case(nn.Conv2d(3, 4, 3).bfloat16(), (torch.randn(1, 3, 8, 8, dtype=torch.bfloat16),), rtol=3e-2, atol=3e-2)


@case
def pooling() -> Case:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            F.avg_pool2d(x, 3, stride=2, padding=1, count_include_pad=False),
            F.adaptive_avg_pool2d(x, (3, 5)),
            *F.max_pool2d(x, 3, stride=1, padding=1, dilation=1, return_indices=True),
            F.adaptive_max_pool2d(x, (2, 3)),
            F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False),
        )

    return Case(Fn(fn), (torch.randn(2, 3, 11, 13),))


def _qkv(*shape: int, dtype: torch.dtype = torch.float32) -> Args:
    return tuple(torch.randn(*shape, dtype=dtype) for _ in range(3))


@case
def attention_plain() -> Case:
    return Case(Fn(lambda q, k, v: F.scaled_dot_product_attention(q, k, v)), _qkv(2, 3, 17, 16))


@case
def attention_causal() -> Case:
    length = Dim("length", min=2, max=256)
    return Case(
        Fn(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
        _qkv(1, 4, 20, 32),
        dynamic_shapes=(({2: length},) * 3,),
        samples=[(_qkv(1, 4, n, 32), {}) for n in (2, 65, 130)],
    )


@case
def attention_bool_mask() -> Case:
    mask = torch.rand(2, 1, 9, 9) > 0.3
    mask[..., 0] = True
    return Case(Fn(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m)), (*_qkv(2, 3, 9, 16), mask))


@case
def attention_additive_mask() -> Case:
    return Case(
        Fn(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m, scale=0.3)),
        (*_qkv(2, 3, 9, 16), torch.randn(9, 9)),
    )


@case
def attention_padding_mask() -> Case:
    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None, :].bool())

    keep = torch.ones(2, 12, dtype=torch.int64)
    keep[1, 7:] = 0
    return Case(Fn(fn), (*_qkv(2, 2, 12, 8), keep))


@case
def attention_grouped_queries() -> Case:
    return Case(
        Fn(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)),
        (torch.randn(1, 8, 10, 16), torch.randn(1, 2, 10, 16), torch.randn(1, 2, 10, 16)),
    )


@case
def attention_bfloat16_and_cross_lengths() -> Case:
    q = torch.randn(1, 2, 5, 32, dtype=torch.bfloat16)
    k, v = (torch.randn(1, 2, 33, 32, dtype=torch.bfloat16) for _ in range(2))
    return Case(Fn(lambda q, k, v: F.scaled_dot_product_attention(q, k, v)), (q, k, v), rtol=2e-2, atol=2e-2)


@case
def multihead_attention_module() -> Case:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    return Case(Block().eval(), (torch.randn(2, 6, 32),))


@case
def transformer_encoder() -> Case:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu", dropout=0.0)
    return Case(
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(),
        (torch.randn(2, 10, 32),),
        dynamic_shapes=({0: Dim("batch", min=1, max=32), 1: Dim("length", min=2, max=128)},),
        samples=[((torch.randn(3, 31, 32),), {})],
        rtol=1e-4,
    )


class Recurrent(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: torch.Tensor) -> Any:
        return self.cell(x)


@case
def lstm() -> Case:
    return Case(Recurrent(nn.LSTM(8, 12, num_layers=2, batch_first=True)).eval(), (torch.randn(3, 7, 8),))


@case
def lstm_bidirectional() -> Case:
    return Case(Recurrent(nn.LSTM(8, 6, bidirectional=True)).eval(), (torch.randn(5, 2, 8),))


@case
def gru() -> Case:
    return Case(Recurrent(nn.GRU(8, 12, batch_first=True)).eval(), (torch.randn(3, 6, 8),))


@case
def embeddings() -> Case:
    class Embeddings(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(50, 16, padding_idx=0)
            self.bag = nn.EmbeddingBag(50, 8, mode="mean")

        def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.words(ids), self.bag(ids)

    return Case(
        Embeddings(),
        (torch.randint(0, 50, (3, 6)),),
        dynamic_shapes=({0: Dim("batch", min=1, max=64), 1: Dim("length", min=2, max=64)},),
        samples=[((torch.randint(0, 50, (5, 9)),), {})],
    )


@case
def control_flow_cond() -> Case:
    class Cond(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda t: self.a(t).relu(), lambda t: self.b(t) - 1, (x,))

    return Case(Cond(), (torch.ones(3, 6),), samples=[((-torch.ones(3, 6),), {})])


@case
def control_flow_while() -> Case:
    from torch._higher_order_ops.while_loop import while_loop

    class Loop(nn.Module):
        def forward(self, n: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return while_loop(lambda i, y: i > 0, lambda i, y: (i - 1, y * 1.5 + 1), (n, x))

    return Case(Loop(), (torch.tensor(3), torch.randn(4)), samples=[((torch.tensor(0), torch.randn(4)), {})])


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x)
        return self.total * 2


@case
def mutated_buffer() -> Case:
    return Case(Counter(), (torch.randn(4),), samples=[((torch.randn(4),), {}) for _ in range(3)], stateful=True)


class Cache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(1, 2, 16, 8))

    def forward(self, k: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        self.keys.index_copy_(2, position, k)
        return self.keys.sum(-1)


@case
def key_value_cache() -> Case:
    steps = [((torch.randn(1, 2, 1, 8), torch.tensor([i])), {}) for i in range(1, 4)]
    return Case(Cache(), (torch.randn(1, 2, 1, 8), torch.tensor([0])), samples=steps, stateful=True)


@case
def mutated_input() -> Case:
    def fn(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x + 1

    return Case(Fn(fn), (torch.randn(3, 4),))


@case
def sorting() -> Case:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        top = torch.topk(x, 5, dim=1)
        ordered, order = torch.sort(x, dim=0, descending=True, stable=True)
        return top.values, top.indices, ordered, order, torch.argsort(x[:, 0]), torch.cumsum(x, 1), x.argmax(1)

    return Case(Fn(fn), (torch.randn(7, 19),))


@case
def sorting_integers() -> Case:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.sort(x, stable=True).values, torch.cumsum(x, 0), torch.topk(x, 3).values, torch.cumprod(x[:3], 0)

    return Case(Fn(fn), (torch.randint(-50, 50, (31,)),))


@case
def scattering() -> Case:
    def fn(x: torch.Tensor, index: torch.Tensor, src: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            x.scatter(1, index, src),
            x.scatter_add(1, index, src),
            x.scatter_reduce(1, index, src, "amax", include_self=False),
            x.index_put((index[0],), src[:, :6][: index.shape[1]].sum() * torch.ones(6), accumulate=True),
            x.gather(1, index),
            x.index_select(0, index[:, 0]),
        )

    index = torch.stack([torch.randperm(6)[:4] for _ in range(8)])
    return Case(Fn(fn), (torch.randn(8, 6), index, torch.randn(8, 4)), rtol=1e-5)


@case
def indexing() -> Case:
    def fn(x: torch.Tensor, keys: torch.Tensor, bins: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            torch.searchsorted(bins, x),
            torch.bucketize(x, bins, right=True),
            torch.where(x > 0, x, -x),
            x[keys],
            x.flip(0),
            torch.roll(x, 2, 1),
            torch.tril(x @ x.T),
        )

    return Case(Fn(fn), (torch.randn(9, 5), torch.tensor([3, 1, 4, 1]), torch.linspace(-2, 2, 9)), rtol=1e-4)


@case
def data_dependent_shapes() -> Case:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.nonzero(x > 0), torch.masked_select(x, x > 0)

    return Case(Fn(fn), (torch.randn(4, 5),), samples=[((torch.randn(4, 5),), {}), ((-torch.ones(4, 5),), {})])


@case
def histogram() -> Case:
    return Case(Fn(lambda x: torch.histc(x, bins=10, min=-3, max=3)), (torch.randn(100),))


@case
def integer_arithmetic() -> Case:
    def fn(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return a + b, a // b, a % b, (a * b) & 255, a << 2, a.float() / b, (a > b) & (b < 5), a.sum(), a.to(torch.int32)

    return Case(Fn(fn), (torch.randint(-90, 90, (6, 7)), torch.randint(1, 9, (6, 7))))


@case
def pointwise_functions() -> Case:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.abs() + 0.1
        return (
            x.exp(), x.expm1(), y.log(), y.log1p(), y.log2(), y.log10(), x.sin(), x.cos(), x.tan(), x.tanh(), x.sigmoid(),
            x.erf(), x.erfc(), y.sqrt(), y.rsqrt(), x.atan(), (x / 4).asin(), (x / 4).acos(), x.sinh(), x.cosh(),
            x.asinh(), (y + 1).acosh(), (x / 4).atanh(), torch.atan2(x, y), torch.pow(y, x), torch.fmod(x, y),
            torch.hypot(x, y), y.lgamma(), x.round(), x.floor(), x.frac(), torch.copysign(y, x), F.mish(x), F.softplus(x),
            F.gelu(x), F.gelu(x, approximate="tanh"), x.exp2(), torch.logaddexp(x, y),
        )  # fmt: skip

    return Case(Fn(fn), (torch.randn(3, 37).clamp(-3.9, 3.9),), rtol=2e-5, atol=2e-6)


@case
def pointwise_functions_float64() -> Case:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.abs() + 0.1
        return (x.exp(), y.log(), x.sin(), x.cos(), x.tanh(), x.erf(), torch.pow(y, x), torch.atan2(x, y), F.gelu(x))

    return Case(Fn(fn), (torch.randn(3, 37, dtype=torch.float64),), rtol=1e-12, atol=1e-13)


@case
def reductions() -> Case:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            x.sum(1), x.mean((0, 2)), x.var(2), x.std(0), x.amax(1), x.prod(2), x.norm(dim=1), x.logsumexp(2),
            F.softmax(x, 1), F.log_softmax(x, 2), x.argmin(2), x.any(1), x.all(0), x.median(dim=1).values,
        )  # fmt: skip

    return Case(Fn(fn), (torch.randn(4, 5, 6),), rtol=1e-4)


@case
def keyword_arguments_and_nested_outputs() -> Case:
    class Nested(nn.Module):
        def forward(self, batch: dict[str, Any], *, scale: torch.Tensor, flag: bool = True) -> dict[str, Any]:
            a, (b, c) = batch["a"], batch["pair"]
            return {"sum": a + b, "list": [c * scale, (a, None)], "flagged": b if flag else c}

    args = ({"a": torch.randn(3), "pair": (torch.randn(3), torch.randn(3))},)
    return Case(Nested(), args, {"scale": torch.tensor(2.0), "flag": True})


@case
def aliased_outputs() -> Case:
    class Aliases(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x, x.t(), self.weight, self.weight[1:], x + self.weight

    return Case(Aliases(), (torch.randn(3, 4),))


@case
def views_and_strides() -> Case:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            x.permute(2, 0, 1), x.reshape(6, 4).contiguous(), x[:, 1:, ::2], x.unsqueeze(0).expand(3, 2, 3, 4),
            torch.cat([x, x * 2], 1), torch.stack([x, -x]), *x.split(1, 0), F.pad(x, (1, 2, 0, 1), value=3.0),
            x.diagonal(0, 1, 2), x.unfold(2, 2, 1), x.repeat(2, 1, 1), torch.einsum("abc,abd->acd", x, x),
        )  # fmt: skip

    return Case(Fn(fn), (torch.randn(2, 3, 4),), rtol=1e-4)


@case
def batched_products() -> Case:
    def fn(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.bmm(a, b), torch.baddbmm(c, a, b, beta=0.5, alpha=2.0), torch.matmul(a[0], b), c @ c.mT

    return Case(
        Fn(fn),
        (torch.randn(4, 5, 6), torch.randn(4, 6, 7), torch.randn(4, 5, 7)),
        dynamic_shapes=(({0: Dim("n", min=1, max=64)},) * 3,),
        samples=[((torch.randn(2, 5, 6), torch.randn(2, 6, 7), torch.randn(2, 5, 7)), {})],
        rtol=1e-4,
    )


@case
def integer_product() -> Case:
    args = (torch.randint(-128, 128, (17, 32), dtype=torch.int8), torch.randint(-128, 128, (32, 24), dtype=torch.int8))
    return Case(Fn(lambda a, b: torch._int_mm(a, b)), args)


@case
def empty_batches() -> Case:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sum(0), torch.cat([x, x]) + 1

    return Case(Fn(fn), (torch.randn(0, 4),))


@case
def random_numbers() -> Case:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.rand_like(x), torch.randn(50, 40), torch.randint(0, 9, (300,)), F.dropout(x, 0.5, training=True)

    def check(outputs: list[Any]) -> None:
        uniform, normal, integers, dropped = outputs
        assert 0 <= uniform.min() < 0.05
        assert 0.95 < uniform.max() < 1
        assert abs(normal.mean()) < 0.1
        assert abs(normal.std() - 1) < 0.1
        assert set(integers.tolist()) == set(range(9))
        assert 0.3 < (dropped == 0).mean() < 0.7

    return Case(Fn(fn), (torch.ones(20, 30),), random=True, check=check)


@case
def proxy_linear_algebra() -> Case:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, r = torch.linalg.qr(x)
        u, s, v = torch.linalg.svd(x, full_matrices=False)
        # The pointwise ones read the results by the strides that Inductor was told.
        layouts = (q.abs() * 2, u.abs() + s, v.abs().exp())
        return q @ r, s, u @ torch.diag(s) @ v, torch.linalg.det(x.T @ x), torch.linalg.solve(x.T @ x, x.T), *layouts

    return Case(Fn(fn), (torch.randn(6, 4),), rtol=1e-3, atol=1e-3)


@case
def proxy_statistics() -> Case:
    def fn(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, inverse, counts = torch.unique(n, return_inverse=True, return_counts=True)
        return values, inverse, counts, torch.median(x), torch.bincount(n, minlength=12)

    return Case(Fn(fn), (torch.randn(21), torch.randint(0, 9, (30,))))


@case
def fast_fourier_transform() -> Case:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        spectrum = torch.fft.rfft(x)
        return torch.view_as_real(spectrum), torch.fft.irfft(spectrum * 2, n=x.shape[-1])

    return Case(Fn(fn), (torch.randn(3, 30),), rtol=1e-4)


@case
def dynamic_expression_shapes() -> Case:
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.repeat_interleave(2, 0) * b

    n = Dim("n", min=1, max=40)
    return Case(
        Fn(fn),
        (torch.randn(5, 3), torch.randn(10, 3)),
        dynamic_shapes=(({0: n}, {0: 2 * n}),),
        samples=[((torch.randn(8, 3), torch.randn(16, 3)), {})],
    )
