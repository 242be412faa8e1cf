"""A Ray Serve application of a package: batching by ``serve.batch``, over HTTP and by handles."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from untorch._core import Tensor
from untorch.integrations.joining import groups, join, split
from untorch.integrations.sharing import check_shareable
from untorch.predictor import Predictor
from untorch.runtime.columns import as_array, batch_dim, input_names, output_names
from untorch.runtime.errors import (
    ArgumentTypeError,
    DeviceLostError,
    InvalidArgumentError,
    UnsupportedError,
)
from untorch.runtime.method import Method
from untorch.runtime.program import load
from untorch.runtime.submit import submit_run

if TYPE_CHECKING:
    from ray.serve import Application
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["ModelServer", "application", "import_serve"]

_MOST_BODY = 64 << 20


def import_serve() -> Any:
    """The module ``ray.serve``. Raises UnsupportedError."""
    try:
        return importlib.import_module("ray.serve")
    except ImportError as error:
        raise UnsupportedError("untorch.integrations.ray needs Ray: pip install 'untorch[ray]'") from error


def application(
    path: str | os.PathLike[str],
    *,
    max_batch_size: int = 32,
    batch_wait_timeout_s: float = 0.002,
    deployment: Mapping[str, Any] | None = None,
    **load_options: Any,
) -> Application:
    """An application for ``serve.run``: ``serve.run(application("model.pt2"))``.

    HTTP: ``POST {"method": "forward", "inputs": {"x": [[…]]}}`` gives ``{"outputs": {…}}``, ``GET`` what there is.
    Handles: ``await handle.predict.remote({"x": array}, method="forward")`` gives a dict of arrays.

    Requests of a method are joined along its batch dimension, if its inputs and outputs all begin with the same dynamic
    dimension. Methods that keep values in buffers are refused: clients would share them.

    Args:
        path: The file, on every node that has a replica.
        max_batch_size: Rows of a joined call; at most what the method takes.
        batch_wait_timeout_s: Seconds that a request waits for others.
        deployment: Options of the deployment: ``num_replicas``, ``ray_actor_options``, ``autoscaling_config`` …
        **load_options: As for ``untorch.load``.

    Raises:
        UnsupportedError: Ray is not installed.
    """
    serve = import_serve()
    options = {"name": "ModelServer", "max_ongoing_requests": 4 * max_batch_size, **(deployment or {})}
    Predictor(path, **load_options)  # a wrong option is an error here, not in a replica
    made: Application = (
        serve.deployment(ModelServer)
        .options(**options)
        .bind(os.path.abspath(path), max_batch_size, batch_wait_timeout_s, load_options)
    )
    return made


class ModelServer:
    """A replica. It loads the package once."""

    def __init__(
        self, path: str, max_batch_size: int, batch_wait_timeout_s: float, load_options: Mapping[str, Any]
    ) -> None:
        self._program = load(path, **load_options)
        runners = int(load_options.get("num_runners", 1))
        self._calls: dict[str, Callable[[list[Any]], Awaitable[list[Any]]]] = {}
        self._refused: dict[str, UnsupportedError] = {}
        for name in self._program:
            method = self._program[name]
            try:
                check_shareable(method)
            except UnsupportedError as error:
                self._refused[name] = error
                continue
            self._calls[name] = _batched(method, max_batch_size, batch_wait_timeout_s, runners)
        self._lost: DeviceLostError | None = None

    async def predict(self, inputs: Mapping[str, Any], method: str = "forward") -> dict[str, Any]:
        """Run a method on arrays by the names of its inputs; the arrays by the names of its outputs."""
        found = self._find(method)
        if (refused := self._refused.get(found.name)) is not None:
            raise UnsupportedError(str(refused))
        names = input_names(found)
        if not isinstance(inputs, Mapping) or set(inputs) != set(names):
            got = ", ".join(map(str, inputs)) or "none" if isinstance(inputs, Mapping) else type(inputs).__name__
            raise InvalidArgumentError(f"method '{found.name}': expected the inputs {', '.join(names)}, got {got}")
        specs = dict(zip(names, found.inputs, strict=False))
        arrays = [as_array(inputs[name], found.name, name, specs.get(name)) for name in names]
        try:
            flat = await self._calls[found.name](arrays)
        except DeviceLostError as error:
            self._lost = error
            raise
        values = (value.numpy() if isinstance(value, Tensor) else value for value in flat)
        return {
            name: value for name, value in zip(output_names(found, len(flat)), values, strict=True) if name is not None
        }

    def check_health(self) -> None:
        """Ray Serve starts a replica anew whose GPU is lost."""
        if self._lost is not None:
            raise self._lost

    async def __call__(self, request: Request) -> Response:
        """HTTP: JSON in, JSON out."""
        from starlette.responses import JSONResponse

        if request.method == "GET":
            return JSONResponse({"methods": {name: _signature(self._program[name]) for name in self._calls}})
        if request.method != "POST":
            return JSONResponse({"error": f"expected GET or POST, got {request.method}"}, 405)
        try:
            document = await read_json(request, {"method", "inputs"})
            outputs = await self.predict(document.get("inputs", {}), document.get("method", "forward"))
        except (InvalidArgumentError, UnsupportedError) as error:
            return JSONResponse({"error": str(error)}, 400)
        return JSONResponse({"outputs": {name: _listed(value) for name, value in outputs.items()}})

    def _find(self, name: Any) -> Method:
        if not isinstance(name, str):
            raise ArgumentTypeError(f"method: expected a name, got {name!r}")
        return self._program.forward if name == "forward" and len(self._program) == 1 else self._program[name]


def _batched(
    method: Method, max_batch_size: int, wait: float, runners: int
) -> Callable[[list[Any]], Awaitable[list[Any]]]:
    """The method's calls, joined by Ray Serve; without a batch dimension one by one."""
    batch = batch_dim(method)

    async def single(arrays: list[Any]) -> list[Any]:
        return await submit_run(method, arrays)

    if batch is None:
        return single
    most = max_batch_size if batch.max is None else min(max_batch_size, batch.max)

    async def run(group: list[list[Any]]) -> list[tuple[Any, Exception | None]]:
        """What each request gets: outputs, or an error."""
        try:
            flat = await submit_run(method, join(group))
        except Exception as error:
            if len(group) == 1:
                return [(None, error)]
            return [result for arrays in group for result in await run([arrays])]
        return [(part, None) for part in split(flat, [len(arrays[0]) if len(group) > 1 else 0 for arrays in group])]

    async def joined(requests: list[list[Any]]) -> list[tuple[Any, Exception | None]]:
        results: list[tuple[Any, Exception | None]] = [(None, None)] * len(requests)
        for places in groups(batch, requests):
            for place, result in zip(places, await run([requests[place] for place in places]), strict=True):
                results[place] = result
        return results

    def rows(requests: list[list[Any]]) -> int:
        return sum(len(arrays[0]) if getattr(arrays[0], "ndim", 0) else 1 for arrays in requests)

    queue = import_serve().batch(
        max_batch_size=most, batch_wait_timeout_s=wait, max_concurrent_batches=runners, batch_size_fn=rows
    )(joined)

    async def call(arrays: list[Any]) -> list[Any]:
        if rows([arrays]) > most:  # the queue takes no request above its size
            return await single(arrays)
        result, error = await queue(arrays)
        if error is not None:
            raise error
        flat: list[Any] = result
        return flat

    return call


