"""torch's inference fast paths that fold a whole attention block or encoder layer into one op."""

from flopwatch.flops.formulas.matmul import matmul_flops
from flopwatch.flops.formulas.registry import OpCall, formula


@formula("aten::_native_multi_head_attention")
def _native_attention(call: OpCall) -> int:
    batch, length, _ = call.arguments["query"].shape
    return _self_attention_block(batch, length, call.arguments["embed_dim"])


@formula("aten::_transformer_encoder_layer_fwd")
def _encoder_layer(call: OpCall) -> int:
    """Torch's inference fast path of `nn.TransformerEncoderLayer`."""
    batch, length, width = call.arguments["src"].shape
    hidden = call.arguments["ffn_weight_1"].shape[0]
    return _self_attention_block(batch, length, width) + 2 * matmul_flops(batch * length, width, hidden)


def _self_attention_block(batch: int, length: int, width: int) -> int:
    projections = 4 * matmul_flops(batch * length, width, width)
    return projections + 2 * batch * matmul_flops(length, width, length)
