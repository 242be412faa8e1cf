"""Integrations with Ray and the Triton Inference Server: import each by its name. None needs torch."""
