"""Inductor tells of every kernel call that it generates."""

from __future__ import annotations

from untorch.export.patches.origins import CallSequence, LayerCall, kernel_origins, layer_call, layer_function


def test_torch_still_keeps_no_origins_by_itself() -> None:
    from torch._inductor import config, debug

    assert config.trace.provenance_tracking_level == 0
    assert debug.set_kernel_post_grad_provenance_tracing([], "kernel") is None
    assert debug._inductor_kernel_stack_trace == {}


def test_calls_go_to_the_layer_that_is_generated() -> None:
    from torch._inductor import debug
    from torch._inductor.codegen import cpp
    from torch._inductor.virtualized import V

    class Graph:
        wrapper_code = object()

    def told(node: object, name: str, is_extern: bool) -> str | None:
        return None if name == "unknown" else f"{name} {is_extern}"

    before = debug.set_kernel_post_grad_provenance_tracing, cpp.set_kernel_post_grad_provenance_tracing
    layer_call("outside of an export", [])
    with kernel_origins(told) as sequence, V.set_graph_handler(Graph()):
        debug.set_kernel_post_grad_provenance_tracing([], "stale")
        Graph.wrapper_code = object()  # the code is generated again
        debug.set_kernel_post_grad_provenance_tracing([], "a", is_extern=False)
        with layer_function("layer_0"):
            cpp.set_kernel_post_grad_provenance_tracing([], "b")
        layer_call("layer_0", ["a_0_weight"])
        layer_call("layer_0", ["a_1_weight"])
        debug.set_kernel_post_grad_provenance_tracing([], "unknown")
    assert sequence == CallSequence(
        ["a False", LayerCall("layer_0", ("a_0_weight",)), LayerCall("layer_0", ("a_1_weight",))],
        {"layer_0": ["b False"]},
        Graph.wrapper_code,
    )
    assert before == (debug.set_kernel_post_grad_provenance_tracing, cpp.set_kernel_post_grad_provenance_tracing)
    with layer_function("outside of an export"):
        pass
