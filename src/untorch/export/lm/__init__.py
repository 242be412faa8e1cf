"""Language models: any causal LM of transformers as one step over a paged KV cache, and its package."""
