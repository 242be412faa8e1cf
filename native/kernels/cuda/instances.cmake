# Template instances that compile in a file of their own, so that they build in parallel. Each is made from a *.cu.in
# beside the template that it instantiates; the values replace the @names@ in it.

untorch_cuda_instance(attention/flash_mma_float16 attention/flash_mma.cu.in
  dtype=float16 type=__half suffix= "bias_text=without a bias")
untorch_cuda_instance(attention/flash_mma_float16_bias attention/flash_mma.cu.in
  dtype=float16 type=__half suffix=_bias "bias_text=with an additive bias, or a scale that is not positive")
untorch_cuda_instance(attention/flash_mma_bfloat16 attention/flash_mma.cu.in
  dtype=bfloat16 type=__nv_bfloat16 suffix= "bias_text=without a bias")
untorch_cuda_instance(attention/flash_mma_bfloat16_bias attention/flash_mma.cu.in
  dtype=bfloat16 type=__nv_bfloat16 suffix=_bias "bias_text=with an additive bias, or a scale that is not positive")

untorch_cuda_instance(attention/flash_wgmma_float16.sm90a attention/flash_wgmma.cu.in dtype=float16 type=__half)
untorch_cuda_instance(attention/flash_wgmma_bfloat16.sm90a attention/flash_wgmma.cu.in
  dtype=bfloat16 type=__nv_bfloat16)
untorch_cuda_instance(attention/paged_wgmma_float16.sm90a attention/paged_wgmma.cu.in dtype=float16 type=__half)
untorch_cuda_instance(attention/paged_wgmma_bfloat16.sm90a attention/paged_wgmma.cu.in
  dtype=bfloat16 type=__nv_bfloat16)

foreach(format "nvfp4;Nvfp4;NVFP4" "int4;Int4;Int4")
  list(GET format 0 prefix)
  list(GET format 1 class)
  list(GET format 2 title)
  untorch_cuda_instance(moe/${prefix}_gate_up moe/moe_gemm.cu.in
    format=${prefix} class=${class} title=${title} op=gate_up gated=true "what=silu(gate) * up, rounded to x's dtype")
  untorch_cuda_instance(moe/${prefix}_down moe/moe_gemm.cu.in
    format=${prefix} class=${class} title=${title} op=down gated=false "what=each pair's share of its token, in float32")
endforeach()

foreach(bits 32 64)
  untorch_cuda_instance(sort/cta_sort${bits} sort/cta_sort.cu.in bits=${bits})
  untorch_cuda_instance(sort/device_sort${bits} sort/device_sort.cu.in bits=${bits})
endforeach()

untorch_cuda_instance(scan/cumsum scan/scan.cu.in launcher=cumsum op=Sum dtypes=arithmetic)
untorch_cuda_instance(scan/cumprod scan/scan.cu.in launcher=cumprod op=Product dtypes=arithmetic)
untorch_cuda_instance(scan/logcumsumexp scan/scan.cu.in launcher=logcumsumexp op=LogAddExp dtypes=floating)
