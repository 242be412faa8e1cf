"""A request of the protocol, however it came: checked, computed, answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from untorch.runtime.errors import ClosedError, InvalidArgumentError, UnsupportedError
from untorch.serve.inference.tensors import DATATYPES, datatype_of, dtype_name
from untorch.serve.model import MethodModel, Port
from untorch.serve.repository import VERSION

if TYPE_CHECKING:
    from untorch.serve.state import ServerState

__all__ = [
    "EXTENSIONS", "REFUSED", "InferRequest", "InferResponse", "config", "infer", "metadata", "not_served", "statistics",
    "timeout_of",
]  # fmt: skip

Array = NDArray[Any]

EXTENSIONS = [
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "model_repository(unload_dependents)",
    "parameters",
    "statistics",
]

# Parameters of a request that are the protocol's own. Those of sequences would change what a call means.
_OWN = frozenset({"timeout", "binary_data_output", "triton_enable_empty_final_response", "headers"})
REFUSED = {
    "sequence_id": "sequences are not served", "sequence_start": "sequences are not served",
    "sequence_end": "sequences are not served", "priority": "calls have no priorities",
}  # fmt: skip
_NOT_THE_MODELS = _OWN | REFUSED.keys()
_REFUSED_TENSOR = {
    "shared_memory_region": "shared memory is not served", "shared_memory_byte_size": "shared memory is not served",
    "shared_memory_offset": "shared memory is not served", "classification": "classification is not served",
}  # fmt: skip


@dataclass
class InferRequest:
    """``outputs``: names that are wanted; empty: all."""

    model: str
    version: str = ""
    id: str = ""
    inputs: dict[str, Array] = field(default_factory=dict)
    outputs: Sequence[str] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class InferResponse:
    """The outputs in the order in which they were asked for."""

    model: str
    version: str
    id: str
    outputs: dict[str, Array]


async def infer(state: ServerState, request: InferRequest, protocol: str) -> InferResponse:
    """Computes a request.

    Raises:
        ModelNotFoundError: There is no such model.
        NotReadyError: The model is not loaded.
        InvalidArgumentError: Names, datatypes, shapes or parameters are not the model's.
        UntorchError: What the call raises.
    """
    with state.metrics.request(protocol) as watch, state.tracer.span("infer", model=request.model):
        model = state.repository.get(request.model, request.version)
        watch.model = model.name
        for name in request.parameters:
            if name in REFUSED and request.parameters[name]:
                raise InvalidArgumentError(f"parameter '{name}': {REFUSED[name]}")
        parameters = {name: value for name, value in request.parameters.items() if name not in _NOT_THE_MODELS}
        timeout = timeout_of(request.parameters.get("timeout"), model.timeout)
        if request.outputs and (known := {port.name for port in model.outputs}):
            for name in request.outputs:
                if name not in known:
                    raise InvalidArgumentError(
                        f"model '{model.name}': unknown output '{name:.80}', there are: {', '.join(sorted(known))}"
                    )
        while True:
            try:
                outputs = await model.infer(request.inputs, parameters, timeout)
                break
            except ClosedError:
                # It was loaded again after we had found it; if it was unloaded, there is no other.
                closed, model = model, state.repository.get(request.model, request.version)
                if model is closed:
                    raise
        for name in request.outputs:
            if name not in outputs:
                raise InvalidArgumentError(
                    f"model '{model.name}': there is no output '{name:.80}' in this call: {', '.join(outputs)}"
                )
        chosen = {name: outputs[name] for name in request.outputs} if request.outputs else outputs
        for array in chosen.values():
            datatype_of(dtype_name(array.dtype))
        return InferResponse(request.model, VERSION, request.id, chosen)


def timeout_of(microseconds: Any, limit: float) -> float | None:
    """Seconds: the request's, at most the server's. None: no limit."""
    if microseconds in (None, 0):
        return limit or None
    if not isinstance(microseconds, int) or isinstance(microseconds, bool) or microseconds < 0:
        raise InvalidArgumentError(f"parameter 'timeout': expected microseconds, got {microseconds!r:.80}")
    return min(microseconds / 1e6, limit) if limit else microseconds / 1e6


def not_served(extension: str) -> UnsupportedError:
    """The error for a call of an extension."""
    return UnsupportedError(f"{extension}: not served; the extensions are: {', '.join(EXTENSIONS)}")


def check_tensor_parameters(parameters: Mapping[str, Any], what: str) -> None:
    """Refuses extensions that are not served. Raises InvalidArgumentError."""
    for name in parameters:
        if name in _REFUSED_TENSOR:
            raise InvalidArgumentError(f"{what}: parameter '{name}': {_REFUSED_TENSOR[name]}")


def config(state: ServerState, name: str, version: str) -> dict[str, Any]:
    """As Triton's model configuration extension has it. Raises ModelNotFoundError, NotReadyError.

    max_batch_size counts rows of joined calls, and then sizes are without dimension 0; 0: sizes are whole.
    """
    model = state.repository.get(name, version)
    ports = (*model.inputs, *model.outputs)
    most = model.max_batch_size if isinstance(model, MethodModel) and all(len(one.shape) > 1 for one in ports) else 0

    def tensor(port: Port) -> dict[str, Any]:
        known = port.datatype in (*DATATYPES, "BYTES")
        kind = {"BYTES": "STRING"}.get(port.datatype, port.datatype) if known else "INVALID"
        return {"name": port.name, "data_type": f"TYPE_{kind}", "dims": list(port.shape[1:] if most else port.shape)}

    return {
        "name": model.name, "platform": model.platform, "backend": "untorch", "max_batch_size": most,
        "input": [tensor(port) for port in model.inputs], "output": [tensor(port) for port in model.outputs],
    }  # fmt: skip


def statistics(state: ServerState, name: str, version: str) -> dict[str, Any]:
    """Of a model, or, without a name, of all that are loaded. Raises ModelNotFoundError, NotReadyError."""
    names = [state.repository.get(name, version).name] if name else sorted(state.repository.models)
    return {"model_stats": [state.metrics.statistics(one).to_json(one, VERSION) for one in names]}


def metadata(state: ServerState, name: str, version: str) -> dict[str, Any]:
    """A model's inputs and outputs."""
    model = state.repository.get(name, version)
    return {
        "name": model.name,
        "versions": [VERSION],
        "platform": model.platform,
        "inputs": [port.to_json() for port in model.inputs],
        "outputs": [port.to_json() for port in model.outputs],
    }
