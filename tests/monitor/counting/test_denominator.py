"""MFU is divided by the peak of the type that the matrix products ran in, however the loss is logged."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from flopwatch import TrainingMonitor, peak_flops
from flopwatch.monitor.counting import costs as peaks_module
from flopwatch.monitor.counting.costs import Peaks
from flopwatch.records.flops import Peak

pytestmark = pytest.mark.slow

PEAKS = {"fp32": 1e12, "tf32": 3e12, "bf16": 7e12, "fp16": 11e12, "fp8": 13e12, "int8": 17e12, "fp64": 0.5e12}
"""Of a device that knows every type, each with a peak of its own."""
ROWS, WIDTH, CLASSES = 6, 8, 4

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def _known_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def known(device: Any, dtype: str, **_: Any) -> Peak:
        return Peak(PEAKS[dtype], str(device), dtype, "this test", "table", "high")

    monkeypatch.setattr(peaks_module, "peak_flops", known)


@pytest.fixture
def compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def a_model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def run(
    folder: Path,
    model: nn.Module,
    step: Step,
    logged: Callable[[torch.Tensor], Any] = lambda loss: loss,
    steps: int = 8,
    after: Callable[[int], None] = lambda number: None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Trains, and returns the records of the log."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dtype = next(model.parameters()).dtype
    with TrainingMonitor(folder, model=model, log_every=2, **options) as monitor:
        for number in range(steps):
            x, y = torch.randn(ROWS, WIDTH, dtype=dtype), torch.randint(0, CLASSES, (ROWS,))
            with monitor.step((x, y)) as current:
                loss = step(x, y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                current.log(loss=logged(loss))
            after(number)
    return [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]


def peaks_used(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record["peak"] for record in records if record["type"] == "row"]


def only(dtype: str) -> dict[str, Any]:
    return {"dtype": dtype, "flops_per_s": pytest.approx(PEAKS[dtype])}


def assert_divided_by(records: list[dict[str, Any]], dtype: str) -> None:
    assert peaks_used(records) == [only(dtype)] * 4
    told = [record["peak"] for record in records if record["type"] == "provenance"][-1]
    assert (told["dtype"], told["flops_per_s"]) == (dtype, PEAKS[dtype])


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.float64, "fp64")]
)
def test_without_autocast_it_is_the_weights_type(dtype: torch.dtype, name: str, tmp_path: Path) -> None:
    model = a_model().to(dtype)
    assert_divided_by(run(tmp_path, model, lambda x, y: functional.cross_entropy(model(x), y)), name)


WAYS_TO_LOG: dict[str, Callable[[torch.Tensor], Any]] = {
    "a tensor": lambda loss: loss,
    "item": lambda loss: loss.item(),
    "detached": lambda loss: loss.detach(),
    "float": lambda loss: float(loss.detach()),
    "nothing": lambda loss: None,
}


@pytest.mark.parametrize("way", WAYS_TO_LOG)
def test_autocast_in_the_loop_decides_whatever_is_logged(way: str, tmp_path: Path) -> None:
    model = a_model()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return functional.cross_entropy(model(x), y)

    assert_divided_by(run(tmp_path, model, step, WAYS_TO_LOG[way]), "bf16")


def test_the_loss_may_be_computed_in_fp32(tmp_path: Path) -> None:
    model = a_model()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            scores = model(x)
        return functional.cross_entropy(scores.float(), y)

    assert_divided_by(run(tmp_path, model, step), "bf16")


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = a_model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize("is_decorated", [True, False])
@pytest.mark.parametrize("what", ["model", "in place", "step"])
@pytest.mark.usefixtures("compiler")
@pytest.mark.filterwarnings("ignore")  # of dynamo
def test_autocast_decides_in_compiled_code(what: str, is_decorated: bool, tmp_path: Path) -> None:
    """Autocast around the compiled model, or inside the compiled step; the loss is a number by then."""
    model = Wrapped()
    called = torch.compile(model, backend="aot_eager") if what == "model" else model
    if what == "in place":
        model.compile(backend="aot_eager")

    def plain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return functional.cross_entropy(called(x), y)

    @torch.autocast("cpu", torch.bfloat16)
    def decorated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(called(x), y)

    step: Step = decorated if is_decorated else plain
    if what == "step":
        step = torch.compile(step, backend="aot_eager")
    assert_divided_by(run(tmp_path, called, step, lambda loss: loss.item()), "bf16")


def test_fp16_with_a_gradient_scaler(tmp_path: Path) -> None:
    model = a_model()
    scaler = torch.amp.GradScaler("cpu")

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            loss = functional.cross_entropy(model(x), y)
        return scaler.scale(loss)

    assert_divided_by(run(tmp_path, model, step, lambda loss: loss.item()), "fp16")


class TwoTypes(nn.Module):
    """A first layer in fp32, a second one in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 32), nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        with torch.autocast("cpu", torch.bfloat16):
            return self.second(x)


