"""The Triton Inference Server: a model repository from a package, and the model that its python backend runs."""

from untorch.integrations.triton.backend import TritonPythonModel
from untorch.integrations.triton.repository import Repository, write_repository

__all__ = ["Repository", "TritonPythonModel", "write_repository"]
