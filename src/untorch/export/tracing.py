"""Tracing: torch.export of one method, again with math attention where fused attention constrains a dynamic size.

While it traces on a GPU, torch.export asks the fused operator that PyTorch would take for the result's strides. With a
mask that is the memory-efficient one, which pads masks to multiples of 8, and its padding becomes a constraint on a
dynamic size: "length = 8·_length - 4". Math attention adds no constraint. The graph has the operator as a whole either
way, so both graphs are equal where untorch's kernels or math replace it.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from untorch.export.collector import rare_collections
from untorch.export.coverage import source_line
from untorch.export.errors import CompileError
from untorch.export.example_sizes import Examples, double_sizes_of_one
from untorch.export.explain import explain, wants_strict_mode
from untorch.export.method import Method, Traced
from untorch.export.options import ExportOptions
from untorch.export.passes.report import PassReport
from untorch.export.patches import (
    checked_conditions,
    no_graph_dump,
    packed_sequences,
    pooling_of_any_length,
    recurrent_shapes,
    tensor_positions,
    traceable_torchvision,
    unchecked_distributions,
    undetected_causal_masks,
)
from untorch.export.results import drop_constant_results, plain_results
from untorch.export.shared_inputs import separate_inputs, warn_of_shared_inputs
from untorch.export.size_guards import find_size_guards
from untorch.export.size_hints import describe_dynamic_shapes, with_hints_of
from untorch.export.small_sizes import allow_small_sizes
from untorch.export.torch_logs import quiet_logs, recorded_guards
from untorch.progress import Progress
from untorch.runtime.errors import InvalidArgumentError, UnsupportedError, UntorchError
from untorch.runtime.log import INFO, log

__all__ = ["export_program", "refuse_fused_attention", "trace_method", "trace_methods"]


def trace_methods(methods: Iterable[Method], progress: Progress) -> list[Method]:
    """torch.export of each, as ``trace_method``; once for those that differ in their examples' sizes or their GPU."""
    found: list[Method] = []
    for method in methods:
        for first in found:
            if (traced := _traced_like(first, method)) is not None:
                method.traced = traced
                break
        else:
            trace_method(method, progress)
        found.append(method)
    return found


def _traced_like(first: Method, method: Method) -> Traced | None:
    """The method's graph from that of ``first``, a method of the same model; None where it has to be traced."""
    if method.model is not first.model or not _are_equal(method.options, first.options):
        return None
    if method.target.device != first.target.device or method.target.host != first.target.host:
        return None
    traced = first.traced
    if method.args is first.args and method.kwargs is first.kwargs and method.dynamic_shapes is first.dynamic_shapes:
        # Compiled beside this process, none changes the symbols that the graphs share.
        if not (method.target.compiles_beside and first.target.compiles_beside):
            return None
        return replace(traced, module=_module(traced.program), notes=list(traced.notes))
    if method.target != first.target or method.defers_guards != first.defers_guards or method.args is None:
        return None
    if describe_dynamic_shapes(method.dynamic_shapes) != describe_dynamic_shapes(first.dynamic_shapes):
        return None
    given, used = (
        pytree.tree_leaves(tree) for tree in ((first.args, first.kwargs or {}), traced.program.example_inputs)
    )
    if len(given) != len(used) or any(a is not b for a, b in zip(given, used, strict=True)):
        return None  # it was traced with other examples
    assert isinstance(method.model, torch.nn.Module)
    if separate_inputs(method.model, method.args, method.kwargs, method.dynamic_shapes)[-1]:
        return None
    with method.target.compile_context(), quiet_logs():
        program = with_hints_of(method.args, method.kwargs, traced.program)
    if program is None:
        return None
    return replace(traced, program=program, module=_module(program), notes=list(traced.notes))


def _are_equal(first: ExportOptions, second: ExportOptions) -> bool:
    """Options may hold tensors, which are equal where they are the same."""
    try:
        return first == second
    except (RuntimeError, ValueError):
        return False


@rare_collections()
def trace_method(method: Method, progress: Progress | None = None) -> Method:
    """torch.export of the method, for its target: sets ``traced``. Raises CompileError or InvalidArgumentError."""
    with method.target.compile_context(), (progress or Progress(False)).step(f"{method.name}: torch.export"):
        traced = export_program(method, method.target.retries_with_math_attention(method.options))
    method.traced = traced
    return method


