"""The target CUDA without its GPU: cross-compilation in a process of its own, with a fake CUDA driver.

The model is traced and changed on the CPU. In a forked child its tensors become fake ones on the GPU, which have a
shape and no memory, and AOTInductor compiles the graph: Triton and ptxas need no GPU. No kernel can be timed, so
kernel_choice and matmul_choice estimate which configuration is the fastest. The parent writes the tensors' values into
the file.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import fx
from torch.utils import _pytree as pytree

from untorch.export import toolkit
from untorch.export.coverage import source_line
from untorch.export.errors import CompileError
from untorch.export.gpus import GpuModel, find_gpu
from untorch.export.host_cpu import HostCpu
from untorch.export.kernel_choice import choose, read_tuning, recording
from untorch.export.kernel_sources import keeping_sources
from untorch.export.matmul_choice import choosing
from untorch.export.passes.report import PassReport
from untorch.export.patches import FAKE_DEVICE, fake_cuda, forget_the_machine
from untorch.export.target.base import AotCompile, InductorRun, Produced
from untorch.export.target.cuda import GpuCode
from untorch.runtime.errors import InvalidArgumentError, UntorchError

if TYPE_CHECKING:
    from untorch.export.method import Method
    from untorch.export.options import ExportOptions

__all__ = ["CrossCompileTarget", "refuse_native_attention"]


@dataclass(frozen=True)
class CrossCompileTarget(GpuCode):
    """A GPU that this machine need not have, nor a driver."""

    compiles_beside: ClassVar[bool] = True
    gpu: GpuModel

    @classmethod
    def resolve(cls, device: object, arch: object, host: HostCpu) -> CrossCompileTarget | None:
        """For an arch, with device="cuda"."""
        if arch is None:
            return None
        if device != "cuda":
            raise InvalidArgumentError(
                f"export: arch={arch!r} names a GPU to cross-compile for: device must be 'cuda', got {device!r}"
            )
        gpu = find_gpu(arch)
        toolkit.require_triton()
        toolkit.cuda_home()
        return cls(gpu.architecture, gpu, host=host)

    def check_request(self, method: Method) -> None:
        """Nothing can be run here, and the model's tensors must lie on the CPU."""
        super().check_request(method)
        if method.options.tuning is not None:
            read_tuning(method.options.tuning)
        if method.options.verify:
            raise InvalidArgumentError(
                f"export: verify=True runs the file, and arch cross-compiles it for a GPU ({self.gpu.name}) that this "
                f"machine need not have: leave verify out, and run it there"
            )
        tensors = method.model.state_dict() if isinstance(method.model, torch.nn.Module) else method.model.state_dict
        found = {t.device.type for t in tensors.values() if isinstance(t, torch.Tensor)} - {"cpu"}
        if found:
            raise InvalidArgumentError(
                f"export: method {method.name!r}: with arch the model is traced on the CPU, and it has tensors on "
                f"{', '.join(sorted(found))}: move it with model.cpu()"
            )

    def check_graph(self, method: Method, passes: list[PassReport]) -> None:
        """PyTorch's choice among its fused attention operators needs the GPU."""
        refuse_native_attention(method.module, passes, method.name, self.gpu)

    def inductor_config(self, options: ExportOptions) -> dict[str, Any]:
        """Padding is decided by measuring; small tensors have no values in the child."""
        return super().inductor_config(options) | {"shape_padding": False, "always_keep_tensor_constants": True}

    def link_libraries(self, folder: Path) -> None:
        """A stub of the driver."""
        from torch._inductor.cpp_builder import get_cpp_compiler

        toolkit.stub_driver(folder / "libcuda.so", get_cpp_compiler())

    def begin_inductor(
        self, method: Method, aot_compile: AotCompile, example: tuple[tuple[Any, ...], dict[str, Any]]
    ) -> InductorRun:
        """In a child process."""
        tuning = method.options.tuning
        known = {} if tuning is None else read_tuning(tuning).get(self.architecture, {})
        child = _ChildProcess(method.name, method.module, example, self.gpu, aot_compile, known)
        return InductorRun(child.finish, child.is_done, child.stop)


@dataclass
class _Failure:
    """An error of torch's or Triton's in the child: many cannot be pickled."""

    reason: str
    trace: str


class _ChildError(Exception):
    """Shows where in the child it was."""


def _tensors_by_name(module: fx.GraphModule) -> dict[str, torch.Tensor]:
    """All parameters, buffers and other tensors of a module and its submodules, by their FQN."""
    found: dict[str, torch.Tensor] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for values in (owner._parameters, owner._buffers, vars(owner)):
            for name, value in values.items():
                if isinstance(value, torch.Tensor):
                    found[f"{prefix}.{name}" if prefix else name] = value
    return found


def refuse_native_attention(module: fx.GraphModule, passes: list[PassReport], method: str, gpu: GpuModel) -> None:
    """Raises CompileError for attention that is left to torch.

    Its choice among the fused operators asks the GPU; without one it would silently be plain math.
    """
    for node in module.graph.nodes:
        if node.target != torch.ops.aten.scaled_dot_product_attention.default:
            continue
        where = source_line(node)
        skipped = [report.skipped.get(node.name) for report in passes if report.name == "choose_attention"]
        reason = next((text for text in skipped if text), "native: the pass choose_attention was switched off")
        raise CompileError(
            f"method {method!r}: {node.name}{f' ({where})' if where else ''} would be left to PyTorch's fused "
            f"operators, which are chosen on the GPU, and this compiles for {gpu.name} without one ({reason}): use "
            f"attention='math' for GEMMs and a softmax, or compile on such a GPU"
        )


