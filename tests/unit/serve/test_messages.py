"""The table of gRPC messages against the descriptors of tritonclient: what both have is the same on the wire."""

from __future__ import annotations

from typing import Any

import pytest

from untorch.serve.inference.messages import DATA_TYPES, METHODS, SERVICE, message_class

service = pytest.importorskip("tritonclient.grpc").service_pb2
configuration = pytest.importorskip("tritonclient.grpc").model_config_pb2

# Messages of which we have a part.
PARTS = {"ModelConfig", "ModelInput", "ModelOutput", "ModelStatistics"}


def fields(descriptor: Any) -> dict[str, Any]:
    return {
        field.name: (
            field.number,
            field.type,
            field.is_repeated,
            field.message_type.full_name if field.message_type is not None else None,
            bool(field.containing_oneof),
        )
        for field in descriptor.fields
    }


def names(descriptor: Any) -> list[str]:
    file = descriptor.file
    found = list(file.message_types_by_name)
    return [
        *found,
        *(f"{name}.{inner}" for name in found for inner in file.message_types_by_name[name].nested_types_by_name),
    ]


def test_every_message_is_the_protocols() -> None:
    ours = message_class("ModelInferRequest").DESCRIPTOR
    checked = 0
    for name in names(ours):
        known = {**configuration.DESCRIPTOR.message_types_by_name, **service.DESCRIPTOR.message_types_by_name}
        theirs = known[name.partition(".")[0]]
        if "." in name:
            theirs = theirs.nested_types_by_name[name.partition(".")[2]]
        mine = message_class(name).DESCRIPTOR
        expected = fields(theirs)
        if name in PARTS:
            expected = {field: expected[field] for field in fields(mine)}
            if "data_type" in expected:  # an enumeration, which is an int32 on the wire
                enum = theirs.fields_by_name["data_type"]
                assert [value.name for value in enum.enum_type.values] == [f"TYPE_{one}" for one in DATA_TYPES]
                expected["data_type"] = (enum.number, enum.TYPE_INT32, False, None, False)
        assert fields(mine) == expected, name
        assert mine.GetOptions().map_entry == theirs.GetOptions().map_entry
        checked += 1
    assert checked > 30


def test_every_call_is_the_protocols() -> None:
    theirs = service.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert theirs.full_name == SERVICE
    for name in METHODS:
        method = theirs.methods_by_name[name]
        assert (method.input_type.name, method.output_type.name) == (f"{name}Request", f"{name}Response")
        assert not method.client_streaming and not method.server_streaming


def test_bytes_are_the_same() -> None:
    values: dict[str, Any] = {"model_name": "m", "id": "7", "raw_input_contents": [b"ab"]}
    ours, theirs = message_class("ModelInferRequest")(**values), service.ModelInferRequest(**values)
    ours.parameters["timeout"].int64_param = 5
    theirs.parameters["timeout"].int64_param = 5
    ours.inputs.add(name="x", datatype="FP32", shape=[2, 3]).contents.fp32_contents.extend([1, 2])
    theirs.inputs.add(name="x", datatype="FP32", shape=[2, 3]).contents.fp32_contents.extend([1, 2])
    assert ours.SerializeToString(deterministic=True) == theirs.SerializeToString(deterministic=True)
