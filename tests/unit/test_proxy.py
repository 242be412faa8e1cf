"""Extern nodes: lists written by AOTInductor itself (tests/unit/data), calls, checks of results, and refusals."""

import json
from pathlib import Path

import ml_dtypes
import numpy
import pytest

from untorch.runtime import registry
from untorch.runtime.errors import InvalidArgumentError, InvalidFileError, ModelError, UnsupportedError
from untorch.runtime.proxy import ExternNode, parse_extern_nodes

DATA = Path(__file__).parent / "data"
FIXTURES = sorted(path.stem.removeprefix("extern_nodes_") for path in DATA.glob("extern_nodes_*.json"))


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})


def load(name: str) -> list[ExternNode]:
    return parse_extern_nodes((DATA / f"extern_nodes_{name}.json").read_text())


def node(*inputs: dict, outputs: tuple = ({"as_tensor": {"name": "buf1"}},), target: str = "custom::op") -> ExternNode:
    arguments = [{"name": f"a{i}", "arg": argument, "kind": 1} for i, argument in enumerate(inputs)]
    body = {"target": target, "inputs": arguments, "outputs": list(outputs), "metadata": {}}
    return parse_extern_nodes(json.dumps({"nodes": [{"name": "buf0", "node": body}]}))[0]


def tensor(name: str = "x") -> dict:
    return {"as_tensor": {"name": name}}


def call(result, *inputs: dict, outputs: tuple = ({"as_tensor": {"name": "buf1"}},), ints=(), arrays=()):
    registry.register_kernel("custom::op", result if callable(result) else lambda *_: result)
    return node(*inputs, outputs=outputs).call(list(ints), list(arrays))


@pytest.mark.parametrize("name", FIXTURES)
def test_counts_are_those_of_the_generated_code(name):
    nodes = load(name)
    calls = json.loads((DATA / f"extern_nodes_{name}.json").read_text())["calls"]
    assert len(calls) == len(nodes) > 0
    for found in calls:
        entry = nodes[found["node"]]
        assert entry.index == found["node"]
        assert entry.num_input_ints + entry.num_output_ints == found["num_ints"]
        assert entry.num_input_tensors + entry.num_output_tensors == found["num_tensors"]


def test_every_kind_of_argument():
    (entry,) = load("mixed")
    assert entry.target == "fixture::mixed"
    assert entry.name == "buf0"
    assert entry.input_names == ("arg0_1", "arg0_1", "arg1_1", "arg1_1", "arg0_1")
    assert entry.output_names == ("buf1", "buf2", "buf3")
    seen = {}

    @registry.register_kernel("fixture::mixed")
    def kernel(*args, **kwargs):
        seen.update(args=args, kwargs=kwargs)
        return args[0] + 1, [args[0], args[2][1]], None

    x, y = numpy.zeros((5, 3), "f"), numpy.ones((5, 3), "f")
    out, first, second = entry.call([5, 3, 7, 2], [x, x, y, y, x])
    assert out.tolist() == (x + 1).tolist()
    assert first is x
    assert second is y
    tensor_x, none, many, maybe, *rest = seen["args"]
    assert tensor_x is x
    assert none is None
    assert many[0] is x
    assert many[1] is y
    assert maybe[0] is y
    assert maybe[1] is None
    assert maybe[2] is x
    assert rest == [[5, 3], 7, 0.5, True, "reflect", [0.25, 0.75], 2]
    assert seen["kwargs"] == {
        "nothing": None,
        "dtype": numpy.dtype(ml_dtypes.bfloat16),
        "device": "cpu",
        "format": "channels_last",
    }


def test_an_input_is_mutated_in_place():
    (entry,) = load("mutated")

    @registry.register_kernel("fixture::scale_")
    def scale(x, factor):
        x *= factor

    x = numpy.ones(3, "f")
    assert entry.num_output_tensors == 0
    assert entry.call([], [x]) == []
    assert x.tolist() == [3, 3, 3]


def test_built_in_kernels_run_a_compiled_model():
    solve, qr, svd = sorted(load("factors"), key=lambda n: ("solve" not in n.target, "qr" not in n.target))
    a, b = numpy.random.default_rng(0).random((2, 4, 4)).astype("f") + numpy.eye(4, dtype="f")
    solution, *_ = solve.call([], [a, b])
    numpy.testing.assert_allclose(a @ solution, b, atol=1e-4)
    q, r = qr.call([], [a])
    numpy.testing.assert_allclose(q @ r, a, atol=1e-5)
    u, s, vh = svd.call([], [a])
    numpy.testing.assert_allclose(u * s @ vh, a, atol=1e-5)


