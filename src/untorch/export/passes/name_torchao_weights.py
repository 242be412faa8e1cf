"""Names the weights that torchao quantised whose operators stay in the graph: the pass changes nothing.

``export`` of a module takes the layers that there are kernels for before tracing (``export/torchao.py``). What reaches
the graph, such as an ExportedProgram of a model behind ``quantize_``, is computed by torchao's operators, most of
them in floating point: the report says so by name.
"""

from __future__ import annotations

from torch import fx

from untorch.export.passes.attributes import attribute
from untorch.export.passes.report import PassReport
from untorch.quant.checkpoints.torchao import is_torchao

__all__ = ["name_torchao_weights"]


def name_torchao_weights(module: fx.GraphModule) -> PassReport:
    """Runs the pass."""
    report = PassReport("name_torchao_weights")
    for node in module.graph.nodes:
        if node.op != "get_attr" or not node.users:
            continue
        value = attribute(module, str(node.target))
        if is_torchao(value):
            report.skipped[str(node.target)] = (
                f"it is torchao's {type(value).__name__}, whose operators stay: most compute in floating point. "
                "Layers that there are kernels for are taken where export gets the module, not an ExportedProgram"
            )
    return report
