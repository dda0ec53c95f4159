import pytest

from ptdbench.profiling import trace
from ptdbench.training.profile import kernel_kind
from tests.profiling.made_trace import kernel, label, launched, write


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("triton_poi_fused__to_copy_0", "compiled"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas", "product"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN", "product"),
        ("void at::native::vectorized_elementwise_kernel<8, converting_copy_kernel_cuda<float, Half>>", "copy"),
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
    assert kernel_kind(name) == expected


def test_kernels_count_in_the_step_in_which_the_host_launched_them(tmp_path):
    """A device that falls behind the host comes to them later."""
    labels = label("warm-up", 0, 1), label("ProfilerStep#5", 1, 2)
    kernels = kernel("early", 1.2, 1.3, 1), kernel("ncclDevKernel_AllReduce", 9, 10, 2)
    path = write(tmp_path / "trace.json", *labels, launched(0.5, 1), launched(1.5, 2), *kernels)
    assert [one.name for one in trace.launched_in_steps(path)[0]] == ["ncclDevKernel_AllReduce"]


def test_without_kernels_it_says_so(tmp_path):
    path = write(tmp_path / "trace.json", label("ProfilerStep#5", 1, 2))
    with pytest.raises(ValueError, match="holds no kernels"):
        trace.launched_in_steps(path)
