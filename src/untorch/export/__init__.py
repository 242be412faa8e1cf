"""The build half: ``export`` compiles a model into one file that runs without PyTorch. Needs torch."""

from untorch.export.coverage import MissingOperator
from untorch.export.errors import CompileError, OptionError, UnsupportedOperatorsError, VerificationError
from untorch.export.exporter import ExportReport, export
from untorch.export.fallbacks import Fallback, check
from untorch.export.lm.build import causal_lm
from untorch.export.method import MethodReport
from untorch.export.options import ExportOptions
from untorch.export.recipes.build import export_folder
from untorch.export.speech.build import speech_to_text
from untorch.quant.options import QuantizeOptions

__all__ = [
    "CompileError",
    "ExportOptions",
    "ExportReport",
    "Fallback",
    "MethodReport",
    "MissingOperator",
    "OptionError",
    "QuantizeOptions",
    "UnsupportedOperatorsError",
    "VerificationError",
    "causal_lm",
    "check",
    "export",
    "export_folder",
    "speech_to_text",
]
