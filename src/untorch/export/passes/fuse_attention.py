"""Makes scaled dot-product attention from attention that is written by hand: GEMM, scale, mask, softmax, GEMM.

``softmax(scale · Q · Kᵀ + mask) · V`` is found by what it computes: from the softmax down to the GEMM with the values,
and up through scales, masks and views to the GEMM of the scores. The scores then need no memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from untorch.export.mutations import Aliases, is_mutating
from untorch.export.passes.attention_masks import Sizes, Term, broadcast_as, combine
from untorch.export.passes.calls import add_call, arguments_of
from untorch.export.passes.constants import Constants, is_pure
from untorch.export.passes.epilogues import value_of
from untorch.export.passes.layouts import replace_in_layout
from untorch.export.passes.report import PassReport

__all__ = ["fuse_attention"]

_aten = torch.ops.aten
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SOFTMAXES = {_aten.softmax.int, _aten._softmax.default}
_GEMMS = {_aten.matmul.default, _aten.bmm.default}
_VIEWS = {_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default}
_SAME = {_aten.contiguous.default, _aten.clone.default, _aten.alias.default, _aten.detach.default}
_CONVERSIONS = {_aten.to.dtype, _aten.to.dtype_layout, _aten.to.device, _aten._to_copy.default, _aten.type_as.default}
_PRODUCTS = {_aten.mul.Tensor, _aten.mul_.Tensor}
_QUOTIENTS = {_aten.div.Tensor, _aten.div_.Tensor}
_SUMS = {_aten.add.Tensor, _aten.add_.Tensor}
_FILLS = {_aten.masked_fill.Scalar, _aten.masked_fill_.Scalar, _aten.masked_fill.Tensor, _aten.masked_fill_.Tensor}
# Conversions bring them along; what is made instead has the dtype and the device that they are for.
_CHECK = _aten._assert_tensor_metadata.default
_SWAPS = {_aten.transpose.int, _aten.swapaxes.default, _aten.mT.default, _aten.permute.default}
# A fill from here down outweighs every score also where it is added: only its own value is left of such a sum.
_LOWEST = -1e30


class _StaysError(Exception):
    """Why the nodes around a softmax stay."""


@dataclass
class _Scores:
    """What the softmax is of: ``scale`` · Q · Kᵀ · ``rows`` + the terms; ``chain``: from there up to the GEMM."""

    constants: Constants
    chain: list[fx.Node] = field(default_factory=list)
    gemm: fx.Node | None = None
    query: Any = None
    key: Any = None  # transposed
    scale: float = 1.0
    rows: list[Term] = field(default_factory=list)  # tensors that scale rows
    terms: list[Term] = field(default_factory=list)


def fuse_attention(module: fx.GraphModule, choice: str = "auto") -> PassReport:
    """Runs the pass in place; not with a ``choice`` of the option ``attention`` but "auto" and "native".

    ``changed`` names the last GEMM of each attention.
    """
    report = PassReport("fuse_attention")
    if choice not in ("auto", "native"):
        report.not_run = f"the option attention is {choice!r}"
        return report
    graph = module.graph
    if any(node.target in _SOFTMAXES for node in graph.nodes):
        _erase_dead(graph, set())  # MultiheadAttention's mean of the probabilities, say, which nothing reads
    found = [(node, _gemm_of_values(node)) for node in graph.nodes if node.target in _SOFTMAXES]
    pairs = [(softmax, last) for softmax, last in found if last is not None]  # else it is of classes, or of experts
    constants = Constants(module) if pairs else None
    for softmax, last in pairs:
        assert constants is not None
        try:
            scores = _scores_of(softmax, constants)
            _check(scores, softmax, last)
            name = last.name
            new = _attention(graph, scores, softmax, last)
        except _StaysError as error:
            report.skipped[softmax.name] = str(error)
            _erase_dead(graph, set())
            continue
        old = {*scores.chain, *_between(softmax, last)}
        replace_in_layout(graph, last, new)
        for check in [user for node in old for user in node.users if user.target == _CHECK]:
            graph.erase_node(check)
        _erase_dead(graph, old)
        report.changed.append(name)
    return report


def _erase_dead(graph: fx.Graph, replaced: set[fx.Node]) -> None:
    """Erases what nothing reads and only computes; of the nodes that were replaced also those that write."""
    graph.eliminate_dead_code(lambda node: not is_pure(node) and node not in replaced)


def _gemm_of_values(softmax: fx.Node) -> fx.Node | None:
    """The GEMM of the probabilities with the values, if nothing else reads the probabilities."""
    node, user = softmax, _only_reader(softmax)
    while user is not None and user.args[0] is node:
        if user.target in _GEMMS:
            return user
        inactive = user.target == _aten.dropout.default and arguments_of(user)["train"] is False
        if not inactive and user.target not in _VIEWS | _SAME | _CONVERSIONS:
            return None
        node, user = user, _only_reader(user)
    return None


def _between(softmax: fx.Node, last: fx.Node) -> list[fx.Node]:
    """The probabilities: from the softmax down to the GEMM with the values."""
    found = [softmax]
    while (user := _only_reader(found[-1])) is not last:
        assert user is not None
        found.append(user)
    return found


def _only_reader(node: fx.Node) -> fx.Node | None:
    """The call that is the only one to read the node's values."""
    users = [user for user in node.users if user.target != _CHECK]
    return users[0] if len(users) == 1 and users[0].op == "call_function" else None


