"""The gRPC messages of the protocol, built from a table of fields: name, number, type."""

from __future__ import annotations

import re
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

__all__ = ["DATA_TYPES", "METHODS", "PACKAGE", "SERVICE", "message_class"]

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"

# A field is "number name type"; * after the type: repeated; a name in brackets: of that oneof. A nested message has its
# outer one's name and a dot. "map:X" is a map from string to X.
_MESSAGES: dict[str, tuple[str, ...]] = {
    "ServerLiveRequest": (),
    "ServerLiveResponse": ("1 live bool",),
    "ServerReadyRequest": (),
    "ServerReadyResponse": ("1 ready bool",),
    "ModelReadyRequest": ("1 name string", "2 version string"),
    "ModelReadyResponse": ("1 ready bool",),
    "ServerMetadataRequest": (),
    "ServerMetadataResponse": ("1 name string", "2 version string", "3 extensions string*"),
    "ModelMetadataRequest": ("1 name string", "2 version string"),
    "ModelMetadataResponse.TensorMetadata": ("1 name string", "2 datatype string", "3 shape int64*"),
    "ModelMetadataResponse": (
        "1 name string", "2 versions string*", "3 platform string", "4 inputs ModelMetadataResponse.TensorMetadata*",
        "5 outputs ModelMetadataResponse.TensorMetadata*",
    ),
    "InferParameter": (
        "1 bool_param bool [choice]", "2 int64_param int64 [choice]", "3 string_param string [choice]",
        "4 double_param double [choice]", "5 uint64_param uint64 [choice]",
    ),
    "InferTensorContents": (
        "1 bool_contents bool*", "2 int_contents int32*", "3 int64_contents int64*", "4 uint_contents uint32*",
        "5 uint64_contents uint64*", "6 fp32_contents float*", "7 fp64_contents double*", "8 bytes_contents bytes*",
    ),
    "ModelInferRequest.InferInputTensor": (
        "1 name string", "2 datatype string", "3 shape int64*", "4 parameters map:InferParameter",
        "5 contents InferTensorContents",
    ),
    "ModelInferRequest.InferRequestedOutputTensor": ("1 name string", "2 parameters map:InferParameter"),
    "ModelInferRequest": (
        "1 model_name string", "2 model_version string", "3 id string", "4 parameters map:InferParameter",
        "5 inputs ModelInferRequest.InferInputTensor*", "6 outputs ModelInferRequest.InferRequestedOutputTensor*",
        "7 raw_input_contents bytes*",
    ),
    "ModelInferResponse.InferOutputTensor": (
        "1 name string", "2 datatype string", "3 shape int64*", "4 parameters map:InferParameter",
        "5 contents InferTensorContents",
    ),
    "ModelInferResponse": (
        "1 model_name string", "2 model_version string", "3 id string", "4 parameters map:InferParameter",
        "5 outputs ModelInferResponse.InferOutputTensor*", "6 raw_output_contents bytes*",
    ),
    "ModelStreamInferResponse": ("1 error_message string", "2 infer_response ModelInferResponse"),
    "ModelRepositoryParameter": (
        "1 bool_param bool [choice]", "2 int64_param int64 [choice]", "3 string_param string [choice]",
        "4 bytes_param bytes [choice]",
    ),
    "RepositoryIndexRequest": ("1 repository_name string", "2 ready bool"),
    "RepositoryIndexResponse.ModelIndex": ("1 name string", "2 version string", "3 state string", "4 reason string"),
    "RepositoryIndexResponse": ("1 models RepositoryIndexResponse.ModelIndex*",),
    "RepositoryModelLoadRequest": (
        "1 repository_name string", "2 model_name string", "3 parameters map:ModelRepositoryParameter",
    ),
    "RepositoryModelLoadResponse": (),
    "RepositoryModelUnloadRequest": (
        "1 repository_name string", "2 model_name string", "3 parameters map:ModelRepositoryParameter",
    ),
    "RepositoryModelUnloadResponse": (),
    "ModelConfigRequest": ("1 name string", "2 version string"),
    "ModelConfigResponse": ("1 config ModelConfig",),
    "ModelStatisticsRequest": ("1 name string", "2 version string"),
    "ModelStatisticsResponse": ("1 model_stats ModelStatistics*",),
    "ModelStatistics": (
        "1 name string", "2 version string", "3 last_inference uint64", "4 inference_count uint64",
        "5 execution_count uint64", "6 inference_stats InferStatistics", "7 batch_stats InferBatchStatistics*",
    ),
    "InferStatistics": (
        "1 success StatisticDuration", "2 fail StatisticDuration", "3 queue StatisticDuration",
        "4 compute_input StatisticDuration", "5 compute_infer StatisticDuration", "6 compute_output StatisticDuration",
        "7 cache_hit StatisticDuration", "8 cache_miss StatisticDuration",
    ),
    "StatisticDuration": ("1 count uint64", "2 ns uint64"),
    "InferBatchStatistics": (
        "1 batch_size uint64", "2 compute_input StatisticDuration", "3 compute_infer StatisticDuration",
        "4 compute_output StatisticDuration",
    ),
    # Of Triton's model configuration, what is told here. An enumeration is an int32 on the wire.
    "ModelConfig": (
        "1 name string", "2 platform string", "17 backend string", "4 max_batch_size int32", "5 input ModelInput*",
        "6 output ModelOutput*",
    ),
    "ModelInput": ("1 name string", "2 data_type int32", "4 dims int64*"),
    "ModelOutput": ("1 name string", "2 data_type int32", "3 dims int64*"),
}  # fmt: skip

