"""What serve.py compares with: KServe's Python server, with a model that calls ONNX Runtime.

``python serve_kserve.py FILE PORT``. KServe is in build/kserve (make build/stamps/clients), which other packages do not
import. It does not join requests.
"""

from __future__ import annotations

import logging
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "build" / "kserve"))

import kserve
import onnxruntime


class OnnxModel(kserve.Model):  # type: ignore[misc]
    """MiniLM by the Open Inference Protocol."""

    def __init__(self, file: str) -> None:
        super().__init__("minilm")
        self._session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        self._names = [one.name for one in self._session.get_inputs()]
        self.ready = True

    def predict(self, request: Any, headers: Any = None, response_headers: Any = None) -> Any:
        """One request's output."""
        given = {tensor.name: tensor.as_numpy() for tensor in request.inputs}
        (result,) = self._session.run(None, {name: given[name] for name in self._names})
        output = kserve.InferOutput("output", list(result.shape), "FP32")
        output.set_data_from_numpy(result, binary_data=True)
        return kserve.InferResponse(response_id=request.id or "0", model_name="minilm", infer_outputs=[output])


def main(file: str, port: int) -> None:
    logging.disable(logging.WARNING)
    server = kserve.ModelServer(http_port=port, enable_grpc=False, workers=1, access_log_format=None)
    server.start([OnnxModel(file)])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
