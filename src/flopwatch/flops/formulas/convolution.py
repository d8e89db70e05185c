"""Convolutions, with groups and transposed ones, forward and backward."""

from collections.abc import Sequence
from math import prod

from flopwatch.flops.formulas.registry import OpCall, OpFlops, formula


@formula("aten::convolution", "aten::_convolution", "aten::convolution_overrideable", "aten::cudnn_convolution")
def _convolution(call: OpCall) -> int:
    transposed = call.arguments.get("transposed", False)
    data = call.arguments.get("input", call.arguments.get("self"))
    return convolution_flops(data.shape, call.arguments["weight"].shape, call.out.shape, transposed=transposed)


@formula("aten::convolution_backward", "aten::convolution_backward_overrideable")
def _convolution_backward(call: OpCall) -> int:
    """Each of the two gradients takes every product of the forward pass once: as many FLOPs as the forward pass.

    torch's own formula forgets the groups here (11 times too high on a depthwise layer).
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
    """Time first: one product per tap of the kernel, over the steps where it does not meet padding alone."""
    length, batch, _ = call.arguments["self"].shape
    taps, channels_in, channels_out = call.arguments["weight"].shape
    pad, out_length = call.arguments["pad"], call.out.shape[0]
    steps = (min(length + pad - tap, out_length) - max(0, pad - tap) for tap in range(taps))
    return sum(2 * max(0, count) * batch * channels_in * channels_out for count in steps)


@formula("torchvision::deform_conv2d")
def _deformable(call: OpCall) -> int:
    """Sampling at shifted places makes the columns; then it is an ordinary convolution (arXiv 1703.06211)."""
    return convolution_flops(
        call.arguments["input"].shape, call.arguments["weight"].shape, call.out.shape, transposed=False
    )


@formula("torchvision::_deform_conv2d_backward")
def _deformable_backward(call: OpCall) -> OpFlops:
    """Two products: the columns' gradient, which input, offsets and mask share, and the weight's. Both always run."""
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
    """2 x every weight x every position it is applied at.

    The weight's second dimension is already divided by the groups; a transposed convolution places its kernel at the
    positions of the input, an ordinary one at those of the output.
    """
    positions = prod((input_shape if transposed else output_shape)[2:])
    return 2 * input_shape[0] * positions * prod(weight_shape)
