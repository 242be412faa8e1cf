"""Text from files, made safe to print: control characters as escapes."""

from __future__ import annotations

import re

__all__ = ["escape_controls"]

# C0 but for tab and line feed, C1, separators of lines and paragraphs, what has no width, what changes the direction.
# The loader does the same to its messages: native/base/text.cpp.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def escape_controls(text: str) -> str:
    """The text with ESC as ``\\x1b``, U+202E as ``\\u202e`` and so on. Tabs and line feeds stay."""
    return _CONTROLS.sub(lambda match: _escape(ord(match[0])), text)


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
