"""What a package says of its front end: the manifest's member "pipeline"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from untorch.runtime.errors import InvalidFileError, UnsupportedError

__all__ = ["FORMAT_VERSION", "MORE_TOKENIZERS", "TOKENIZER", "Settings", "read_settings"]

FORMAT_VERSION = 1
TOKENIZER = "extra/pipeline/tokenizer.json"
# Of models with several text encoders.
MORE_TOKENIZERS = ("extra/pipeline/tokenizer_2.json", "extra/pipeline/tokenizer_3.json")


class Settings:
    """The member's values, each checked for its type as it is read."""

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self._values, self._path = values, path

    def get(self, name: str, kind: type) -> Any:
        """The value. Raises InvalidFileError if it is missing or of another type."""
        value = self._values.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.damaged(f"{name}: expected {kind.__name__}, got {value!r:.80}")
        return value

    def optional(self, name: str, kind: type) -> Any:
        """The value; None if there is none. Raises InvalidFileError if it is of another type."""
        return None if self._values.get(name) is None else self.get(name, kind)

    def at(self, values: Mapping[str, Any]) -> Settings:
        """Of values that are among these."""
        return Settings(values, self._path)

    def texts(self, name: str) -> list[str]:
        """A list of strings. Raises InvalidFileError."""
        value: list[str] = self.get(name, list)
        if not all(isinstance(item, str) for item in value):
            raise self.damaged(f"{name}: expected a list of strings, got {value!r:.80}")
        return value

    def damaged(self, problem: str) -> InvalidFileError:
        """The error for a value that is wrong."""
        return InvalidFileError(f"{self._path}: the manifest's pipeline is damaged: {problem}")


def read_settings(manifest: Mapping[str, Any], path: str) -> Settings:
    """Of a program's manifest. Raises InvalidFileError; UnsupportedError for a newer format."""
    section = manifest.get("pipeline")
    if not isinstance(section, Mapping):
        hint = ""
        if "llm" in manifest:
            hint = "; this one holds a language model: use untorch.llm.Engine"
        raise InvalidFileError(
            f"{path} holds no pipeline: packages with one are made by untorch export DIR, or "
            f"untorch.export.export_folder{hint}"
        )
    if section.get("format_version") != FORMAT_VERSION:
        raise UnsupportedError(
            f"{path}: its pipeline has format {section.get('format_version')!r}, this untorch reads {FORMAT_VERSION}: "
            "export it again, or upgrade untorch"
        )
    return Settings(section, path)
