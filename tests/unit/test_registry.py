"""The operator registry: names, precedence, laziness, and the text for a missing kernel."""

import importlib
import subprocess
import sys

import pytest

from untorch import _core
from untorch.runtime import errors, registry
from untorch.runtime.coverage import describe_kernel
from untorch.runtime.registry import find_kernel, manual_seed, register_kernel, registered_kernels


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})


def first() -> int:
    return 1


def second() -> int:
    return 2


def test_overload_wins_over_base_name():
    register_kernel("custom::op", first)
    assert find_kernel("custom::op") is find_kernel("custom::op.Tensor") is first
    register_kernel("custom::op.Tensor", second)
    assert find_kernel("custom::op.Tensor") is second
    assert find_kernel("custom::op.Scalar") is first
    assert find_kernel("custom::op.default") is first


def test_registering_again_replaces():
    register_kernel("custom::op", first)
    register_kernel("custom::op.default", second)
    assert find_kernel("custom::op") is second


def test_decorator_gives_the_function_back():
    @register_kernel("custom::decorated")
    def kernel() -> int:
        return 3

    assert kernel() == 3
    assert find_kernel("custom::decorated") is kernel


def test_registered_kernels_come_before_built_in_ones():
    built_in = find_kernel("aten::median.dim")
    assert built_in.__module__ == "untorch.runtime.kernels.statistics"
    register_kernel("aten::median", first)
    assert find_kernel("aten::median.dim") is first


def test_registered_kernels_lists_both():
    register_kernel("custom::op", first)
    names = registered_kernels()
    assert names == sorted(names)
    assert {"custom::op", "aten::linalg_qr", "aten::median.dim", "prims::normal"} <= set(names)


def test_missing_kernel():
    with pytest.raises(errors.UnsupportedError) as caught:
        find_kernel("custom::missing.out")
    assert str(caught.value) == (
        "operator `custom::missing.out` has no kernel: untorch has no C shim and no Python kernel for it; register one "
        'with untorch.register_kernel("custom::missing.out", fn), or change the model so that it is not called'
    )
    with pytest.raises(errors.UnsupportedError):
        find_kernel("aten::multinomial.out")  # a built-in kernel serves the overload that it was written for


@pytest.mark.parametrize("name", ["linalg_qr", "aten::", "::x", "aten::a b", "", "aten::a.b.c", 3])
def test_malformed_name(name):
    with pytest.raises(errors.InvalidArgumentError) as caught:
        register_kernel(name, first)
    assert str(caught.value) == (
        f"operator name: expected `namespace::operator` or `namespace::operator.overload`, got {name!r}"
    )


def test_kernel_must_be_callable():
    with pytest.raises(errors.InvalidArgumentError) as caught:
        register_kernel("custom::op", 3)
    assert str(caught.value) == "register_kernel: expected a callable for `custom::op`, got `int`; pass a function"


@pytest.mark.parametrize("option", ["cast", "unchecked"])
def test_options_are_flags(option):
    with pytest.raises(
        errors.ArgumentTypeError, match=f"^register_kernel: {option}: expected True or False for `a::b`"
    ):
        register_kernel("a::b", first, **{option: 1})
    decorated = register_kernel("custom::op", **{option: True})(first)
    assert decorated is first
    assert getattr(registry.find_registration("custom::op.Tensor"), option) is True


def test_a_kernel_per_device():
    register_kernel("custom::op", first)
    register_kernel("custom::op", second, device="cuda")
    assert find_kernel("custom::op") is first
    assert find_kernel("custom::op.Tensor", "cuda") is second
    assert registry.served_by("custom::op", "cuda") == "registered"
    assert registry.served_by("aten::linalg_qr") == "built-in"
    assert registry.served_by("aten::linalg_qr", "cuda") is None
    assert registered_kernels("cuda") == ["custom::op"]

    @register_kernel("custom::other", device="cuda")
    def kernel() -> int:
        return 3

    assert find_kernel("custom::other", "cuda") is kernel
    with pytest.raises(errors.UnsupportedError):
        find_kernel("custom::other")