class _ChildProcess:
    """``aot_compile(module, args, kwargs)`` in a child process that sees ``gpu``.

    tuning: the configurations that are known for kernels on it, see ``kernel_choice``.
    """

    def __init__(
        self,
        name: str,
        module: fx.GraphModule,
        example: tuple[Any, dict[str, Any]],
        gpu: GpuModel,
        aot_compile: AotCompile,
        tuning: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._name, self._gpu, self._values = name, gpu, _tensors_by_name(module)
        self._folder = tempfile.TemporaryDirectory(prefix="untorch-")
        self._path = Path(self._folder.name) / "produced"
        self._process = multiprocessing.get_context("fork").Process(
            target=_child, args=(self._path, module, example, gpu, aot_compile, tuning)
        )
        with warnings.catch_warnings():
            # The child uses one thread, and neither locks nor the GPU of its parent.
            warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
            self._process.start()

    def is_done(self) -> bool:
        return not self._process.is_alive()

    def finish(self) -> Produced:
        """Raises CompileError, or what the call raised if that is an error of untorch's. Nothing is left of it then."""
        try:
            result = self._result()
        finally:
            self.stop()
        if isinstance(result, UntorchError):
            raise result
        if isinstance(result, _Failure):
            text = f"method {self._name!r}: AOTInductor failed: {result.reason}"
            raise CompileError(text) from _ChildError(result.trace)
        paths, on_gpu, made, choices, sources = result
        missing = [fqn for fqn, source in on_gpu.items() if source not in self._values]
        if missing:
            raise CompileError(
                f"method {self._name!r}: AOTInductor made constants whose values are not known: {missing}"
            )
        tensors = {fqn: self._values[source] for fqn, source in on_gpu.items()} | made
        return Produced(paths, tensors, frozenset(on_gpu), choices, sources)

    def _result(self) -> Any:
        """What the child wrote. Raises CompileError if it wrote nothing."""
        self._process.join()
        if not self._path.exists():
            raise CompileError(
                f"method {self._name!r}: the process that compiles for {self._gpu.name} ended with exit code "
                f"{self._process.exitcode}"
            )
        return torch.load(self._path, weights_only=False)

    def stop(self) -> None:
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._folder.cleanup()


def _child(
    path: Path,
    module: fx.GraphModule,
    example: tuple[Any, dict[str, Any]],
    gpu: GpuModel,
    aot_compile: AotCompile,
    tuning: Mapping[str, Mapping[str, Any]],
) -> None:
    """Writes (paths, the module's tensors by their names there, others, the kernels' configurations, their sources), an
    error, or what is left of a foreign one.
    """
    torch.set_num_threads(1)  # the parent's threads were not forked
    forget_the_machine()
    result: Any
    try:
        from torch._inductor.fx_passes import joint_graph

        joint_graph.lazy_init(torch.device("cpu"))
        values: dict[int, torch.Tensor] = {}
        with (
            torch.no_grad(), fake_cuda(gpu, values, lambda kernel: choose(gpu, kernel, tuning)),
            recording(gpu.architecture) as choices, choosing(gpu, tuning, choices[gpu.architecture]),
            keeping_sources() as sources,
        ):  # fmt: skip
            args, kwargs = _place(module, example, values)
            names = {tensor.untyped_storage()._cdata: fqn for fqn, tensor in _tensors_by_name(module).items()}
            on_gpu, made, paths = {}, {}, []
            for item in aot_compile(module, args, kwargs):
                if not isinstance(item, dict):
                    paths.append(item)
                    continue
                for fqn, (tensor, _) in item.items():
                    if isinstance(tensor, torch._subclasses.FakeTensor):
                        # A constant of the code has another name there; the copy of one that is written, other memory.
                        on_gpu[fqn] = names.get(tensor.untyped_storage()._cdata, fqn)
                    else:
                        made[fqn] = tensor
        result = (paths, on_gpu, made, choices, sources)
    except UntorchError as error:
        result = error
    except Exception as error:
        result = _Failure(str(error) or type(error).__name__, traceback.format_exc())
    partial = path.with_suffix(".partial")
    torch.save(result, partial)
    partial.rename(path)


def _place(
    module: fx.GraphModule, example: tuple[Any, dict[str, Any]], values: dict[int, torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Makes the module and its graphs one for the GPU; gives the example inputs there.

    ``values`` gets the values of the fake tensors by their id.
    """
    mode = _fake_mode(module)
    mode.allow_non_fake_inputs = True
    placed: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=FAKE_DEVICE)
        return torch.nn.Parameter(made, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else made

    def moved(value: Any) -> Any:
        return FAKE_DEVICE if isinstance(value, torch.device) else value

    for owner in module.modules():
        tensors: Any
        for tensors in (owner._parameters, owner._buffers, vars(owner)):
            for name, tensor in list(tensors.items()):
                if not isinstance(tensor, torch.Tensor):
                    continue
                if id(tensor) not in placed:
                    placed[id(tensor)] = fake(tensor)
                    values[id(placed[id(tensor)])] = tensor
                tensors[name] = placed[id(tensor)]
        if isinstance(owner, fx.GraphModule):
            for node in owner.graph.nodes:
                node.args = fx.node.map_aggregate(node.args, moved)
                node.kwargs = fx.node.map_aggregate(node.kwargs, moved)
                if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor):
                    node.meta["val"] = fake(node.meta["val"])
            owner.recompile()
    args, kwargs = pytree.tree_map_only(torch.Tensor, fake, example)
    return tuple(args), dict(kwargs)


def _fake_mode(module: fx.GraphModule) -> Any:
    """The mode whose symbols the graph's sizes are made of."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    for node in module.graph.nodes:
        if isinstance(value := node.meta.get("val"), FakeTensor):
            return value.fake_mode
    return FakeTensorMode()
