"""Lists ops without matrix products, which count as 0 FLOPs. Other ops without a formula are reported as uncounted.

An op is free if torch's tags or its schema say so, or if it is listed here. Nothing is guessed from an op's inputs,
because a missed product would be a wrong number without a warning. The list was made by hand from all ops in the `aten`
namespace of torch 2.15; reductions are listed too, because torch before 2.10 does not tag them. It leaves out linear
algebra (`linalg_*`, `cholesky`, `geqrf`, ...) and products of sparse and nested tensors, because their FLOPs do not
follow from shapes.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any

import torch

from flopwatch.torch_internals.ops import OpOverload, op_name, op_schema

_LISTED = """
# elements
__and__ __irshift__ __lshift__ __or__ __rshift__ __xor__ abs add bitwise_and bitwise_left_shift bitwise_or
bitwise_right_shift bitwise_xor copysign div eq floor_divide gcd ge gt heaviside isinf isnan lcm le lt mul ne
remainder rsub sub xlogy ldexp
# losses
_ctc_loss _cudnn_ctc_loss miopen_ctc_loss _use_cudnn_ctc_loss binary_cross_entropy binary_cross_entropy_with_logits
dist huber_loss mse_loss multi_margin_loss multilabel_margin_loss_backward multilabel_margin_loss_forward
nll_loss2d_backward nll_loss2d_forward nll_loss_backward nll_loss_forward smooth_l1_loss soft_margin_loss
# norms
_batch_norm_no_update _batch_norm_with_update _batch_norm_with_update_functional _fused_rms_norm
_native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training
_weight_norm_interface batch_norm_backward batch_norm_backward_elemt batch_norm_backward_reduce batch_norm_elemt
batch_norm_gather_stats batch_norm_gather_stats_with_counts batch_norm_stats batch_norm_update_stats cudnn_batch_norm
linalg_cross linalg_vector_norm miopen_batch_norm native_batch_norm native_group_norm native_layer_norm native_norm
norm quantized_batch_norm renorm
# activations
_log_softmax _masked_scale _masked_softmax _prelu_kernel _safe_softmax _softmax _thnn_fused_gru_cell
_thnn_fused_lstm_cell _thnn_differentiable_gru_cell_backward _thnn_differentiable_lstm_cell_backward celu elu gelu glu
glu_jvp hardshrink hardsigmoid hardswish hardtanh leaky_relu log_sigmoid_backward log_sigmoid_forward log_softmax mish
relu rrelu_with_noise rrelu_with_noise_functional softmax softplus softshrink threshold _add_relu
_transform_bias_rescale_qkv _nested_tensor_softmax_with_shape _sparse_log_softmax _sparse_softmax selu
# pooling and resampling
_adaptive_avg_pool2d _adaptive_avg_pool3d _grid_sampler_2d_cpu_fallback _upsample_bicubic2d_aa _upsample_bilinear2d_aa
_upsample_lanczos2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d avg_pool1d
avg_pool2d avg_pool3d cudnn_grid_sampler fractional_max_pool2d fractional_max_pool3d grid_sampler_2d grid_sampler_3d
max_pool2d_backward max_pool2d_with_indices max_pool3d_with_indices max_unpool2d max_unpool3d
mkldnn_adaptive_avg_pool2d mkldnn_max_pool2d mkldnn_max_pool3d quantized_max_pool1d quantized_max_pool2d
quantized_max_pool3d upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d
upsample_nearest3d upsample_trilinear3d
# places
_chunk_cat _index_put_impl _jagged_to_padded_dense_forward _nested_compute_contiguous_strides_offsets
_nested_from_padded _nested_from_padded_and_nested_example _nested_from_padded_tensor _nested_get_jagged_dummy
_nested_get_lengths _nested_get_max_seqlen _nested_get_min_seqlen _nested_get_offsets _nested_select_backward
_nested_sum_backward _nested_tensor_from_mask _nested_tensor_from_tensor_list _nested_tensor_size
_nested_tensor_storage_offsets _nested_tensor_strides _pack_padded_sequence _pad_packed_sequence
_padded_dense_to_jagged_forward _reshape_copy _stack _unsafe_index _unsafe_index_put _unsafe_masked_index
_unsafe_masked_index_put_accumulate _unsafe_view as_strided as_strided_scatter block_diag cat channel_shuffle col2im
constant_pad_nd copy diag_embed diagonal_backward diagonal_scatter embedding embedding_dense_backward embedding_renorm
flip gather im2col index index_add index_copy index_fill index_put index_reduce index_select masked_fill
masked_scatter masked_select narrow_copy nonzero nonzero_static pixel_shuffle pixel_unshuffle put reflection_pad1d
reflection_pad2d reflection_pad3d repeat repeat_interleave replication_pad1d replication_pad2d replication_pad3d
resize resize_as roll rot90 scatter scatter_add scatter_reduce select_backward select_scatter slice_backward
slice_scatter squeeze stack t take to_padded_tensor transpose tril triu unfold_backward unsafe_split
unsafe_split_with_sizes unsqueeze where _embedding_bag _embedding_bag_dense_backward _embedding_bag_forward_only
_embedding_bag_per_sample_weights_backward _no_grad_embedding_renorm
# sums and order
_aminmax _cummax_helper _cummin_helper _foreach_norm _is_all_true _is_any_true _linalg_check_errors _logcumsumexp
_segment_reduce_backward _unique _unique2 bincount bucketize count_nonzero cummax cummin cumprod cumsum histc
histogram _histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors isin kthvalue logcumsumexp
median mode nanmedian prod searchsorted segment_reduce sort std_mean sum topk trace unique_consecutive unique_dim
unique_dim_consecutive var_mean hash_tensor _sparse_csr_prod _sparse_csr_sum _sparse_sum all amax amin aminmax any
argmax argmin logsumexp max mean min nansum std var
# new values
_dirichlet_grad _efficientzerotensor _fill_mem_eff_dropout_mask _fused_dropout _philox_key_fold_in _philox_key_split
_philox_normal _philox_randint _philox_uniform _sample_dirichlet _standard_gamma _standard_gamma_grad arange bernoulli
binomial cauchy complex empty_like empty_permuted empty_quantized empty_strided exponential eye fill full full_like
geometric lift linspace log_normal logspace multinomial native_dropout new_empty new_empty_strided new_full new_ones
new_zeros normal normal_functional ones ones_like poisson polar rand rand_like randint randint_like randn randn_like
random randperm range scalar_tensor uniform zero zeros zeros_like _new_zeros_with_same_feature_meta _no_grad_fill
_no_grad_normal _no_grad_uniform _no_grad_zero bartlett_window blackman_window fft_fftfreq fft_rfftfreq hamming_window
hann_window kaiser_window tril_indices triu_indices
# copies and storage
_coalesce _coalesced _copy_from _copy_from_and_resize _conj_physical _convert_indices_from_coo_to_csr
_convert_indices_from_csr_to_coo _convert_weight_to_int4pack _convert_weight_to_int4pack_for_cpu _cslt_compress
_cudnn_init_dropout_state _cudnn_rnn_flatten_weight _dyn_quant_pack_4bit_weight _lazy_clone _make_dep_token
_mkldnn_reshape _mkldnn_transpose _pin_memory _resize_output _sparse_coo_tensor_with_dims
_sparse_coo_tensor_with_dims_and_tensors _sparse_compressed_tensor_unsafe _sparse_mask_projection
_sparse_semi_structured_apply _sparse_semi_structured_apply_dense _sparse_semi_structured_tile _spdiags _to_copy
_to_dense _to_sparse _to_sparse_bsc _to_sparse_bsr _to_sparse_csc _to_sparse_csr _to_sparse_semi_structured clone
copy_sparse_to_sparse detach from_file int_repr lu_unpack mkldnn_reorder_conv2d_weight mkldnn_reorder_conv3d_weight
resize_as_sparse set shallow_copy_data sparse_compressed_tensor sparse_coo_tensor sparse_mask sparse_resize
sparse_resize_and_clear split_copy split_with_sizes_copy to_mkldnn record_stream unbind_copy
# quantisation
_choose_qparams_per_tensor _empty_affine_quantized _empty_per_channel_affine_quantized
_fake_quantize_learnable_per_channel_affine _fake_quantize_learnable_per_tensor_affine
_fake_quantize_per_tensor_affine_cachemask_tensor_qparams _fused_moving_avg_obs_fq_helper
_fused_moving_avg_obs_fq_helper_functional _make_per_channel_quantized_tensor _make_per_tensor_quantized_tensor
dequantize fake_quantize_per_channel_affine_cachemask fake_quantize_per_tensor_affine_cachemask q_per_channel_scales
q_per_channel_zero_points quantize_per_channel quantize_per_tensor quantize_per_tensor_dynamic
# optimizers
_amp_foreach_non_finite_check_and_unscale _amp_update_scale _fused_adagrad _fused_adam _fused_adamw _fused_sgd
# assertions
_functional_assert_async _functional_assert_scalar _functional_sym_constrain_range
_functional_sym_constrain_range_for_size
# Fourier transforms, which have no matrix products: only matmuls and convolutions count as FLOPs, by convention
_fft_c2c _fft_c2r _fft_r2c
"""
_FREE_ATEN_OPS = frozenset(re.sub("#.*", "", _LISTED).split())
# torch's namespaces for control flow, profiling, random numbers and element-wise work, without matrix products.
_FREE_NAMESPACES = frozenset(("prim", "profiler", "debugprims", "rngprims", "inductor_prims", "debug_mode_ops"))
COLLECTIVE_NAMESPACES = frozenset(
    ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "fsdp", "symm_mem")
)
# By namespace, prefixes of ops that only change how numbers are stored (torchao 0.18, bitsandbytes 0.50, torch.ao)
# or select positions (torchvision 0.29). Other ops in these namespaces have formulas or are reported as uncounted.
_FREE_PREFIXES = {
    "bitsandbytes": "dequantize int8_double_quant int8_mm_dequant int8_vectorwise optimizer_update quantize",
    "quantized_decomposed": "choose_qparams dequantize quantize fake_quant convert_element_type",
    "torchao": """
