"""Takes each private name of torch away, or breaks it, and shows what flopwatch does instead, with its words."""

import re
import time
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flopwatch
from flopwatch import torch_internals
from flopwatch.errors import MeasurementError
from flopwatch.flops.tracing import live, regions
from flopwatch.monitor.timing.divide import TapeDivision
from flopwatch.monitor.timing.hooks import PassHooks
from flopwatch.monitor.timing.tape import HostTimer, Tape
from flopwatch.torch_internals import PRIVATE_NAMES, autograd, modules, ops

ROWS, WIDTH, LAYERS = 4, 8, 8
MODEL_FLOPS = LAYERS * 2 * 2 * ROWS * WIDTH * WIDTH * 3 - 2 * ROWS * WIDTH * WIDTH  # the input needs no gradient
RECOMPUTED = LAYERS * 2 * ROWS * WIDTH * WIDTH  # checkpointing stops before the last product of a layer
DESIGN = Path(__file__).parents[1] / "docs" / "design.md"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.recomputes = recomputes

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint.checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return x.sum()


@pytest.fixture(autouse=True)
def _the_names_are_checked_again():
    torch_internals.why_not_countable.cache_clear()
    yield
    torch_internals.why_not_countable.cache_clear()


def count(**options):
    return flopwatch.count_flops(Model(**options), torch.ones(ROWS, WIDTH))


def is_estimated_without(name):
    """Whether a count is an estimate that names what is missing, and no step is counted as it runs."""
    result = count()
    with pytest.raises(MeasurementError, match=f"no usable .*`{name}`.*, so ops cannot be counted one by one"):
        flopwatch.count_flops(Model(), torch.ones(ROWS, WIDTH), method="trace")
    [note] = [note for note in result.notes if f"`{name}`" in note]
    assert note.startswith("the FLOPs are estimated, because torch ")
    assert "cannot be counted as they run" in live.obstacle()
    return result.method == "estimate"


TAKEN_AWAY = {}
"""The test of each private name."""


def without(name):
    def remember(test):
        TAKEN_AWAY[name] = test
        return test

    return remember


def test_every_private_name_of_torch_has_a_test_that_takes_it_away():
    assert TAKEN_AWAY.keys() == PRIVATE_NAMES.keys()


@pytest.mark.parametrize("name", list(PRIVATE_NAMES))
def test_without(name, monkeypatch):
    TAKEN_AWAY[name](monkeypatch)


def test_the_portable_suite_records_what_this_release_lacks(request, monkeypatch):
    conftest = request.config.pluginmanager.get_plugin(str(DESIGN.parents[1] / "conftest.py"))
    assert conftest.what_this_torch_lacks() == []
    torch_internals.why_not_countable.cache_clear()
    monkeypatch.setitem(torch_internals.CHECKS, ("_gone",), lambda: False)
    assert conftest.what_this_torch_lacks() == [f"torch {torch.__version__} has no usable `_gone`"]


def test_with_all_names_nothing_is_said_and_the_count_is_right():
    result = count(recomputes=True)
    assert result.method == "trace"
    assert result.model_flops == MODEL_FLOPS
    assert result.recompute_flops == RECOMPUTED
    assert not [note for note in result.notes if "no usable" in note]


