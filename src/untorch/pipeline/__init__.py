"""``untorch.pipeline("model.pt2")(inputs)``: text, images and audio in, labels and scores out. Imports no torch.

It runs packages of ``untorch.export.export_folder``, whose front end (tokenizer, image steps, labels) is in the file.
Results have the format of transformers' pipelines. Text needs the package tokenizers, image files need Pillow and audio
files soundfile: ``pip install 'untorch[pipeline]'``.
"""

import sys as _sys
import types as _types
import typing as _typing

from untorch.pipeline.base import Pipeline
from untorch.pipeline.load import check_arguments, open_pipeline

__all__ = ["Pipeline", "open_pipeline"]


class _Module(_types.ModuleType):
    """The module is the function, too: an import of a submodule puts it in the place of ``untorch.pipeline``."""

    def __call__(self, *source: _typing.Any, **options: _typing.Any) -> Pipeline:
        """``open_pipeline(source, …)``."""
        check_arguments(source, options)
        return open_pipeline(*source, **options)


_sys.modules[__name__].__class__ = _Module
