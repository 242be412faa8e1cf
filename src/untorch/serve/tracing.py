"""OpenTelemetry spans, where its API is installed. Exporters are set up by opentelemetry-instrument or the caller."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["Tracer"]


class Tracer:
    """Makes spans; without the package opentelemetry-api, it does nothing."""

    def __init__(self) -> None:
        self._trace: Any = None
        self._propagate: Any = None
        try:
            self._trace = importlib.import_module("opentelemetry.trace")
            self._propagate = importlib.import_module("opentelemetry.propagate")
        except ImportError:
            return
        self._tracer = self._trace.get_tracer("untorch.serve")

    @property
    def enabled(self) -> bool:
        """Whether spans are made."""
        return self._trace is not None

    @contextmanager
    def server_span(self, name: str, headers: Mapping[str, str], **attributes: Any) -> Iterator[Any]:
        """The span of a request, a child of the one that the ``traceparent`` header names."""
        if self._trace is None:
            yield None
            return
        context = self._propagate.extract(dict(headers))
        kind = self._trace.SpanKind.SERVER
        with self._tracer.start_as_current_span(name, context=context, kind=kind, attributes=attributes) as span:
            yield span

    @contextmanager
    def span(self, name: str, **attributes: Any) -> Iterator[Any]:
        """A span within the current one. An exception is recorded in it."""
        if self._trace is None:
            yield None
            return
        with self._tracer.start_as_current_span(name, attributes=attributes) as span:
            yield span
