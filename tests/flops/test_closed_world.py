"""Every op has a formula, is known to cost nothing, or is named."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import flopwatch
from flopwatch.flops.formulas import registry
from flopwatch.flops.formulas.free_ops import may_differ_under_a_mode
from flopwatch.flops.tracing.counter import CountingMode
from flopwatch.flops.tracing.replica import ModuleStack
from flopwatch.records.flops import FlopCount

X = torch.randn(4, 8)
CLASSES = torch.zeros(4, dtype=torch.long)


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def counted(run: Callable[[], torch.Tensor]) -> FlopCount:
    with CountingMode(ModuleStack(), "full") as mode:
        out = run()
        mode.in_backward = True
        out.sum().backward()
    return mode.tally.as_count("step", "full")


NOT_PRODUCTS = {
    "mse": lambda: F.mse_loss(leaf(4, 8), X),
    "smooth l1": lambda: F.smooth_l1_loss(leaf(4, 8), X),
    "huber": lambda: F.huber_loss(leaf(4, 8), X),
    "kl": lambda: F.kl_div(leaf(4, 8), X.softmax(-1), reduction="batchmean"),
    "cross entropy with class weights": lambda: F.cross_entropy(leaf(4, 8), CLASSES, weight=torch.ones(8)),
    "cross entropy of soft labels": lambda: F.cross_entropy(leaf(4, 8), X.softmax(-1)),
    "binary cross entropy": lambda: F.binary_cross_entropy(leaf(4, 8).sigmoid(), X.sigmoid()),
    "binary cross entropy with logits": lambda: F.binary_cross_entropy_with_logits(leaf(4, 8), X.sigmoid()),
    "cosine similarity": lambda: F.cosine_similarity(leaf(4, 8), X),
    "triplet margin": lambda: F.triplet_margin_loss(leaf(4, 8), X, X + 1),
    "distance": lambda: torch.dist(leaf(4, 8), X),
    "layer norm": lambda: F.layer_norm(leaf(4, 8), (8,), leaf(8), leaf(8)),
    "group norm": lambda: F.group_norm(leaf(4, 8, 3), 2, leaf(8), leaf(8)),
    "rms norm": lambda: F.rms_norm(leaf(4, 8), (8,), leaf(8)),
    "batch norm": lambda: F.batch_norm(leaf(4, 8, 5), torch.zeros(8), torch.ones(8), leaf(8), leaf(8), training=True),
    "prelu": lambda: F.prelu(leaf(4, 8), leaf(8)),
    "grid sample": lambda: F.grid_sample(leaf(1, 1, 4, 8), torch.zeros(1, 4, 8, 2), align_corners=False),
    "concatenation": lambda: torch.cat([leaf(4, 8), leaf(2, 8)]),
    "scatter": lambda: torch.zeros(4, 8).scatter_add(0, torch.zeros(2, 8, dtype=torch.long), leaf(2, 8)),
    "index put": lambda: torch.zeros(4, 8).index_put((CLASSES[:2],), leaf(2, 8)),
    "glu": lambda: F.glu(leaf(4, 8)),
}


@pytest.mark.parametrize("run", NOT_PRODUCTS.values(), ids=NOT_PRODUCTS)
def test_elementwise_work_raises_no_alarm(run: Callable[[], torch.Tensor]) -> None:
    count = counted(run)

    assert count.uncounted == ()
    assert count.model_flops == 0


def test_ops_that_write_in_place_cost_the_same() -> None:
    count = counted(lambda: torch.conv_tbc(leaf(5, 2, 3), leaf(3, 3, 4), leaf(4)))

    assert "addmm_" in count.by_op
    assert count.coverage == 1.0


def test_a_sparse_product_counts_its_stored_numbers() -> None:
    class Graph(nn.Module):
        adjacency: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8, bias=False)
            self.register_buffer("adjacency", torch.eye(4).to_sparse())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(self.adjacency, self.layer(x))

    count = flopwatch.count_flops(Graph(), X)

    edges = 4  # in the forward pass, and once more for the gradient of the layer's output
    assert count.method == "step"
    assert count.coverage == 1.0
    assert count.model_flops == 2 * 2 * 4 * 8 * 8 + 2 * (2 * edges * 8)
    assert any("sparse" in note for note in count.notes)


class Calls(nn.Module):
    """A model that is one function, and a parameter so that it has one."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x) + self.bias