def test_a_dynamic_integer_comes_from_the_call():
    (entry,) = [n for n in load("samples") if n.target == "aten::multinomial"]
    assert entry.num_input_ints == 1
    (drawn,) = entry.call([3], [numpy.ones((2, 5), "f")])
    assert drawn.shape == (2, 3)
    with pytest.raises(InvalidArgumentError) as caught:
        entry.call([], [numpy.ones((2, 5), "f")])
    assert str(caught.value) == (
        f"operator `aten::multinomial` (node `{entry.name}`): expected 1 integers, got 0; the model library and its "
        f"list of extern nodes do not belong together"
    )
    with pytest.raises(InvalidArgumentError, match="expected 1 tensors, got 2"):
        entry.call([3], [numpy.ones((2, 5), "f")] * 2)


def test_a_missing_kernel():
    with pytest.raises(UnsupportedError, match='untorch.register_kernel\\("custom::op", fn\\)'):
        node().call([], [])


def test_names_that_python_keeps_for_itself():
    text = json.dumps({
        "nodes": [{"name": "b", "node": {
            "target": "aten::uniform",
            "inputs": [
                {"name": "self", "arg": tensor(), "kind": 1},
                {"name": "from", "arg": {"as_float": 4.0}, "kind": 2},
                {"name": "to", "arg": {"as_float": 5.0}, "kind": 2},
            ],
            "outputs": [tensor("b")], "metadata": {},
        }}]
    })  # fmt: skip
    (drawn,) = parse_extern_nodes(text)[0].call([], [numpy.zeros(50, "f")])
    assert 4 <= drawn.min() <= drawn.max() <= 5


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ({"as_none": True}, None),
        ({"as_bools": [True, False]}, [True, False]),
        ({"as_strings": ["a"]}, ["a"]),
        ({"as_floats": []}, []),
        ({"as_float": 2}, 2.0),
        ({"as_float": "-Infinity"}, -numpy.inf),
        ({"as_complex": {"real": 1.0, "imag": -2.0}}, 1 - 2j),
        ({"as_scalar_type": 7}, numpy.dtype("float32")),
        ({"as_scalar_type": 29}, numpy.dtype(ml_dtypes.float8_e4m3fn)),
        ({"as_memory_format": 4}, "preserve_format"),
        ({"as_layout": 7}, "strided"),
        ({"as_device": {"type": "cuda", "index": 1}}, "cuda:1"),
        ({"as_optional_tensor": {"as_none": True}}, None),
        ({"as_tensors": []}, []),
        ({"as_bool": False, "as_int": None}, False),
    ],
)
def test_constants(argument, expected):
    entry = node(argument)
    assert entry.num_input_ints == entry.num_input_tensors == 0
    seen = []
    call(lambda value: seen.append(value) or numpy.zeros(1), argument)
    assert seen == [expected]
    assert type(seen[0]) is type(expected)


def test_lists_are_fresh_for_each_call():
    def kernel(values):
        values.append(1.0)
        return numpy.zeros(len(values))

    registry.register_kernel("custom::op", kernel)
    entry = node({"as_floats": [0.5]})
    assert entry.call([], [])[0].shape == entry.call([], [])[0].shape == (2,)


@pytest.mark.parametrize(
    ("argument", "ints", "expected"),
    [
        ({"as_int": 3}, [9], 9),
        ({"as_sym_int": {"as_name": "s0"}}, [9], 9),
        ({"as_ints": [1, 2]}, [8, 9], [8, 9]),
        ({"as_sym_ints": [{"as_name": "s0"}, {"as_int": 2}]}, [8, 9], [8, 9]),
    ],
)
def test_integers_come_from_the_call(argument, ints, expected):
    seen = []
    call(lambda value: seen.append(value) or numpy.zeros(1), argument, ints=ints)
    assert seen == [expected]


@pytest.mark.parametrize(
    "argument",
    [
        {"as_custom_obj": {"name": "o", "class_fqn": "c"}},
        {"as_graph": {"name": "g", "graph": {}}},
        {"as_sym_float": {"as_name": "f"}},
        {"as_nested_tensors": [[{"name": "x"}]]},
        {"as_from_the_future": 1},
        {"as_memory_format": 9},
    ],
)
def test_unknown_kinds_are_refused(argument):
    ((kind, value),) = argument.items()
    with pytest.raises(UnsupportedError) as caught:
        node(argument)
    assert str(caught.value) == (
        f"extern node `buf0` (`custom::op`), argument `a0`: an argument of kind `{kind}` with the value {value!r} "
        f"cannot be passed to a Python kernel; change the model so that the operator is called without it"
    )


