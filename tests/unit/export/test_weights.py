"""Tests of the weight store: equal storages once, views share, lone slices bring only their part."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from untorch import _core
from untorch.archive import BLOCK_BYTES
from untorch.export.errors import CompileError
from untorch.export.weights import Constant, WeightStore, parse_constants

WRAPPER = """
    constants_info_[0].name = "l_weight";
    constants_info_[0].from_folded = false;
    constants_info_[0].shape = {2, 3};
    constants_info_[0].stride = {3, 1};
    constants_info_[0].original_fqn = "l.weight";
    constants_info_[1].name = "scalar";
    constants_info_[1].from_folded = false;
    constants_info_[1].shape = {};
    constants_info_[1].stride = {};
    constants_info_[1].original_fqn = "scalar";
    constants_info_[2].name = "folded";
    constants_info_[2].from_folded = true;
"""


def test_parse_constants() -> None:
    assert parse_constants(WRAPPER) == [
        Constant("l_weight", "l.weight", (2, 3), (3, 1)),
        Constant("scalar", "scalar", (), ()),
    ]
    with pytest.raises(CompileError, match=r"constant 0 of the generated wrapper has no original_fqn"):
        parse_constants(WRAPPER.replace('constants_info_[0].original_fqn = "l.weight";', ""))


def constant(name: str, tensor: torch.Tensor) -> Constant:
    return Constant(name, name, tuple(tensor.shape), tuple(tensor.stride()))


def add(store: WeightStore, mutated: frozenset[str] = frozenset(), **tensors: torch.Tensor) -> list[dict[str, object]]:
    return store.add_method([constant(name, t) for name, t in tensors.items()], tensors, mutated)[0]


def read(store: WeightStore, entry: dict[str, object], dtype: torch.dtype) -> torch.Tensor:
    raw = bytes(store.files[int(str(entry["weight"]))].data)
    flat = torch.frombuffer(bytearray(raw), dtype=dtype)
    return flat.as_strided(entry["shape"], entry["strides"], entry["storage_offset"])  # type: ignore[arg-type]


def test_equal_storages_are_stored_once_across_methods() -> None:
    store = WeightStore()
    a = torch.randn(4, 5)
    (first,) = add(store, a=a)
    second, third = add(store, b=a.clone(), c=a.view(torch.int32))
    assert first["weight"] == second["weight"] != third["weight"]
    assert len(store.entries) == 2
    assert store.nbytes == 160
    assert store.entries[0] == {"file": "data/weights/weight_0", "nbytes": 80}


def test_a_storage_is_read_once_for_all_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    read_bytes, sizes = WeightStore._add_bytes, []

    def counted(self: WeightStore, storage: torch.UntypedStorage, start: int, length: int, dtype: str) -> int:
        sizes.append(length)
        return read_bytes(self, storage, start, length, dtype)

    monkeypatch.setattr(WeightStore, "_add_bytes", counted)
    store, weight, empty = WeightStore(), torch.randn(4), torch.empty(0)
    found = [add(store, a=weight, b=empty) for _ in range(3)]
    assert sizes == [16, 0] and [[e["weight"] for e in entries] for entries in found] == [[0, 1]] * 3
    [part] = add(store, a=weight[2:])
    assert part["weight"] == 2 and torch.equal(read(store, part, torch.float32), weight[2:])


def test_a_storage_in_the_place_of_one_that_is_gone() -> None:
    """A copy of stored bytes is not kept: another weight may get its memory."""
    store = WeightStore()
    add(store, a=torch.zeros(1000))
    for value in map(float, range(20)):
        weight = torch.full((1000,), value)
        [entry] = add(store, a=weight)
        assert torch.equal(read(store, entry, torch.float32), weight)
    assert len(store.files) == 20


def test_views_share_their_storage() -> None:
    store = WeightStore()
    base = torch.randn(4, 6)
    whole, part, turned = add(store, whole=base, part=base[1:3, 2:], turned=base.t())
    assert whole["weight"] == part["weight"] == turned["weight"]
    for entry, tensor in ((whole, base), (part, base[1:3, 2:]), (turned, base.t())):
        assert torch.equal(read(store, entry, torch.float32), tensor)


def test_a_lone_slice_brings_only_its_part() -> None:
    store = WeightStore()
    part = torch.randn(100, 6)[10:12, 1:]
    (entry,) = add(store, part=part)
    assert store.nbytes == 11 * 4
    assert torch.equal(read(store, entry, torch.float32), part)


def test_parts_that_nothing_reads_are_left_out() -> None:
    """As of one buffer for all parameters, of which a pass replaced some."""
    store = WeightStore()
    flat = torch.randn(1000)
    parts = {
        "matrix": flat[100:112].view(3, 4), "turned": flat[100:112].view(3, 4).t(), "next": flat[112:115],
        "left": flat[200:220].view(4, 5)[:, :2], "right": flat[200:220].view(4, 5)[:, 2:], "none": flat[300:300],
    }  # fmt: skip
    entries = add(store, **parts)
    *entries, empty = entries
    assert empty["shape"] == [0]
    for entry, tensor in zip(entries, parts.values(), strict=False):
        assert torch.equal(read(store, entry, torch.float32), tensor)
    weights = [entry["weight"] for entry in entries]
    assert weights[0] == weights[1] and weights[3] == weights[4] and len(set(weights)) == 3
    assert store.nbytes == (12 + 3 + 20) * 4


def test_parts_that_are_most_of_a_storage_share_it() -> None:
    """Another method has the whole of it: a merged weight."""
    store = WeightStore()
    whole = torch.randn(10, 4)
    (first,) = add(store, whole=whole)
    up, gate = add(store, up=whole[:4], gate=whole[5:])
    assert first["weight"] == up["weight"] == gate["weight"] and store.nbytes == 160
    assert torch.equal(read(store, gate, torch.float32), whole[5:])


def test_dtypes_in_one_storage() -> None:
    store = WeightStore()
    numbers = torch.randn(8)
    parts = {"bytes": numbers.view(torch.uint8)[3:9], "numbers": numbers[1:5]}
    entries = add(store, **parts)
    for entry, tensor in zip(entries, parts.values(), strict=True):
        assert torch.equal(read(store, entry, tensor.dtype), tensor)
    assert store.nbytes == 32


def test_what_is_written_keeps_its_whole_storage() -> None:
    store = WeightStore()
    base = torch.randn(10)
    entries = add(store, frozenset({"first"}), first=base[:2], last=base[8:])
    assert entries[0]["weight"] == entries[1]["weight"] and store.nbytes == 40


def test_writes_reach_everything_in_the_storage() -> None:
    base = torch.randn(4)
    entries = add(WeightStore(), frozenset({"half"}), half=base[:2], whole=base, other=torch.randn(3))
    assert [entry["mutated"] for entry in entries] == [True, True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.int8])
def test_dtypes(dtype: torch.dtype) -> None:
    store = WeightStore()
    tensor = torch.ones(3).to(dtype)
    (entry,) = add(store, x=tensor)
    assert entry["dtype"] == str(dtype).removeprefix("torch.")
    assert torch.equal(read(store, entry, dtype), tensor)


def test_empty_tensor() -> None:
    store = WeightStore()
    (entry,) = add(store, x=torch.empty(0, 3))
    assert store.entries[0]["nbytes"] == 0
    assert entry["shape"] == [0, 3]


def test_errors() -> None:
    store = WeightStore()
    with pytest.raises(CompileError, match="'x': AOTInductor gave no value for it"):
        store.add_method([Constant("x", "x", (1,), (1,))], {}, frozenset())
    with pytest.raises(CompileError, match=r"expects shape \(2,\) and strides \(1,\), its value has \(3,\)"):
        store.add_method([Constant("x", "x", (2,), (1,))], {"x": torch.randn(3)}, frozenset())


def graph(**tensors: torch.Tensor) -> fx.GraphModule:
    """One that reads the tensors."""
    root, made = torch.nn.Module(), fx.Graph()
    for name, tensor in tensors.items():
        setattr(root, name, tensor)
    made.output([made.get_attr(name) for name in tensors])
    return fx.GraphModule(root, made)


def test_weights_that_are_stored_early() -> None:
    """Large ones that are alone in their storage; the methods' own then are the same files."""
    large, half = torch.randn(1 << 18), torch.randn(1 << 19)
    read = graph(large=large, again=large, small=torch.ones(4), part=half[: 1 << 18], equal=large.clone())
    store = WeightStore()
    store.add_early(read)
    assert [file.name for file in store.take_files()] == ["data/weights/weight_0"]
    assert list(store.take_files()) == []
    assert store.has_unused
    entries = add(store, large=large, small=torch.ones(4), equal=large.clone())
    assert [entry["weight"] for entry in entries] == [0, 1, 0]
    assert not store.has_unused
    assert [file.name for file in store.take_files()] == ["data/weights/weight_1"]


def test_only_what_was_stored_early_can_be_unused() -> None:
    large = torch.randn(1 << 18)
    store = WeightStore()
    add(store, large=large)
    store.add_early(graph(large=large))
    assert not store.has_unused
    store.add_early(graph(other=torch.randn(1 << 18)))
    assert store.has_unused


def test_digests_of_weights() -> None:
    """Those of blocks, which the archive need not compute again."""
    store = WeightStore()
    add(store, small=torch.ones(4), large=torch.ones(BLOCK_BYTES // 4 + 1))
    small, large = store.take_files()
    assert small.digest is None
    assert large.digest == _core.sha256(large.data, BLOCK_BYTES)
