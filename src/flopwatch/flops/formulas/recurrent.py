"""Recurrent layers that run as one op."""

from collections.abc import Sequence
from math import prod
from typing import Any

from flopwatch.flops.formulas.registry import OpCall, OpFlops, formula


@formula("aten::mkldnn_rnn_layer")
def _mkldnn_rnn(call: OpCall) -> int:
    return _rnn_flops(call.arguments["input"].shape, [call.arguments["weight0"], call.arguments["weight1"]])


@formula("aten::mkldnn_rnn_layer_backward")
def _mkldnn_rnn_backward(call: OpCall) -> OpFlops:
    """The kernel computes every gradient; needed are those asked for, and the state's, through which all others go.

    The state's first gradient leads to the state a sequence began with: one product less where nobody needs that.
    """
    data, into_gates, from_state = (call.arguments[name] for name in ("input", "weight1", "weight2"))
    tokens, samples = prod(data.shape[:-1]), call.arguments["hx_"].shape[-2]
    asked = call.needs_grad if len(call.needs_grad) > 5 else (True,) * 6
    into_gates_flops, from_state_flops = 2 * tokens * prod(into_gates.shape), 2 * tokens * prod(from_state.shape)
    spared = into_gates_flops * (not asked[0])
    spared += into_gates_flops * (not asked[1])
    spared += from_state_flops * (not asked[2])
    spared += 2 * samples * prod(from_state.shape) * (not asked[5])
    return OpFlops(2 * (into_gates_flops + from_state_flops) - spared, spared)


@formula("aten::_cudnn_rnn", "aten::miopen_rnn")
def _fused_rnn(call: OpCall) -> int:
    return _rnn_flops(call.arguments["input"].shape, call.arguments["weight"])


@formula("aten::_cudnn_rnn_backward", "aten::miopen_rnn_backward")
def _fused_rnn_backward(call: OpCall) -> int:
    weight_gradient = int(call.arguments["output_mask"][3])
    return (1 + weight_gradient) * _rnn_flops(call.arguments["input"].shape, call.arguments["weight"])


def _rnn_flops(input_shape: Sequence[int], weights: Sequence[Any]) -> int:
    """Every matrix of every layer and direction meets every token once; biases are vectors and do not count."""
    tokens = prod(input_shape[:-1])
    return sum(2 * tokens * prod(weight.shape) for weight in weights if len(weight.shape) == 2)
