"""How overlapping intervals of a trace divide the time: every nanosecond belongs to one use."""

import random

import pytest

from flopwatch.runs.traces.intervals import USES, split_time
from flopwatch.runs.traces.uses import use_of_kernel, use_of_op


def split(on_cpu=False, begin=0, end=100, **intervals):
    spent = split_time(intervals, begin, end, on_cpu=on_cpu)
    return {use: nanoseconds for use, nanoseconds in spent.items() if nanoseconds}


def test_time_without_any_interval_is_idle():
    assert split() == {"idle": 100}
    assert split(matmul=[(20, 30)]) == {"matmul": 10, "idle": 90}


def test_communication_is_exposed_only_while_nothing_computes():
    spent = split(matmul=[(0, 40)], other_kernel=[(50, 60)], communication=[(30, 70)])
    assert spent == {"matmul": 40, "other_kernel": 10, "communication": 20, "idle": 30, "hidden_communication": 20}


def test_the_gaps_in_an_optimizer_are_idle_on_a_device_and_the_optimizers_on_a_cpu():
    """A device waits for Python there; on a CPU this Python is the optimizer."""
    intervals = {"optimizer": [(0, 50)], "other_kernel": [(10, 20), (30, 60)], "communication": [(0, 5)]}
    assert split(**intervals) == {"optimizer": 30, "other_kernel": 10, "communication": 5, "idle": 55}
    assert split(on_cpu=True, **intervals) == {
        "optimizer": 50,
        "other_kernel": 10,
        "idle": 40,
        "hidden_communication": 5,
    }


def test_only_time_within_the_steps_counts():
    assert split(begin=10, end=30, matmul=[(0, 12), (28, 99)], copy=[(40, 50)]) == {"matmul": 4, "idle": 16}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("on_cpu", [True, False])
def test_random_intervals_add_up_and_agree_with_a_count_of_every_nanosecond(seed, on_cpu):
    draw = random.Random(seed)
    marks = {use: [False] * 1000 for use in USES}
    intervals = {use: [] for use in USES}
    for use in USES:
        for _ in range(draw.randrange(12)):
            start = draw.randrange(-50, 1000)
            end = start + draw.randrange(120)
            intervals[use].append((start, end))
            for nanosecond in range(max(start, 0), min(end, 1000)):
                marks[use][nanosecond] = True
    spent = split_time(intervals, 0, 1000, on_cpu=on_cpu)

    assert sum(spent.values()) - spent["hidden_communication"] == 1000
    expected = dict.fromkeys((*USES, "idle"), 0)
    for nanosecond in range(1000):
        active = [use for use in USES if marks[use][nanosecond]]
        computes = {"matmul", "attention", "other_kernel"} & set(active)
        if not on_cpu and not computes:
            active = [use for use in active if use != "optimizer"]
        expected[active[0] if active else "idle"] += 1
    assert {use: spent.get(use, 0) for use in expected} == expected


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1", "matmul"),
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_align8>", "matmul"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "matmul"),
        ("sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nchw", "matmul"),
        ("void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>", "matmul"),
        ("Cijk_Ailk_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x256x64", "matmul"),
        ("triton_tem_fused_addmm_relu_3", "matmul"),
        ("void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<cutlass::bfloat16_t>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3", "attention"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("void two_shot_all_reduce_kernel<c10::BFloat16>", "communication"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "other_kernel"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>", "other_kernel"),
        ("triton_poi_fused_add_convert_element_type_mul_7", "other_kernel"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "other_kernel"),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float>", "other_kernel"),
        ("cudnn_infer_volta_scudnn_128x64_relu_medium_nn_v1", "matmul"),
        ("volta_s884cudnn_fp16_256x128_ldg8_wgrad_idx_exp_interior_nhwc_nt", "matmul"),
        ("volta_fp16_s884cudnn_256x128_ldg8_relu_f2f_exp_small_nhwc2nchw_tn_v1", "matmul"),
        ("void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1>", "matmul"),
        ("void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true, (cudnnKernelDataType_t)2>", "matmul"),
        ("void fft2d_r2c_32x32<float, false, 1u, false>", "matmul"),
        ("batched_transpose_16x32_half", "matmul"),
        ("igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x128x32_wt32x32x8_ws1x1_wr2x2_ta1x8x2x1", "matmul"),
        ("_ZN2ck16tensor_operation6device37kernel_batched_gemm_xdlops_bwd_weightINS_47Grid", "matmul"),
        ("miopenSp3AsmConv_v30_3_1_gfx94x_fp32_f2x3_stride1", "matmul"),
        ("bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_et128x16_m128x16x32_cga1x1x1", "matmul"),
        ("fused_moe_kernel", "matmul"),
        ("void fbgemm_gpu::permute_2D_data_kernel<false, int, float>", "other_kernel"),
        ("void moe::dev::finalize::finalizeKernelVecLoad<KernelParams<cutlass::bfloat16_t>>", "other_kernel"),
        ("void tensorrt_llm::quantize_with_block_size<2>(flashinfer::QuantizationSFLayout)", "other_kernel"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, unsigned char>", "other_kernel"),
        ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<PosEncodingMode(0), 2u>", "attention"),
        ("attn_fwd", "attention"),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>", "communication"),
    ],
)
def test_a_kernel_is_known_by_its_name(name, use):
    assert use_of_kernel(name, "kernel") == use


def test_copies_with_the_host_are_copies_and_those_on_the_device_are_its_work():
    assert use_of_kernel("Memcpy HtoD (Pageable -> Device)", "gpu_memcpy") == "copy"
    assert use_of_kernel("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy") == "copy"
    assert use_of_kernel("Memcpy DtoD (Device -> Device)", "gpu_memcpy") == "other_kernel"
    assert use_of_kernel("Memset (Device)", "gpu_memset") == "other_kernel"


@pytest.mark.parametrize(
    ("name", "use"),
    [
        *((f"aten::{op}", "matmul") for op in ("mm", "addmm", "addmm_", "bmm", "baddbmm", "_scaled_mm", "mv", "dot")),
        *((f"aten::{op}", "matmul") for op in ("convolution", "_convolution", "conv2d", "mkldnn_convolution")),
        ("aten::convolution_backward", "matmul"),
        ("mkldnn::_linear_pointwise", "matmul"),
        ("aten::scaled_dot_product_attention", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("c10d::allreduce_", "communication"),
        ("aten::linear", "other_kernel"),
        ("aten::matmul", "other_kernel"),
        ("aten::mul", "other_kernel"),
        ("aten::copy_", "other_kernel"),
        ("aten::mmax", "other_kernel"),
        ("graph_0_cpp_fused_add_relu_1", "other_kernel"),
        ("autograd::engine::evaluate_function: AddmmBackward0", None),
        ("torch::autograd::AccumulateGrad", None),
        ("CompiledFunctionBackward", None),
    ],
)
def test_an_op_is_known_by_its_name(name, use):
    """`aten::linear` and `aten::matmul` call the op that multiplies, so their own time is that of views."""
    assert use_of_op(name) == use
