"""Formulas for layers that run as one op: convolutions, recurrent layers, encoder layers, distances, affine grids."""

from collections.abc import Sequence
from math import prod
from typing import Any

from flopwatch.flops.formulas.matrices import matmul_flops
from flopwatch.flops.formulas.registry import OpCall, OpFlops, formula


@formula("aten::convolution", "aten::_convolution", "aten::convolution_overrideable", "aten::cudnn_convolution")
def _convolution(call: OpCall) -> int:
    transposed = call.arguments.get("transposed", False)
    data = call.arguments.get("input", call.arguments.get("self"))
    return convolution_flops(data.shape, call.arguments["weight"].shape, call.out.shape, transposed=transposed)


@formula("aten::convolution_backward", "aten::convolution_backward_overrideable")
def _convolution_backward(call: OpCall) -> int:
    """Each of the two gradients (input and weight) costs as much as the forward pass.

    torch's own formula ignores groups, so its result is many times too high for a depthwise layer.
    """
    arguments = call.arguments
    grad_input, grad_weight, _ = arguments["output_mask"]
    once = convolution_flops(
        arguments["input"].shape,
        arguments["weight"].shape,
        arguments["grad_output"].shape,
        transposed=arguments["transposed"],
    )
    return once * (int(grad_input) + int(grad_weight))


@formula("aten::conv_tbc")
def _conv_tbc(call: OpCall) -> int:
    """The first dimension is time. Each kernel position is multiplied with input steps only, not with padding."""
    length, batch, _ = call.arguments["self"].shape
    taps, channels_in, channels_out = call.arguments["weight"].shape
    pad, out_length = call.arguments["pad"], call.out.shape[0]
    steps = (min(length + pad - tap, out_length) - max(0, pad - tap) for tap in range(taps))
    return sum(2 * max(0, count) * batch * channels_in * channels_out for count in steps)


@formula("torchvision::deform_conv2d")
def _deformable(call: OpCall) -> int:
    """The input is sampled at shifted positions; the products are those of a convolution (arXiv 1703.06211)."""
    return convolution_flops(
        call.arguments["input"].shape, call.arguments["weight"].shape, call.out.shape, transposed=False
    )


@formula("torchvision::_deform_conv2d_backward")
def _deformable_backward(call: OpCall) -> OpFlops:
    """The kernel always runs two products: for the gradients of input, offsets and mask, and for that of the weight."""
    arguments = call.arguments
    once = convolution_flops(
        arguments["input"].shape, arguments["weight"].shape, arguments["grad"].shape, transposed=False
    )
    data, weight, offset, mask = call.needs_grad[:4] if len(call.needs_grad) >= 4 else (True,) * 4
    needed = int(data or offset or mask) + int(weight)
    return OpFlops(once * needed, once * (2 - needed))


def convolution_flops(
    input_shape: Sequence[int], weight_shape: Sequence[int], output_shape: Sequence[int], *, transposed: bool
) -> int:
    """Return 2 x (number of weights) x (number of positions at which they are applied).

    The second dimension of the weight is already divided by the groups. A transposed convolution applies its kernel at
    the positions of the input, an ordinary one at those of the output.
    """
    positions = prod((input_shape if transposed else output_shape)[2:])
    return 2 * input_shape[0] * positions * prod(weight_shape)


@formula("aten::mkldnn_rnn_layer")
def _mkldnn_rnn(call: OpCall) -> int:
    return _rnn_flops(call.arguments["input"].shape, [call.arguments["weight0"], call.arguments["weight1"]])


@formula("aten::mkldnn_rnn_layer_backward")
def _mkldnn_rnn_backward(call: OpCall) -> OpFlops:
    """The kernel computes all gradients. Those that the model does not need count as extra FLOPs.

    The model always needs the gradients of the hidden states, but that of the initial state only if it is requested.
    """
    data, into_gates, from_state = (call.arguments[name] for name in ("input", "weight1", "weight2"))
    tokens, samples = prod(data.shape[:-1]), call.arguments["hx_"].shape[-2]
    # The inputs of the autograd node are the data, two matrices, two biases and the initial states.
    wanted = call.needs_grad if len(call.needs_grad) > 5 else (True,) * 6
    into_gates_flops, from_state_flops = 2 * tokens * prod(into_gates.shape), 2 * tokens * prod(from_state.shape)
    not_needed = into_gates_flops * ((not wanted[0]) + (not wanted[1])) + from_state_flops * (not wanted[2])
    not_needed += 2 * samples * prod(from_state.shape) * (not wanted[5])
    return OpFlops(2 * (into_gates_flops + from_state_flops) - not_needed, not_needed)


