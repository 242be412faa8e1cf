"""The build half (needs torch and transformers): compiles a folder of Whisper or Voxtral into one package.

    python build.py ./whisper-small -o whisper.pt2
    python build.py ./Voxtral-Mini-3B -o voxtral.pt2 --tokenizer tokenizer.json --quantize int4 --device cuda

The package has the log-mel front end, the model and its tokenizer. run.py transcribes with it, without torch.
"""

from __future__ import annotations

import argparse
import pathlib
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="with config.json, safetensors and preprocessor_config.json")
    parser.add_argument("-o", "--output", type=pathlib.Path, default=pathlib.Path("speech.pt2"))
    parser.add_argument("--tokenizer", help="a tokenizer.json; default: the folder's")
    parser.add_argument("--quantize", help="linear layers in int4 or int8; default: as they are")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; default: cpu")
    parser.add_argument("--arch", help="a GPU's architecture, such as sm_90; default: the GPU of this machine")
    options = parser.parse_args()

    from untorch.export import speech_to_text

    given = {name: value for name in ("quantize", "arch") if (value := getattr(options, name))}
    start = time.perf_counter()
    report = speech_to_text(options.folder, options.output, tokenizer=options.tokenizer, device=options.device, **given)
    seconds = time.perf_counter() - start
    print(f"{report.path}: {report.nbytes / 2**20:.1f} MiB, methods {', '.join(report.methods)}, in {seconds:.0f} s")


if __name__ == "__main__":
    main()
