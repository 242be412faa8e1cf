"""The protocol's gRPC service."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy
from google.protobuf.message import DecodeError

from untorch.runtime.errors import InvalidArgumentError, SystemResourceError, UntorchError
from untorch.serve.errors import status_of
from untorch.serve.inference.infer import (
    EXTENSIONS,
    InferRequest,
    InferResponse,
    check_tensor_parameters,
    config,
    infer,
    metadata,
    not_served,
    statistics,
)
from untorch.serve.inference.messages import DATA_TYPES, METHODS, SERVICE, message_class
from untorch.serve.inference.rest import check_load_parameters
from untorch.serve.inference.tensors import check_shape, datatype_of, dtype_name, dtype_of, from_raw, to_raw
from untorch.serve.middleware import is_authorized

if TYPE_CHECKING:
    from untorch.serve.state import ServerState

__all__ = ["GrpcServer"]

_log = logging.getLogger("untorch.serve")
# Where InferTensorContents has the values of a datatype. It has no place for the 16-bit floating-point ones.
_CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip
# Calls of Triton's extensions that are not served.
_NOT_SERVED = {
    **{
        f"{kind}SharedMemory{action}": "shared memory"
        for kind in ("System", "Cuda") for action in ("Register", "Status", "Unregister")
    },
    "TraceSetting": "trace settings", "LogSettings": "log settings",
}  # fmt: skip
_OPEN = frozenset({f"/{SERVICE}/ServerLive", f"/{SERVICE}/ServerReady"})


class GrpcServer:
    """Listens on a port of its own, in the same event loop as HTTP.

    Args:
        state: Of the server.
        host: As for HTTP.
        port: 0: any free one.

    Raises:
        SystemResourceError: The port is taken.
    """

    def __init__(self, state: ServerState, host: str, port: int) -> None:
        options = state.options
        self._server = grpc.aio.server(
            interceptors=[_Authorize(options.api_keys)] if options.api_keys else [],
            options=[
                ("grpc.max_receive_message_length", options.max_body),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 1 if options.workers > 1 else 0),
            ],
            maximum_concurrent_rpcs=options.max_connections,
        )
        service = _Service(state)
        handlers: dict[str, grpc.RpcMethodHandler] = {}
        for name in METHODS:
            handlers[name] = grpc.unary_unary_rpc_method_handler(
                service.wrap(getattr(service, name), message_class(f"{name}Request")),
                response_serializer=message_class(f"{name}Response").SerializeToString,
            )
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            service.ModelStreamInfer,
            response_serializer=message_class("ModelStreamInferResponse").SerializeToString,
        )
        for name, extension in _NOT_SERVED.items():
            handlers[name] = grpc.unary_unary_rpc_method_handler(service.refuse(extension))
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if options.tls_certificate is not None and options.tls_key is not None:
                pair = (Path(options.tls_key).read_bytes(), Path(options.tls_certificate).read_bytes())
                self.port = self._server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
            else:
                self.port = self._server.add_insecure_port(address)
        except RuntimeError:
            self.port = 0
        if not self.port:
            raise SystemResourceError(f"gRPC cannot listen on {address}: is the port taken?")

    async def start(self) -> None:
        """Begins to take calls."""
        await self._server.start()

    async def stop(self, grace: float) -> None:
        """Takes no more calls, and gives those that run so many seconds."""
        await self._server.stop(grace)


class _Authorize(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Asks for ``authorization: Bearer KEY`` in the metadata."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._keys = keys

        async def refuse(request: Any, context: Any) -> Any:
            text = "authorization: expected 'Bearer KEY' with a key of this server"
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, text)

        async def refuse_stream(request: Any, context: Any) -> AsyncIterator[Any]:
            await refuse(request, context)
            yield

        self._refuse = grpc.unary_unary_rpc_method_handler(refuse)
        self._refuse_stream = grpc.stream_stream_rpc_method_handler(refuse_stream)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        """Lets a call with a key pass."""
        value = next((str(value) for key, value in details.invocation_metadata or () if key == "authorization"), "")
        if details.method in _OPEN or is_authorized(value, self._keys):
            return await continuation(details)
        return self._refuse_stream if details.method.endswith("/ModelStreamInfer") else self._refuse


class _Service:
    """The calls. Names are the protocol's."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def wrap(self, function: Callable[[Any], Awaitable[Any]], message: Any) -> Callable[[Any, Any], Awaitable[Any]]:
        """The function for a message's bytes, with a status for every exception."""

        async def call(data: bytes, context: Any) -> Any:
            try:
                return await function(_parse(message, data))
            except Exception as error:
                status, text = _status(error)
            return await context.abort(getattr(grpc.StatusCode, status), text)

        return call

    def refuse(self, extension: str) -> Callable[[Any, Any], Awaitable[Any]]:
        """A function that says that this is not served."""

        async def call(data: bytes, context: Any) -> Any:
            status, text = _status(not_served(extension))
            return await context.abort(getattr(grpc.StatusCode, status), text)

        return call

    async def ServerLive(self, request: Any) -> Any:  # noqa: N802
        return message_class("ServerLiveResponse")(live=True)

    async def ServerReady(self, request: Any) -> Any:  # noqa: N802
        return message_class("ServerReadyResponse")(ready=self._state.ready)

    async def ModelReady(self, request: Any) -> Any:  # noqa: N802
        ready = self._state.repository.is_ready(request.name, request.version) and self._state.ready
        return message_class("ModelReadyResponse")(ready=ready)

    async def ServerMetadata(self, request: Any) -> Any:  # noqa: N802
        return message_class("ServerMetadataResponse")(
            name="untorch", version=self._state.version, extensions=EXTENSIONS
        )

    async def ModelMetadata(self, request: Any) -> Any:  # noqa: N802
        return message_class("ModelMetadataResponse")(**metadata(self._state, request.name, request.version))

    async def ModelConfig(self, request: Any) -> Any:  # noqa: N802
        found = config(self._state, request.name, request.version)
        for tensor in (*found["input"], *found["output"]):
            tensor["data_type"] = DATA_TYPES.index(tensor["data_type"].removeprefix("TYPE_"))
        return message_class("ModelConfigResponse")(config=found)

    async def ModelStatistics(self, request: Any) -> Any:  # noqa: N802
        return message_class("ModelStatisticsResponse")(**statistics(self._state, request.name, request.version))

    async def RepositoryIndex(self, request: Any) -> Any:  # noqa: N802
        rows = await self._state.call(self._state.repository.index)
        return message_class("RepositoryIndexResponse")(
            models=[row for row in rows if row["state"] == "READY" or not request.ready]
        )

    async def RepositoryModelLoad(self, request: Any) -> Any:  # noqa: N802
        check_load_parameters(dict.fromkeys(request.parameters))
        await self._state.change("load", request.model_name)
        return message_class("RepositoryModelLoadResponse")()

    async def RepositoryModelUnload(self, request: Any) -> Any:  # noqa: N802
        await self._state.change("unload", request.model_name)
        return message_class("RepositoryModelUnloadResponse")()

    async def ModelInfer(self, request: Any) -> Any:  # noqa: N802
        return _answer(await infer(self._state, _read(request), "grpc"))

    async def ModelStreamInfer(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Answers in the order of the requests; one that fails is no end of the stream."""
        response = message_class("ModelStreamInferResponse")
        async for data in requests:
            request = message_class("ModelInferRequest")()
            try:
                request = _parse(type(request), data)
                yield response(infer_response=await self.ModelInfer(request))
            except Exception as error:
                failed = message_class("ModelInferResponse")(id=request.id, model_name=request.model_name)
                yield response(error_message=_status(error)[1], infer_response=failed)


def _parse(message: Any, data: bytes) -> Any:
    """A message of its bytes. Raises InvalidArgumentError."""
    try:
        return message.FromString(data)
    except DecodeError:
        raise InvalidArgumentError(f"the request's bytes are no {message.DESCRIPTOR.name}") from None


def _status(error: Exception) -> tuple[str, str]:
    _, status = status_of(error)
    if isinstance(error, UntorchError):
        return status, str(error)
    if isinstance(error, MemoryError):
        return status, "there is not enough memory for this request"
    _log.error("a gRPC call failed", exc_info=error)
    return status, "internal error"


def _parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in given.items():
        choice = value.WhichOneof("choice")
        found[name] = getattr(value, choice) if choice is not None else None
    return found


def _read(request: Any) -> InferRequest:
    """Inputs are raw bytes, all of them, or typed contents, all of them."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidArgumentError(
            f"raw_input_contents: expected {len(request.inputs)} entries, one an input, got {len(raw)}"
        )
    inputs: dict[str, Any] = {}
    for i, tensor in enumerate(request.inputs):
        what = f"input '{tensor.name:.80}'"
        check_tensor_parameters(_parameters(tensor.parameters), what)
        if tensor.name in inputs:
            raise InvalidArgumentError(f"inputs: '{tensor.name:.80}' is given twice")
        shape = check_shape(list(tensor.shape), what)
        if raw:
            if tensor.HasField("contents"):
                raise InvalidArgumentError(f"{what}: contents: expected none beside raw_input_contents")
            inputs[tensor.name] = from_raw(raw[i], tensor.datatype, shape, what)
        else:
            inputs[tensor.name] = _from_contents(tensor, shape, what)
    outputs: list[str] = []
    for output in request.outputs:
        check_tensor_parameters(_parameters(output.parameters), f"output '{output.name:.80}'")
        outputs.append(output.name)
    return InferRequest(
        request.model_name, request.model_version, request.id, inputs, outputs, _parameters(request.parameters)
    )


