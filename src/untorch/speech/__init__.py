"""Speech to text by packages of ``untorch.export.speech_to_text``: audio files in, text out. Imports no torch.

``Transcriber`` is what callers use. ``read_audio``, ``resample`` and ``LogMel`` are its front end, with numpy and, for
files, soundfile (``pip install 'untorch[speech]'``).
"""

from untorch.speech.audio import read_audio
from untorch.speech.features import LogMel, normalize
from untorch.speech.outputs import Recognition, Segment, Transcription, Word
from untorch.speech.resample import resample
from untorch.speech.settings import SpeechSettings
from untorch.speech.subtitles import to_srt, to_vtt
from untorch.speech.transcriber import Transcriber

__all__ = [
    "LogMel",
    "Recognition",
    "Segment",
    "SpeechSettings",
    "Transcriber",
    "Transcription",
    "Word",
    "normalize",
    "read_audio",
    "resample",
    "to_srt",
    "to_vtt",
]