def export_program(method: Method, retry: bool) -> Traced:
    """The method's program, and what was done otherwise than asked for.

    retry: what is refused is traced again with math attention. Raises CompileError with what torch.export said first.
    """
    if isinstance(method.model, torch.export.ExportedProgram):
        if method.model.example_inputs is None:
            raise InvalidArgumentError(
                f"method {method.name!r}: the exported program has no example inputs, which AOTInductor needs: export "
                f"it again with torch.export.export"
            )
        warn_of_shared_inputs(method.name, method.model)
        program = copy.copy(method.model)
        program._range_constraints = dict(program.range_constraints)
        with quiet_logs():
            allow_small_sizes(program)
        return _traced(program)
    assert isinstance(method.model, torch.nn.Module)
    assert method.args is not None
    _refuse_sparse_weights(method)
    args, kwargs, shapes, notes = separate_inputs(method.model, method.args, method.kwargs, method.dynamic_shapes)
    examples = double_sizes_of_one(method.name, method.model, args, kwargs, shapes)
    if examples.doubled:
        notes.append(f"traced with two in the place of one: {', '.join(examples.doubled)}")
    try:
        return _traced(_exported(method, examples), notes=notes)
    except UntorchError:
        raise
    except Exception as error:
        refusal = error
    if method.defers_guards:
        try:
            return _traced(_exported(method, examples, deferred=True), notes=notes)
        except Exception:  # the first error says more
            pass
    if retry:
        try:
            with sdpa_kernel(SDPBackend.MATH):
                program = _exported(method, examples)
            log(INFO, "method %s is traced with math attention: torch.export said: %s", method.name, refusal)
            note = "traced with math attention: with PyTorch's fused operators torch.export said: "
            return _traced(program, str(refusal), [*notes, note + str(refusal).splitlines()[0]])
        except Exception:  # then it was not attention, and the first error says more
            pass
    if wants_strict_mode(refusal) and not method.options.strict:
        try:
            program = _exported(method, examples, strict=True)
            log(INFO, "method %s is traced in strict mode: torch.export said: %s", method.name, refusal)
            return _traced(program, notes=[*notes, f"traced in strict mode: {str(refusal).splitlines()[0]}"])
        except Exception:
            pass
    text = f"method {method.name!r}: torch.export failed: {explain(refusal, _guards_of(method, examples, refusal))}"
    scripted = [name for name, part in method.model.named_modules() if isinstance(part, torch.jit.ScriptModule)]
    if scripted and "ScriptModule" not in text:
        text += (
            f"\n  {scripted[0] or 'The model'} is a ScriptModule, which torch.export does not trace: use the module "
            f"that torch.jit.script or torch.jit.trace was given."
        )
    if examples.doubled:
        text += (
            f"\n  The examples have the size one there, and two was traced instead: {', '.join(examples.doubled)}. If "
            f"the model takes one alone, leave the dimension out of dynamic_shapes."
        )
    raise CompileError(text) from refusal


def _refuse_sparse_weights(method: Method) -> None:
    """Raises UnsupportedError for parameters and buffers that are not dense."""
    assert isinstance(method.model, torch.nn.Module)
    for name, tensor in (*method.model.named_parameters(), *method.model.named_buffers()):
        if tensor.layout not in (torch.strided, torch._mkldnn):  # type: ignore[attr-defined]
            raise UnsupportedError(
                f"method {method.name!r}: {name} has the layout {tensor.layout}, and packages hold dense tensors: keep "
                f"{name}.to_dense(), or its indices and values as buffers of their own (index_add, scatter_add)"
            )


def _traced(
    program: torch.export.ExportedProgram, refusal: str | None = None, notes: list[str] | None = None
) -> Traced:
    if any(_is_vmap(node) for node in program.graph.nodes):
        program = program.run_decompositions({})
    module = _module(program)
    with quiet_logs():
        guards = find_size_guards(program)
    return Traced(program, module, refusal, [*(notes or []), *(f"checked at each call: {g}" for g in guards)], guards)


def _module(program: torch.export.ExportedProgram) -> fx.GraphModule:
    """A graph of its own, over the program's tensors."""
    module = program.module()
    assert isinstance(module, fx.GraphModule)
    drop_constant_results(module)
    return module


def _is_vmap(node: fx.Node) -> bool:
    """Whether the node is a step of torch.vmap, between which tensors have no memory that passes could look at."""
    return getattr(node.target, "__module__", None) == "torch._functorch.predispatch"


def _exported(
    method: Method,
    examples: Examples,
    strict: bool = False,
    deferred: bool = False,
    model: torch.nn.Module | None = None,
) -> torch.export.ExportedProgram:
    if model is None:
        assert isinstance(method.model, torch.nn.Module)
        model = method.model
    strict = strict or method.options.strict
    with contextlib.ExitStack() as stack:
        stack.enter_context(quiet_logs())
        stack.enter_context(no_graph_dump())
        stack.enter_context(traceable_torchvision())
        stack.enter_context(undetected_causal_masks())
        stack.enter_context(unchecked_distributions())
        stack.enter_context(pooling_of_any_length())
        if method.options.passes.get("serve_recurrent", True):
            stack.enter_context(recurrent_shapes())
            stack.enter_context(packed_sequences())
        if not strict:  # Dynamo has an order of its own for hooks
            stack.enter_context(tensor_positions())
            stack.enter_context(checked_conditions())
            stack.enter_context(plain_results(method.name, model, method.kwargs))
        program = torch.export.export(
            model, examples.args, examples.kwargs, dynamic_shapes=examples.dynamic_shapes, strict=strict,
            prefer_deferred_runtime_asserts_over_guards=deferred,
        )  # fmt: skip
    with quiet_logs():
        allow_small_sizes(program, model, examples)
    return program


def _guards_of(method: Method, examples: Examples, error: Exception) -> list[str]:
    """What torch.export assumed about sizes, where that is what it complains about: traced again, and recorded."""
    if "Constraints violated" not in str(error) and "conflicts between user-specified ranges" not in str(error):
        return []
    with recorded_guards() as guards, contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _exported(method, examples)
    return guards


def refuse_fused_attention(method: Method, passes: list[PassReport]) -> None:
    """Raises CompileError for attention that the passes left to PyTorch's fused operators, where those were refused."""
    for node in method.module.graph.nodes:
        if node.target != torch.ops.aten.scaled_dot_product_attention.default:
            continue
        where = source_line(node)
        reasons = [report.skipped[node.name] for report in passes if node.name in report.skipped]
        raise CompileError(
            f"method {method.name!r}: torch.export failed: {method.traced.refusal}\nIt succeeds with math attention, "
            f"but {node.name}{f' ({where})' if where else ''} would be PyTorch's fused operator "
            f"({'; '.join(reasons) or 'no pass changed it'}): use attention='math' for GEMMs and a softmax, or a "
            f"static size"
        )
