"""Recurrent layers that run as one op."""

from collections.abc import Sequence
from math import prod
from typing import Any

from flopwatch.flops.formulas.registry import OpCall, formula


@formula("aten::mkldnn_rnn_layer")
def _mkldnn_rnn(call: OpCall) -> int:
    return _rnn_flops(call.arguments["input"].shape, [call.arguments["weight0"], call.arguments["weight1"]])


@formula("aten::mkldnn_rnn_layer_backward")
def _mkldnn_rnn_backward(call: OpCall) -> int:
    return 2 * _rnn_flops(call.arguments["input"].shape, [call.arguments["weight1"], call.arguments["weight2"]])


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
