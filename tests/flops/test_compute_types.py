"""FLOPs by the type the products ran in."""

import pytest
import torch
from torch import nn

import flopwatch
from flopwatch.flops.formulas.registry import compute_type, type_of_product
from flopwatch.hardware.peaks import DTYPES, canonical_dtype
from flopwatch.records.flops import PhaseFlops
from support.torch_features import needs_grouped_mm

X = torch.randn(8, 16)


class Mixed(nn.Module):
    """A bf16 layer under a head that stays in fp32, as language models keep theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 32, dtype=torch.bfloat16)
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x.bfloat16()).float())
        return out


def test_a_count_knows_the_type_of_every_product() -> None:
    count = flopwatch.count_flops(Mixed(), X)

    body, head = 2 * 8 * 16 * 32, 2 * 8 * 32 * 4
    assert count.by_dtype == {"bf16": PhaseFlops(body, body), "fp32": PhaseFlops(head, 2 * head)}


def test_the_types_add_up_to_what_is_executed() -> None:
    count = flopwatch.count_flops(nn.LSTM(16, 8), torch.randn(3, 2, 16), loss_fn=lambda out: out[0])

    assert sum(flops.total for flops in count.by_dtype.values()) == count.hardware_flops


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8],
)
def test_types_have_the_names_of_the_table_of_peaks(dtype: torch.dtype) -> None:
    assert compute_type(dtype) == canonical_dtype(dtype)
    assert compute_type(dtype) in DTYPES


def test_an_addend_of_another_type_does_not_decide() -> None:
    factors = {"self": torch.zeros(4), "mat1": torch.zeros(2, 3, dtype=torch.bfloat16), "mat2": torch.zeros(3, 4)}

    assert type_of_product(factors) == "bf16"


def test_fp8_products_are_fp8() -> None:
    class Fp8(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one = torch.ones(())
            fp8 = torch.float8_e4m3fn
            return torch._scaled_mm(x.to(fp8), self.weight.to(fp8).T, one, one, out_dtype=torch.bfloat16)

    count = flopwatch.count_flops(Fp8(), torch.randn(16, 16), training=False)

    assert {dtype: flops.total for dtype, flops in count.by_dtype.items()} == {"fp8": 2 * 16 * 16 * 32}


@needs_grouped_mm
def test_an_optional_tensor_does_not_decide_the_type() -> None:
    """The ends of the groups are integers, and an argument that may be left out."""
    from flopwatch.flops.tracing.counter import CountingMode
    from flopwatch.flops.tracing.replica import ModuleStack

    rows, experts = torch.randn(8, 16, dtype=torch.bfloat16), torch.randn(2, 16, 32, dtype=torch.bfloat16)
    with CountingMode(ModuleStack(), "full") as mode:
        torch._grouped_mm(rows, experts, offs=torch.tensor([3, 8], dtype=torch.int32))

    assert list(mode.tally.as_count("step", "full").by_dtype) == ["bf16"]


def test_weights_that_decide_themselves_how_they_are_multiplied_are_told() -> None:
    """As torchao's quantised weights do."""
    from torch.testing._internal.two_tensor import TwoTensor

    layer = nn.Linear(16, 4)
    layer.weight = nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach()))

    count = flopwatch.count_flops(layer, X, method="trace")

    assert any("TwoTensor" in note for note in count.notes)