def forward_count(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> FlopCount:
    return flopwatch.count_flops(Calls(function), x, training=False)


@pytest.mark.parametrize(
    "function",
    [torch.linalg.svdvals, torch.linalg.eigvalsh, torch.linalg.pinv, torch.linalg.matrix_exp],
)
def test_linear_algebra_without_an_exact_count_is_named(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    count = forward_count(function, torch.eye(8))

    assert count.is_lower_bound
    assert count.coverage == 0.0


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("to_sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_a_matrix_that_the_model_itself_makes_sparse_counts_its_stored_numbers(
    to_sparse: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """A fake tensor that is made sparse stores nothing, and a trace would count 0 FLOPs."""
    dense = torch.ones(8, 5)

    count = forward_count(lambda x: to_sparse(x) @ dense, torch.eye(4, 8))

    assert count.method == "step"
    assert count.model_flops == 2 * 4 * 5


def test_an_op_of_another_package_is_named_whatever_it_takes() -> None:
    with torch.library._scoped_library("flopwatch_test", "FRAGMENT") as library:
        library.define("packed_attention(Tensor qkv) -> Tensor")
        library.impl("packed_attention", lambda qkv: qkv[..., :4].clone(), "CompositeExplicitAutograd")
        count = forward_count(lambda x: torch.ops.flopwatch_test.packed_attention(x), X)

    assert [op.op for op in count.uncounted] == ["flopwatch_test::packed_attention"]
    assert count.coverage == 0.0


def test_an_op_written_in_python_counts_what_it_runs() -> None:
    def int8_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight.float().T

    op = torch.library.custom_op("flopwatch_test::int8_linear", int8_linear, mutates_args=())
    op.register_fake(lambda x, weight: x.new_empty(x.shape[0], weight.shape[0]))

    count = forward_count(lambda x: op(x, INT8), ROWS)

    assert (count.model_flops, count.coverage) == (2 * 8 * 32 * 64, 1.0)


def test_multiplying_whole_numbers_cannot_differ_while_a_step_is_counted() -> None:
    """Vision-language models do this with the sides of their images."""
    prod = torch.ops.aten.prod.default
    assert not may_differ_under_a_mode(prod, (torch.tensor([2, 3]),))
    assert may_differ_under_a_mode(prod, (ROWS,))


INT8 = torch.ones(64, 32, dtype=torch.int8)
ROWS = torch.randn(8, 32)


def test_products_with_packed_int8_weights_run_in_the_type_of_the_activation() -> None:
    count = forward_count(
        lambda x: torch.ops.aten._weight_int8pack_mm(x.bfloat16(), INT8, torch.ones(64, dtype=torch.bfloat16)), ROWS
    )

    assert {dtype: flops.total for dtype, flops in count.by_dtype.items()} == {"bf16": 2 * 8 * 32 * 64}
    assert count.coverage == 1.0


def test_dynamically_quantised_layers_run_in_int8() -> None:
    layers = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls torch.ao deprecated; models use it all the same
        model = torch.ao.quantization.quantize_dynamic(layers, {nn.Linear})

    count = flopwatch.count_flops(model, ROWS, training=False)

    assert {dtype: flops.total for dtype, flops in count.by_dtype.items()} == {"int8": 2 * 8 * (32 * 64 + 64 * 8)}


@pytest.mark.parametrize("points", [10, 40], ids=["a loop over coordinates", "a matrix product"])
def test_distances_cost_the_product_that_they_are(points: int) -> None:
    """The gradient of each side is a product of the pairs' gradients with the other side's points."""
    a, b = leaf(points, 8), leaf(points + 1, 8)

    count = counted(lambda: torch.cdist(a, b))

    assert count.model_flops == 3 * 2 * points * (points + 1) * 8
    assert count.coverage == 1.0


def test_a_triangular_solve_costs_the_substitution() -> None:
    triangle = torch.eye(6)

    count = forward_count(lambda x: torch.linalg.solve_triangular(triangle, x, upper=False), torch.randn(6, 5))

    assert count.model_flops == 5 * sum(2 * row + 1 for row in range(6))


def test_bitsandbytes_and_torchvision_products_have_formulas() -> None:
    """Their ops are known by name; the packages need not be installed."""
    a, b = torch.ones(4, 6, dtype=torch.int8), torch.ones(5, 6, dtype=torch.int8)
    with torch.library._scoped_library("bitsandbytes", "FRAGMENT") as library:
        library.define("int8_linear_matmul(Tensor A, Tensor B) -> Tensor")
        library.impl("int8_linear_matmul", lambda a, b: a.int() @ b.int().T, "CompositeExplicitAutograd")
        int8 = counted_forward(lambda: torch.ops.bitsandbytes.int8_linear_matmul(a, b))
    numbers = ", ".join(f"int n{index}" for index in range(8))
    with torch.library._scoped_library("torchvision", "FRAGMENT") as library:
        library.define(
            f"deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, {numbers}, "
            "bool use_mask) -> Tensor"
        )
        library.impl("deform_conv2d", lambda x, *_: x.new_zeros(2, 5, 4, 4), "CompositeExplicitAutograd")
        x, weight, rest = torch.zeros(2, 3, 6, 6), torch.zeros(5, 3, 3, 3), [torch.zeros(1)] * 3
        deformable = counted_forward(lambda: torch.ops.torchvision.deform_conv2d(x, weight, *rest, *range(8), False))

    assert {dtype: flops.total for dtype, flops in int8.by_dtype.items()} == {"int8": 2 * 4 * 6 * 5}
    assert deformable.model_flops == 2 * 2 * 4 * 4 * (5 * 3 * 3 * 3)


def counted_forward(run: Callable[[], object]) -> FlopCount:
    with CountingMode(ModuleStack(), "full") as mode:
        run()
    return mode.tally.as_count("step", "full")


def test_attention_over_a_part_of_a_cache_has_no_formula() -> None:
    op = torch.ops.aten._flash_attention_forward.default
    packed = dict.fromkeys(("query", "key", "value"), torch.empty(6, 2, 8))
    formula = registry.find_formula(op)
    assert formula is not None
    assert formula(registry.OpCall(op, packed, None)) is not None
    assert formula(registry.OpCall(op, {**packed, "seqused_k": torch.tensor([3])}, None)) is None
