"""The C function that generated code calls for each result of a proxy kernel."""

__all__ = ["CHECK_RESULT", "C_SHIM"]

CHECK_RESULT = "aoti_torch_untorch_check_result"
C_SHIM = (
    f"AOTITorchError {CHECK_RESULT}(AtenTensorHandle result, int32_t dtype, int64_t ndim, const int64_t* sizes, "
    f"const int64_t* strides, const char* op, int64_t index)"
)
