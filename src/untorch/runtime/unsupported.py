"""C shims that PyTorch's headers declare and untorch does not have, with the reason for each.

A model that needs one is refused at export and, with the shim's name, at load.
"""

from __future__ import annotations

from collections.abc import Collection

# What a build without nvcc says about every CUDA shim; the native library says the same (cuda/kernel_registry.h).
BUILT_WITHOUT_CUDA = "this untorch was built without CUDA: install the CUDA toolkit (nvcc) and reinstall untorch"

# Functions of streams and memory, which need no kernel: every build has them.
_WITHOUT_KERNELS = {
    "aoti_torch_cuda_caching_allocator_raw_alloc",
    "aoti_torch_cuda_caching_allocator_raw_delete",
    "aoti_torch_cuda_guard_set_index",
}


def has_cuda_kernels(functions: Collection[str]) -> bool:
    """Whether a native library that exports these functions was built with CUDA."""
    return any(name.startswith("aoti_torch_cuda_") and name not in _WITHOUT_KERNELS for name in functions)


_TRAINING = "a backward operator: untorch runs inference only"
_TRAINING_QUANTIZATION = "observes ranges during quantisation-aware training: untorch runs inference only"
_DISTRIBUTED = "a collective of torch.distributed: untorch runs in one process"
_SPARSE = "makes a sparse tensor: untorch has strided tensors only"
_ONEDNN_QUANTIZED = "works on weights packed by oneDNN's int8 kernels, whose layout is private to oneDNN"
_FBGEMM = "works on weights packed by FBGEMM, whose layout is private to FBGEMM"
_OTHER_DEVICES = "a hook for out-of-tree devices: PyTorch has no CPU kernel for it either"
_ARM_INT4 = "runs int4 kernels of Arm's KleidiAI on weights packed in its private layout"
_INT4 = (
    "works on int4 weights packed for the vectors of the CPU that packed them, which their shape does not tell: "
    "export the model with `untorch`, which repacks weights that are constants"
)
_CUDNN_RNN = "works on a weight buffer packed by cuDNN's recurrent layers, whose layout is private to cuDNN"
_OTHER_GPUS = "a hook for out-of-tree devices: PyTorch has no CUDA kernel for it either"
_FLASH_3 = "runs FlashAttention 3 on float8 tensors: not served yet"
_BLAS_HANDLE = "hands out the cuBLAS handle of PyTorch: untorch works with cuBLASLt, which has none to share"
_CUDA_ONLY = "a deprecated name of a CUDA kernel: PyTorch has no CPU kernel for it"

