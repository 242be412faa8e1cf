"""What serve.py compares with: a Starlette application that calls ONNX Runtime, by uvicorn with httptools and uvloop.

``python serve_onnxruntime.py FILE PORT [--batch]``. It reads and writes binary tensors of the Open Inference Protocol
as untorch does, and checks nothing. Calls run in one thread, or, with ``--batch``, through untorch's batcher.
"""

from __future__ import annotations

import asyncio
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import onnxruntime
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from untorch.serve.batching import Batcher


def main(file: str, port: int, batch: bool) -> None:
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    thread = ThreadPoolExecutor(1)

    def run(inputs: Any) -> Any:
        return session.run(None, dict(zip(names, inputs, strict=True)))

    batcher = Batcher(run, joins=batch, max_batch_size=32)

    async def infer(request: Request) -> Response:
        body = await request.body()
        at = int(request.headers["inference-header-content-length"])
        inputs = []
        for tensor in json.loads(body[:at])["inputs"]:
            size = tensor["parameters"]["binary_data_size"]
            inputs.append(numpy.frombuffer(body[at : at + size], numpy.int64).reshape(tensor["shape"]))
            at += size
        if batch:
            (output,) = await batcher.infer(inputs)
        else:
            (output,) = await asyncio.get_running_loop().run_in_executor(thread, run, inputs)
        raw = output.tobytes()
        header = json.dumps(
            {
                "outputs": [
                    {
                        "name": "output", "datatype": "FP32", "shape": list(output.shape),
                        "parameters": {"binary_data_size": len(raw)},
                    }
                ]
            }
        ).encode()  # fmt: skip
        return Response(header + raw, headers={"inference-header-content-length": str(len(header))})

    app = Starlette(routes=[Route("/v2/models/minilm/infer", infer, methods=["POST"])])
    uvicorn.run(app, port=port, log_level="error", access_log=False, http="httptools", loop="uvloop")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), "--batch" in sys.argv)