# The values of Triton's DataType, without TYPE_.
DATA_TYPES = (
    "INVALID", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64",
    "STRING", "BF16",
)  # fmt: skip

# The service's calls: each has the messages NAMERequest and NAMEResponse, but for the stream.
METHODS = (
    "ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer", "RepositoryIndex",
    "RepositoryModelLoad", "RepositoryModelUnload", "ModelConfig", "ModelStatistics",
)  # fmt: skip

_FIELD = re.compile(r"(\d+) (\w+) (map:)?([\w.]+)(\*)?(?: \[(\w+)\])?")
_Field = descriptor_pb2.FieldDescriptorProto


def message_class(name: str) -> Any:
    """The class of a message, such as "ModelInferRequest"."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


def _build_pool() -> descriptor_pool.DescriptorPool:
    """A pool of its own: a client in the same process may have messages of the same names."""
    file = descriptor_pb2.FileDescriptorProto(name="untorch/inference.proto", package=PACKAGE, syntax="proto3")
    messages: dict[str, Any] = {}
    # Outer messages first.
    for name in sorted(_MESSAGES, key=lambda text: text.count(".")):
        outer, _, inner = name.rpartition(".")
        messages[name] = messages[outer].nested_type.add(name=inner) if outer else file.message_type.add(name=name)
    for name, fields in _MESSAGES.items():
        for field in fields:
            _add_field(messages[name], name, field)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


def _add_field(message: Any, outer: str, text: str) -> None:
    match = _FIELD.fullmatch(text)
    assert match is not None, text
    number, name, is_map, kind, repeated, oneof = match.groups()
    field = message.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
    if repeated or is_map:
        field.label = _Field.LABEL_REPEATED
    if is_map:
        entry = "".join(part.capitalize() for part in name.split("_")) + "Entry"
        nested = message.nested_type.add(name=entry)
        nested.options.map_entry = True
        _set_type(nested.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL), "string")
        _set_type(nested.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL), kind)
        kind = f"{outer}.{entry}"
    _set_type(field, kind)
    if oneof:
        names = [one.name for one in message.oneof_decl]
        if oneof not in names:
            message.oneof_decl.add(name=oneof)
            names.append(oneof)
        field.oneof_index = names.index(oneof)


def _set_type(field: Any, kind: str) -> None:
    scalar = getattr(_Field, f"TYPE_{kind.upper()}", None)
    if scalar is not None:
        field.type = scalar
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{PACKAGE}.{kind}"


_POOL = _build_pool()
