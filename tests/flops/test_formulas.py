"""Each op's formula against products that torch counts itself, or against counting by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.flop_counter import FlopCounterMode

import flopwatch
from flopwatch.flops.formulas.attention import MASK_NOT_READABLE, causal_pairs
from flopwatch.flops.formulas.layers import convolution_flops
from flopwatch.flops.tracing.counter import CountingMode
from flopwatch.flops.tracing.replica import ModuleStack
from flopwatch.records.flops import AttentionConvention, FlopCount
from support.torch_features import needs_grouped_mm


def ours(run: Callable[[], Any], attention: AttentionConvention = "full") -> FlopCount:
    with CountingMode(ModuleStack(), attention) as mode:
        run()
    return mode.tally.as_count("step", attention)


def theirs(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


@pytest.mark.parametrize(
    ("run", "same_as"),
    [
        (lambda: torch.mv(leaf(5, 7), leaf(7)), lambda: leaf(5, 7) @ leaf(7, 1)),
        (lambda: torch.addmv(leaf(5), leaf(5, 7), leaf(7)), lambda: leaf(5, 7) @ leaf(7, 1)),
        (lambda: torch.dot(leaf(9), leaf(9)), lambda: leaf(1, 9) @ leaf(9, 1)),
        (lambda: torch.vdot(leaf(9), leaf(9)), lambda: leaf(1, 9) @ leaf(9, 1)),
        (lambda: torch.addr(leaf(5, 7), leaf(5), leaf(7)), lambda: leaf(5, 1) @ leaf(1, 7)),
        (
            lambda: torch.addbmm(leaf(4, 6), leaf(3, 4, 5), leaf(3, 5, 6)),
            lambda: torch.bmm(leaf(3, 4, 5), leaf(3, 5, 6)),
        ),
        (lambda: torch._addmm_activation(leaf(6), leaf(4, 5), leaf(5, 6)), lambda: leaf(4, 5) @ leaf(5, 6)),
        (
            lambda: torch._int_mm(torch.ones(32, 8, dtype=torch.int8), torch.ones(8, 8, dtype=torch.int8)),
            lambda: leaf(32, 8) @ leaf(8, 8),
        ),
        (
            lambda: F.bilinear(leaf(11, 4), leaf(11, 5), leaf(3, 4, 5)),
            lambda: torch.einsum("nox,nx->no", torch.einsum("ni,oix->nox", leaf(11, 4), leaf(3, 4, 5)), leaf(11, 5)),
        ),
    ],
    ids=["mv", "addmv", "dot", "vdot", "addr", "addbmm", "addmm_activation", "int_mm", "bilinear"],
)
def test_an_op_costs_what_the_same_products_cost(run: Callable[[], Any], same_as: Callable[[], Any]) -> None:
    count = ours(run)

    assert count.forward_flops == theirs(same_as)
    assert count.coverage == 1.0


@needs_grouped_mm
def test_a_grouped_matmul_costs_one_matrix_per_row() -> None:
    rows, experts = leaf(10, 8), leaf(3, 8, 16)
    offsets = torch.tensor([2, 7, 10], dtype=torch.int32)

    def run() -> None:
        out = torch._grouped_mm(rows, experts, offs=offsets)
        (out * torch.randn_like(out)).sum().backward()

    count = ours(run)

    by_group = [rows[0:2] @ experts[0], rows[2:7] @ experts[1], rows[7:10] @ experts[2]]
    forward = sum(2 * part.shape[0] * 8 * 16 for part in by_group)
    assert count.forward_flops == forward
    assert count.backward_flops == 2 * forward


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(6, 12, 3, stride=2, padding=1, groups=3),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.Conv2d(4, 6, (3, 5), dilation=2),
        nn.Conv3d(4, 4, 2, groups=2),
        nn.ConvTranspose2d(6, 4, 3, stride=2, groups=2),
    ],
    ids=lambda layer: str(layer),
)
def test_a_convolution_costs_its_multiplications(layer: nn.Module) -> None:
    data = leaf(2, layer.in_channels, *([9] * len(layer.kernel_size)))

    count = ours(lambda: layer(data).sum().backward())

    assert count.forward_flops == 2 * _multiplications(layer, data)
    assert count.backward_flops == 2 * count.forward_flops


def _multiplications(layer: nn.Module, data: torch.Tensor) -> int:
    """Every output (input, if transposed) position meets every weight: count by a convolution of ones.

    Padding counts as data, as in torch's own formula.
    """
    positions = data if isinstance(layer, nn.ConvTranspose2d) else layer(data)
    per_sample = positions[0, 0].numel() * layer.weight.numel()
    return int(data.shape[0] * per_sample)


def test_convolution_flops_of_a_depthwise_layer() -> None:
    # 32 channels of their own 3 x 3 kernel at 16 x 16 positions: 2 * 32 * 9 * 256
    assert convolution_flops((1, 32, 16, 16), (32, 1, 3, 3), (1, 32, 16, 16), transposed=False) == 147_456


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("bidirectional", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_recurrent_layer_costs_its_cells(kind: str, bidirectional: bool) -> None:
    layer = getattr(nn, kind)(6, 5, num_layers=2, bidirectional=bidirectional)
    data = leaf(7, 3, 6)
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    directions = 1 + bidirectional
    # Per step and sample: gates x hidden x (input + hidden), for each layer and direction.
    weights = directions * gates * 5 * (6 + 5) + directions * gates * 5 * (5 * directions + 5)

    count = flopwatch.count_flops(layer, data, loss_fn=lambda output: output[0].sum())
    real = ours(lambda: layer(data)[0].sum().backward())

    # Backward is twice that, less the gradient of the first input (the data leaf asks for one only in `real`) and the
    # gradients of the states the two layers begin with.
    first_input = 2 * 7 * 3 * directions * gates * 5 * 6
    first_states = 2 * 3 * 2 * directions * gates * 5 * 5
    assert count.forward_flops == real.forward_flops == 2 * 7 * 3 * weights
    assert count.backward_flops == 2 * count.forward_flops - first_states
    assert flopwatch.count_flops(layer, data.detach(), loss_fn=lambda output: output[0].sum()).backward_flops == (
        2 * count.forward_flops - first_input - first_states
    )
    assert count.coverage == 1.0


class Attention(nn.Module):
    def __init__(self, *, mask: torch.Tensor | None, causal: bool, dropout: float) -> None:
        super().__init__()
        self.mask, self.causal, self.dropout = mask, causal, dropout

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=self.mask, is_causal=self.causal, dropout_p=self.dropout
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "causal", "bool mask", "float mask"])
@pytest.mark.parametrize("value_width", [8, 6], ids=["fused", "taken apart: other width"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_needs_what_eager_attention_runs(kind: str, value_width: int, dropout: float) -> None:
    operands = leaf(2, 4, 9, 8), leaf(2, 4, 11, 8), leaf(2, 4, 11, value_width)
    allowed = torch.rand(2, 1, 9, 11) > 0.3
    allowed[:, :, :, 0] = True
    mask = {"bool mask": allowed, "float mask": torch.zeros(2, 1, 9, 11).masked_fill(~allowed, -torch.inf)}.get(kind)
    model = nn.ModuleList(nn.Linear(8, width, bias=False) for width in (8, 8, value_width))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projections = model
            self.attention = Attention(mask=mask, causal=kind == "causal", dropout=dropout)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            query, key, value = (layer(z) for layer, z in zip(self.projections, (x, y, y), strict=True))
            return self.attention(query, key, value)

    def eager() -> None:
        query, key, value = operands
        ((query @ key.transpose(-1, -2)).softmax(-1) @ value).sum().backward()

    batch = (torch.randn(2, 4, 9, 8), torch.randn(2, 4, 11, 8))
    full = flopwatch.count_flops(Model(), batch)
    causal = flopwatch.count_flops(Model(), batch, attention="causal")
    step = flopwatch.count_flops(Model(), batch, method="step")

    projections = sum(part.total for name, part in full.by_module.items() if name.startswith("projections"))
    attention = full.model_flops - projections
    assert attention == theirs(eager)
    assert full.hardware_flops == step.hardware_flops
    every_pair = 2 * 4 * 9 * 11
    pairs = {"causal": 2 * 4 * int(torch.ones(9, 11).tril().sum()), "bool mask": 4 * int(allowed.sum())}
    assert (causal.model_flops - projections) * every_pair == attention * pairs.get(kind, every_pair)
    # A floating mask is fake in a trace like every floating tensor, so what it hides cannot be known.
    assert causal.notes == ((MASK_NOT_READABLE,) if kind == "float mask" else ())
    assert causal.method == "trace"


def test_masks_of_attention_written_out_do_not_show_and_the_count_says_so() -> None:
    class Eager(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layer(x)
            return ((x @ x.transpose(-1, -2)).tril() / 3) @ x

    count = flopwatch.count_flops(Eager(), torch.randn(2, 5, 8), attention="causal")

    assert "counts masked pairs too" in count.notes[0]


@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (3, 7), (7, 3), (1, 5)])
def test_causal_pairs_are_the_cells_of_the_mask(queries: int, keys: int) -> None:
    ones = torch.ones(queries, keys)

    assert causal_pairs(queries, keys, last_aligned=False) == ones.tril().sum()
    assert causal_pairs(queries, keys, last_aligned=True) == ones.tril(keys - queries).sum()


def test_a_fused_backward_is_charged_for_gradients_nobody_needs() -> None:
    query, key, value = torch.randn(1, 2, 8, 4), torch.randn(1, 2, 8, 4), leaf(1, 2, 8, 4)

    count = ours(lambda: F.scaled_dot_product_attention(query, key, value).sum().backward())

    product = 2 * 2 * 8 * 8 * 4
    assert count.backward_flops == product  # dV alone
    assert count.recompute_flops == 4 * product  # the kernel computes dP, dQ, dK and the scores all the same


def test_the_encoder_fast_path_costs_what_the_slow_one_does() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    data = torch.randn(2, 7, 16)
    with torch.no_grad():
        fast = ours(lambda: layer(data))
    slow = ours(lambda: layer(data))  # grad mode rules the fast path out

    assert "_transformer_encoder_layer_fwd" in fast.by_op
    assert fast.forward_flops == slow.forward_flops > 0


def test_ops_in_inference_mode_are_counted_by_their_parts() -> None:
    layer = nn.Linear(4, 6)
    with torch.inference_mode():
        assert ours(lambda: layer(torch.randn(3, 4))).forward_flops == 2 * 3 * 4 * 6


def test_a_user_can_teach_an_op() -> None:
    library = torch.library.Library("flopwatch_test", "DEF")
    library.define("mystery(Tensor a, Tensor b) -> Tensor")
    library.impl("mystery", lambda a, b: a @ b.T, "CompositeExplicitAutograd")
    a, b = torch.randn(3, 4), torch.randn(5, 4)

    def run() -> torch.Tensor:
        return torch.ops.flopwatch_test.mystery(a, b)

    untaught = ours(run)
    flopwatch.register_formula("flopwatch_test::mystery")(lambda a, b, *, out: 2 * out.numel() * a.shape[1])
    taught = ours(run)

    assert untaught.coverage == 0.0
    assert untaught.is_lower_bound
    assert [(op.op, op.shapes) for op in untaught.uncounted] == [("flopwatch_test::mystery", ((3, 4), (5, 4)))]
    assert (taught.forward_flops, taught.coverage) == (2 * 3 * 5 * 4, 1.0)
    with pytest.raises(flopwatch.InputError, match="replace=True"):
        flopwatch.register_formula("flopwatch_test::mystery")
    with pytest.raises(flopwatch.InputError, match="mylib::foo"):
        flopwatch.register_formula("mystery")


def test_an_op_without_a_formula_is_named_with_its_module() -> None:
    class Eigenvalues(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.eigvalsh(x)

    model = nn.Sequential(nn.Linear(6, 6), Eigenvalues())

    count = flopwatch.count_flops(model, torch.randn(6, 6), training=False)

    assert count.coverage == 0.5
    assert [(op.op, op.module, op.calls) for op in count.uncounted] == [("_linalg_eigh", "1", 1)]


def test_a_complex_product_is_four_real_ones() -> None:
    a, b = torch.randn(3, 4, dtype=torch.complex64), torch.randn(4, 5, dtype=torch.complex64)

    assert ours(lambda: a @ b).forward_flops == 4 * theirs(lambda: a.real @ b.real)
