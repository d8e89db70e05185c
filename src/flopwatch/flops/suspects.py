"""Which ops without a formula might be matrix products in disguise.

A false alarm costs a user a look; a miss is a wrong number nobody notices. So the rule is wide: an op of torch that
contracts a dimension shared by two floating inputs, or any op of another package that takes two floating matrices.
"""

from collections import Counter

import torch

from flopwatch.flops.tally import float_tensors

# They reduce over dimensions that two inputs share, element by element: no products of matrices.
_ELEMENTWISE_LOSSES_AND_NORMS = {
    "_batch_norm_with_update_functional",
    "_cdist_backward",
    "_ctc_loss",
    "_ctc_loss_backward",
    "_embedding_bag_per_sample_weights_backward",
    "_fused_rms_norm_backward",
    "_fused_sdp_choice",
    "_pdist_backward",
    "_thnn_fused_gru_cell",
    "_thnn_fused_gru_cell_backward",
    "_thnn_fused_lstm_cell",
    "_thnn_fused_lstm_cell_backward",
    "_thnn_fused_lstm_cell_backward_impl",
    "_weight_norm_interface",
    "_weight_norm_interface_backward",
    "batch_norm_backward",
    "binary_cross_entropy",
    "binary_cross_entropy_backward",
    "binary_cross_entropy_with_logits",
    "cat",
    "cudnn_batch_norm_backward",
    "dist",
    "huber_loss",
    "miopen_batch_norm_backward",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss_forward",
    "native_batch_norm",
    "native_batch_norm_backward",
    "native_group_norm_backward",
    "native_layer_norm_backward",
    "nll_loss2d_backward",
    "nll_loss2d_forward",
    "nll_loss_backward",
    "nll_loss_forward",
    "smooth_l1_loss",
    "soft_margin_loss",
    "stack",
}
_QUIET_NAMESPACES = {"prim", "prims", "profiler", "_c10d_functional", "c10d", "debugprims", "inductor", "_quantized"}


def is_suspect(func: torch._ops.OpOverload, arguments: list[object], out: object) -> bool:
    """True when this op may hide a matrix product."""
    namespace, _, name = func._schema.name.partition("::")
    if namespace in _QUIET_NAMESPACES:
        return False
    if namespace == "aten" and (name in _ELEMENTWISE_LOSSES_AND_NORMS or torch.Tag.pointwise in func.tags):
        return False
    inputs = [tensor for tensor in float_tensors(arguments) if tensor.dim() >= 1]
    if len(inputs) < 2:
        return False
    if namespace != "aten":
        return sum(tensor.dim() >= 2 for tensor in inputs) >= 2
    return _contracts(inputs, float_tensors([out]))


def _contracts(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
    shared = Counter(size for tensor in inputs for size in set(tensor.shape) if size > 1)
    kept = {size for tensor in outputs for size in tensor.shape}
    return any(count >= 2 and size not in kept for size, count in shared.items())