def _scores_of(softmax: fx.Node, constants: Constants) -> _Scores:
    scores, given = _Scores(constants), arguments_of(softmax)
    value = value_of(given.get("self", given.get("input")))
    if value is None or given["dim"] not in (-1, value.dim() - 1):
        raise _StaysError("the softmax is not over the last dimension")
    user, node = softmax, softmax.args[0]
    while True:
        if not isinstance(node, fx.Node) or node.op != "call_function":
            raise _StaysError("the softmax is not of a GEMM's result")
        if _only_reader(node) is not user:
            raise _StaysError(f"the scores have another user: {node.name}")
        scores.chain.append(node)
        if _is_gemm(node):
            _take_gemm(scores, node)
            return scores
        user, node = node, _step(scores, node)


def _is_gemm(node: Any) -> bool:
    return isinstance(node, fx.Node) and (node.target in _GEMMS or node.target == _aten.baddbmm.default)


def _take_gemm(scores: _Scores, node: fx.Node) -> None:
    scores.gemm = node
    if node.target in _GEMMS:
        scores.query, scores.key = node.args[0], node.args[1]
        return
    given = arguments_of(node)
    alpha, beta = given["alpha"], given["beta"]
    if not isinstance(alpha, int | float) or not isinstance(beta, int | float) or alpha == 0:
        raise _StaysError(f"{node.name} has factors that are not numbers")
    if beta != 0:
        _add_term(scores, node, given["self"], scores.scale * beta)
    scores.scale *= alpha
    scores.query, scores.key = given["batch1"], given["batch2"]


def _step(scores: _Scores, node: fx.Node) -> Any:
    """Notes what a node does to the scores; gives the node that it does it to."""
    target, args = node.target, node.args
    if target in _VIEWS | _SAME:
        before, after = _shape(args[0]), _shape(node)
        if min(len(before), len(after)) < 3 or not _equal(before[-2:], after[-2:]):
            raise _StaysError(f"{node.name} changes the rows of the scores")
        return args[0]
    if target in _CONVERSIONS:
        before_, after_ = value_of(args[0]), value_of(node)
        if before_ is None or after_ is None or after_.device != before_.device or after_.dtype not in _DTYPES:
            raise _StaysError(f"{node.name} does more than widen the scores")
        return args[0]
    if target in _PRODUCTS | _QUOTIENTS:
        return _take_scale(scores, node)
    if target in _SUMS and node.kwargs.get("alpha", 1) == 1:
        left, right = args[0], args[1]
        if not _leads_to_gemm(left, node) and target == _aten.add.Tensor:
            left, right = right, left
        _add_term(scores, node, right, scores.scale)
        return left
    if target in _FILLS:
        _add_fill(scores, node, args[1], args[2], masked=True)
        return args[0]
    if target in (_aten.where.self, _aten.where.ScalarOther):
        _add_fill(scores, node, args[0], args[2], masked=False)
        return args[1]
    raise _StaysError(f"{node.name} stands between the GEMM and the softmax")


def _leads_to_gemm(node: Any, user: fx.Node) -> bool:
    """Whether nothing but what _step takes stands between a GEMM and the node."""
    while isinstance(node, fx.Node) and _only_reader(node) is user and _equal_rank(node, user):
        if _is_gemm(node):
            return True
        if node.target in _SUMS:
            return any(_leads_to_gemm(operand, node) for operand in node.args[:2])
        if node.target not in _VIEWS | _SAME | _CONVERSIONS | _PRODUCTS | _QUOTIENTS | _FILLS or not node.args:
            return False
        user, node = node, node.args[0]
    return False


def _equal_rank(node: fx.Node, user: fx.Node) -> bool:
    return user.target in _VIEWS or _equal(_shape(node), _shape(user))


