"""Images in the prompts of language models: patches, an encoder's tables, and rotary positions. Never imports torch."""
