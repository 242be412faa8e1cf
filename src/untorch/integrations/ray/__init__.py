"""Ray: a class for ``Dataset.map_batches``, and applications for Ray Serve. ``pip install 'untorch[ray]'``."""

from __future__ import annotations

import typing as _typing

from untorch.integrations.ray.batches import BatchPredictor

if _typing.TYPE_CHECKING:
    from untorch.integrations.ray.front_end import pipeline
    from untorch.integrations.ray.llm import language_model, openai
    from untorch.integrations.ray.serving import application
else:  # Ray Serve takes a second to import, and Ray Data does not need it

    def __getattr__(name: str) -> object:
        if name == "application":
            from untorch.integrations.ray.serving import application

            return application
        if name == "pipeline":
            from untorch.integrations.ray.front_end import pipeline

            return pipeline
        if name in ("language_model", "openai"):
            from untorch.integrations.ray import llm as module

            return getattr(module, name)
        raise AttributeError(f"module 'untorch.integrations.ray' has no attribute '{name}'")


__all__ = ["BatchPredictor", "application", "language_model", "openai", "pipeline"]
