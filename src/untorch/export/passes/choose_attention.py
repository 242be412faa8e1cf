"""Chooses the attention backend of each scaled dot-product attention: Triton kernels, PyTorch's operators, or math.

"native" leaves the call to AOTInductor, which takes a fused operator (flash, memory-efficient, cuDNN) that the runtime
has; "math" makes it GEMMs and a softmax; "triton" makes it ``untorch::attention``, whose kernels are compiled
into the model; "auto" is "triton" on CUDA where that serves the call, and "native" elsewhere. On CUDA "auto" takes the
runtime's own kernel where that is the faster one, under an operator's name, which needs no GPU to choose it: cuDNN's
for sm_90, the memory-efficient one for wide heads.
"""

from __future__ import annotations

import importlib.util
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from untorch.export.coverage import source_line
from untorch.export.errors import CompileError
from untorch.export.mutations import Aliases, is_mutating
from untorch.export.passes.calls import add_call, arguments_of
from untorch.export.passes.layouts import replace_in_layout
from untorch.export.passes.report import PassReport

__all__ = ["Attention", "choose_attention"]

Attention = Literal["auto", "triton", "native", "math"]

_aten = torch.ops.aten
_COPIES = (_aten.clone.default, _aten.contiguous.default)
_MAX_WIDTH = 256
_MAX_FLOAT32_WIDTH = 128  # above, the runtime's kernel, which splits the keys, is the faster one
_MAX_RUNTIME_WIDTH = 512  # kMaxAttentionWidth
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Where the runtime's kernel was measured to be faster than Triton's: heads at least so wide, and more queries than few,
# of which narrow causal heads have more, and those that are padded to 64 most.
_WGMMA_WIDTH, _PADDED, _NARROW = 33, 64, 96
_FEW_QUERIES, _FEW_NARROW_CAUSAL, _FEW_PADDED = 256, 512, 1024


@dataclass(frozen=True)
class _Call:
    """The arguments of one attention; ``repeated`` if key heads are repeated to as many as there are query heads."""

    q: fx.Node
    k: fx.Node
    v: fx.Node
    mask: fx.Node | None
    dropout: Any
    causal: Any
    scale: Any
    repeated: bool


def choose_attention(
    module: fx.GraphModule, choice: Attention, device: str, architecture: str | None = None
) -> PassReport:
    """Runs the pass in place, for a GPU ``architecture`` such as "sm_90". Raises CompileError if ``choice`` is "triton"
    and a call cannot be served by it."""
    report = PassReport("choose_attention")
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target != _aten.scaled_dot_product_attention.default:
            continue
        call = _arguments(node)
        if choice == "native" or (choice == "auto" and device != "cuda"):
            why = "the option attention asks for it" if choice == "native" else f"the method is for {device}"
            report.skipped[node.name] = f"native: {why}"
            continue
        if choice == "math":
            _replace_by_math(module.graph, node, call)
            report.changed.append(f"{node.name}: math: the option attention asks for it")
            continue
        shared = _without_repetition(node, call)
        reason = _reason_against_triton(shared, device)
        name = node.name
        if choice == "auto" and _is_wide(call) and _takes_efficient(call):
            _replace_by_efficient(module.graph, node, call)
            report.changed.append(f"{name}: the runtime's kernel for wide heads: {_description(call, call)}")
        elif reason is None:
            replace_call, kernel = _replace_by_triton, "triton"
            if choice == "auto" and architecture == "sm_90" and _takes_wgmma(shared):
                replace_call, kernel = _replace_by_operator, "the runtime's kernel for sm_90"
            replace_call(module.graph, node, shared)
            report.changed.append(f"{name}: {kernel}: {_description(call, shared)}")
        elif choice == "triton":
            where = source_line(node)
            raise CompileError(
                f"attention='triton' cannot serve {node.name}{f' ({where})' if where else ''}: {reason}; "
                f"attention='auto' takes a native operator for such calls"
            )
        else:
            report.skipped[node.name] = f"native: {reason}"
    return report