def seconds_at_peak(flops: dict[str, int]) -> float:
    return sum(count / PEAKS[name] for name, count in flops.items())


def test_each_type_is_divided_by_its_own_peak(tmp_path: Path) -> None:
    model = TwoTypes()
    records = run(tmp_path, model, lambda x, y: functional.cross_entropy(model(x).float(), y))
    # The input needs no gradient: two products of the first layer, three of the second.
    flops = {"fp32": ROWS * 2 * WIDTH * 32 * 2, "bf16": ROWS * 2 * 32 * CLASSES * 3}
    expected = sum(flops.values()) / seconds_at_peak(flops)
    assert [peak["flops_per_s"] for peak in peaks_used(records)] == [pytest.approx(expected)] * 4
    assert peaks_used(records)[-1]["dtype"] == "fp32", "most of the work"


class Int8Product(torch.autograd.Function):
    """An int8 product forward; gradients in the activation's type, as QAT does it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        small_x, small_weight = x.clamp(-1, 1).mul(127).to(torch.int8), weight.clamp(-1, 1).mul(127).to(torch.int8)
        return torch._int_mm(small_x, small_weight.T).to(x.dtype) / 127**2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x


class Float8Product(Int8Product):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        small_x, small_weight = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
        one = torch.ones(())
        return torch._scaled_mm(small_x, small_weight.T, one, one, out_dtype=torch.bfloat16).to(x.dtype)


class Quantised(nn.Module):
    def __init__(self, product: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.weight, self.product = nn.Parameter(torch.randn(16, 16) / 4), product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product.apply(x, self.weight)


@pytest.mark.parametrize(("product", "name"), [(Int8Product, "int8"), (Float8Product, "fp8")])
def test_quantised_layers_have_the_peak_of_their_products(
    product: type[torch.autograd.Function], name: str, tmp_path: Path
) -> None:
    layer = Quantised(product)
    model = nn.Sequential(nn.Linear(WIDTH, 16), layer)
    records = run(tmp_path, model, lambda x, y: functional.cross_entropy(model(torch.cat([x] * 3)), y.repeat(3)))
    one = 2 * 3 * ROWS * 16 * 16
    flops = {name: one, "fp32": 2 * one + 2 * (2 * 3 * ROWS * WIDTH * 16)}
    expected = sum(flops.values()) / seconds_at_peak(flops)
    assert peaks_used(records)[-1]["flops_per_s"] == pytest.approx(expected)


def test_a_change_of_type_on_the_way_changes_the_peak(tmp_path: Path) -> None:
    model, is_cast = a_model(), False

    def switch(number: int) -> None:
        nonlocal is_cast
        is_cast = number >= 3

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            return functional.cross_entropy(model(x), y)

    used = [peak["flops_per_s"] for peak in peaks_used(run(tmp_path, model, step, after=switch))]
    assert used == [pytest.approx(PEAKS[name]) for name in ("fp32", "fp32", "bf16", "bf16")]


def test_a_type_the_user_has_named_is_used_whatever_ran(tmp_path: Path) -> None:
    model = a_model()
    assert_divided_by(run(tmp_path, model, lambda x, y: functional.cross_entropy(model(x), y), dtype="bf16"), "bf16")


@contextmanager
def tf32(*, is_allowed: bool) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if is_allowed else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def test_fp32_products_on_cuda_are_tf32_where_the_switch_allows_it() -> None:
    """There is no such device here; the switch is torch's own."""
    for is_allowed, name in ((True, "tf32"), (False, "fp32")):
        with tf32(is_allowed=is_allowed):
            peaks = Peaks(torch.device("cuda"), None, None)
            assert peaks.seconds({"fp32": 10**12}) == 10**12 / PEAKS[name]
            assert peaks.seconds({"bf16": 10**12}) == 10**12 / PEAKS["bf16"], "says nothing about other types"


def test_a_type_without_a_peak_makes_mfu_unknown_not_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks_module, "peak_flops", lambda *_, **__: None)
    model = a_model()
    records = run(tmp_path, model, lambda x, y: functional.cross_entropy(model(x), y))
    rows = [record for record in records if record["type"] == "row"]
    assert all(row["peak"] is None and not any("mfu" in key for key in row["values"]) for row in rows)
    assert any(record.get("code") == "peak_unknown" for record in records)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_is_the_one_that_is_looked_up(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peaks_module, "peak_flops", peak_flops)
    name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    expected = peak_flops("cpu", name)
    if expected is None:
        pytest.skip(f"this CPU has no known peak for {name}")
    model = a_model().to(dtype)
    used = peaks_used(run(tmp_path, model, lambda x, y: functional.cross_entropy(model(x), y)))
    assert used[-1] == {"dtype": name, "flops_per_s": pytest.approx(expected.flops_per_s)}
