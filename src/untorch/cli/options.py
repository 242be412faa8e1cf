"""The command line's shared arguments and options: one flag has one name, type and help text in all commands.

A default that depends on the command is None here; the command's docstring says what it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "ArchOption",
    "CpuOption",
    "CudaGraphsOption",
    "DebugOption",
    "DequantizeWeightsOption",
    "DeviceOption",
    "DimOption",
    "FieldOption",
    "FileArgument",
    "InputOption",
    "JsonOption",
    "MethodOption",
    "NumRunnersOption",
    "NumThreadsOption",
    "OutputOption",
    "QuantizeOption",
    "QuietOption",
    "RecipeOption",
    "RequiredOutputOption",
    "SeedOption",
    "SigstoreTrustConfigOption",
    "SpinUsOption",
    "TrustOption",
    "VerifyOption",
    "WeightsOption",
]  # fmt: skip

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The .pt2 file.", show_default=False)]

# What every command has. --debug is read from the arguments where errors are reported, so that it also works when the
# command line itself is wrong.
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]

# Files.
_OUTPUT = typer.Option("--output", "-o", metavar="PATH", help="Where to write the result.", show_default=False)
OutputOption = Annotated[Path | None, _OUTPUT]
RequiredOutputOption = Annotated[Path, _OUTPUT]

# Trust.
SigstoreTrustConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--sigstore-trust-config",
        metavar="JSON",
        help="Sigstore's client trust configuration. Default: the public instance's.",
    ),
]

# Loading: the names are those of untorch.load().
DeviceOption = Annotated[
    str | None, typer.Option("--device", metavar="DEVICE", help="cpu, cuda, or one GPU by its index: cuda:1.")
]
NumThreadsOption = Annotated[
    int,
    typer.Option("--num-threads", metavar="N", min=0, help="Threads of a call; 0: OMP_NUM_THREADS, else all cores."),
]
SpinUsOption = Annotated[
    int | None,
    typer.Option(
        "--spin-us", metavar="N", min=0, max=1_000_000,
        help="Microseconds that an idle thread of a call spins before it sleeps. Default: UNTORCH_SPIN_US, else 100.",
    ),
]  # fmt: skip
NumRunnersOption = Annotated[
    int | None, typer.Option("--num-runners", metavar="N", min=1, help="Concurrent calls of a method; others wait.")
]
CudaGraphsOption = Annotated[
    int,
    typer.Option(
        "--cuda-graphs",
        metavar="N",
        min=0,
        help="On a GPU: of how many shapes of inputs a method keeps a CUDA graph, which later calls replay.",
    ),
]
DequantizeWeightsOption = Annotated[
    bool, typer.Option("--dequantize-weights", help="Also keep int4 and NVFP4 weights dequantized on the GPU.")
]

Tf32Option = Annotated[
    bool | None,
    typer.Option("--tf32/--no-tf32", help="Whether float32 operators on a GPU may use TF32. Default: as exported."),
]

WeightsOption = Annotated[
    Path | None,
    typer.Option(
        "--weights",
        metavar="PATH",
        help="A .safetensors file with weights of the package, or the folder of several: export leaves them there, "
        "other commands find them there. Default: the package's folder, then UNTORCH_WEIGHTS.",
    ),
]

TrustOption = Annotated[
    Path | None,
    typer.Option("--trust", metavar="POLICY", help="A trust policy (JSON or TOML) that must accept the file."),
]

# Calling a method.
MethodOption = Annotated[
    str | None, typer.Option("--method", metavar="NAME", help="The method. Default: the only one, or forward.")
]
InputOption = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        "-i",
        metavar="[NAME=]VALUE",
        help="An input, repeatable: a .npy file, a .npz file with several, or random, zeros or ones, with dtype and "
        "shape if the file does not tell them (x=random:float32[2,3]) and bounds for integers "
        "(ids=random:int64[1,8]:0..99). Without a name: the next input. A stock package's inputs are named "
        "0, 1, and so on.",
    ),
]
DimOption = Annotated[
    list[str] | None,
    typer.Option("--dim", metavar="SYMBOL=SIZE", help="The size of a dynamic dimension, repeatable: s0=16."),
]
SeedOption = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of random inputs.")]

# Exporting.
ArchOption = Annotated[
    list[str] | None,
    typer.Option(
        "--arch",
        metavar="ARCH",
        help="Compile for this GPU architecture, which need not be in this machine, repeatable: sm_90, or a name such "
        "as H200. With --device cuda.",
    ),
]
CpuOption = Annotated[
    str | None,
    typer.Option(
        "--cpu",
        metavar="TARGET[,TARGET…]",
        help="The CPUs to run on: portable, native, x86-64-v2, x86-64-v3, x86-64-v4; several with commas.",
    ),
]
QuantizeOption = Annotated[
    str | None,
    typer.Option("--quantize", metavar="DTYPE", help="Quantise linear layers: int4, int8, fp8 (GPUs) or nvfp4."),
]
RecipeOption = Annotated[
    Path | None,
    typer.Option(
        "--recipe",
        metavar="FILE",
        help="A recipe, .json or .toml, with a dtype for each pattern of layers: quantize-report writes it, with the "
        "sensitivity of each layer, and export quantises by it.",
    ),
]
VerifyOption = Annotated[
    bool, typer.Option("--verify", help="Run the file in a process without torch and compare it with eager.")
]
FieldOption = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="NAME=VALUE",
        help="A field of ExportOptions, repeatable; quantize.NAME=VALUE for one of its quantize options, "
        "inductor.NAME=VALUE for one of Inductor's.",
    ),
]
