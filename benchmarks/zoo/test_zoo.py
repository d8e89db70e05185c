"""The zoo of architectures: a sample of it, and that its judgement can fail."""

import dataclasses
import signal
from math import prod

import pytest
import torch
from torch import nn

import flopwatch

pytest.importorskip("transformers")

from zoo import examine, hugging_face
from zoo.page import page
from zoo.pool import Worker
from zoo.specimen import Outcome, Shape, Specimen, Verdict
from zoo.truth import true_flops

pytestmark = pytest.mark.slow

SAMPLE = ("gpt2", "deberta-v2", "vit", "resnet")
"""`python -m zoo` examines all of them; the kinds that steer a count are in tests/flops/test_every_architecture.py."""


def _linear(_: bool) -> nn.Module:
    return nn.Linear(16, 8)


def _rows(shape: Shape) -> torch.Tensor:
    return torch.ones(shape.batch_size, 16)


SPECIMEN = Specimen("vision", _linear, _rows, Shape(2))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("gpt2", "vit") else pytest.mark.campaign) for name in SAMPLE]
)
def test_an_architecture_is_equal_to_real_steps_or_says_why_not(name: str) -> None:
    cells = examine.examine(hugging_face.specimen(name))

    assert {column: cell for column, cell in cells.items() if cell.status == "wrong"} == {}
    assert cells["count"].status == "equal"


@pytest.mark.filterwarnings("ignore")
def test_there_are_more_than_400_types_of_models_to_try() -> None:
    assert len(hugging_face.architectures()) > 400


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_the_truth_of_a_convolution_is_the_closed_formula_whatever_its_groups(groups: int) -> None:
    layer = nn.Conv2d(8, 16, 3, groups=groups)
    image = torch.ones(2, 8, 10, 10, requires_grad=True)

    products = 2 * 8 * 8 * prod(layer.weight.shape)
    assert true_flops(layer, image) == 3 * 2 * products


def test_the_truth_counts_attention_and_recurrence() -> None:
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.ones(3, 5, 16)
    projections, pairs = 4 * 3 * 5 * 16 * 16, 2 * 3 * 5 * 5 * 16
    # the input needs no gradient, so the three projections of it have one gradient less
    assert true_flops(attention, (x, x, x)) == 2 * (3 * (projections + pairs) - 3 * 3 * 5 * 16 * 16)

    recurrent = nn.LSTM(16, 8, batch_first=True)
    inputs, states = 3 * 5 * 16 * 32, 3 * 5 * 8 * 32
    # likewise; and the first state needs no gradient either
    assert true_flops(recurrent, x) == 2 * (2 * inputs + 3 * states - 3 * 8 * 32)


def test_the_truth_of_fused_attention_has_the_scores_twice_as_it_runs_and_once_as_it_is_needed() -> None:
    class Attention(nn.Module):
        def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(query, key, value)

    batch = tuple(torch.ones(3, 2, length, 16, requires_grad=True) for length in (5, 7, 7))
    product = 2 * 3 * 2 * 5 * 7 * 16

    assert true_flops(Attention(), batch, as_it_runs=True) == 7 * product
    assert true_flops(Attention(), batch) == 6 * product


def test_the_truth_of_distances_is_one_product_of_all_pairs() -> None:
    class Distances(nn.Module):
        def forward(self, x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
            return (torch.cdist(x.detach(), codes) + x.sum()).sum()

    batch = torch.ones(30, 4, requires_grad=True), torch.ones(40, 4)

    assert true_flops(Distances(), batch) == 2 * 30 * 40 * 4
    assert true_flops(Distances(), batch, as_it_runs=True) == 2 * 30 * 40 * (4 + 2)


@pytest.mark.parametrize("unit_diagonal", [False, True])
def test_the_truth_of_a_triangular_solve_is_that_of_substitution(unit_diagonal: bool) -> None:
    class Solve(nn.Module):
        def forward(self, triangle: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
            return torch.linalg.solve_triangular(triangle, columns, upper=False, unitriangular=unit_diagonal)

    # row i takes i products, i sums and, unless the diagonal is 1, a division; the gradient of the columns the same
    per_column = sum(2 * i + (not unit_diagonal) for i in range(6))
    assert true_flops(Solve(), (torch.eye(6), torch.ones(6, 5, requires_grad=True))) == 2 * 5 * per_column


def test_another_number_is_wrong_and_with_a_note_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = flopwatch.count_flops
    notes: tuple[str, ...] = ()

    def one_more(*args: object, **options: object) -> flopwatch.FlopCount:
        count = real(*args, **options)  # type: ignore[arg-type]
        return dataclasses.replace(count, hardware_flops=count.hardware_flops + 1, notes=notes)

    assert examine.examine(SPECIMEN)["count"].status == "equal"
    monkeypatch.setattr(flopwatch, "count_flops", one_more)
    assert examine.examine(SPECIMEN)["count"].status == "wrong"
    notes = ("an estimate",)
    assert examine.examine(SPECIMEN)["count"] == Verdict("told", 1025, 1024, "executed FLOPs; an estimate")


def test_an_exception_is_told_if_it_is_flopwatchs_own_and_wrong_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise flopwatch.UntraceableError("this model cannot be followed")

    def crash(*_: object, **__: object) -> None:
        raise KeyError("oops")

    monkeypatch.setattr(flopwatch, "fit_flops_law", refuse)
    assert examine.examine(SPECIMEN)["law"] == Verdict("told", reason="this model cannot be followed")
    monkeypatch.setattr(flopwatch, "fit_flops_law", crash)
    assert examine.examine(SPECIMEN)["law"].status == "wrong"


def test_an_architecture_over_its_time_is_given_up_and_the_row_says_so() -> None:
    worker = Worker(limit_s=0.01)

    assert worker.examine(("transformers", "bert")).error == "not done after 0 s"


def test_the_limit_is_of_processor_time_so_the_kernel_ends_the_process() -> None:
    worker = Worker(limit_s=1.0)
    process = worker._running()

    assert worker.examine(("transformers", "bert")).error == "not done after 1 s"
    assert process.poll() in (-signal.SIGXCPU, -signal.SIGKILL)


@pytest.mark.filterwarnings("ignore")
def test_the_page_has_every_wrong_cell_with_its_ratio() -> None:
    fine = Verdict("equal", 10, 10)
    rows = [
        Outcome("good", "timm", "vision", cells={"count": fine, "law": fine, "padding": Verdict("not asked")}),
        Outcome("bad", "timm", "vision", cells={"count": fine, "law": Verdict("wrong", 12, 10), "padding": fine}),
        Outcome("absent", "timm", error="TypeError: no"),
    ]
    text = page(rows, [("timm", "unseen")])

    assert "bad (1.200x)" in text
    assert "**timm** (1): unseen." in text
    assert "absent: `TypeError: no`" in text
    assert "| timm | 3 | 2 | 2 | 0 | 0 | 1 | 0 | 1 | 1 | 0 | 0 |" in text
