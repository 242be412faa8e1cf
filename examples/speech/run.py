"""The run half, in an environment without torch: prints what is said in an audio file as the model writes it.

    python run.py whisper.pt2 speech.wav --language en --times

Files are read by soundfile: pip install 'untorch[speech]', for Voxtral 'untorch[speech,llm]'.
"""

from __future__ import annotations

import argparse
import sys
import time

from untorch.speech import Transcriber, to_srt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package")
    parser.add_argument("audio", help="WAV, FLAC, OGG or MP3")
    parser.add_argument("--language", help="such as en; default: Whisper detects it")
    parser.add_argument("--times", action="store_true", help="subtitles at the end; Whisper only")
    options = parser.parse_args()
    with Transcriber(options.package) as transcriber:
        start, first = time.perf_counter(), None
        handle = transcriber.submit(options.audio, language=options.language, timestamps=options.times)
        for piece in handle:
            first = first or time.perf_counter() - start
            print(piece, end="", flush=True)
        print()
        result, seconds = handle.result(), time.perf_counter() - start
    if options.times and result.segments:
        print(to_srt(result.segments))
    began = "no text" if first is None else f"first text after {first:.2f} s"
    print(f"{result.duration:.1f} s of audio in {seconds:.2f} s, {began}", file=sys.stderr)


if __name__ == "__main__":
    main()