@formula("aten::_cudnn_rnn", "aten::miopen_rnn")
def _fused_rnn(call: OpCall) -> int:
    return _rnn_flops(call.arguments["input"].shape, call.arguments["weight"])


@formula("aten::_cudnn_rnn_backward", "aten::miopen_rnn_backward")
def _fused_rnn_backward(call: OpCall) -> int:
    weight_gradient = int(call.arguments["output_mask"][3])
    return (1 + weight_gradient) * _rnn_flops(call.arguments["input"].shape, call.arguments["weight"])


def _rnn_flops(input_shape: Sequence[int], weights: Sequence[Any]) -> int:
    """Return the FLOPs of an RNN: each matrix of each layer and direction is multiplied with each token once."""
    tokens = prod(input_shape[:-1])
    return sum(2 * tokens * prod(weight.shape) for weight in weights if len(weight.shape) == 2)


# In inference, torch runs an attention block or an encoder layer as one op. If there is a padding mask, torch turns the
# batch into a nested tensor, in which each sample has its real length, so no padding is computed.
TAKE_NESTED = ("aten::_native_multi_head_attention", "aten::_transformer_encoder_layer_fwd")


@formula("aten::_native_multi_head_attention")
def _native_attention(call: OpCall) -> int:
    return _self_attention_block(_sample_lengths(call.arguments["query"]), call.arguments["embed_dim"])


@formula("aten::_transformer_encoder_layer_fwd")
def _encoder_layer(call: OpCall) -> int:
    """`nn.TransformerEncoderLayer` in inference has attention and a feed-forward block of two products."""
    lengths, width = _sample_lengths(call.arguments["src"]), call.arguments["embed_dim"]
    hidden = call.arguments["ffn_weight_1"].shape[0]
    return _self_attention_block(lengths, width) + 2 * matmul_flops(sum(lengths), width, hidden)


def _self_attention_block(lengths: list[int], width: int) -> int:
    projections = 4 * matmul_flops(sum(lengths), width, width)
    return projections + 2 * sum(matmul_flops(length, width, length) for length in lengths)


def _sample_lengths(tokens: Any) -> list[int]:
    if tokens.is_nested:
        return [int(sample.shape[0]) for sample in tokens.unbind()]
    batch, length, _ = tokens.shape
    return [int(length)] * batch


# Euclidean distances count as the matrix product a·b in |a - b|² = |a|² - 2a·b + |b|². torch runs this product for more
# than 25 points, and a loop over the coordinates for fewer (ATen/native/Distance.cpp); both count in the same way.
# Distances in other norms have no products, so they count as element-wise work, which is 0 FLOPs.


@formula("aten::_euclidean_dist")
def _euclidean(call: OpCall) -> OpFlops:
    """The kernel's matrix product has two extra columns for the squared norms. Their FLOPs are `extra`."""
    pairs, width = prod(call.out.shape), call.arguments["x1"].shape[-1]
    return OpFlops(2 * pairs * width, 2 * pairs * 2)


@formula("aten::_cdist_forward", "aten::_pdist_forward")
def _distances(call: OpCall) -> int:
    return _distance_products(call, prod(call.out.shape))


@formula("aten::_cdist_backward")
def _cdist_backward(call: OpCall) -> int:
    """The op computes the gradient of `x1` only: each pair's gradient is multiplied with the pair's point in `x2`."""
    return _distance_products(call, _gradients(call))


@formula("aten::_pdist_backward")
def _pdist_backward(call: OpCall) -> int:
    """Each pair contributes to the gradients of both its points."""
    return 2 * _distance_products(call, _gradients(call))


def _gradients(call: OpCall) -> int:
    """The gradient of the distances is the first argument. It is called `grad`, and since torch 2.14 `grad_output`."""
    return prod(next(iter(call.arguments.values())).shape)


def _distance_products(call: OpCall, pairs: int) -> int:
    points = call.arguments["x1" if "x1" in call.arguments else "self"]
    return 2 * pairs * points.shape[-1] if call.arguments["p"] == 2 else 0


@formula("aten::affine_grid_generator", "aten::cudnn_affine_grid_generator")
def _affine_grid(call: OpCall) -> int:
    """The coordinates of every position, with a 1 appended, are multiplied with the matrix of the transform."""
    *positions, dims = call.out.shape
    return matmul_flops(prod(positions), dims + 1, dims)
