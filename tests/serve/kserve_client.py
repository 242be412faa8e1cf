"""Calls a server by KServe's clients: ``python kserve_client.py HTTP GRPC``. Prints "ok".

A process of its own: its gRPC messages have the names of tritonclient's.
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

X = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=np.float32)
EXPECTED = [30.0, 80.0, 130.0, 54.0, 168.0, 282.0]


async def main(http: str, grpc: str) -> None:
    """REST with JSON and with binary tensors, then gRPC."""
    rest = InferenceRESTClient(RESTConfig(protocol="v2"))
    url = f"http://{http}"
    assert await rest.is_server_live(url)
    assert await rest.is_server_ready(url)
    assert await rest.is_model_ready(url, "own.linear")
    for binary in (False, True):
        one = InferInput("x", [2, 4], "FP32")
        one.set_data_from_numpy(X, binary_data=binary)
        request = InferRequest("own.linear", [one], request_id="5", parameters={"binary_data_output": binary})
        response = await rest.infer(url, request, model_name="own.linear", timeout=20)
        assert response.id == "5"
        assert response.outputs[0].as_numpy().ravel().tolist() == EXPECTED, response
    await rest.close()
    async with InferenceGRPCClient(grpc) as client:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("own.linear")
        for binary in (False, True):
            one = InferInput("x", [2, 4], "FP32")
            one.set_data_from_numpy(X, binary_data=binary)
            response = await client.infer(InferRequest("own.linear", [one]), timeout=20)
            assert response.outputs[0].as_numpy().ravel().tolist() == EXPECTED, response
    print("ok")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
