"""What is taken for a product without a formula, and what is not."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import flopwatch
from flopwatch.flops.counter import CountingMode
from flopwatch.flops.replica import ModuleStack
from flopwatch.records import FlopCount

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


def test_sparse_products_are_not_counted_as_dense_ones() -> None:
    class Graph(nn.Module):
        adjacency: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8, bias=False)
            self.register_buffer("adjacency", torch.eye(4).to_sparse())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(self.adjacency, self.layer(x))

    count = flopwatch.count_flops(Graph(), X)

    assert count.method == "step"
    assert count.is_lower_bound
    assert {op.module for op in count.uncounted} == {""}
    assert count.model_flops == 2 * 2 * 4 * 8 * 8  # the dense layer alone
