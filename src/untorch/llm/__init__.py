"""Language models: the engine over a paged KV cache. Never imports torch."""