def test_missing_kernel_for_cuda():
    with pytest.raises(errors.UnsupportedError) as caught:
        find_kernel("aten::linalg_qr", "cuda")
    assert str(caught.value) == (
        "operator `aten::linalg_qr` has no kernel for cuda: untorch has no C shim and no native kernel for it there; "
        'register one that works on arrays on the GPU with untorch.register_kernel("aten::linalg_qr", fn, '
        'device="cuda"), change the model so that it is not called, or export it for the CPU'
    )


@pytest.mark.parametrize("device", ["tpu", "cuda:0", None])
def test_unknown_device(device):
    with pytest.raises(errors.InvalidArgumentError) as caught:
        register_kernel("a::b", first, device=device)
    assert str(caught.value) == f'register_kernel: device: expected "cpu" or "cuda" for `a::b`, got {device!r}'


def test_a_registered_kernel_takes_a_native_operator_over():
    assert registry.served_by("torchvision::nms") == "native"
    try:
        register_kernel("torchvision::nms", first)
        assert registry.served_by("torchvision::nms") == "registered"
    finally:
        _core.use_native_operator("torchvision::nms", "cpu", True)
    with pytest.raises(errors.InvalidArgumentError) as caught:
        _core.use_native_operator("aten::linalg_qr", "cpu", False)
    assert str(caught.value) == (
        "untorch_use_native_operator: there is no native kernel for `aten::linalg_qr` on the CPU: "
        "untorch_native_operators lists them"
    )


@pytest.mark.parametrize("seed", [-1, 1.5, True, None])
def test_seed_must_be_a_natural_number(seed):
    with pytest.raises(errors.InvalidArgumentError, match="^manual_seed: expected an integer that is not negative"):
        manual_seed(seed)


@pytest.mark.parametrize("module", registry._MODULES)
def test_table_and_modules_agree(module):
    kernels = importlib.import_module(f"untorch.runtime.kernels.{module}").KERNELS
    assert set(registry._MODULES[module].split()) == set(kernels)


def test_every_operator_is_served_by_one_module():
    names = [name for names in registry._MODULES.values() for name in names.split()]
    assert len(names) == len(set(names))


def test_import_is_light():
    code = (
        "import sys; import untorch.runtime.registry, untorch.runtime.proxy;"
        "print([m for m in sys.modules if m.startswith(('torch', 'untorch.export', 'untorch.runtime.kernels'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.InvalidArgumentError, ValueError),
        (errors.InvalidFileError, ValueError),
        (errors.UnsupportedError, NotImplementedError),
        (errors.ClosedError, RuntimeError),
        (errors.OutOfMemoryError, MemoryError),
        (errors.ModelError, RuntimeError),
    ],
)
def test_errors_are_the_expected_builtin_too(error, builtin):
    assert issubclass(error, errors.UntorchError)
    assert issubclass(error, builtin)
    assert error.__name__ in errors.__all__


def test_overflow_is_a_result_and_no_warning(recwarn):
    import numpy

    determinant, *_ = find_kernel("aten::_linalg_det")(numpy.eye(300, dtype=numpy.float32) * 100)
    assert numpy.isinf(determinant)
    assert not recwarn.list


def test_what_inspect_says_of_an_operator():
    assert describe_kernel("torchvision::nms") == {
        "name": "torchvision::nms", "kind": "operator", "served": True, "device": "cpu", "by": "native",
    }  # fmt: skip
    assert describe_kernel("aten::linalg_qr")["by"] == "built-in"
    assert describe_kernel("aten::linalg_qr", "cuda") == {
        "name": "aten::linalg_qr", "kind": "operator", "served": False, "device": "cuda",
        "reason": "it has no kernel for cuda: register one with untorch.register_kernel",
    }  # fmt: skip
    assert describe_kernel("no name")["served"] is False