def _arguments(node: fx.Node) -> _Call:
    found = arguments_of(node)
    return _Call(
        found["query"], found["key"], found["value"], found["attn_mask"], found["dropout_p"], found["is_causal"],
        found["scale"], bool(found["enable_gqa"]),
    )  # fmt: skip


def _value(node: fx.Node | None) -> torch.Tensor:
    value = node.meta.get("val") if node is not None else None
    assert isinstance(value, torch.Tensor)
    return value


def _same(a: Any, b: Any) -> bool:
    return statically_known_true(a == b)


def _reason_against_triton(call: _Call, device: str) -> str | None:
    if device != "cuda":
        return f"the method is for {device}"
    if not _has_triton():
        return "Triton is not installed"
    return _reason_of_shapes(call)


def _is_wide(call: _Call) -> bool:
    """Whether Triton's kernels do not take such heads, or are slower than the runtime's."""
    q, v = _value(call.q), _value(call.v)
    limit = _MAX_FLOAT32_WIDTH if q.dtype == torch.float32 else _MAX_WIDTH
    return any(isinstance(size, int) and size > limit for size in (q.shape[-1], v.shape[-1]))


def _takes_efficient(call: _Call) -> bool:
    """Whether the runtime serves the call as PyTorch's memory-efficient operator, which has a head of keys for each of
    queries."""
    if call.repeated or _reason_of_shapes(call, _MAX_RUNTIME_WIDTH) is not None:
        return False
    return call.mask is None or _value(call.mask).dtype in (torch.bool, _value(call.q).dtype)


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _reason_of_shapes(call: _Call, widest: int = _MAX_WIDTH) -> str | None:
    q, k, v = (_value(node) for node in (call.q, call.k, call.v))
    if call.dropout != 0:
        return f"it has a dropout of {call.dropout}"
    if not isinstance(call.causal, bool) or not isinstance(call.scale, int | float | None):
        return "its scale is not a number that is known at export"
    if q.dtype not in _DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        names = ", ".join(dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in (q, k, v)))
        return f"the type is {names}, expected float16, bfloat16 or float32"
    if not (q.dim() == k.dim() == v.dim() and q.dim() in (3, 4)):
        return f"the query has {q.dim()} dimensions, the key {k.dim()}, the value {v.dim()}, expected 3 or 4 of each"
    for name, size in (("head size", q.shape[-1]), ("head size of the values", v.shape[-1])):
        if not isinstance(size, int):
            return f"the {name} varies"
        if not 1 <= size <= widest:
            return f"the {name} is {size}, expected 1 to {widest}"
    if not _same(q.shape[-1], k.shape[-1]) or not _same(k.shape[-2], v.shape[-2]):
        return "keys and queries differ in their head size, or keys and values in their length"
    heads, heads_kv = q.shape[-3], k.shape[-3]
    if q.dim() == 4:
        if not _same(q.shape[0], k.shape[0]) or not _same(q.shape[0], v.shape[0]):
            return "the batch sizes of query, key and value are not known to be equal"
        if not isinstance(heads, int) or not isinstance(heads_kv, int) or not isinstance(v.shape[1], int):
            return "the number of heads varies"
        if heads_kv < 1 or v.shape[1] != heads_kv or heads % heads_kv or not (call.repeated or heads == heads_kv):
            return f"there are {heads} heads of queries, {heads_kv} of keys and {v.shape[1]} of values"
    elif not _same(heads, heads_kv) or not _same(heads, v.shape[0]):
        return "the heads of query, key and value are not known to be as many"
    return _reason_of_mask(call, q, k)


def _reason_of_mask(call: _Call, q: torch.Tensor, k: torch.Tensor) -> str | None:
    if call.mask is None:
        return None
    mask = _value(call.mask)
    if mask.dtype not in (torch.bool, *_DTYPES):
        return f"the mask's type is {str(mask.dtype).removeprefix('torch.')}"
    full = (*q.shape[:-1], k.shape[-2])
    if mask.dim() > len(full):
        return f"the mask has {mask.dim()} dimensions, expected at most {len(full)}"
    for size, expected in zip(reversed(mask.shape), reversed(full), strict=False):
        if not _same(size, 1) and not _same(size, expected):
            return f"the mask {list(mask.shape)} is not known to have the sizes {list(full)}"
    return None