def _from_contents(tensor: Any, shape: tuple[int, ...], what: str) -> Any:
    dtype = dtype_of(tensor.datatype, what)
    field = _CONTENTS.get(tensor.datatype)
    if field is None:
        raise InvalidArgumentError(f"{what}: contents: {tensor.datatype} has no field there: use raw_input_contents")
    values = getattr(tensor.contents, field)
    count = int(numpy.prod(shape, dtype=object)) if shape else 1
    if len(values) != count:
        raise InvalidArgumentError(
            f"{what}: {field}: expected {count} elements as the shape says, got {len(values)}"
        )  # fmt: skip
    if dtype.hasobject:
        array = numpy.empty(count, dtype=object)
        array[:] = list(values)
        return array.reshape(shape)
    try:
        return numpy.array(list(values), dtype=dtype).reshape(shape)
    except OverflowError:
        raise InvalidArgumentError(
            f"{what}: {field}: a number is out of the range of {tensor.datatype}"
        ) from None  # fmt: skip


def _answer(response: InferResponse) -> Any:
    tensor = message_class("ModelInferResponse.InferOutputTensor")
    return message_class("ModelInferResponse")(
        model_name=response.model,
        model_version=response.version,
        id=response.id,
        outputs=[
            tensor(name=name, datatype=datatype_of(dtype_name(array.dtype)), shape=array.shape)
            for name, array in response.outputs.items()
        ],
        raw_output_contents=[to_raw(array) for array in response.outputs.values()],
    )
