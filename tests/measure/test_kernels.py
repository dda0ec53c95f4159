import pytest

from ptdbench.measure.kernels import kind


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("triton_poi_fused__to_copy_0", "compiled"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas", "product"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN", "product"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)", "attention"),
        ("sm80_xmma_fprop_implicit_gemm_conv_indexed_bf16bf16", "convolution"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>", "norm"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "reduction"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", "copy"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "elementwise"),
        ("a kernel of somebody's own", "other"),
    ],
)
def test_what_a_kernel_is_for(name, expected):
    assert kind(name) == expected
