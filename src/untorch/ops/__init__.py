"""Operators of our own for torch.library: schema, fake and reference implementations, and their C shims."""
