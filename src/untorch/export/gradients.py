"""Models that differentiate in their forward, such as forces from energies: traced through autograd first.

torch.export refuses torch.autograd.grad and torch.func.grad. make_fx runs autograd while it traces, so its graph has
the operators of the backward pass as well, and torch.export takes that graph as a model.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from untorch.export.example_sizes import Examples, dynamic_dims
from untorch.export.explain import Frame, is_model_code

__all__ = ["differentiates", "trace_through_autograd"]

_REFUSED = re.compile(
    r"view functorch tensor|TensorWrapper|fake tensor in the exported program constant's list|does not require grad|"
    r"torch\.autograd\.grad|torch\.func\.(grad|jac|hess)"
)


def differentiates(error: BaseException) -> bool:
    """Whether torch.export says what it says of models that compute gradients."""
    return _REFUSED.search(str(error)) is not None


def trace_through_autograd(model: nn.Module, examples: Examples) -> nn.Module:
    """A module with the model's weights that computes the same without autograd, for sizes that vary as examples say.

    Raises what make_fx raises, and ValueError where Python code branches on a size that varies.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    leaves, spec = pytree.tree_flatten((tuple(examples.args), dict(examples.kwargs or {})))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    results: list[Any] = []

    def run(given: dict[str, torch.Tensor], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        flat = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            flat[place] = tensor
        args, kwargs = pytree.tree_unflatten(flat, spec)
        with torch.enable_grad():
            result = torch.func.functional_call(model, given, args, kwargs)
        values, out_spec = pytree.tree_flatten(result)
        results[:] = values, out_spec
        return [value.detach() for value in values if isinstance(value, torch.Tensor)]

    # Sizes of their own: equal sizes of the examples are not the same size.
    environment = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    fake = [_fake(mode, leaves[place], i, _dynamic(model, examples, leaves[place])) for i, place in enumerate(places)]
    known = {name: _fake(mode, tensor, name, set()) for name, tensor in weights.items()}
    with mode:
        graph = make_fx(run)(known, fake)
    for guard in environment.guards:
        place: Any = guard.sloc.framework_loc
        if hasattr(place, "filename") and is_model_code(Frame(place.filename, place.lineno or 0, place.name)):
            raise ValueError("a branch on a size that varies")
    return _Graph(model, graph, weights, places, *results)


def _dynamic(model: nn.Module, examples: Examples, tensor: torch.Tensor) -> set[int]:
    """The dimensions of the input that vary."""
    if not examples.dynamic_shapes:
        return set()
    found, _ = dynamic_dims(model, examples.args, examples.kwargs, examples.dynamic_shapes)
    dims = next((dims for _, leaf, dims in found if leaf is tensor), {})
    return {index for index, dim in dims.items() if dim is not None and not isinstance(dim, int)}


def _fake(mode: Any, tensor: torch.Tensor, name: object, dynamic: set[int]) -> torch.Tensor:
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    sizes = [DimDynamic.DYNAMIC if i in dynamic else DimDynamic.STATIC for i in range(tensor.dim())]
    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
    made: torch.Tensor = mode.from_tensor(tensor, source=ConstantSource(f"input_{name}"), symbolic_context=context)
    return made


class _Graph(nn.Module):
    """Calls the traced graph with the model's weights, as the model is called, and gives results of its form."""

    def __init__(
        self, model: nn.Module, graph: fx.GraphModule, weights: dict[str, torch.Tensor], places: list[int],
        values: list[Any], spec: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.graph = graph
        self._names = {name: name.replace(".", "_") for name in weights}
        for name, tensor in weights.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(self._names[name], tensor)
            else:
                self.register_buffer(self._names[name], tensor)
        self._places, self._values, self._spec = places, values, spec

        @functools.wraps(model.forward)  # torch.export reads the names of arguments
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._run(args, kwargs)

        self.forward = forward

    def _run(self, args: Any, kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        weights = {name: getattr(self, own) for name, own in self._names.items()}
        tensors = iter(self.graph(weights, [leaves[place] for place in self._places]))
        values = [next(tensors) if isinstance(value, torch.Tensor) else value for value in self._values]
        return pytree.tree_unflatten(values, self._spec)
