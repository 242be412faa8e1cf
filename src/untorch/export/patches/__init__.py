"""Every patch of torch and Triton that untorch makes, in force only while a model is compiled.

``registry.PATCHES`` is the table: what each replaces, for which versions of torch, why, and the test that fails when it
is no longer needed. Nothing outside this folder sets an attribute of torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from untorch.export.host_cpu import HostCpu
from untorch.export.patches.compiler import objects_at_a_time
from untorch.export.patches.conditions import checked_conditions, unchecked_distributions
from untorch.export.patches.cpu import (
    gathered_channels_last,
    has_cpp_march,
    march,
    reduced_bytes,
    scattered_tiles,
    small_loops,
    torch_version,
    vector_isa,
)
from untorch.export.patches.cuda import kept_kernels, kernel_accesses, kernel_objects, kernel_sources, toolkit_folder
from untorch.export.patches.fake_cuda import fake_cuda, forget_the_machine
from untorch.export.patches.fake_driver import FAKE_DEVICE
from untorch.export.patches.graphs import (
    changing_scalars,
    checked_results,
    checks_of_values,
    clones_of_buffers,
    constants_in_loops,
    decomposed_index_add,
    generated_only,
    lstm_hidden_state,
    one_copy_of_buffers,
    treespec_warning,
)
from untorch.export.patches.guards import checked_sizes
from untorch.export.patches.launches import dependent_launches
from untorch.export.patches.layers import called_layers, equal_layers
from untorch.export.patches.library import declared_arrays, interface_table, neutral_paths
from untorch.export.patches.numbers import open_slices, varying_numbers
from untorch.export.patches.origins import CallSequence, LayerCall, kernel_origins
from untorch.export.patches.recurrent import packed_sequences, recurrent_shapes
from untorch.export.patches.registry import PATCHES, Patch
from untorch.export.patches.specs import named_tuples
from untorch.export.patches.tensor_indices import tensor_positions
from untorch.export.patches.tracing import (
    no_graph_dump,
    pooling_of_any_length,
    results_of_any_size,
    traceable_torchvision,
    undetected_causal_masks,
)

__all__ = [
    "FAKE_DEVICE", "PATCHES", "CallSequence", "LayerCall", "Patch", "called_layers", "checked_conditions",
    "checked_sizes", "compile_patches", "dependent_launches", "equal_layers", "fake_cuda", "forget_the_machine",
    "gathered_channels_last", "generated_only", "has_cpp_march", "interface_table", "kept_kernels", "kernel_origins",
    "kernel_sources", "neutral_paths", "no_graph_dump", "objects_at_a_time", "packed_sequences",
    "pooling_of_any_length", "recurrent_shapes",
    "results_of_any_size", "tensor_positions", "toolkit_folder", "torch_version", "traceable_torchvision",
    "treespec_warning", "unchecked_distributions", "undetected_causal_masks", "varying_numbers",
]  # fmt: skip


@contextlib.contextmanager
def compile_patches(host: HostCpu, reads_shared_buffers: bool = False) -> Iterator[None]:
    """What every target needs while a method is traced and compiled.

    reads_shared_buffers: the method reads buffers that other methods of the file write.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(treespec_warning())
        stack.enter_context(changing_scalars(reads_shared_buffers))
        stack.enter_context(clones_of_buffers())
        stack.enter_context(one_copy_of_buffers())
        stack.enter_context(checked_results())
        stack.enter_context(small_loops())
        stack.enter_context(scattered_tiles())
        stack.enter_context(reduced_bytes())
        stack.enter_context(gathered_channels_last())
        stack.enter_context(declared_arrays())
        stack.enter_context(kernel_accesses())
        stack.enter_context(kernel_objects())
        stack.enter_context(lstm_hidden_state())
        stack.enter_context(decomposed_index_add())
        stack.enter_context(checks_of_values())
        stack.enter_context(results_of_any_size())
        stack.enter_context(named_tuples())
        stack.enter_context(open_slices())
        stack.enter_context(constants_in_loops())
        if host.vector_bits is not None:
            stack.enter_context(vector_isa(host.vector_bits))
        if host.march is not None and not has_cpp_march():
            stack.enter_context(march(host.march))
        yield
