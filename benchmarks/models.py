"""Builds what the benchmarks run, below build/bench (needs torch): packages, ONNX files, inputs with eager's outputs.

``python benchmarks/models.py minilm mlp add_one add_four int8 zoo``; files that exist and are up to date are kept.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import sys
import time
import types
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from common import ROOT, WORK
from runtimes import import_openvino

# (batch, length) of the sentence model's cases.
MINILM_CASES = ((1, 32), (1, 128), (16, 128))


def minilm_case(batch: int, length: int) -> str:
    """A case's name; its inputs and expected output are in ``<name>.npz``."""
    return f"minilm_{batch}x{length}"


# torchvision's first: where its library does not load, transformers needs the stand-ins of cpu_zoo.py.
INT8_MODELS = {
    "resnet50": "ResNet-50, 224 × 224",
    "mobilenet_v3_large": "MobileNet-v3 large, 224 × 224",
    "vit_b_16": "ViT-B/16, 224 × 224",
    "mlp": "MLP 512–2048–512, 16 rows",
    "minilm": "MiniLM, 128 tokens",
    "bert_base": "BERT base, 128 tokens",
    "whisper_tiny_encoder": "Whisper tiny encoder, 30 s",
}
# SmoothQuant for static ranges of transformers: convolutions are not smoothed.
INT8_SMOOTH = ("minilm", "bert_base", "vit_b_16", "whisper_tiny_encoder")
INT8_BATCHES = 4


INT8 = WORK / "int8.json"  # the models that were built


def int8_case(model: str) -> str:
    """The name of a case of cpu_int8.py, and of its files."""
    return f"int8_{model}"


ZOO = WORK / "zoo.json"


def zoo_case(model: str, dtype: str) -> str:
    """The name of a case of cpu_zoo.py, and of its files."""
    return f"zoo_{model}_{dtype}"


def package_fingerprint(file: str, *versions: str) -> str:
    """Changes when a package would come out differently: untorch's own files, this builder's, and the versions."""
    digest = hashlib.sha256()
    spec = importlib.util.find_spec("untorch")
    if spec is None or spec.origin is None:
        raise SystemExit("untorch is not installed in this environment")
    package = pathlib.Path(spec.origin).parent
    for path in (*sorted(package.rglob("*.py")), package / "libuntorch.so", pathlib.Path(file)):
        digest.update(path.read_bytes())
    for name in versions:
        digest.update(importlib.metadata.version(name).encode())
    return digest.hexdigest()


def _fingerprint() -> str:
    return package_fingerprint(__file__, "torch", "onnxruntime", "openvino")


def _builder_of_the_example() -> types.ModuleType:
    path = ROOT / "examples" / "sentence_embeddings" / "build.py"
    spec = importlib.util.spec_from_file_location("sentence_embeddings_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _write_case(name: str, model: Any, inputs: tuple[Any, ...]) -> None:
    import numpy
    import torch

    with torch.no_grad():
        expected = model(*inputs).numpy()
    arrays = {f"input{i}": x.numpy() for i, x in enumerate(inputs)}
    numpy.savez(WORK / f"{name}.npz", expected=expected, **arrays)


def _stock(model: Any, example: tuple[Any, ...], path: pathlib.Path, shapes: Any, config: dict[str, Any]) -> None:
    """A package as PyTorch makes it."""
    import torch

    with torch.no_grad():
        program = torch.export.export(model, example, dynamic_shapes=shapes)
        torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=config)


def _onnx(model: Any, example: tuple[Any, ...], path: pathlib.Path, names: list[str], axes: Any) -> None:
    """By the tracing exporter: torch 2.13's newer one wrote a file for MiniLM that ONNX Runtime refuses to load."""
    import torch

    torch.onnx.register_custom_op_symbolic("aten::diff", _onnx_diff, 17)
    torch.onnx.register_custom_op_symbolic("aten::cumsum", _onnx_cumsum, 17)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # nn.TransformerEncoderLayer's own operator has no ONNX form
    try:
        torch.onnx.export(
            model, example, str(path), dynamo=False, opset_version=17,
            input_names=names, output_names=["output"], dynamic_axes=axes,
        )  # fmt: skip
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _onnx_diff(g: Any, x: Any, n: Any, dim: Any, prepend: Any, append: Any) -> Any:
    """Differences of neighbours, as transformers' masks take them of positions; the exporter lacks them."""
    from torch.onnx import symbolic_helper

    del n  # 1
    axis = symbolic_helper._get_const(dim, "i", "dim")
    parts = [part for part in (prepend, x, append) if not symbolic_helper._is_none(part)]
    whole = g.op("Concat", *parts, axis_i=axis) if len(parts) > 1 else x
    later = symbolic_helper._slice_helper(g, whole, axes=[axis], starts=[1], ends=[2**62])
    return g.op("Sub", later, symbolic_helper._slice_helper(g, whole, axes=[axis], starts=[0], ends=[-1]))