def _take_scale(scores: _Scores, node: fx.Node) -> Any:
    left, right = node.args[0], node.args[1]
    product = node.target in _PRODUCTS
    if product and (_number(scores, left) is not None or not _equal(_shape(left), _shape(node))):
        left, right = right, left
    number = _number(scores, right)
    if number is not None:
        if not math.isfinite(number) or number == 0:
            raise _StaysError(f"{node.name} scales the scores by {number}")
        scores.scale *= number if product else 1 / number
        return left
    shape = _shape(right)
    if not product or not isinstance(right, fx.Node) or (shape and not _same(shape[-1], 1)):
        raise _StaysError(f"{node.name} scales the scores by a tensor that varies along the keys")
    scores.rows.append(Term(right, _shape(node)))
    return left


def _add_term(scores: _Scores, node: fx.Node, term: Any, factor: float) -> None:
    value = value_of(term)
    if value is None or not value.dtype.is_floating_point or scores.rows:
        raise _StaysError(f"{node.name} adds something else than a mask to the scores")
    scores.terms.append(Term(term, _shape(node), factor))


def _add_fill(scores: _Scores, node: fx.Node, condition: Any, fill: Any, *, masked: bool) -> None:
    value, number = value_of(condition), _number(scores, fill)
    if value is None or value.dtype != torch.bool or number is None or scores.rows or scores.scale <= 0:
        raise _StaysError(f"{node.name} selects between scores and something else than a number")
    number *= scores.scale
    if number > _LOWEST:
        raise _StaysError(f"{node.name} fills in {number:g}: as a summand it would differ where all keys are masked")
    scores.terms.append(Term(condition, _shape(node), 1.0, number, masked))


def _number(scores: _Scores, value: Any) -> float | None:
    """A number, also as a constant tensor without dimensions."""
    if isinstance(value, int | float):
        return float(value)
    like = value_of(value)
    if like is None or like.dim() or not scores.constants.is_known(value):
        return None
    return float(scores.constants.value(value))


def _check(scores: _Scores, softmax: fx.Node, last: fx.Node) -> None:
    """Raises _StaysError for what the kernel does not compute, and where memory is written in between."""
    q, k, v = (value_of(node) for node in (scores.query, scores.key, last.args[1]))
    if q is None or k is None or v is None or value_of(last) is None:
        raise _StaysError("an operand has no example value")
    dtypes = dict.fromkeys(str(value.dtype).removeprefix("torch.") for value in (q, k, v, last.meta["val"]))
    if len(dtypes) != 1 or q.dtype not in _DTYPES:
        raise _StaysError(f"it is in {', '.join(dtypes)}; the fused kernel is for float32, bfloat16 or float16 alone")
    for term in (*scores.terms, *scores.rows):
        mask = value_of(term.node)
        if term.fill is None and mask is not None and mask.dtype not in (q.dtype, torch.float32):
            raise _StaysError(f"the mask {term.node.name} is {str(mask.dtype).removeprefix('torch.')}")
    if q.dim() < 3 or q.dim() != k.dim() or not _equal(q.shape[:-2], k.shape[:-2]):
        raise _StaysError("query and key are not batches of the same sizes")
    if not isinstance(q.shape[-1], int) or not _same(q.shape[-1], v.shape[-1]) or not _same(k.shape[-1], v.shape[-2]):
        raise _StaysError("the heads of keys and values differ in their size")
    if v.dim() < 3 or (not _equal(v.shape[:-2], q.shape[:-2]) and v.dim() not in (3, 4)):
        raise _StaysError("query and value are not batches of the same sizes")
    aliases = Aliases(last.graph)
    operands = [scores.query, scores.key, last.args[1], *(term.node for term in (*scores.terms, *scores.rows))]
    read = {member for operand in operands for member in aliases.group(operand)}
    inside = {softmax, *scores.chain}
    node = scores.chain[-1]
    while node is not last:
        higher = isinstance(node.target, torch._ops.HigherOrderOperator)
        if node not in inside and (higher or is_mutating(node)) and not read.isdisjoint(node.all_input_nodes):
            raise _StaysError(f"{node.name} writes into an operand")
        node = node.next


