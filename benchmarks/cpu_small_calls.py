"""What is the overhead of a call? Tiny models, numpy array to numpy array, one thread, microseconds.

An MLP of 64 → 256 → 64 with ReLU on a batch of 8, and x + 1 on 8 floats: almost nothing but overhead.
"""

from __future__ import annotations

from typing import Any

from common import Contestant, Report, Table, Workers, arguments, ensure_models, summarise

MODELS = {"mlp": "MLP 64-256-64, batch 8", "add_one": "x + 1"}
TOLERANCE = 1e-5
THREADS = 1


def contestants(model: str) -> list[Contestant]:
    """Each runtime as documented, and the faster entry points that two of them have."""
    return [
        Contestant("untorch", "untorch", "untorch", f"{model}.pt2"),
        Contestant("torch", "torch's loader, frozen weights", "torch", f"{model}_frozen.pt2"),
        Contestant("torch_raw", "torch's loader, frozen, loader.run", "torch", f"{model}_frozen.pt2", {"raw": True}),
        Contestant("onnxruntime", "ONNX Runtime", "onnxruntime", f"{model}.onnx"),
        Contestant("openvino", "OpenVINO", "openvino", f"{model}.onnx"),
        Contestant("openvino_shared", "OpenVINO, shared outputs", "openvino", f"{model}.onnx", {"share_outputs": True}),
    ]


def main() -> None:
    options = arguments(__doc__)
    rounds, seconds, inner = (1, 0.01, 20) if options.quick else (15, 0.2, 200)
    ensure_models(*MODELS)
    report = Report("cpu_small_calls", options.quick)
    cells: dict[str, list[str]] = {}
    for model in MODELS:
        case = f"{model}_default"
        entries = contestants(model)
        with Workers(entries, THREADS) as workers:
            differences = workers.check([case], TOLERANCE)
            times = workers.rounds([case], rounds, seconds, inner)
            values: dict[str, Any] = {"idle_share": workers.idle_share}
        for contestant in entries:
            result = summarise(times[contestant.key][case])
            values[contestant.key] = {**result, "inner": inner, "difference": differences[contestant.key][case]}
            text = f"{result['median'] * 1e6:.2f} ({result['best'] * 1e6:.2f})"
            cells.setdefault(contestant.label, []).append(text)
        report.values[model] = values
    note = f"Microseconds a call, one thread, median (best) of means of {inner} calls; lower is better."
    rows = [[label, *texts] for label, texts in cells.items()]
    report.tables["cpu_small_calls"] = Table(["Runtime", *MODELS.values()], rows, note)
    report.write(options.output)


if __name__ == "__main__":
    main()