def _onnx_cumsum(g: Any, x: Any, dim: Any, dtype: Any) -> Any:
    """Of positions, which the exporter would sum as bool, where transformers' masks do."""
    from torch.onnx import symbolic_helper

    del dtype  # int64, as these are
    axis = g.op("Constant", value_t=_int64(symbolic_helper._get_const(dim, "i", "dim")))
    return g.op("CumSum", g.op("Cast", x, to_i=7), axis)  # 7: INT64


def _int64(value: int) -> Any:
    import torch

    return torch.tensor(value, dtype=torch.int64)


def _step(label: str, work: Callable[[], Any]) -> None:
    start = time.perf_counter()
    print(f"  {label} …", end="", file=sys.stderr, flush=True)
    work()
    print(f" {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)


def build_minilm() -> None:
    import torch
    from torch.export import Dim

    from untorch.export import export

    openvino = import_openvino()
    torch.manual_seed(0)
    model = _builder_of_the_example().load_model()
    for batch, length in MINILM_CASES:
        ids, mask = torch.randint(1000, 20000, (batch, length)), torch.ones(batch, length, dtype=torch.int64)
        _write_case(minilm_case(batch, length), model, (ids, mask))
    example = (torch.randint(1000, 20000, (2, 16)), torch.ones(2, 16, dtype=torch.int64))
    sizes = {0: Dim("batch", min=1, max=256), 1: Dim("length", min=2, max=512)}
    shapes = (sizes, sizes)
    axes = {name: {0: "batch", 1: "length"} for name in ("input_ids", "attention_mask")}
    # The ONNX file first: Inductor's compile threads, once started, would fight the tracer for the cores.
    _step("MiniLM, ONNX", lambda: _onnx(model, example, WORK / "minilm.onnx", list(axes), axes))
    _step(
        "MiniLM, OpenVINO",
        lambda: openvino.save_model(
            openvino.convert_model(model, example_input=example), WORK / "minilm.xml", compress_to_fp16=False
        ),
    )
    _step("MiniLM, untorch", lambda: export(model, example, WORK / "minilm.pt2", dynamic_shapes=shapes, progress=False))

    class Half(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = _builder_of_the_example().load_model().bfloat16()

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            embedding: torch.Tensor = self.model(input_ids, attention_mask).float()
            return embedding

    _step(
        "MiniLM, untorch bfloat16",
        lambda: export(Half(), example, WORK / "minilm_bfloat16.pt2", dynamic_shapes=shapes, progress=False),
    )
    _step("MiniLM, torch", lambda: _stock(model, example, WORK / "minilm_stock.pt2", shapes, {}))
    _step(
        "MiniLM, torch frozen",
        lambda: _stock(model, example, WORK / "minilm_frozen.pt2", shapes, {"freezing": True}),
    )


def _build_small(name: str, model: Any, example: tuple[Any, ...]) -> None:
    from untorch.export import export

    _write_case(f"{name}_default", model, example)
    _step(f"{name}, ONNX", lambda: _onnx(model, example, WORK / f"{name}.onnx", ["x"], None))
    _step(f"{name}, untorch", lambda: export(model, example, WORK / f"{name}.pt2", progress=False))
    frozen = {"freezing": True}
    _step(f"{name}, torch frozen", lambda: _stock(model, example, WORK / f"{name}_frozen.pt2", None, frozen))


def build_mlp() -> None:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)).eval()
    example = (torch.randn(8, 64),)
    _build_small("mlp", model, example)
    _step("mlp, torch", lambda: _stock(model, example, WORK / "mlp_stock.pt2", None, {}))