def test_a_release_of_torch_that_was_not_tested_is_named_once(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert [note for note in count().notes if "not tested with torch 2.99.0, but with torch 2.6 to 2.15" in note]


def test_the_design_page_lists_every_private_name_of_torch():
    rows = re.findall(r"^\| `([\w.]+)` \|", DESIGN.read_text(), flags=re.MULTILINE)
    assert set(PRIVATE_NAMES.values()) <= set(rows)


@without("_schema")
def schema(monkeypatch):
    # The attribute is set on each op, so the check is given an op without it.
    fails(monkeypatch, lambda: types.SimpleNamespace()._schema)
    assert is_estimated_without("_schema")


@without("_get_current_dispatch_mode_stack")
def mode_stack(monkeypatch):
    monkeypatch.setattr(ops, "dispatch_mode_stack", list)
    assert is_estimated_without("_get_current_dispatch_mode_stack")


def fails(monkeypatch, probe):
    """Let a check fail whose name belongs to a type of C, from which it cannot be taken away."""
    [names] = [names for names in torch_internals.CHECKS if set(names) & set(probe.__code__.co_names)]
    monkeypatch.setitem(torch_internals.CHECKS, names, probe)


def test_with_the_stack_of_modes_another_counter_sees_nothing_of_a_count():
    with FlopCounterMode(display=False) as other:
        assert count().model_flops == MODEL_FLOPS
    assert other.get_total_flops() == 0


@without("OPDEFS")
def custom_ops(monkeypatch):
    op = custom_op("opdefs")
    from torch._library import custom_ops as defined

    assert ops.python_body(op) is not None
    monkeypatch.delattr(defined, "OPDEFS")
    assert ops.python_body(op) is None
    assert reports_as_uncounted(op)


@without("_init_fn")
def custom_op_body(monkeypatch):
    op = custom_op("init_fn")
    from torch._library import custom_ops as defined

    definition = defined.OPDEFS["flopwatch_test::init_fn"]
    monkeypatch.setattr(definition, "_init_fn", lambda something, different: None)
    assert ops.python_body(op) is None
    assert reports_as_uncounted(op)


def custom_op(name):
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    torch.library.custom_op(f"flopwatch_test::{name}", product, mutates_args=()).register_fake(product)
    return getattr(torch.ops.flopwatch_test, name).default


def reports_as_uncounted(op):
    class Calls(nn.Module):
        def forward(self, x):
            return op(x, x)

    result = flopwatch.count_flops(Calls(), torch.ones(WIDTH, WIDTH), training=False)
    return [uncounted.op for uncounted in result.uncounted] == [op.name().partition(".")[0]]


@without("_version")
def version(monkeypatch):
    without_counter = ops._counter_of(object)
    tensor = torch.zeros(1)
    assert ops.tensor_version(tensor) == ops.tensor_version(tensor)
    assert without_counter(tensor) != without_counter(tensor)


@without("_current_graph_task_id")
def graph_task(monkeypatch):
    monkeypatch.setattr(autograd, "current_graph_task_id", lambda: 7)
    assert is_estimated_without("_current_graph_task_id")


@without("_execution_engine")
def execution_engine(monkeypatch):
    run_backward = torch.autograd.Variable._execution_engine.run_backward  # torch itself needs it
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", types.SimpleNamespace(run_backward=run_backward))
    model = Model()
    tape = Tape(HostTimer(time.monotonic), time.monotonic)
    hooks = PassHooks(tape)
    tape.start_step()
    hooks.forward_begins()
    output = model(torch.ones(ROWS, WIDTH))
    hooks.forward_ends(output)
    output.backward()
    tape.end_step()
    (step,) = TapeDivision().divide(tape.take()).steps
    assert not step.knows_passes


@without("_current_autograd_node")
def autograd_node(monkeypatch):
    monkeypatch.setattr(autograd, "current_autograd_node", lambda: None)
    assert is_estimated_without("_current_autograd_node")


@without("_get_sequence_nr")
def next_number(monkeypatch):
    monkeypatch.setattr(autograd, "recorded_operations", lambda: 5)
    assert is_estimated_without("_get_sequence_nr")


@without("_sequence_nr")
def own_number(monkeypatch):
    monkeypatch.setattr(autograd, "sequence_nr", lambda node: node.no_such_name())
    assert is_estimated_without("_sequence_nr")


@without("_compiled_call_impl")
def compiled_call(monkeypatch):
    monkeypatch.setattr(modules, "COMPILED_CALL", "_no_such_name")
    assert is_estimated_without("_compiled_call_impl")


@without("eval_frame")
def eval_frame(monkeypatch):
    compiled = torch.compile(Model(), backend="eager")
    assert autograd.compiled_original(compiled) is not None
    monkeypatch.setattr(type(compiled), "__module__", "torch.compiler.elsewhere")
    assert autograd.compiled_original(compiled) is None
    result = flopwatch.count_flops(compiled, torch.ones(ROWS, WIDTH))
    assert result.model_flops == MODEL_FLOPS or result.notes


@without("cached_backends")
def cached_backends(monkeypatch):
    import torch._dynamo.eval_frame as compiler

    monkeypatch.setattr(live, "_has_compiled", [])
    monkeypatch.setattr(live, "_requested", [])
    monkeypatch.delattr(compiler, "cached_backends")
    assert live.may_compile()


@without("call_user_compiler")
def call_user_compiler(monkeypatch):
    from torch._dynamo.output_graph import OutputGraph

    monkeypatch.delattr(OutputGraph, "call_user_compiler")
    monkeypatch.setattr(regions, "state", regions.Listening())
    regions.install(regions)
    assert regions.state.missed == regions.UNSEEN


@without("counters")
def counters(monkeypatch):
    import torch._dynamo.utils

    monkeypatch.delattr(torch._dynamo.utils, "counters")
    assert autograd.compiled_graphs() == 0


@without("calculate_time_spent")
def calculate_time_spent(monkeypatch):
    import torch._dynamo.utils

    monkeypatch.delattr(torch._dynamo.utils, "calculate_time_spent")
    assert autograd.compile_seconds() == 0


@without("_aot_autograd")
def aot_autograd(monkeypatch):
    from torch._dynamo.output_graph import OutputGraph

    monkeypatch.setattr(OutputGraph, "call_user_compiler", OutputGraph.call_user_compiler)
    monkeypatch.setattr(autograd, "_AOT", "_absent")
    monkeypatch.setattr(regions, "state", regions.Listening())
    regions.install(regions)
    assert regions.state.missed == regions.UNSEEN


@without("kernel_side_table")
def kernel_side_table(monkeypatch):
    # A graph that cannot be counted makes a step not exact: tests/monitor/test_compiled.py.
    from torch._higher_order_ops import triton_kernel_wrap

    monkeypatch.delattr(triton_kernel_wrap, "kernel_side_table")
    with pytest.raises(AttributeError):
        autograd.graph_kernel(0, 0)


@without("_get_default_store")
def default_store(monkeypatch):
    from torch.distributed import distributed_c10d

    monkeypatch.delattr(distributed_c10d, "_get_default_store")
    with pytest.raises(MeasurementError, match="each rank reports only itself"):
        modules.default_store()


@without("_get_fsdp_state")
def fsdp_state(monkeypatch):
    # tests/monitor/ranks/test_layout.py shows what is done without it.
    assert modules.fsdp_groups(nn.Linear(2, 2)) == []


@without("_call_impl")
def call_impl(monkeypatch):
    def hook(module, args):
        seen.append(modules.arguments_by_name(1))

    seen = []
    handle = nn.modules.module.register_module_forward_pre_hook(hook)
    try:
        nn.Identity()(input=torch.ones(1))
        hook(None, ())  # here no module calls the hook, as in a release in which the caller looks different
    finally:
        handle.remove()
    assert [list(each) for each in seen] == [["input"], []]


@without("_functorch")
def functorch(monkeypatch):
    shapes = []

    def look(x):
        shapes.append(modules.whole_shape(x) if modules.is_in_transform() else x.shape)
        return x

    torch.func.vmap(look)(torch.ones(3, 2))
    monkeypatch.setattr(modules, "transform_level", lambda: None)
    torch.func.vmap(look)(torch.ones(3, 2))
    assert shapes == [(3, 2), (2,)]
