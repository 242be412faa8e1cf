"""Audio classification: a waveform to labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from untorch.pipeline.base import Pipeline, numbered, read_count
from untorch.pipeline.scores import activate, activation_of, best
from untorch.runtime.errors import InvalidArgumentError
from untorch.speech.audio import read_audio
from untorch.speech.features import normalize

__all__ = ["AudioClassification"]


class AudioClassification(Pipeline):
    """The best labels with their scores; top_k of them, 5 by default. sampling_rate is that of arrays."""

    options = ("top_k", "function_to_apply", "sampling_rate")

    def run(self, inputs: Sequence[Any], options: Mapping[str, Any], is_list: bool) -> list[Any]:
        """See the class. Each waveform is a call of its own, as waveforms that are padded give other results."""
        top_k = read_count("top_k", options.get("top_k", 5))
        rate, fewest = self.settings.get("sampling_rate", int), self.settings.get("min_samples", int)
        longest, name = self.settings.get("max_samples", int), activation_of(options, self.settings)
        found = []
        for index, source in enumerate(inputs):
            with numbered(index if is_list else None):
                samples = read_audio(source, rate, source_rate=options.get("sampling_rate"))
                if not fewest <= len(samples) <= longest:
                    raise InvalidArgumentError(
                        f"pipeline: inputs: expected {fewest} to {longest} samples at {rate} Hz, got {len(samples)}"
                    )
            if self.settings.get("normalize", bool):
                samples = normalize(samples)
            logits = self.call("forward", {"input_values": samples[None]})[0]
            scores = activate(logits, name)
            found.append(best(scores, self.labels(len(scores)), top_k))
        return found