def _without_repetition(node: fx.Node, call: _Call) -> _Call:
    """The call with keys and values as they were before their heads were repeated, if that is how they were made."""
    k, v = _unrepeated(call.k), _unrepeated(call.v)
    if k is None or v is None or call.repeated or _value(k).shape[1] != _value(v).shape[1]:
        return call
    aliases = Aliases(node.graph)
    if _is_written_between(aliases, k, call.k, node) or _is_written_between(aliases, v, call.v, node):
        return call
    return replace(call, k=k, v=v, repeated=True)


def _is_written_between(aliases: Aliases, source: fx.Node, copied: fx.Node, node: fx.Node) -> bool:
    """Whether the memory of ``source`` may change while a copy of it waits to be read by ``node``."""
    if not aliases.is_written(source):
        return False
    group = set(aliases.group(source))
    step = copied  # up from here all are views, but for a clone
    while step is not source:
        copied = step if step.target in _COPIES else copied
        step = step.all_input_nodes[0]
    between = copied.next
    while between is not node:
        may_write = is_mutating(between) or isinstance(between.target, torch._ops.HigherOrderOperator)
        if may_write and not group.isdisjoint(between.all_input_nodes):
            return True
        between = between.next
    return False


def _unrepeated(node: fx.Node) -> fx.Node | None:
    """x [b, h, l, d], if the node is x with every head n times in a row."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() != 4:
        return None
    if node.target == _aten.repeat_interleave.self_int:
        source, repeats = node.args[0], node.args[1]
        dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
        good = isinstance(repeats, int) and dim in (1, -3) and isinstance(source, fx.Node)
        return source if good and isinstance(source, fx.Node) and _value(source).dim() == 4 else None
    if node.target not in (_aten.reshape.default, _aten.view.default, _aten._unsafe_view.default):
        return None
    expanded = _skip(node.args[0], _COPIES)
    if expanded is None or expanded.target != _aten.expand.default:
        return None
    wide = _skip(expanded.args[0], ())
    if wide is None or wide.target != _aten.unsqueeze.default or wide.args[1] not in (2, -3):
        return None
    source = _skip(wide.args[0], ())
    if source is None or _value(source).dim() != 4:
        return None
    b, h, length, width = _value(source).shape
    n = _value(expanded).shape[2]
    if not isinstance(h, int) or not isinstance(n, int):
        return None
    pairs = zip((*_value(expanded).shape, *value.shape), (b, h, n, length, width, b, h * n, length, width), strict=True)
    return source if all(_same(a, other) for a, other in pairs) else None


def _skip(node: Any, targets: tuple[Any, ...]) -> fx.Node | None:
    """The first node from ``node`` up that is none of ``targets`` and no slice of everything."""
    while isinstance(node, fx.Node) and node.op == "call_function":
        if node.target == _aten.slice.Tensor:
            before, after = _value(node.args[0]), _value(node)  # type: ignore[arg-type]
            if not all(_same(a, b) for a, b in zip(before.shape, after.shape, strict=True)):
                return node
        elif node.target not in targets:
            return node
        node = node.args[0]
    return node if isinstance(node, fx.Node) else None


def _description(call: _Call, shared: _Call) -> str:
    q, k = _value(shared.q), _value(shared.k)
    parts = [str(q.dtype).removeprefix("torch."), f"head size {q.shape[-1]}"]
    if q.dim() == 4 and q.shape[1] != k.shape[1]:
        parts.append(f"{q.shape[1]} heads over {k.shape[1]}")
    if shared.k is not call.k:
        parts.append("keys and values no longer repeated")
    return ", ".join(parts)


def _takes_wgmma(call: _Call) -> bool:
    """Whether the runtime's WGMMA kernel serves the call, faster than Triton: native/kernels/attention.h."""
    q = _value(call.q)
    if q.dtype == torch.float32 or call.mask is not None or not (call.scale is None or call.scale > 0):
        return False
    width = max(q.shape[-1], _value(call.v).shape[-1])
    few = _FEW_NARROW_CAUSAL if call.causal and width < _NARROW else _FEW_QUERIES
    if width < _PADDED:
        few = _FEW_PADDED
    return bool(width >= _WGMMA_WIDTH) and not statically_known_true(q.shape[-2] <= few)


