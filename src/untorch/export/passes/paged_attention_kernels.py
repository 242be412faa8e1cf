"""Gives ``untorch::paged_attention`` of methods for CUDA the Triton kernels that are compiled into the model.

Prompts are untorch::paged_prefill's where its kernel takes the layer.
"""

from __future__ import annotations

import torch
from torch import fx

from untorch.export.errors import CompileError
from untorch.export.passes.attributes import add_constant
from untorch.export.passes.calls import add_call, arguments_of
from untorch.export.passes.report import PassReport
from untorch.ops import paged_attention, paged_prefill

__all__ = ["paged_attention_kernels"]


def paged_attention_kernels(module: fx.GraphModule, architecture: str | None) -> PassReport:
    """Replaces each call. The pool stays the argument that is written.

    Raises CompileError for heads and pages that the kernels cannot serve on that architecture.
    """
    report = PassReport("paged_attention_kernels")
    calls = [node for node in module.graph.nodes if node.target == paged_attention.OPERATOR]
    if not calls:
        return report
    from untorch.ops.attention.paged_configs import paged_config
    from untorch.ops.attention.paged_operator import OPERATOR

    capability = int(architecture.removeprefix("sm_").rstrip("af")) if architecture else 80
    # Two elements a row: rows that begin at multiples of 16 bytes are one kind of pointer to Triton.
    offsets = sorted({arguments_of(node)["offset"] for node in calls})
    rows = {offset: row for row, offset in enumerate(offsets)}
    pool = arguments_of(calls[0])["pool"].meta["val"]
    values = torch.tensor(offsets, device=pool.device)[:, None].repeat(1, 2)
    with module.graph.inserting_before(calls[0]):
        table = add_constant(module, "paged_attention_offsets", values, calls[0])
        table.meta["val"] = pool.fake_mode.from_tensor(values)
    for node in calls:
        given = arguments_of(node)
        q, width, width_v = given["q"].meta["val"], given["width"], given["width_v"]
        try:
            paged_config(
                capability, q.element_size(), width, width_v, q.shape[1] // given["heads_kv"],
                fp8=pool.dtype == torch.float8_e4m3fn,
            )  # fmt: skip
        except ValueError as error:
            raise CompileError(f"{node.name}: {error}") from error
        with module.graph.inserting_before(node):
            row = add_call(module.graph, node, torch.ops.aten.select.int, (table, 0, rows[given["offset"]]))
            offset = add_call(module.graph, node, torch.ops.aten.select.int, (row, 0, 0))
        node.target = OPERATOR
        wgmma = paged_prefill.is_served(
            capability, q.dtype, pool, given["offset"], width, width_v, given["scale"],
            window=given["window"], alibi=given["alibi"] is not None, softcap=given["softcap"],
        )  # fmt: skip
        given |= {"offset": offset, "aligned": given["offset"] % 16 == 0, "wgmma": wgmma}
        node.args = tuple(given[argument.name] for argument in OPERATOR._schema.arguments)
        report.changed.append(node.name)
    module.recompile()
    return report
