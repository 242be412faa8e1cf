"""How much memory the export of a language model's folder takes, with and without ``stream_weights``. Needs torch.

Folders are of random weights in bfloat16, in the sizes of published models, below build/bench. Each export is a process
of its own; what is counted is its memory that is not backed by files, beyond what it has after the imports. The largest
model is exported with streamed weights alone.
"""

from __future__ import annotations

import json
import pathlib
import re
import resource
import subprocess
import sys
import threading
import time
from typing import Any

from common import ROOT, WORK, Report, Table, arguments

_SHARED = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "rms_norm_eps": 1e-6}
SIZES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _SHARED | {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": _SHARED | {
        "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
# How each is quantised: by its name in the table, and with which of the two it is exported.
CASES = (
    ("Qwen3-0.6B", None, ("memory", "files")),
    ("Qwen3-0.6B", "int8", ("memory", "files")),
    ("Qwen3-0.6B", "int4", ("memory", "files")),
    ("Qwen3-8B", "int4", ("files",)),
)
_SHARD_BYTES = 2 << 30


def folder_of(size: str) -> pathlib.Path:
    """A Hugging Face folder with random weights, made where it is missing."""
    import torch
    import transformers
    from safetensors.torch import save_file

    folder = WORK / f"folder_{size}"
    if (folder / "model.safetensors.index.json").is_file():
        return folder
    config: Any = transformers.Qwen3Config(**SIZES[size], max_position_embeddings=4096, dtype=torch.bfloat16)
    config.architectures = ["Qwen3ForCausalLM"]
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in transformers.Qwen3ForCausalLM(config).named_parameters()}
    config.save_pretrained(folder)
    torch.manual_seed(0)
    source = (torch.randn(1 << 26) * 0.02).to(torch.bfloat16)
    placed: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}

    def write() -> None:
        file = f"model-{len(set(placed.values())):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        placed.update(dict.fromkeys(shard, file))
        shard.clear()

    for number, (name, shape) in enumerate(shapes.items()):
        count = shape.numel()
        begin = number * 8191 % len(source)  # no two tensors have the same values
        values = source.repeat(-(-(begin + count) // len(source)))[begin : begin + count]
        shard[name] = torch.ones(shape, dtype=torch.bfloat16) if len(shape) == 1 else values.clone().reshape(shape)
        if sum(tensor.nbytes for tensor in shard.values()) > _SHARD_BYTES:
            write()
    if shard:
        write()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return folder


def anonymous_bytes() -> int:
    """This process's memory that is not backed by files."""
    found = re.search(r"RssAnon:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


class Watch(threading.Thread):
    """The most memory while it runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0

    def run(self) -> None:
        """Until the process ends."""
        while True:
            self.most = max(self.most, anonymous_bytes())
            time.sleep(0.005)


def child(size: str, quantize: str, kind: str) -> None:
    """One export, with its figures on the last line of the output."""
    import transformers  # noqa: F401 - part of what every export needs

    from untorch.export import export_folder

    begin, watch = anonymous_bytes(), Watch()
    watch.start()
    start = time.perf_counter()
    report = export_folder(
        WORK / f"folder_{size}", WORK / "streamed.pt2", quantize=json.loads(quantize), progress=False,
        stream_weights=kind == "files", max_positions=4096,
    )  # fmt: skip
    used = resource.getrusage(resource.RUSAGE_SELF)
    found = {
        "bytes": watch.most - begin, "seconds": time.perf_counter() - start, "file": report.nbytes,
        "cpu": used.ru_utime + used.ru_stime,
        "quantise": sum(t for name, t in report.seconds.items() if name.endswith("quantise")),
        "steps": report.seconds,
    }  # fmt: skip
    (WORK / "streamed.pt2").unlink()
    print(json.dumps(found))


def measure(size: str, quantize: str | None, kind: str) -> dict[str, Any]:
    """Of one export, in a process of its own."""
    script = str(ROOT / "benchmarks" / "export_memory.py")
    command = [sys.executable, "-W", "ignore", script, "--child", size, json.dumps(quantize), kind]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{size}, {quantize}, {kind}: its process ended with exit code {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    options = arguments(__doc__)
    report = Report("export_memory", options.quick)
    rows = []
    for size, quantize, kinds in CASES[:1] if options.quick else CASES:
        folder = folder_of(size)
        weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        found = {kind: measure(size, quantize, kind) for kind in kinds}
        report.values[f"{size}, {quantize or 'bfloat16'}"] = {"weights": weights, **found}
        cells = [f"{weights / 2**30:.2f}", f"{found['files']['file'] / 2**30:.2f}"]
        for key, scale, digits in (("bytes", 2**30, 2), ("seconds", 1, 0)):
            cells += [
                f"{found[kind][key] / scale:.{digits}f}" if kind in found else "–" for kind in ("memory", "files")
            ]
        cells.append(f"{found['files']['quantise']:.0f}" if quantize else "–")
        rows.append([f"{size}, {quantize or 'bfloat16'}", *cells])
    columns = [
        "Model", "weights, GiB", "package, GiB", "memory, GiB", "memory, streamed", "seconds", "seconds, streamed",
        "of these: quantise",
    ]  # fmt: skip
    note = (
        "Memory that is not backed by files, beyond that of the imports, at most. Random weights in bfloat16; int4 by "
        "HQQ in groups of 128. –: not run."
    )
    report.tables["export_memory"] = Table(columns, rows, note)
    report.write(options.output)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
