"""Which methods a server may call for several clients."""

from __future__ import annotations

from untorch.runtime.errors import UnsupportedError
from untorch.runtime.method import Method

__all__ = ["check_shareable"]


def check_shareable(method: Method) -> None:
    """Raises UnsupportedError if a call leaves something to the next one, which may be another client's."""
    if any(constant.get("mutated") for constant in (method._spec or {}).get("constants", [])):
        raise UnsupportedError(
            f"method '{method.name}' keeps values in buffers from call to call, and the requests of all clients would "
            "share them"
        )
    for spec in method.inputs:
        if spec.mutated:
            raise UnsupportedError(
                f"method '{method.name}' writes into its input '{spec.name}', and a client would not see it"
            )
