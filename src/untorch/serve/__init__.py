"""Serves packages over HTTP. Never imports torch."""