def build_add_one() -> None:
    import torch

    class AddOne(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    _build_small("add_one", AddOne().eval(), (torch.randn(8),))


def build_add_four() -> None:
    """The same sum with four arrays by position and with a dict of four."""
    import torch

    from untorch.export import export

    class AddFour(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
            return a + b + c + d

    class AddDict(torch.nn.Module):
        def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
            return x["a"] + x["b"] + x["c"] + x["d"]

    four = tuple(torch.randn(8) for _ in range(4))
    _write_case("add_four_default", AddFour().eval(), four)
    named = (dict(zip("abcd", four, strict=True)),)
    frozen = {"freezing": True}
    for name, model, example in (("add_four", AddFour().eval(), four), ("add_dict", AddDict().eval(), named)):
        export(model, example, WORK / f"{name}.pt2", progress=False)
        _stock(model, example, WORK / f"{name}_frozen.pt2", None, frozen)


def build_zoo() -> None:
    """The models of cpu_zoo.py. What a peer cannot export has no file, and a line in ``zoo.json``."""
    import torch
    from cpu_zoo import MODELS, RECURRENT, load_model

    from untorch.export import export

    # A build that was cut off goes on where it was, if nothing has changed since.
    stamp, fingerprint = WORK / "zoo.stamp", _fingerprint()
    if not stamp.exists() or stamp.read_text() != fingerprint:
        for path in WORK.glob("zoo_*"):
            path.unlink()
        stamp.write_text(fingerprint)
    refused: dict[str, str] = {}
    names = os.environ.get("UNTORCH_BENCH_MODELS", "").split() or list(MODELS)

    def attempt(label: str, work: Callable[[], Any], path: pathlib.Path) -> None:
        try:
            if not path.exists():
                _step(label, work)
        except Exception as error:
            path.unlink(missing_ok=True)
            refused[path.name] = f"{type(error).__name__}: {str(error)[:300]}"
            print(f" {refused[path.name]}", file=sys.stderr, flush=True)

    for name in names:
        for dtype in ("float32", "bfloat16"):
            case = zoo_case(name, dtype)
            model, inputs = load_model(name, getattr(torch, dtype))
            _write_case(case, model, inputs)
            own, other = WORK / f"{case}.pt2", WORK / f"{case}.onnx"
            if dtype == "float32":
                attempt(f"{name}, ONNX", partial(_onnx, model, inputs, other, ["x"], None), other)
            attempt(f"{name}, {dtype}, untorch", partial(export, model, inputs, own, cpu="native", progress=False), own)
    for name in names:
        frozen = WORK / f"{zoo_case(name, 'float32')}_frozen.pt2"
        if name in RECURRENT:
            refused[frozen.name] = "AOTInductor unrolls the time steps, and takes minutes"
            continue
        model, inputs = load_model(name)
        attempt(f"{name}, torch frozen", partial(_stock, model, inputs, frozen, None, {"freezing": True}), frozen)
    ZOO.write_text(json.dumps({"models": names, "refused": refused}, indent=1) + "\n")


def build_int8() -> None:
    """The models of cpu_int8.py: float32, dynamic and static int8 of untorch, ONNX Runtime, and OpenVINO by NNCF.

    A file that a peer cannot make is left out, and is in ``int8.json`` with the reason.
    """
    import torch
    from cpu_zoo import MODELS, load_model

    from untorch.export import export

    torch.manual_seed(0)
    layers = torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512)
    tokens = torch.randint(1000, 20000, (1, 128)), torch.ones(1, 128, dtype=torch.int64)
    cases: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {
        "mlp": lambda: (torch.nn.Sequential(*layers).eval(), (torch.randn(16, 512),)),
        "minilm": lambda: (_builder_of_the_example().load_model(), tokens),
        **{name: partial(load_model, name) for name in INT8_MODELS if name in MODELS},
    }
    wanted = os.environ.get("UNTORCH_BENCH_MODELS", "").split() or list(cases)
    names = [name for name in INT8_MODELS if name in wanted]
    refused: dict[str, str] = {}
    for name in names:
        case = int8_case(name)
        model, inputs = cases[name]()
        batches = [tuple(_another(x) for x in inputs) for _ in range(INT8_BATCHES)]
        _write_case(case, model, inputs)
        refused |= _peers_of_int8(name, case, model, inputs, batches)
        options: dict[str, Any] = {"cpu": "native", "progress": False}
        static = {"dtype": "int8", "calibration": batches, **({"smooth": 0.5} if name in INT8_SMOOTH else {})}
        packages = [("", None, {}), ("_int8", "int8", {}), ("_static", static, {})]
        if name in INT8_SMOOTH:  # transformers
            packages.append(("_bf16", static, {"bfloat16_attention": True}))
        for ending, quantize, own in packages:
            work = partial(export, model, inputs, WORK / f"{case}{ending}.pt2", quantize=quantize, **options, **own)
            _step(f"{name}, untorch{ending.replace('_', ' ')}", work)
    INT8.write_text(json.dumps({"models": names, "refused": refused}) + "\n")


def _another(x: Any) -> Any:
    """Random values like those of an example input; masks stay."""
    import torch

    if x.dtype.is_floating_point:
        return torch.randn_like(x)
    return x.clone() if bool((x == 1).all()) else torch.randint_like(x, int(x.min()), int(x.max()) + 1)


def _peers_of_int8(
    name: str, case: str, model: Any, inputs: tuple[Any, ...], batches: list[tuple[Any, ...]]
) -> dict[str, str]:
    """ONNX files in float32, qint8 and QDQ, and OpenVINO's if NNCF is installed; what failed, with the reason."""
    import onnxruntime.quantization as quantization  # type: ignore[import-untyped,unused-ignore]
    from onnxruntime.quantization.shape_inference import quant_pre_process  # type: ignore[import-untyped,unused-ignore]

    plain, prepared = WORK / f"{case}.onnx", WORK / f"{case}_prepared.onnx"
    arguments = [f"x{i}" for i in range(len(inputs))]
    _step(f"{name}, ONNX", partial(_onnx, model, inputs, plain, arguments, None))
    quant_pre_process(str(plain), str(prepared), skip_symbolic_shape=True)
    feeds = [{key: x.numpy() for key, x in zip(arguments, batch, strict=True)} for batch in batches]

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc,unused-ignore]
        def __init__(self) -> None:
            self._feeds = iter(feeds)

        def get_next(self) -> Any:
            return next(self._feeds, None)

    def dynamic(path: pathlib.Path, per_channel: bool) -> None:
        quantization.quantize_dynamic(
            str(prepared), str(path), weight_type=quantization.QuantType.QInt8, per_channel=per_channel
        )

    def static(path: pathlib.Path) -> None:
        quantization.quantize_static(
            str(prepared), str(path), Reader(), quant_format=quantization.QuantFormat.QDQ, per_channel=True,
            activation_type=quantization.QuantType.QUInt8, weight_type=quantization.QuantType.QInt8,
        )  # fmt: skip

    work: dict[pathlib.Path, Callable[[pathlib.Path], None]] = {
        WORK / f"{case}_tensor.onnx": partial(dynamic, per_channel=False),
        WORK / f"{case}_channel.onnx": partial(dynamic, per_channel=True),
        WORK / f"{case}_qdq.onnx": static,
    }
    if importlib.util.find_spec("nncf") is not None:
        work[WORK / f"{case}_nncf.xml"] = partial(_nncf, plain, feeds, name in INT8_SMOOTH)
    refused = {}
    for path, make in work.items():
        path.unlink(missing_ok=True)
        try:
            _step(f"{name}, {path.stem.removeprefix(case + '_')}", partial(make, path))
        except Exception as error:  # whatever a peer raises
            refused[path.name] = f"{type(error).__name__}: {str(error)[:300]}"
            print(f" {refused[path.name]}", file=sys.stderr, flush=True)
    return refused


