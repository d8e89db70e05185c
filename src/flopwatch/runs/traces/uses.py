"""What a kernel or an op of a trace uses the time for, told by its name."""

import re

COMMUNICATION = re.compile(
    r"nccl|rccl|nvshmem|multimem|c10d::|gloo:|mpi:|ucc:|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|"
    r"symm_mem|_c10d_functional::",
    re.IGNORECASE,
)
_ATTENTION = re.compile(
    # FlashInfer has norms and quantization too, and vLLM's cache for FlashAttention is only written to.
    r"(?<!cache_)flash(?!infer)|Batch(Prefill|Decode)With|fmha|attention|sdpa|mha_fwd|mha_bwd|attn",
    re.IGNORECASE,
)
_FUSED_KERNEL = re.compile(r"triton_(poi|red|per|for)_")
"""Element-wise kernels and reductions of torch.compile. They are named after the ops around them, such as a matmul."""
_MATMUL_KERNEL = re.compile(
    # Not a product: fbgemm is a library for embeddings too, and cutlass has numbers that other kernels take.
    r"(?<!fb)gemm|gemv|cutlass(?!::(bfloat16|half|tfloat|float|complex|Array|\w*int))|cublas|xmma|nvjet|wgmma|"
    r"splitkreduce|cijk_|wgrad|dgrad|fprop|triton_tem_|triton\w*_mm_|matmul|^bmm_|fused_moe_kernel|"
    # Convolutions, and what cuDNN and MIOpen run only within one: layouts, offsets, scales, Fourier transforms.
    r"conv(?!ert)|[a-z]\d*cudnn_\d+x\d+|winograd|fft2d_[rc]2[rc]_|nchwToNhwc|nhwcToNchw|scalePackedTensor|"
    r"cask_cudnn|batched_transpose_\d|transpose_(NCHW2CNHW|CNHW2NCHW)|SubTensorOpWith",
    re.IGNORECASE,
)
_MATMUL_OP = re.compile(
    r"aten::_?(mm|addmm|bmm|baddbmm|addbmm|addmv|mv|dot|vdot|scaled_mm|grouped_mm|scaled_grouped_mm|int_mm|"
    r"addmm_activation)_?$|aten::\w*conv(?!ert)|aten::mkldnn_\w*linear|aten::mkldnn_rnn|mkl_linear|mkldnn::|mkl::|"
    r"onednn::\w*(linear|conv)"
)
_WRAPPER_OP = re.compile(
    r"autograd::engine::|torch::autograd::|\w*Backward\d*$|Torch-Compiled Region|## Call CompiledFxGraph|TorchDynamo"
)
"""Ops that only call others. Time in them in which no other op runs is spent in Python or in the autograd engine."""


def use_of_kernel(name: str, category: str) -> str:
    """The use of an accelerator's time by a kernel or copy.

    >>> use_of_kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "kernel")
    'communication'
    >>> use_of_kernel("pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>", "kernel")
    'attention'
    >>> use_of_kernel("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy")
    'copy'
    >>> use_of_kernel("triton_poi_fused_convolution_relu_0", "kernel"), use_of_kernel("triton_tem_fused_mm_5", "kernel")
    ('other_kernel', 'matmul')
    """
    # In a memset and in a copy within the device, the device works and the host does not take part.
    if category == "gpu_memset" or "DtoD" in name or _FUSED_KERNEL.match(name):
        return "other_kernel"
    if category == "gpu_memcpy":
        return "copy"
    uses = ((COMMUNICATION, "communication"), (_ATTENTION, "attention"), (_MATMUL_KERNEL, "matmul"))
    return next((use for pattern, use in uses if pattern.search(name)), "other_kernel")


def use_of_op(name: str) -> str | None:
    """The use of a CPU's time by an op; None for an op that only calls others.

    A CPU has no copies from the host to itself: an op that copies is a computation like any other.

    >>> use_of_op("aten::addmm"), use_of_op("aten::layer_norm"), use_of_op("AddmmBackward0")
    ('matmul', 'other_kernel', None)
    """
    if _WRAPPER_OP.match(name):
        return None
    uses = ((COMMUNICATION, "communication"), (_MATMUL_OP, "matmul"), (_ATTENTION, "attention"))
    return next((use for pattern, use in uses if pattern.search(name)), "other_kernel")