def _replace_by_triton(graph: fx.Graph, node: fx.Node, call: _Call) -> None:
    from untorch.ops.attention.operator import OPERATOR

    def result(tensors: list[fx.Node], scale: float | None) -> fx.Node:
        return add_call(graph, node, OPERATOR, (*tensors, call.mask, call.causal, scale))

    _replace_batched(graph, node, call, result)


def _replace_by_operator(graph: fx.Graph, node: fx.Node, call: _Call) -> None:
    """cuDNN's is the operator whose diagonal begins top left and whose key heads may be fewer, as here."""

    def result(tensors: list[fx.Node], scale: float | None) -> fx.Node:
        args, named = (*tensors, None, False, 0.0, call.causal, False), {"scale": scale}
        several = add_call(graph, node, _aten._scaled_dot_product_cudnn_attention.default, args, named)
        return add_call(graph, node, operator.getitem, (several, 0))

    _replace_batched(graph, node, call, result)


def _replace_by_efficient(graph: fx.Graph, node: fx.Node, call: _Call) -> None:
    """The memory-efficient operator, whose mask is added, and has all four sizes of the scores."""

    def result(tensors: list[fx.Node], scale: float | None) -> fx.Node:
        bias = None if call.mask is None else _bias(graph, node, call.mask, *tensors[:2])
        args, named = (*tensors, bias, False, 0.0, call.causal), {"scale": scale}
        several = add_call(graph, node, _aten._scaled_dot_product_efficient_attention.default, args, named)
        return add_call(graph, node, operator.getitem, (several, 0))

    _replace_batched(graph, node, call, result)


def _bias(graph: fx.Graph, like: fx.Node, mask: fx.Node, q: fx.Node, k: fx.Node) -> fx.Node:
    """A mask as numbers that are added to the scores, expanded to their sizes."""
    if _value(mask).dtype == torch.bool:
        kind = {"dtype": _value(q).dtype, "device": _value(q).device}
        zero, low = (add_call(graph, like, _aten.full.default, ([], value), kind) for value in (0.0, float("-inf")))
        mask = add_call(graph, like, _aten.where.self, (mask, zero, low))
    for _ in range(4 - _value(mask).dim()):
        mask = add_call(graph, like, _aten.unsqueeze.default, (mask, 0))
    sizes: list[int | fx.Node] = []
    for dim, (tensor, place) in enumerate(((q, 0), (q, 1), (q, 2), (k, 2))):
        size = _value(tensor).shape[place]
        if _same(_value(mask).shape[dim], size):
            sizes.append(-1)  # as it is
        else:
            sizes.append(size if isinstance(size, int) else add_call(graph, like, _aten.sym_size.int, (tensor, place)))
    return add_call(graph, like, _aten.expand.default, (mask, sizes))


def _replace_batched(
    graph: fx.Graph, node: fx.Node, call: _Call, result_of: Callable[[list[fx.Node], float | None], fx.Node]
) -> None:
    """With what ``result_of`` makes of query, key and value in four dimensions, and of the scale."""
    with graph.inserting_before(node):
        tensors: list[fx.Node] = [call.q, call.k, call.v]
        batched = _value(call.q).dim() == 4
        if not batched:
            tensors = [add_call(graph, node, _aten.unsqueeze.default, (tensor, 0)) for tensor in tensors]
        result = result_of(tensors, None if call.scale is None else float(call.scale))
        if not batched:
            result = add_call(graph, node, _aten.squeeze.dim, (result, 0))
    replace_in_layout(graph, node, result)


def _replace_by_math(graph: fx.Graph, node: fx.Node, call: _Call) -> None:
    args = (call.q, call.k, call.v, call.mask, call.dropout, call.causal)
    named = {"scale": call.scale, "enable_gqa": call.repeated}
    with graph.inserting_before(node):
        pair = add_call(graph, node, _aten._scaled_dot_product_attention_math.default, args, named)
        result = add_call(graph, node, operator.getitem, (pair, 0))
    replace_in_layout(graph, node, result)
