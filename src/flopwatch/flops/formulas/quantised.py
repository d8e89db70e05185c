"""Products of quantised matrices: torch's packed weights, torch.ao, oneDNN, torchao, bitsandbytes.

All of them are one linear layer: every number of the activation (rows x contracted) meets every output feature. Weights
are packed in ways that hide their shape, so the number of features is read from the output or from an argument.

Sources: the schemas of torch 2.13, torchao 0.18 and bitsandbytes 0.50. Which type the product runs in: weight-only
kernels convert the weight to the activation's type; dynamic ones quantise the activation and multiply in int8.
"""

from math import prod

from flopwatch.flops.formulas.matmul import matmul_flops
from flopwatch.flops.formulas.registry import OpCall, OpFlops, formula

# By the name that the activation has in the schema.
_ACTIVATION = {
    "self": [
        "aten::_weight_int8pack_mm",
        "aten::_weight_int4pack_mm",
        "aten::_weight_int4pack_mm_for_cpu",
        "aten::_weight_int4pack_mm_with_scales_and_zeros",
        "quantized::int4mm_packed_weight_cpu",
    ],
    "input": ["aten::_mixed_dtypes_linear", "torchao::da8w4_linear_cpu", "torchao::float8_linear_cpu"],
    "X": ["quantized::linear_dynamic_fp16", "quantized::linear_relu_dynamic_fp16", "mkldnn::_linear_pointwise"],
    "qx": ["onednn::qlinear_pointwise"],
    "a": [
        "ao::blockwise_fp8_gemm",
        "torchao::blockwise_scaled_mm",
        "torchao::mx_fp8_bf16",
        "torchao::triton_fp8_gemm_1x128_128x1",
        "torchao::triton_fp8_gemm_1x128_128x128",
    ],
    "A": ["torchao::scaled_int8_mm"],
}
_IN_INT8 = [
    "quantized::linear",
    "quantized::linear_relu",
    "quantized::linear_leaky_relu",
    "quantized::linear_tanh",
    "quantized::linear_dynamic",
    "quantized::linear_relu_dynamic",
    "quantized::linear_with_input_q_dq_qweight_dq_output_fp32",
    "quantized::linear_with_input_q_dq_qweight_dq_relu_output_fp32",
    "_quantized::linear",
    "_quantized::linear_dynamic",
]


@formula(*(name for names in _ACTIVATION.values() for name in names))
def _linear(call: OpCall) -> int:
    name = next(key for key, names in _ACTIVATION.items() if call.func._schema.name in names)
    return int(2 * prod(call.arguments[name].shape) * call.out.shape[-1])


@formula(*_IN_INT8)
def _linear_in_int8(call: OpCall) -> OpFlops:
    return OpFlops(2 * prod(call.arguments["X"].shape) * call.out.shape[-1], dtype="int8")


@formula("aten::_dyn_quant_matmul_4bit")
def _dynamic_4bit(call: OpCall) -> OpFlops:
    arguments = call.arguments
    rows = prod(arguments["inp"].shape[:-1])
    return OpFlops(matmul_flops(rows, arguments["in_features"], arguments["out_features"]), dtype="int8")


@formula("bitsandbytes::int8_linear_matmul", "bitsandbytes::int8_scaled_mm")
def _bitsandbytes_int8(call: OpCall) -> int:
    """A is (..., contracted), B is (features, contracted)."""
    return int(2 * prod(call.arguments["A"].shape) * call.arguments["B"].shape[0])


@formula("bitsandbytes::int8_mixed_scaled_mm")
def _bitsandbytes_mixed(call: OpCall) -> OpFlops:
    """LLM.int8(): columns with outliers are multiplied once more in the activation's own type (arXiv 2208.07339)."""
    activation, features = call.arguments["CA"], call.arguments["CB"].shape[0]
    outliers = call.arguments.get("outlier_cols")
    columns = 0 if outliers is None else outliers.numel()
    rows = prod(activation.shape[:-1])
    needed = matmul_flops(rows, activation.shape[-1], features)
    return OpFlops(needed, matmul_flops(rows, columns, features), dtype="int8")


@formula("bitsandbytes::gemv_4bit", "bitsandbytes::gemm_4bit")
def _bitsandbytes_4bit(call: OpCall) -> int:
    """The packed weight's own shape, (features, contracted), is an argument."""
    return int(2 * prod(call.arguments["A"].shape) * call.arguments["shapeB"][0])
