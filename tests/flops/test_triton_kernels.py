"""Triton kernels that a training launches itself: counted by a formula, known to be free, or named.

Triton needs a GPU, so that a module with the parts of it that flopwatch uses stands in for it.
"""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

import flopwatch
from flopwatch.flops.formulas import registry
from flopwatch.flops.tracing import regions
from flopwatch.flops.tracing.kernels import watch_launches
from flopwatch.flops.tracing.region_counts import count_region

ROWS, WIDTH = 4, 16
LINEAR = 2 * ROWS * WIDTH * WIDTH * 2  # forward and the gradient of the weight


class JITFunction:
    """As Triton's: holds a Python function, and launches it by `run`."""

    def __init__(self, function, module="my_kernels", source="tl.dot(a, b)"):
        function.__module__ = module
        self.fn, self.src = function, source
        self.arg_names = list(function.__code__.co_varnames[: function.__code__.co_argcount])

    def run(self, *args, grid, warmup, **kwargs):
        return None if warmup else self.fn(*args, **kwargs)

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)


@pytest.fixture(autouse=True)
def triton(monkeypatch):
    jit = ModuleType("triton.runtime.jit")
    jit.JITFunction = JITFunction
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", jit)
    yield
    registry.kernel_formulas.clear()


def scale_rows(x, out, BLOCK=16):  # noqa: N803
    out.numpy()[:] = x.detach().numpy() * 2


class Launches(nn.Module):
    def __init__(self, kernel):
        super().__init__()
        self.layer, self.kernel = nn.Linear(WIDTH, WIDTH, bias=False), kernel

    def forward(self, x):
        filled = torch.empty_like(x)
        self.kernel[(1,)](x, filled, BLOCK=32)
        return self.layer(filled).sum()


def rows_of_training(kernel, folder):
    model = Launches(kernel)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = flopwatch.TrainingMonitor(folder, model=model, log_every=2, peak_flops_per_s=1e12, sinks=[], strict=True)
    for _ in range(8):
        batch = torch.randn(ROWS, WIDTH)
        with monitor.step(batch):
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    monitor.close()
    records = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    return [record for record in records if record["type"] == "row"]


def test_a_kernel_without_a_formula_is_named_and_the_row_is_not_exact(tmp_path):
    rows = rows_of_training(JITFunction(scale_rows), tmp_path)

    assert not any(row["exact"] for row in rows)
    assert all("triton::scale_rows" in row["notes"][0] for row in rows)
    assert {flops for row in rows for flops in row["steps"]["model_flops"]} == {LINEAR}


def test_a_kernel_with_a_formula_is_counted_by_its_arguments(tmp_path):
    @flopwatch.formula("triton::scale_rows")
    def flops(x, out, BLOCK):  # noqa: N803
        return 2 * x.shape[0] * BLOCK

    rows = rows_of_training(JITFunction(scale_rows), tmp_path)

    assert all(row["exact"] for row in rows)
    assert {flops for row in rows for flops in row["steps"]["model_flops"]} == {LINEAR + 2 * ROWS * 32}


def test_the_launches_with_which_triton_chooses_parameters_are_not_counted(monkeypatch):
    seen, kernel = [], JITFunction(lambda x: None)
    code = compile("def _bench(launch):\n    launch()\n", "/triton/autotuner.py", "exec")
    tuner = {}
    exec(code, tuner)
    monkeypatch.setitem(sys.modules, "triton.runtime.autotuner", SimpleNamespace(__file__="/triton/autotuner.py"))
    launch = JITFunction.run

    stop = watch_launches(lambda *call: seen.append(call))
    tuner["_bench"](lambda: kernel[(1,)](1))
    kernel.run(1, grid=(1,), warmup=True)
    kernel[(1,)](2)
    stop()
    kernel[(1,)](3)

    assert [arguments for _, arguments in seen] == [{"x": 2}]
    assert JITFunction.run is launch


def test_a_step_in_which_triton_is_imported_is_not_exact(monkeypatch):
    monkeypatch.delitem(sys.modules, "triton.runtime.jit")
    stop = watch_launches(print)
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", ModuleType("triton.runtime.jit"))

    assert stop() is False


def graph_with_a_launch(kernel):
    """A graph as the compiler captures it: torch's op for launches, with numbers for kernel and constants."""
    graph = torch.fx.Graph()
    x, out = graph.placeholder("x"), graph.placeholder("out")
    for node in (x, out):
        node.meta["example_value"] = torch.ones(ROWS, WIDTH)
    graph.call_function(
        torch.ops.higher_order.triton_kernel_wrapper_mutation,
        (),
        {
            "kernel_idx": kernel_side_table.add_kernel(kernel),
            "constant_args_idx": kernel_side_table.add_constant_args({"BLOCK": 8}),
            "grid": [(1,)],
            "tma_descriptor_metadata": {},
            "kwargs": {"x": x, "out": out},
        },
    )
    graph.output((out,))
    return torch.fx.GraphModule(nn.Module(), graph)


def test_a_launch_in_a_compiled_graph_is_counted_by_its_arguments_or_named():
    kernel = JITFunction(scale_rows)
    region = regions.Region(graph_with_a_launch(kernel))
    named = count_region(region, (), has_grad=False, attention="full").forward

    @flopwatch.formula("triton::scale_rows")
    def flops(x, out, BLOCK):  # noqa: N803
        return x.numel() * BLOCK

    region = regions.Region(graph_with_a_launch(kernel))
    counted = count_region(region, (), has_grad=False, attention="full").forward

    assert named.uncounted == ("triton::scale_rows",)
    assert counted.phases.forward == ROWS * WIDTH * 8
    assert counted.uncounted == ()


def test_a_kernel_that_is_hidden_from_torch_makes_a_row_not_exact(tmp_path):
    class Extension:
        """As a function of a C++ extension: it writes to a tensor without an op of torch."""

        def __getitem__(self, grid):
            return scale_rows

    rows = rows_of_training(Extension(), tmp_path)

    assert not any(row["exact"] for row in rows)
    assert all("kernel past the dispatcher" in row["notes"][0] for row in rows)
