"""torch's inference fast paths that fold a whole attention block or encoder layer into one op.

With a padding mask torch makes the batch a nested tensor, in which each sample has its own length, and no padding runs.
"""

from typing import Any

from flopwatch.flops.formulas.matmul import matmul_flops
from flopwatch.flops.formulas.registry import OpCall, formula

KNOW_NESTED = ("aten::_native_multi_head_attention", "aten::_transformer_encoder_layer_fwd")


@formula("aten::_native_multi_head_attention")
def _native_attention(call: OpCall) -> int:
    return _self_attention_block(_lengths(call.arguments["query"]), call.arguments["embed_dim"])


@formula("aten::_transformer_encoder_layer_fwd")
def _encoder_layer(call: OpCall) -> int:
    """Torch's inference fast path of `nn.TransformerEncoderLayer`."""
    lengths, width = _lengths(call.arguments["src"]), call.arguments["embed_dim"]
    hidden = call.arguments["ffn_weight_1"].shape[0]
    return _self_attention_block(lengths, width) + 2 * matmul_flops(sum(lengths), width, hidden)


def _self_attention_block(lengths: list[int], width: int) -> int:
    projections = 4 * matmul_flops(sum(lengths), width, width)
    return projections + 2 * sum(matmul_flops(length, width, length) for length in lengths)


def _lengths(tokens: Any) -> list[int]:
    if tokens.is_nested:
        return [int(size) for size in tokens._nested_tensor_size()[:, 0]]
    batch, length, _ = tokens.shape
    return [int(length)] * batch
