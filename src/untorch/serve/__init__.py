"""Serves packages over HTTP and gRPC: the Open Inference Protocol, dynamic batching, metrics. Never imports torch.

``untorch serve`` is the command. Needs the extra ``untorch[serve]``.
"""

from untorch.serve.options import ServeOptions

__all__ = ["ServeOptions"]