def _attention(graph: fx.Graph, scores: _Scores, softmax: fx.Node, last: fx.Node) -> fx.Node:
    """The call of F.scaled_dot_product_attention, in the shape of ``last``, before it."""
    with graph.inserting_before(last):
        query, key, scale = _without_scales(graph, scores, last)
        value: Any = last.args[1]
        shape = _shape(scores.gemm)  # of the scores: [..., queries, keys]
        wide = _shape(softmax)
        sizes = Sizes(graph, (query, key, value), _sizes_in(scores.chain))
        if len(shape) != 4:  # the kernel's have batches and heads
            head = wide[:2] if len(wide) == 4 else (1, *shape[:-2]) if len(shape) == 3 else (-1, shape[-3])
            if head[0] == -1:
                head = (_product(shape[:-3]), shape[-3])
            shape = (*head, *shape[-2:])
        rows = [_rows(graph, term, shape, sizes) for term in scores.rows]
        mask = None
        if scores.terms:
            dtype = value_of(softmax.args[0]).dtype  # type: ignore[union-attr]
            mask = combine(graph, last, scores.terms, shape, sizes, dtype)
            if mask is None:
                raise _StaysError("the mask's dimensions are not known to be those of the scores")
        query, key, value = (_batched(graph, operand, shape, sizes) for operand in (query, key, value))
        for row in rows:
            query = add_call(graph, last, _aten.mul.Tensor, (query, row))
        arguments = (query, key, value, mask, 0.0, False)
        result = add_call(graph, last, _aten.scaled_dot_product_attention.default, arguments, {"scale": scale})
        if not _equal(_shape(result), _shape(last)):
            wanted = [sizes.argument(size) for size in _shape(last)]
            if None in wanted:
                raise _StaysError("the result's sizes are not known")
            result = add_call(graph, last, _aten.reshape.default, (result, wanted))
    return result


def _without_scales(graph: fx.Graph, scores: _Scores, last: fx.Node) -> tuple[fx.Node, fx.Node, float]:
    """Query, key and the scale that is applied to their product; numbers that scale them before count too."""
    scale = scores.scale
    query, factor = _unscaled(scores, scores.query)
    scale *= factor
    key, factor = _unscaled(scores, scores.key)
    scale *= factor
    if _swaps_last(key):
        key, factor = _unscaled(scores, key.args[0])
        scale *= factor
    else:
        key = add_call(graph, last, _aten.transpose.int, (key, -2, -1))
    return query, key, scale


def _swaps_last(node: fx.Node) -> bool:
    """Whether the node is a view of a tensor with its last two dimensions exchanged."""
    if node.target not in _SWAPS:
        return False
    rank = len(_shape(node))
    if node.target == _aten.mT.default:
        return True
    if node.target == _aten.permute.default:
        dims = [dim % rank for dim in node.args[1]]  # type: ignore[operator,union-attr]
        return dims == [*range(rank - 2), rank - 1, rank - 2]
    return {dim % rank for dim in node.args[1:]} == {rank - 2, rank - 1}  # type: ignore[operator]


def _unscaled(scores: _Scores, node: Any) -> tuple[fx.Node, float]:
    """The node, or what it is a multiple of, with the factor, if nothing else reads the multiple."""
    scale = 1.0
    while node.target in (_aten.mul.Tensor, _aten.div.Tensor) and len(node.users) == 1:
        number = _number(scores, node.args[1])
        before, after = value_of(node.args[0]), value_of(node)
        if number is None or before is None or after is None or before.dtype != after.dtype:
            break
        if number == 0 or not math.isfinite(number):
            break
        scale *= number if node.target == _aten.mul.Tensor else 1 / number
        node = node.args[0]
    return node, scale


def _rows(graph: fx.Graph, term: Term, shape: tuple[Any, ...], sizes: Sizes) -> fx.Node:
    row = broadcast_as(graph, term.node, (*term.shape[:-1], 1), (*shape[:-1], 1), sizes)
    if row is None:
        raise _StaysError("the dimensions of a scale are not known to be those of the scores")
    return row


def _batched(graph: fx.Graph, node: fx.Node, scores: tuple[Any, ...], sizes: Sizes) -> fx.Node:
    """An operand as [batch, heads, length, width]."""
    given = _shape(node)
    wanted = (*scores[:2], *given[-2:])
    if _equal(given, wanted):
        return node
    if len(given) == 3 and _same(scores[0], 1):
        return add_call(graph, node, _aten.unsqueeze.default, (node, 0))
    arguments = [sizes.argument(size) for size in wanted]
    if None in arguments or not _same(_product(given[:-2]), _product(scores[:2])):
        raise _StaysError("the batch sizes of query, key and value are not known to be those of the scores")
    return add_call(graph, node, _aten.reshape.default, (node, arguments))


def _sizes_in(chain: list[fx.Node]) -> list[fx.Node]:
    """The nodes that give sizes to the chain's views."""
    found = {n for node in chain for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.SymInt)}
    return list(found)


def _shape(node: Any) -> tuple[Any, ...]:
    value = value_of(node)
    return () if value is None else tuple(value.shape)


def _product(sizes: tuple[Any, ...]) -> Any:
    result: Any = 1
    for size in sizes:
        result = result * size
    return result


def _same(a: Any, b: Any) -> bool:
    return statically_known_true(a == b)


def _equal(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
