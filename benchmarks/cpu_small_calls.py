"""What is the overhead of a call? Tiny models, numpy array to numpy array, one thread, microseconds.

An MLP of 64 → 256 → 64 with ReLU on a batch of 8, and x + 1 on 8 floats: almost nothing but overhead. And the sum of
four arrays of 8 floats, given by position and as a dict: the overhead of a tree of arguments.
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


def tree_contestants() -> list[Contestant]:
    """The runtimes that take trees of arguments, by position and with a dict."""
    entries = []
    for key, label, file in (
        ("untorch", "untorch", "{}.pt2"),
        ("torch", "torch's loader, frozen weights", "{}_frozen.pt2"),
    ):
        entries.append(Contestant(f"{key}_flat", f"{label}: f(a, b, c, d)", key, file.format("add_four")))
        entries.append(Contestant(f"{key}_dict", f"{label}: f({{…}})", key, file.format("add_dict"), {"names": "abcd"}))
    return entries


def main() -> None:
    options = arguments(__doc__)
    rounds, seconds, inner = (1, 0.01, 20) if options.quick else (15, 0.2, 200)
    ensure_models(*MODELS, "add_four")
    report = Report("cpu_small_calls", options.quick)

    def measure(key: str, entries: list[Contestant], case: str) -> dict[str, str]:
        """The texts of one column, by label."""
        with Workers(entries, THREADS) as workers:
            differences = workers.check([case], TOLERANCE)
            times = workers.rounds([case], rounds, seconds, inner)
            values: dict[str, Any] = {"idle_share": workers.idle_share}
        texts = {}
        for contestant in entries:
            result = summarise(times[contestant.key][case])
            values[contestant.key] = {**result, "inner": inner, "difference": differences[contestant.key][case]}
            texts[contestant.label] = f"{result['median'] * 1e6:.2f} ({result['best'] * 1e6:.2f})"
        report.values[key] = values
        return texts

    cells: dict[str, list[str]] = {}
    for model in MODELS:
        for label, text in measure(model, contestants(model), f"{model}_default").items():
            cells.setdefault(label, []).append(text)
    note = f"Microseconds a call, one thread, median (best) of means of {inner} calls; lower is better."
    rows = [[label, *texts] for label, texts in cells.items()]
    report.tables["cpu_small_calls"] = Table(["Runtime", *MODELS.values()], rows, note)
    trees = measure("add_four", tree_contestants(), "add_four_default")
    report.tables["cpu_tree_calls"] = Table(["Call", "a + b + c + d"], [list(row) for row in trees.items()], note)
    report.write(options.output)


if __name__ == "__main__":
    main()
