"""What serve.py compares with: the Triton Inference Server of nvidia-pytriton's wheel, with ONNX Runtime.

``python serve_triton.py FILE PORT``. UNTORCH_TRITON_PYTHON names a Python with nvidia-pytriton, numpy<2 and
onnxruntime. The wheel has Triton's Python backend alone, so a model of it calls ONNX Runtime. Triton joins requests
(dynamic batching).
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

from common import WORK

CONFIG = """
name: "minilm"
backend: "python"
max_batch_size: 32
dynamic_batching {{ }}
input [
  {{ name: "input_ids", data_type: TYPE_INT64, dims: [ -1 ] }},
  {{ name: "attention_mask", data_type: TYPE_INT64, dims: [ -1 ] }}
]
output [ {{ name: "output", data_type: TYPE_FP32, dims: [ -1 ] }} ]
instance_group [ {{ kind: KIND_CPU, count: 1 }} ]
parameters: {{ key: "file", value: {{ string_value: "{file}" }} }}
"""
# Requests of a batch are joined by the model: that is how the Python backend works.
MODEL = """
import json
import numpy, onnxruntime
import triton_python_backend_utils as utils

class TritonPythonModel:
    def initialize(self, args):
        file = json.loads(args["model_config"])["parameters"]["file"]["string_value"]
        self.session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        self.names = [one.name for one in self.session.get_inputs()]

    def execute(self, requests):
        arrays = [
            [utils.get_input_tensor_by_name(one, name).as_numpy() for one in requests] for name in self.names
        ]
        given = {name: numpy.concatenate(many) for name, many in zip(self.names, arrays)}
        (result,) = self.session.run(None, given)
        begin, answers = 0, []
        for one in arrays[0]:
            rows = numpy.ascontiguousarray(result[begin : begin + len(one)])
            answers.append(utils.InferenceResponse([utils.Tensor("output", rows)]))
            begin += len(one)
        return answers
"""


def main(file: str, port: int) -> None:
    """Writes the repository, and becomes the server."""
    python = os.environ["UNTORCH_TRITON_PYTHON"]
    code = "import json, pytriton, sys, sysconfig as s; print(json.dumps([pytriton.__path__[0], s.get_config_var('LIBDIR'), '%d.%d' % sys.version_info[:2]]))"  # noqa: E501
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    package, libraries, version = json.loads(found.stdout)
    wheel = pathlib.Path(package, "tritonserver")
    folder = WORK / "triton"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "repository" / "minilm" / "1").mkdir(parents=True)
    (folder / "repository" / "minilm" / "config.pbtxt").write_text(CONFIG.format(file=os.path.abspath(file)))
    (folder / "repository" / "minilm" / "1" / "model.py").write_text(MODEL)
    backend = folder / "backends" / "python"
    backend.mkdir(parents=True)
    stub = wheel / "python_backend_stubs" / version / "triton_python_backend_stub"
    for path in (*(wheel / "backends" / "python").glob("*.*"), stub):
        shutil.copy(path, backend)
    (backend / stub.name).chmod(0o755)
    # The stub takes the first python3 of PATH for its own, and ignores PYTHONPATH.
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([os.path.dirname(python), os.environ["PATH"]]),
        "LD_LIBRARY_PATH": os.pathsep.join([str(pathlib.Path(package).parent / "nvidia_pytriton.libs"), libraries]),
    }
    words = [
        f"--model-repository={folder / 'repository'}", f"--backend-directory={folder / 'backends'}",
        f"--http-port={port}", "--http-address=127.0.0.1", "--allow-grpc=false", "--allow-metrics=false",
        "--disable-auto-complete-config", "--log-info=false", "--log-warning=false",
    ]  # fmt: skip
    program = str(wheel / "bin" / "tritonserver")
    os.execve(program, [program, *words], environment)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