def test_unknown_results_and_scalar_types_are_refused():
    with pytest.raises(UnsupportedError, match=r"\(`custom::op`\), result 0: a result of kind `as_sym_int` cannot"):
        node(outputs=({"as_sym_int": {"as_name": "u0"}},))
    with pytest.raises(UnsupportedError, match="scalar type 9 has no numpy dtype"):
        node({"as_scalar_type": 9})
    for kind in ("as_scalar_type", "as_layout", "as_memory_format"):
        with pytest.raises(UnsupportedError, match=r"scalar type \[\] has no numpy dtype|with the value \[\]"):
            node({kind: []})
    with pytest.raises(UnsupportedError, match="an optional tensor of kind `as_int` is not known"):
        node({"as_optional_tensors": [{"as_int": 1}]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "^extern nodes: not valid JSON: "),
        ("[]", "^extern nodes: expected an object with the list `nodes`$"),
        ('{"nodes": 3}', "^extern nodes: expected an object with the list `nodes`$"),
        ('{"nodes": [3]}', "^extern node 0: expected the field `node` of type dict, got 3$"),
        ('{"nodes": [{"node": {}}]}', "^extern node 0: expected the field `target` of type str, got {}$"),
        ('{"nodes": [{"node": {"target": "a::b", "inputs": 1}}]}', "expected the field `inputs` of type list"),
        (
            '{"nodes": [{"node": {"target": "a::b", "inputs": [{"name": "x", "arg": {}}]}}]}',
            r"`a::b`\), argument `x`: expected an object with one field `as_…`, got {}$",
        ),
        (
            '{"nodes": [{"node": {"target": "a::b", "inputs": [{"name": "x", "arg": {"as_bool": 2}}]}}]}',
            "argument `x`: `as_bool` does not match the value 2$",
        ),
        (
            '{"nodes": [{"node": {"target": "a::b", "inputs": [{"name": "x", "arg": {"as_float": "a"}}]}}]}',
            "argument `x`: expected a number, got 'a'$",
        ),
        (
            '{"nodes": [{"node": {"target": "a::b", "inputs": [{"name": "x", "arg": {"as_ints": 2}}]}}]}',
            "argument `x`: expected a list, got 2$",
        ),
        ("[" * 100_000, "^extern nodes: not valid JSON: "),
        (
            '{"nodes": [{"node": {"target": "a::b", "inputs": [], "outputs": [], "metadata": [1]}}]}',
            "expected the field `metadata` of type dict",
        ),
        (
            f'{{"nodes": [{{"node": {{"target": "a::b", "inputs": [{{"name": "x", "arg": {{"as_float": {10**400}}}}}]}}}}]}}',
            "argument `x`: expected a number, got 1000",
        ),
    ],
)
def test_damaged_lists(text, message):
    with pytest.raises(InvalidFileError, match=message):
        parse_extern_nodes(text)


TWO = ({"as_tensor": {"name": "b1"}}, {"as_tensors": [{"name": "b2"}, {"name": "b3"}]})
ONE = numpy.ones(2)


def test_results_in_their_forms():
    assert call((ONE,))[0] is ONE
    assert call(numpy.float32(2))[0].dtype == numpy.float32
    assert len(call((ONE, [ONE, ONE]), outputs=TWO)) == 3
    assert len(call([ONE, ONE], outputs=({"as_tensors": [{"name": "b1"}, {"name": "b2"}]},))) == 2
    assert call(None, outputs=({"as_none": True},)) == []
    assert call((ONE, None), outputs=(TWO[0], {"as_optional_tensor": {"as_none": True}}))[0] is ONE
    assert call(7, outputs=({"as_int": 7},), ints=[7]) == []


@pytest.mark.parametrize(
    ("result", "outputs", "message"),
    [
        (None, TWO[:1], "expected numpy.ndarray as result 0, got `NoneType`"),
        (2.0, TWO[:1], "expected numpy.ndarray as result 0, got `float`"),
        ((ONE, ONE), TWO[:1], "expected numpy.ndarray as result 0, got `tuple of 2`"),
        (ONE, TWO, "expected a tuple of 2 results, got `ndarray`"),
        ((ONE,), TWO, "expected 2 results, got `tuple of 1`"),
        ((ONE, [ONE]), TWO, "expected a list of 2 arrays as result 1, got `list of 1`"),
        ((ONE, [ONE, 1]), TWO, r"expected numpy.ndarray as result 1\[1\], got `int`"),
        (ONE, (), r"expected nothing \(None\), got `ndarray`"),
    ],
)
def test_results_of_the_wrong_form(result, outputs, message):
    with pytest.raises(ModelError, match=rf"^kernel of `custom::op` \(node `buf0`\): {message}$"):
        call(result, outputs=outputs)


@pytest.mark.parametrize("dtype", ["O", "U3", "M8[s]", "longdouble", ">f4"])
def test_results_of_the_wrong_dtype(dtype):
    with pytest.raises(ModelError, match="result 0: expected a dtype that a tensor can have, got `.*`; cast it"):
        call(numpy.zeros(2, dtype))


def test_an_integer_result_must_be_what_was_compiled():
    with pytest.raises(ModelError, match="result 0: expected the integer 7 that the model was compiled with, got 8"):
        call(8, outputs=({"as_int": 7},), ints=[7])


def test_what_a_kernel_raises_goes_through():
    def kernel():
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="^mine$"):
        call(kernel)