UNSUPPORTED_SHIMS: dict[str, str] = {
    "aoti_torch__scaled_dot_product_efficient_attention": _CUDA_ONLY,
    "aoti_torch__scaled_dot_product_flash_attention": _CUDA_ONLY,
    "aoti_torch__scaled_dot_product_flash_attention_v2": _CUDA_ONLY,
    "aoti_torch_cpu__adaptive_avg_pool2d_backward": _TRAINING,
    "aoti_torch_cpu__adaptive_avg_pool3d_backward": _TRAINING,
    "aoti_torch_cpu__c10d_functional_all_reduce": _DISTRIBUTED,
    "aoti_torch_cpu__c10d_functional_all_reduce_": _DISTRIBUTED,
    "aoti_torch_cpu__c10d_functional_wait_tensor": _DISTRIBUTED,
    "aoti_torch_cpu__cdist_backward": _TRAINING,
    "aoti_torch_cpu__dyn_quant_matmul_4bit": _ARM_INT4,
    "aoti_torch_cpu__dyn_quant_pack_4bit_weight": _ARM_INT4,
    "aoti_torch_cpu__embedding_bag_dense_backward": _TRAINING,
    "aoti_torch_cpu__embedding_bag_per_sample_weights_backward": _TRAINING,
    "aoti_torch_cpu__fused_moving_avg_obs_fq_helper": _TRAINING_QUANTIZATION,
    "aoti_torch_cpu__fused_moving_avg_obs_fq_helper_functional": _TRAINING_QUANTIZATION,
    "aoti_torch_cpu__pdist_backward": _TRAINING,
    "aoti_torch_cpu__qconv2d_pointwise_binary_tensor": _ONEDNN_QUANTIZED,
    "aoti_torch_cpu__qconv_pointwise_tensor": _ONEDNN_QUANTIZED,
    "aoti_torch_cpu__qlinear_pointwise_binary_tensor": _ONEDNN_QUANTIZED,
    "aoti_torch_cpu__qlinear_pointwise_tensor": _ONEDNN_QUANTIZED,
    "aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu_backward": _TRAINING,
    "aoti_torch_cpu__scaled_dot_product_fused_attention_overrideable": _OTHER_DEVICES,
    "aoti_torch_cpu__scaled_dot_product_fused_attention_overrideable_backward": _TRAINING,
    "aoti_torch_cpu__segment_reduce_backward": _TRAINING,
    "aoti_torch_cpu__to_sparse": _SPARSE,
    "aoti_torch_cpu__weight_int4pack_mm_cpu_tensor": _INT4,
    "aoti_torch_cpu__wrapped_linear_prepack": _FBGEMM,
    "aoti_torch_cpu__wrapped_quantized_linear_prepacked": _FBGEMM,
    "aoti_torch_cpu_adaptive_max_pool2d_backward": _TRAINING,
    "aoti_torch_cpu_adaptive_max_pool3d_backward": _TRAINING,
    "aoti_torch_cpu_avg_pool2d_backward": _TRAINING,
    "aoti_torch_cpu_avg_pool3d_backward": _TRAINING,
    "aoti_torch_cpu_convolution_backward": _TRAINING,
    "aoti_torch_cpu_fractional_max_pool2d_backward": _TRAINING,
    "aoti_torch_cpu_fractional_max_pool3d_backward": _TRAINING,
    "aoti_torch_cpu_grid_sampler_2d_backward": _TRAINING,
    "aoti_torch_cpu_grid_sampler_3d_backward": _TRAINING,
    "aoti_torch_cpu_masked_scatter_backward": _TRAINING,
    "aoti_torch_cpu_max_pool2d_with_indices_backward": _TRAINING,
    "aoti_torch_cpu_max_pool3d_with_indices_backward": _TRAINING,
    "aoti_torch_cpu_replication_pad1d_backward": _TRAINING,
    "aoti_torch_cpu_replication_pad2d_backward": _TRAINING,
    "aoti_torch_cpu_soft_margin_loss_backward": _TRAINING,
    "aoti_torch_cpu_to_sparse": _SPARSE,
    "aoti_torch_cpu_upsample_bicubic2d_backward": _TRAINING,
    "aoti_torch_cpu_upsample_linear1d_backward": _TRAINING,
    "aoti_torch_cpu_upsample_trilinear3d_backward": _TRAINING,
    "aoti_torch_cpu_wrapped_fbgemm_linear_fp16_weight": _FBGEMM,
    "aoti_torch_cpu_wrapped_fbgemm_pack_gemm_matrix_fp16": _FBGEMM,
    "aoti_torch_cuda__adaptive_avg_pool2d_backward": _TRAINING,
    "aoti_torch_cuda__adaptive_avg_pool3d_backward": _TRAINING,
    "aoti_torch_cuda__cdist_backward": _TRAINING,
    "aoti_torch_cuda__cudnn_rnn": _CUDNN_RNN,
    "aoti_torch_cuda__efficient_attention_backward": _TRAINING,
    "aoti_torch_cuda__embedding_bag_dense_backward": _TRAINING,
    "aoti_torch_cuda__embedding_bag_per_sample_weights_backward": _TRAINING,
    "aoti_torch_cuda__flash_attention_backward": _TRAINING,
    "aoti_torch_cuda__flash_attention_forward_quantized": _FLASH_3,
    "aoti_torch_cuda__fused_moving_avg_obs_fq_helper": _TRAINING_QUANTIZATION,
    "aoti_torch_cuda__fused_moving_avg_obs_fq_helper_functional": _TRAINING_QUANTIZATION,
    "aoti_torch_cuda__pdist_backward": _TRAINING,
    "aoti_torch_cuda__scaled_dot_product_cudnn_attention_backward": _TRAINING,
    "aoti_torch_cuda__scaled_dot_product_efficient_attention_backward": _TRAINING,
    "aoti_torch_cuda__scaled_dot_product_flash_attention_backward": _TRAINING,
    "aoti_torch_cuda__scaled_dot_product_flash_attention_quantized": _FLASH_3,
    "aoti_torch_cuda__scaled_dot_product_fused_attention_overrideable": _OTHER_GPUS,
    "aoti_torch_cuda__scaled_dot_product_fused_attention_overrideable_backward": _TRAINING,
    "aoti_torch_cuda__segment_reduce_backward": _TRAINING,
    "aoti_torch_cuda__to_sparse": _SPARSE,
    "aoti_torch_cuda_adaptive_max_pool2d_backward": _TRAINING,
    "aoti_torch_cuda_adaptive_max_pool3d_backward": _TRAINING,
    "aoti_torch_cuda_avg_pool2d_backward": _TRAINING,
    "aoti_torch_cuda_avg_pool3d_backward": _TRAINING,
    "aoti_torch_cuda_convolution_backward": _TRAINING,
    "aoti_torch_cuda_fractional_max_pool2d_backward": _TRAINING,
    "aoti_torch_cuda_fractional_max_pool3d_backward": _TRAINING,
    "aoti_torch_cuda_grid_sampler_2d_backward": _TRAINING,
    "aoti_torch_cuda_grid_sampler_3d_backward": _TRAINING,
    "aoti_torch_cuda_masked_scatter_backward": _TRAINING,
    "aoti_torch_cuda_max_pool2d_with_indices_backward": _TRAINING,
    "aoti_torch_cuda_max_pool3d_with_indices_backward": _TRAINING,
    "aoti_torch_cuda_replication_pad1d_backward": _TRAINING,
    "aoti_torch_cuda_replication_pad2d_backward": _TRAINING,
    "aoti_torch_cuda_soft_margin_loss_backward": _TRAINING,
    "aoti_torch_cuda_to_sparse": _SPARSE,
    "aoti_torch_cuda_upsample_bicubic2d_backward": _TRAINING,
    "aoti_torch_cuda_upsample_linear1d_backward": _TRAINING,
    "aoti_torch_cuda_upsample_trilinear3d_backward": _TRAINING,
    "torch_get_current_cuda_blas_handle": _BLAS_HANDLE,
}