def _nncf(plain: pathlib.Path, feeds: list[dict[str, Any]], transformer: bool, path: pathlib.Path) -> None:
    """NNCF's post-training quantisation of the ONNX file, as its documentation has it."""
    import nncf  # type: ignore[import-untyped,import-not-found,unused-ignore]

    openvino = import_openvino()
    quantized = nncf.quantize(
        openvino.Core().read_model(str(plain)), nncf.Dataset(feeds),
        model_type=nncf.ModelType.TRANSFORMER if transformer else None,
    )  # fmt: skip
    openvino.save_model(quantized, str(path), compress_to_fp16=False)


BUILDERS = {
    "minilm": build_minilm,
    "mlp": build_mlp,
    "add_one": build_add_one,
    "add_four": build_add_four,
    "int8": build_int8,
    "zoo": build_zoo,
}


def main() -> None:
    WORK.mkdir(parents=True, exist_ok=True)
    fingerprint = _fingerprint()
    stamp = WORK / "built.json"
    built = json.loads(stamp.read_text()) if stamp.exists() else {}
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for name in sys.argv[1:] or BUILDERS:
        if built.get(name) == fingerprint:
            continue
        print(f"building {name} below {WORK.relative_to(ROOT)} (once) …", file=sys.stderr, flush=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            BUILDERS[name]()
        built[name] = fingerprint
        stamp.write_text(json.dumps(built, indent=1) + "\n")


if __name__ == "__main__":
    main()
