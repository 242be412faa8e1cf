"""Lists, strings, values, threads, tags, devices and refusals of the stable C interface."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from shim import ShimError, delete, handle, lib, raise_on


def opaque(name: str, *args: Any) -> ctypes.c_void_p:
    out = ctypes.c_void_p()
    raise_on(getattr(lib, name)(*args, ctypes.byref(out)))
    return out


def test_list() -> None:
    values = opaque("torch_new_list_reserve_size", ctypes.c_size_t(4))
    for value in (7, 2**64 - 1):
        raise_on(lib.torch_list_push_back(values, ctypes.c_uint64(value)))
    raise_on(lib.torch_list_set_item(values, ctypes.c_size_t(0), ctypes.c_uint64(9)))
    size, item = ctypes.c_size_t(), ctypes.c_uint64()
    raise_on(lib.torch_list_size(values, ctypes.byref(size)))
    assert size.value == 2
    seen = []
    for i in range(2):
        raise_on(lib.torch_list_get_item(values, ctypes.c_size_t(i), ctypes.byref(item)))
        seen.append(item.value)
    assert seen == [9, 2**64 - 1]
    with pytest.raises(ShimError, match="list_get_item: index 2 is out of range for a list of 2"):
        raise_on(lib.torch_list_get_item(values, ctypes.c_size_t(2), ctypes.byref(item)))
    with pytest.raises(ShimError, match="list_set_item: index 5 is out of range for a list of 2"):
        raise_on(lib.torch_list_set_item(values, ctypes.c_size_t(5), item))
    raise_on(lib.torch_delete_list(values))
    with pytest.raises(ShimError, match="list_size: the list is null"):
        raise_on(lib.torch_list_size(None, ctypes.byref(size)))


def test_string() -> None:
    text = opaque("torch_new_string_handle", b"a\0bc", ctypes.c_size_t(4))
    length, data = ctypes.c_size_t(), ctypes.c_void_p()
    raise_on(lib.torch_string_length(text, ctypes.byref(length)))
    raise_on(lib.torch_string_c_str(text, ctypes.byref(data)))
    assert ctypes.string_at(data, length.value) == b"a\0bc"
    raise_on(lib.torch_delete_string(text))
    with pytest.raises(ShimError, match="string_length: the string is null"):
        raise_on(lib.torch_string_length(None, ctypes.byref(length)))


def test_values_and_profiler_marks() -> None:
    value = ctypes.POINTER(ctypes.c_uint64)()
    raise_on(lib.torch_new_stable_ivalue(ctypes.byref(value)))
    assert value[0] == 0
    raise_on(lib.torch_delete_stable_ivalue(value))
    live = torch.ones(2)
    tensor = handle(live)
    strings = (ctypes.c_char_p * 2)(b"a", b"b")
    made = [
        opaque("aoti_torch_int64_to_ivalue", ctypes.c_int64(3)),
        opaque("aoti_torch_str_to_ivalue", b"text"),
        opaque("aoti_torch_strlist_to_ivalue", strings, ctypes.c_int64(2)),
        opaque("aoti_torch_tensor_to_ivalue", tensor),
    ]
    guard = opaque("aoti_record_function_start", b"kernel", None, None, ctypes.c_uint64(0))
    raise_on(lib.aoti_record_function_end(guard))
    for each in made:
        assert each.value
        raise_on(lib.aoti_torch_delete_c10_value_object(each))
    delete(tensor)


def test_parallel_for_covers_the_range_once() -> None:
    seen: list[tuple[int, int]] = []
    callback = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)(
        lambda b, e, _: seen.append((b, e))
    )
    for begin, end, grain in ((0, 1000, 10), (5, 8, 100), (3, 3, 1), (0, 7, 0)):
        seen.clear()
        raise_on(
            lib.torch_parallel_for(ctypes.c_int64(begin), ctypes.c_int64(end), ctypes.c_int64(grain), callback, None)
        )
        assert [i for b, e in sorted(seen) for i in range(b, e)] == list(range(begin, end))
    threads, index = ctypes.c_uint32(), ctypes.c_uint32(9)
    raise_on(lib.torch_get_num_threads(ctypes.byref(threads)))
    raise_on(lib.torch_get_thread_idx(ctypes.byref(index)))
    assert threads.value >= 1 and index.value == 0
    with pytest.raises(ShimError, match="parallel_for: 'grain_size' is -1, expected 0 or more"):
        raise_on(lib.torch_parallel_for(ctypes.c_int64(0), ctypes.c_int64(9), ctypes.c_int64(-1), callback, None))


def test_tags() -> None:
    names = [name for name in torch.Tag.__members__ if hasattr(lib, f"torch_tag_{name}")]
    assert len(names) == 18
    for name in names:
        assert getattr(lib, f"torch_tag_{name}")() == int(torch.Tag.__members__[name])  # type: ignore[call-overload]


@pytest.mark.parametrize("text", ["cpu", "cuda", "cuda:1", "meta", "cpu:0", "xpu:3", "mps"])
def test_device_strings(text: str) -> None:
    kind, index = ctypes.c_uint32(), ctypes.c_int32()
    raise_on(lib.torch_parse_device_string(text.encode(), ctypes.byref(kind), ctypes.byref(index)))
    device = torch.device(text)
    code = {"cpu": 0, "cuda": 1, "xpu": 12, "mps": 13, "meta": 14}[device.type]
    assert (kind.value, index.value) == (code, -1 if device.index is None else device.index)


@pytest.mark.parametrize("text", ["cuda:", "cuda:-1", "cuda:1x", "cuda:999"])
def test_a_bad_device_index(text: str) -> None:
    out = ctypes.c_int32()
    with pytest.raises(ShimError, match=f'parse_device_string: "{text}" has no valid index after the colon'):
        raise_on(lib.torch_parse_device_string(text.encode(), ctypes.byref(out), ctypes.byref(out)))
    with pytest.raises(ShimError, match='parse_device_string: "gpu" is no device, expected cpu, cuda'):
        raise_on(lib.torch_parse_device_string(b"gpu", ctypes.byref(out), ctypes.byref(out)))


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.mark.skipif(has_driver(), reason="this machine has a GPU driver")
@pytest.mark.parametrize(
    ("name", "prefix"),
    [("create_device_guard", "aoti_torch_"), ("create_cuda_guard", "aoti_torch_"), ("get_current_stream", "aoti_torch_"),
     ("get_current_cuda_stream", "aoti_torch_"), ("cuda_stream_synchronize", "torch_")],
)  # fmt: skip
def test_without_a_driver_the_reason_is_given(name: str, prefix: str) -> None:
    out = ctypes.c_void_p()
    args = (None, 0) if name == "cuda_stream_synchronize" else (0, ctypes.byref(out))
    text = (
        f"{name}: CUDA is not available: no NVIDIA driver was found .libcuda.so.1 cannot be opened.: install NVIDIA's"
    )
    with pytest.raises(ShimError, match=text):
        raise_on(getattr(lib, f"{prefix}{name}")(*args))
    assert lib.aoti_torch_delete_device_guard(None) == 0
    assert lib.aoti_torch_delete_stream(None) == 0
    assert lib.aoti_torch_delete_cuda_guard(None) == 0
    assert lib.aoti_torch_delete_cuda_stream_guard(None) == 0


@pytest.mark.parametrize("name", ["stream_id", "get_current_device_index", "get_current_stream"])
def test_null_arguments_of_streams(name: str) -> None:
    args = {"stream_id": (None, None), "get_current_stream": (0, None)}.get(name, (None,))
    with pytest.raises(ShimError, match=f"{name}: .* is null"):
        raise_on(getattr(lib, f"aoti_torch_{name}")(*args))


@pytest.mark.parametrize(
    ("name", "args", "text"),
    [
        (
            "aoti_torch_library_init_def",
            (b"mylib", b"f.cpp", 3, None),
            "'mylib' would be registered with torch.library",
        ),
        ("aoti_torch_library_init_impl", (b"mylib", b"CPU", b"f.cpp", 3, None), "library_init_impl: 'mylib'"),
        ("aoti_torch_library_init_fragment", (b"mylib", b"f.cpp", 3, None), "library_init_fragment: 'mylib'"),
        ("aoti_torch_library_def", (None, b"op(Tensor x) -> Tensor"), "untorch has no operator registry"),
        ("aoti_torch_library_impl", (None, b"op", None), "use|register a kernel with untorch.register_kernel"),
        ("torch_library_impl", (None, b"op", None, 0), "library_impl: 'op'"),
        ("torch_library_def_with_tags", (None, b"op()", None, 0), "library_def: 'op\\(\\)'"),
        ("torch_library_set_python_module", (None, b"m", b""), "library_set_python_module: 'm'"),
        ("aoti_torch_call_dispatcher", (b"aten::amax", b"", None), "operator 'aten::amax' is called through PyTorch's"),
        ("torch_call_dispatcher", (b"aten::add", b"Tensor", None, 0), "operator 'aten::add.Tensor' is called"),
    ],
)
def test_the_registry_is_refused(name: str, args: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ShimError, match=text):
        raise_on(getattr(lib, name)(*args))
