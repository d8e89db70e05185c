"""What attackers found in compiled trainings: rows are right or say why they are not exact, and nothing is changed."""

import json
import threading

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import flopwatch
from flopwatch.flops.tracing import live, regions

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
STEPS, ROWS, WIDTH = 10, 4, 16
LINEAR = 2 * ROWS * WIDTH * WIDTH
ON_NEW_TORCH = pytest.mark.skipif(not live._compiles_beside, reason="before torch 2.10, compiled code alone is counted")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.second(self.first(x).relu())


def data(step, *sizes):
    return torch.randn(*(sizes or (ROWS, WIDTH)), generator=torch.Generator().manual_seed(step))


def compiled(function, **options):
    return torch.compile(function, **{"backend": "aot_eager", **options})


def as_it_is(function, **options):
    return function


def trained(make, folder=None, *, compile_with=compiled, steps=STEPS):
    """The weights after a training, its rows, and the FLOPs that torch counts while nothing is compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model, loss_of = make(compile_with)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = None
    if folder is not None:
        monitor = flopwatch.TrainingMonitor(folder, model=model, log_every=2, peak_flops_per_s=1e12, sinks=[])
    flops = []
    for step in range(steps):

        def run(step=step):
            loss_of(step).backward()
            optimizer.step()
            optimizer.zero_grad()

        if monitor is not None:
            with monitor.step(data(step)):
                run()
        elif compile_with is as_it_is:
            with FlopCounterMode(display=False) as counter:
                run()
            flops.append(counter.get_total_flops())
        else:
            run()
    rows = []
    if monitor is not None:
        monitor.close()
        records = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
        rows = [record for record in records if record["type"] == "row"]
    return [p.detach().clone() for p in model.parameters()], rows, flops


def wrong_steps(rows, truth):
    """Steps in rows that are called exact, with other FLOPs than the truth."""
    return [
        (step, flops, truth[step])
        for row in rows
        if row["exact"]
        for step, flops in zip(row["steps"]["step"], row["steps"]["model_flops"], strict=True)
        if flops != truth[step]
    ]


def a_second_backend(compile_with):
    net, head = Net(), nn.Linear(WIDTH, WIDTH)
    first, second = compile_with(net), compile_with(head, backend="eager")
    return nn.ModuleList([net, head]), lambda step: second(first(data(step))).square().mean()


def views_of_an_input(compile_with):
    net, head = Net(), nn.Linear(WIDTH, WIDTH)

    def views(x):
        return x.view(-1), head(x).view(-1)

    first, second = compile_with(net), compile_with(views)
    return nn.ModuleList([net, head]), lambda step: sum(each.square().mean() for each in second(first(data(step))))


def a_hook_on_a_result(compile_with):
    net, factor = Net(), torch.eye(WIDTH)
    run = compile_with(net)

    def loss_of(step):
        out = run(data(step))
        out.register_hook(lambda grad: grad @ factor)
        return out.square().mean()

    return net, loss_of


def a_class_with_the_name_of_torchs(compile_with):
    class CompiledFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad @ weight.T, x.T @ grad

    net, weight = Net(), nn.Parameter(torch.eye(WIDTH))
    net.register_parameter("last", weight)
    run = compile_with(net)
    return net, lambda step: CompiledFunction.apply(run(data(step)), weight).square().mean()


def a_write_under_autocast(compile_with):
    net, inner, outer = Net(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def add(x):
        with torch.autocast("cpu", torch.bfloat16):
            x += inner(x)
        return x

    added = compile_with(add)

    def loss_of(step):
        with torch.autocast("cpu", torch.bfloat16):
            x = outer(data(step))
        x = added(x.float())
        with torch.autocast("cpu", torch.bfloat16):
            return net(x).float().square().mean()

    return nn.ModuleList([net, inner, outer]), loss_of


@ON_NEW_TORCH
@pytest.mark.parametrize(
    "make",
    [
        a_second_backend,
        views_of_an_input,
        a_hook_on_a_result,
        a_class_with_the_name_of_torchs,
        a_write_under_autocast,
    ],
)
def test_a_row_is_exact_and_right_and_the_weights_are_those_of_the_bare_training(make, tmp_path):
    weights, rows, _ = trained(make, tmp_path)
    bare, _, _ = trained(make)
    _, _, truth = trained(make, compile_with=as_it_is)

    assert all(row["exact"] for row in rows), rows[0].get("notes")
    assert wrong_steps(rows, truth) == []
    assert all(torch.equal(one, other) for one, other in zip(weights, bare, strict=True))


def a_function_of_the_user_in_the_graph(compile_with):
    net, calls = Net(), []

    def noted(x):
        calls.append(x)
        return x * len(calls)

    torch.compiler.allow_in_graph(noted)
    run = compile_with(lambda x: noted(net(x)))
    return net, lambda step: run(data(step)).square().mean()


@ON_NEW_TORCH
def test_a_function_of_the_user_in_a_graph_is_not_run_a_second_time(tmp_path):
    weights, rows, _ = trained(a_function_of_the_user_in_the_graph, tmp_path)
    bare, _, _ = trained(a_function_of_the_user_in_the_graph)

    assert not any(row["exact"] for row in rows)
    assert "which is not torch's and is not run a second time" in rows[-1]["notes"][0]
    assert all(torch.equal(one, other) for one, other in zip(weights, bare, strict=True))


@ON_NEW_TORCH
def test_a_backward_pass_through_compiled_code_of_an_earlier_step_is_told(tmp_path):
    net = Net()
    run, kept = compiled(net), [compiled(net)(data(0)).square().mean()]
    monitor = flopwatch.TrainingMonitor(tmp_path, model=net, log_every=2, peak_flops_per_s=1e12, sinks=[])
    for step in range(STEPS):
        with monitor.step(data(step)):
            kept.append(run(data(step)).square().mean())
            kept.pop(0).backward()
            net.zero_grad()
    monitor.close()
    records = [json.loads(line) for line in (tmp_path / "training_log.jsonl").read_text().splitlines()]

    assert not any(record["exact"] for record in records if record["type"] == "row")


@ON_NEW_TORCH
def test_the_products_of_a_compiled_optimizer_are_not_those_of_the_training(tmp_path):
    class Orthogonal(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self):
            for parameter in self.param_groups[0]["params"]:
                if parameter.ndim == 2:
                    parameter.add_(parameter.grad @ parameter.grad.T, alpha=-0.01)

    torch._dynamo.reset()
    net = Net()
    optimizer = Orthogonal(net.parameters())
    run, update = compiled(net), compiled(optimizer.step)
    monitor = flopwatch.TrainingMonitor(tmp_path, model=net, log_every=2, peak_flops_per_s=1e12, sinks=[])
    for step in range(STEPS):
        with monitor.step(data(step)):
            run(data(step)).square().mean().backward()
            update()
            optimizer.zero_grad()
    monitor.close()
    records = [json.loads(line) for line in (tmp_path / "training_log.jsonl").read_text().splitlines()]
    rows = [record for record in records if record["type"] == "row"]

    assert {flops for row in rows for flops in row["steps"]["model_flops"]} == {5 * LINEAR}  # the input has no gradient
    assert all(row["exact"] for row in rows)


def equal_products(compile_with):
    net = Net()
    run = compile_with(lambda x: net(x).square().mean() + net(x).abs().mean())
    return net, lambda step: run(data(step))


def unused_products(compile_with):
    net, unused = Net(), torch.eye(WIDTH)

    def loss(x):
        x @ unused
        return net(x).square().mean()

    run = compile_with(loss)
    return net, lambda step: run(data(step))


@ON_NEW_TORCH
@pytest.mark.parametrize("make", [equal_products, unused_products])
def test_executed_flops_are_absent_where_a_compiler_may_leave_products_out(make, tmp_path):
    _, rows, _ = trained(make, tmp_path)
    _, _, truth = trained(make, compile_with=as_it_is)

    assert all(row["exact"] and "hardware_flops" not in row["steps"] for row in rows)
    assert wrong_steps(rows, truth) == []


@ON_NEW_TORCH
def test_sizes_of_eager_modules_beside_compiled_code_are_seen_in_the_batch(tmp_path):
    def make(compile_with):
        net, loss = Net(), compile_with(lambda x: x.square().mean())
        lengths = {20: 30, 21: 30, 30: 30}
        return net, lambda step: loss(net(data(step, ROWS, lengths.get(step, 6), WIDTH)).mean(1))

    torch._dynamo.reset()
    net, loss_of = make(compiled)
    monitor = flopwatch.TrainingMonitor(tmp_path, model=net, log_every=2, peak_flops_per_s=1e12, sinks=[])
    for step in range(34):
        length = 30 if step in (20, 21, 30) else 6
        with monitor.step({"x": data(step, ROWS, length, WIDTH)}):
            loss_of(step).backward()
            net.zero_grad()
    monitor.close()
    records = [json.loads(line) for line in (tmp_path / "training_log.jsonl").read_text().splitlines()]
    truth = {step: 5 * LINEAR * (30 if step in (20, 21, 30) else 6) for step in range(34)}

    assert wrong_steps([record for record in records if record["type"] == "row"], truth) == []


@ON_NEW_TORCH
def test_compiled_code_in_another_thread_belongs_to_no_step(tmp_path):
    def make(compile_with):
        net, teacher = Net(), Net()
        run, other = compile_with(net), compile_with(teacher)

        def loss_of(step):
            thread = threading.Thread(target=lambda: other(data(step)))
            thread.start()
            thread.join()
            return run(data(step)).square().mean()

        return net, loss_of

    _, rows, _ = trained(make, tmp_path)

    assert {flops for row in rows for flops in row["steps"]["model_flops"]} == {5 * LINEAR}


@pytest.fixture(autouse=True)
def _nothing_is_missed():
    """The bare training compiles too, after which a monitor that begins to listen would say that it has missed code."""
    regions.install(regions)
    regions.state.missed = None
    yield
    regions.leave(regions)
    regions.state.missed = None
