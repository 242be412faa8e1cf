"""The engine's methods for adapters (LoRA): loading, unloading, and finding them by name."""

from __future__ import annotations

import os

from untorch.llm.lora import Adapter, Loras
from untorch.llm.runner import Runner
from untorch.runtime.errors import UnsupportedError

__all__ = ["LoraMethods"]


class LoraMethods:
    """Of ``Engine``."""

    _runner: Runner

    @property
    def loras(self) -> list[str]:
        """The names of the adapters that are loaded."""
        return [] if self._runner.loras is None else self._runner.loras.names

    def load_lora(self, name: str, folder: str | os.PathLike[str]) -> None:
        """Load an adapter of PEFT, adapter_config.json and adapter_model.safetensors, while the engine runs.

        Requests that use another one of that name go on with it.

        Raises:
            InvalidFileError: A file is damaged, or is not for this model's layers. FileMissingError: There is none.
            UnsupportedError: It is no LoRA of linear layers; or the package was exported without ``lora``.
        """
        self._loras("load_lora").load(name, folder)

    def unload_lora(self, name: str) -> None:
        """Forget an adapter; requests that use it go on. Raises InvalidArgumentError for an unknown name."""
        self._loras("unload_lora").unload(name)

    def _loras(self, what: str) -> Loras:
        if self._runner.loras is None:
            raise UnsupportedError(
                f"{what}: the package takes no adapters: export it with causal_lm(…, lora=True), or with the names of "
                "the adapters' layers"
            )
        return self._runner.loras

    def _adapter(self, name: str | None) -> Adapter | None:
        if name is None:
            return None
        return self._loras("submit: lora").get(name)
