"""What stock packages tell about results of Python kernels: generated code, as AOTInductor writes it."""

from __future__ import annotations

import pytest

from untorch.runtime.errors import ModelError, UnsupportedError
from untorch.runtime.generated_code import DeclaredResult, declared_result
from untorch.runtime.proxy import ExternNode, parse_extern_nodes

SOURCE = """
    if (_check_aoti_runtime_check_inputs_env()) { assert_size_stride(arg2_1, {s77, 4L}, {4L, 1L}, "input"); }
    RAIIAtenTensorHandle buf3(buf3_handle);
    if (_check_aoti_runtime_check_inputs_env()) { assert_size_stride(buf3, {s77, 4L}, {4L, 1L}, "torch.ops.demo.x"); }
    if (_check_aoti_runtime_check_inputs_env()) { assert_size_stride(buf5, {}, {}, "torch.ops.demo.y"); }
    if (_check_aoti_runtime_check_inputs_env()) { assert_size_stride(buf6, {s77, 4L}, {1L, s77}, "torch.ops.demo.y"); }
    if (_check_aoti_runtime_check_inputs_env()) { assert_size_stride(buf9, {u0, 2L}, {2L, 1L}, "torch.ops.demo.nz"); }
    if (_check_aoti_runtime_check_inputs_env()) { assert_size_stride(buf10, {4L, }, {1L, }, "torch.ops.demo.w"); }
    auto u0 = buf9.size(0);
    auto buf13 = std::move(buf6);  // reuse
    auto view = wrap_with_raii_handle_if_needed(reinterpret_tensor_wrapper(buf5, 1, int_array_4, int_array_5, 0L));
    cpp_fused_1((float*)(buf13.data_ptr()), (const float*)(buf3.data_ptr()), (const bool*)(view.data_ptr()), s77);
    cpp_fused_2((const double*)(wrap_with_raii_handle_if_needed(reinterpret_tensor_wrapper(buf9, 1, a, b, 0L)).data_ptr()));
    cpp_fused_3((const int64_t*)(buf9.data_ptr()), (const at::BFloat16*)(buf30.data_ptr()));
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("buf3", DeclaredResult("float32", ("s77", 4), (4, 1))),
        ("buf5", DeclaredResult("bool", (), ())),
        ("buf6", DeclaredResult("float32", ("s77", 4), (1, "s77"))),
        ("buf9", DeclaredResult(None, ("u0", 2), (2, 1))),  # it is looked at as two dtypes
        ("buf10", DeclaredResult(None, (4,), (1,))),
        ("buf30", None),
        ("buf1", None),
    ],
)
def test_declarations(name: str, expected: DeclaredResult | None) -> None:
    assert declared_result(SOURCE, name) == expected


def node(output: str) -> ExternNode:
    text = f'{{"nodes": [{{"name": "b", "node": {{"target": "custom::op", "inputs": [], "metadata": {{}}, "outputs": [{{"as_tensor": {{"name": "{output}"}}}}]}}}}]}}'
    return parse_extern_nodes(text)[0]


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    from untorch.runtime import registry

    monkeypatch.setattr(registry, "_registered", {})


def test_a_package_that_does_not_tell_is_refused() -> None:
    import numpy

    from untorch.runtime.registry import register_kernel

    for source in (None, "", SOURCE):
        register_kernel("custom::op", lambda: numpy.ones(3, "f"))
        with pytest.raises(UnsupportedError) as caught:
            node("buf1").call([], [], lambda source=source: source)
        assert str(caught.value) == (
            "kernel of `custom::op` (node `b`): the package does not tell the shapes of its results, and the model "
            "would read other memory if one were wrong: export the model with untorch, or with a newer PyTorch, or "
            "register the kernel with unchecked=True if it keeps to its fake implementation"
        )
        register_kernel("custom::op", lambda: numpy.ones(3, "f"), unchecked=True)
        (array,) = node("buf1").call([], [], lambda source=source: source)
        assert array.shape == (3,)


def test_sizes_that_are_known() -> None:
    import numpy

    from untorch.runtime.registry import register_kernel

    def result(output: str, array: numpy.ndarray) -> numpy.ndarray:
        register_kernel("custom::op", lambda: array)
        return node(output).call([], [], lambda: SOURCE)[0]

    assert result("buf3", numpy.ones((7, 4), "f")).shape == (7, 4)
    assert result("buf3", numpy.ones((4, 7), "f").T.reshape(7, 4)).strides == (16, 4)
    assert result("buf3", numpy.asfortranarray(numpy.ones((7, 4), "f"))).strides == (16, 4)
    assert result("buf9", numpy.ones((0, 2), "i8")).shape == (0, 2)
    for output, array, text in [
        ("buf3", numpy.ones((7, 5), "f"), r"expected the shape \[s77, 4\], .*, got float32\[7, 5\]: return that shape"),
        ("buf3", numpy.ones((0, 4), "f"), r"got float32\[0, 4\]"),
        ("buf3", numpy.ones(28, "f"), r"got float32\[28\]"),
        ("buf10", numpy.ones(0, "f"), r"expected the shape \[4\]"),
        ("buf3", numpy.ones((7, 4)), "expected the dtype float32"),
    ]:
        with pytest.raises(ModelError, match=text):
            result(output, array)