async def read_json(request: Request, known: set[str]) -> dict[str, Any]:
    """The request's JSON object, of which every field is known. Raises InvalidArgumentError."""
    import json

    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MOST_BODY:
            raise InvalidArgumentError(f"expected at most {_MOST_BODY} bytes")
    try:
        document = json.loads(bytes(body))
    except ValueError as error:
        raise InvalidArgumentError(f"expected JSON: {error}") from None
    if not isinstance(document, dict):
        raise InvalidArgumentError(f"expected a JSON object, got {type(document).__name__}")
    if unknown := [key for key in document if key not in known]:
        raise InvalidArgumentError(f"expected the fields {', '.join(sorted(known))}, got {', '.join(unknown)}")
    return document


def _signature(method: Method) -> dict[str, Any]:
    def described(specs: Any) -> list[dict[str, Any]]:
        return [
            {
                "name": spec.name,
                "dtype": spec.dtype,
                "shape": [size if isinstance(size, int) else -1 for size in spec.shape],
            }
            for spec in specs
            if spec is not None
        ]

    return {"inputs": described(method.inputs), "outputs": described(method.outputs)}


def _listed(array: Any) -> Any:
    """Nested lists; NaN and infinity, which JSON does not have, as strings."""
    if array.dtype.kind not in "biuf":
        array = array.astype("float32") if array.dtype.name == "bfloat16" else array.astype(str)
    values = array.tolist()
    return values if array.dtype.kind in "biu" else _finite(values)


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