_fill_indices _scaled_embedding_bag _triton_permute choose_qparams da8w4_linear_prepack dequantize float8_linear_prepack
fused_pad fused_unpad mx_block_rearrange mxfp8_quantize quantize to_sparse_semi_structured
triton_fp8_blockwise_act_quant triton_fp8_blockwise_weight_quant triton_fp8_colwise triton_fp8_per_group
triton_fp8_rowwise triton_mx_block_rearrange triton_mxfp8_dequant triton_to_mxfp8 triton_weight_quantize
""",
    "torchvision": "_ps_roi _roi nms ps_roi roi",
}
_FREE_TAGS = tuple(
    getattr(torch.Tag, name) for name in ("pointwise", "reduction", "view_copy") if hasattr(torch.Tag, name)
)


@functools.cache
def costs_nothing(func: OpOverload) -> bool:
    namespace, _, name = op_name(func).partition("::")
    if namespace in COLLECTIVE_NAMESPACES:  # symm_mem has collectives that are fused with a matrix product
        return "matmul" not in name and "_mm" not in name
    if namespace == "prims":
        return name != "svd"
    if namespace in _FREE_NAMESPACES:
        return True
    if namespace != "aten":
        return name.startswith(tuple(_FREE_PREFIXES.get(namespace, "").split()))
    if name.startswith("_foreach_"):
        return not name.endswith("mm")
    plain = name if name.endswith("__") else name.removesuffix("_")
    # What has no product has none in its gradient.
    is_listed = plain in _FREE_ATEN_OPS or plain.partition("_backward")[0] in _FREE_ATEN_OPS
    if is_listed or any(tag in func.tags for tag in _FREE_TAGS) or func.is_view:
        return True
    schema = op_schema(func)
    takes = any("Tensor" in str(argument.type) for argument in schema.arguments)
    gives = any("Tensor" in str(result.type) for result in schema.returns)
    return not takes or (not gives and not schema.is_mutable)


# Ops whose results may differ in the last bits while a dispatch mode is active, because torch then computes them
# differently: a kernel that calls other ops loses the user's autocast, and a few backward formulas and decompositions
# take another branch (`isTensorSubclassLike` in torch's C++ code). They were found by comparing 14,212 calls of torch's
# op database with and without a mode, bit by bit (torch 2.13). A step of the training itself is never run under a
# dispatch mode if the model has such an op.
_RISKY = """
_linalg_det _linalg_eigh _linalg_svd _scaled_grouped_mm_v2 _scaled_mm_v2 _sparse_sparse_matmul cumprod linalg_inv_ex
linalg_lstsq linalg_pinv prod
"""
_RISKY_UNDER_AUTOCAST = """
_native_multi_head_attention _sparse_addmm _sparse_mm _transformer_encoder_layer_fwd _trilinear affine_grid_generator
"""
_under_autocast = frozenset(f"aten::{name}" for name in _RISKY_UNDER_AUTOCAST.split())
RISKY = frozenset(f"aten::{name}" for name in _RISKY.split()) | _under_autocast


def is_inside_autocast() -> bool:
    """Whether a context of autocast is entered; inside of a dispatch mode, torch says that autocast is off."""
    _nest()
    return bool(_leave_nest())


_nest, _leave_nest = torch.autocast_increment_nesting, torch.autocast_decrement_nesting


def may_differ_under_a_mode(func: OpOverload, args: Sequence[Any]) -> bool:
    """Whether a call is of an op in `RISKY`. Calls on whole numbers are not: they are exact and have no gradient.

    Vision-language models multiply the sides of their images in this way: `image_grid_thw.prod(-1)`.
    """
    name = op_name(func)
    if name not in RISKY or (name in _under_autocast and not is_inside_autocast()):
        return False
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    return not tensors or any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)
