"""OpenTelemetry spans, where its API is installed. Exporters are set up by opentelemetry-instrument or the caller."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

__all__ = ["Tracer"]

_NO_SPAN: AbstractContextManager[Any] = nullcontext()


class Tracer:
    """Makes spans; without the package opentelemetry-api, or a provider of spans, it does nothing."""

    def __init__(self) -> None:
        self._trace: Any = None
        self._propagate: Any = None
        self._is_enabled = False
        self._looked = float("-inf")
        try:
            self._trace = importlib.import_module("opentelemetry.trace")
            self._propagate = importlib.import_module("opentelemetry.propagate")
        except ImportError:
            return
        self._tracer = self._trace.get_tracer("untorch.serve")
        # What the API has for want of a provider.
        self._without = (self._trace.ProxyTracerProvider, self._trace.NoOpTracerProvider)

    @property
    def enabled(self) -> bool:
        """Whether spans are made: from at most a second after a provider was set."""
        if self._trace is None:
            return False
        if not self._is_enabled and (now := time.monotonic()) - self._looked >= 1.0:  # each look reads the environment
            self._looked = now
            self._is_enabled = not isinstance(self._trace.get_tracer_provider(), self._without)
        return self._is_enabled

    def server_span(self, name: str, headers: Mapping[str, str], **attributes: Any) -> AbstractContextManager[Any]:
        """The span of a request, a child of the one that the ``traceparent`` header names."""
        if not self.enabled:
            return _NO_SPAN
        context, kind = self._propagate.extract(dict(headers)), self._trace.SpanKind.SERVER
        span: AbstractContextManager[Any] = self._tracer.start_as_current_span(
            name, context=context, kind=kind, attributes=attributes
        )
        return span

    def span(self, name: str, **attributes: Any) -> AbstractContextManager[Any]:
        """A span within the current one. An exception is recorded in it."""
        if not self.enabled:
            return _NO_SPAN
        span: AbstractContextManager[Any] = self._tracer.start_as_current_span(name, attributes=attributes)
        return span
