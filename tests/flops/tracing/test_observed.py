"""Steps that torch's profiler counts: the FLOPs are those of the dispatch mode, and no bit of the training changes."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from flopwatch.flops.tracing.live import LiveStep
from flopwatch.flops.tracing.observed import ObservedStep, can_observe
from flopwatch.flops.tracing.recorded import FUSED_GRADIENTS, IN_OPTIMIZER, PASS_WITH_GRAPH
from support.counted_steps import counted

Step = Callable[[], Any]


def trained(model: nn.Module, loss: Callable[[nn.Module], torch.Tensor], optimizer: Any = torch.optim.AdamW) -> Step:
    tool = optimizer(model.parameters(), lr=1e-3)

    def step() -> None:
        tool.zero_grad()
        loss(model).backward()
        tool.step()

    step.model = model  # type: ignore[attr-defined]
    return step


def seeded(make: Callable[[], Step]) -> Step:
    torch.manual_seed(0)
    return make()


def mlp() -> Step:
    data = torch.randn(5, 8)
    return trained(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), lambda model: model(data).sum())


def convolutions() -> Step:
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, groups=2),
        nn.BatchNorm2d(8),
        nn.ConvTranspose2d(8, 6, 3, stride=2, groups=2),
        nn.Conv2d(6, 2, 1),
    )
    data = torch.randn(2, 4, 9, 9)
    return trained(model, lambda model: model(data).square().mean())


def volumes() -> Step:
    data = torch.randn(2, 3, 5, 6, 7)
    return trained(nn.Conv3d(3, 4, (2, 3, 3), padding=1), lambda model: model(data).mean())


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.qkv, self.options = nn.Linear(16, 48), options

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(data).view(2, 10, 3, 4, 4).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value, **self.options)


def causal_attention() -> Step:
    data = torch.randn(2, 10, 16)
    return trained(Attention(is_causal=True), lambda model: model(data).sum())


def masked_attention() -> Step:
    data, mask = torch.randn(2, 10, 16), torch.ones(10, 10, dtype=torch.bool).tril()
    return trained(Attention(attn_mask=mask), lambda model: model(data).sum())


def batched_products() -> Step:
    model = nn.ParameterList([torch.randn(3, 4, 5), torch.randn(3, 5, 6), torch.randn(3, 4, 6), torch.randn(6)])

    def loss(model: Any) -> torch.Tensor:
        left, right, addend, vector = model
        product = (
            torch.baddbmm(addend, left, right) + torch.bmm(left, right) + torch.einsum("bij,bjk->bik", left, right)
        )
        return (product @ vector).sum() + torch.addmm(addend[0], left[0], right[0]).sum() + torch.dot(vector, vector)

    return trained(model, loss)


def lstm() -> Step:
    data = torch.randn(5, 2, 3)
    return trained(nn.LSTM(3, 4, 2), lambda model: model(data)[0].sum())


def tied_head() -> Step:
    embedding = nn.Embedding(20, 8)
    model = nn.Sequential(embedding, nn.Linear(8, 8))
    tokens = torch.randint(0, 20, (2, 6))

    def loss(model: Any) -> torch.Tensor:
        return F.cross_entropy((model(tokens) @ embedding.weight.T).flatten(0, 1), tokens.flatten())

    return trained(model, loss)


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6)) for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, data: torch.Tensor) -> Any:
        for layer in self.layers:
            data = checkpoint(layer, data, use_reentrant=self.use_reentrant)
        return data


def checkpoints() -> Step:
    data = torch.randn(4, 6)
    return trained(Checkpointed(use_reentrant=False), lambda model: model(data).sum())


def reentrant_checkpoints() -> Step:
    data = torch.randn(4, 6, requires_grad=True)
    return trained(Checkpointed(use_reentrant=True), lambda model: model(data).sum())


def checkpointed_whole() -> Step:
    data = torch.randn(4, 6)
    model = Checkpointed(use_reentrant=False)
    return trained(model, lambda model: checkpoint(lambda: model(data).sum(), use_reentrant=False))


def autocast() -> Step:
    data = torch.randn(5, 8)

    def loss(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(data).float().sum() + (data.double() @ data.double().T).float().sum()

    return trained(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), loss)


def gradient_penalty() -> Step:
    data = torch.randn(5, 8, requires_grad=True)

    def loss(model: nn.Module) -> torch.Tensor:
        out = model(data).sum()
        [gradient] = torch.autograd.grad(out, data, create_graph=True)
        return out + gradient.norm()

    return trained(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), loss)


def llama() -> Step:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48,
    )  # fmt: skip
    tokens = torch.randint(0, 50, (2, 12))
    return trained(transformers.LlamaForCausalLM(config), lambda model: model(input_ids=tokens, labels=tokens).loss)


def lbfgs() -> Step:
    model, data = nn.Linear(4, 3), torch.randn(6, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        return loss

    def step() -> None:
        optimizer.step(closure)

    step.model = model  # type: ignore[attr-defined]
    return step


class Muon(torch.optim.Optimizer):
    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.dim() == 2:
                square = parameter.grad @ parameter.grad.T
                parameter.sub_(square @ parameter.grad, alpha=self.param_groups[0]["lr"])


def muon() -> Step:
    data = torch.randn(5, 8)
    return trained(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), lambda model: model(data).sum(), Muon)


ORDINARY = [
    *(mlp, convolutions, volumes, causal_attention, masked_attention, batched_products, tied_head, checkpoints),
    *(reentrant_checkpoints, checkpointed_whole, autocast, gradient_penalty, llama, muon),
]


@pytest.mark.slow
@pytest.mark.parametrize("make", ORDINARY)
def test_the_count_is_that_of_the_dispatch_mode(make: Callable[[], Step]) -> None:
    theirs, ours = (counted(kind, seeded(make)) for kind in (LiveStep, ObservedStep))
    assert theirs.failure is None
    assert ours.failure is None
    assert replace(ours, before_calls=0) == theirs
    assert ours.phases.total > 0


def test_products_of_an_optimizer_with_a_closure_are_in_doubt() -> None:
    theirs, ours = (counted(kind, seeded(lbfgs)) for kind in (LiveStep, ObservedStep))
    assert ours.phases.total == theirs.phases.total + theirs.optimizer
    assert (ours.doubt, theirs.doubt) == (IN_OPTIMIZER, None)


def of_output(loss: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Step]:
    def make() -> Step:
        data = torch.randn(5, 4)
        return trained(nn.Linear(4, 4), lambda model: loss(model(data)))

    return make


def square(out: torch.Tensor) -> torch.Tensor:
    return out.T @ out + 10 * torch.eye(4)


def bilinear() -> Step:
    left, right = torch.randn(5, 4), torch.randn(5, 6)
    return trained(nn.Bilinear(4, 6, 3), lambda model: model(left, right).sum())


def bilinear_under_autocast() -> Step:
    left, right = torch.randn(5, 4), torch.randn(5, 6)

    def loss(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(left, right).float().sum()

    return trained(nn.Bilinear(4, 6, 3), loss)


def sparse(to_sparse: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Step]:
    def make() -> Step:
        matrix = to_sparse(torch.tensor([[0, 1.0, 0, 0], [2, 0, 0, 0], [0, 3, 0, 0], [0] * 4]))
        return trained(nn.ParameterList([torch.randn(4, 3)]), lambda model: torch.sparse.mm(matrix, model[0]).sum())

    return make


RISKY_MODELS = {
    "prod": of_output(lambda out: out.prod(-1).sum()),
    "cumprod": of_output(lambda out: out.cumprod(-1).sum()),
    "bilinear": bilinear,
    "bilinear under autocast": bilinear_under_autocast,
    "inv": of_output(lambda out: torch.linalg.inv(square(out)).sum()),
    "svd": of_output(lambda out: torch.linalg.svdvals(out).sum()),
    "det": of_output(lambda out: torch.linalg.det(square(out))),
    "eigh": of_output(lambda out: torch.linalg.eigh(square(out))[0].sum()),
    "affine_grid": of_output(
        lambda out: F.affine_grid(out.flatten()[:12].view(2, 2, 3), [2, 1, 4, 4], align_corners=False).sum()
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("to_sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_sparse_products_are_named(to_sparse: Callable[[torch.Tensor], torch.Tensor]) -> None:
    count = counted(ObservedStep, seeded(sparse(to_sparse)))
    assert count.failure is None
    assert count.uncounted


def encoder(*, is_padded: bool) -> Step:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    data, mask = torch.randn(2, 4, 8), torch.tensor([[False] * 4, [False, False, True, True]])

    def loss(head: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            out = model(data, src_key_padding_mask=mask if is_padded else None)
        return head(out).sum()

    return trained(nn.Linear(8, 3), loss)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", RISKY_MODELS)
def test_models_with_risky_ops_have_the_same_flops(name: str) -> None:
    ours = counted(ObservedStep, seeded(RISKY_MODELS[name]))
    sys.setprofile(lambda *_: None)  # under a profiler of Python, the mode is not left at a risky op
    theirs = counted(LiveStep, seeded(RISKY_MODELS[name]))
    sys.setprofile(None)
    assert ours.failure is None
    assert (ours.phases, ours.by_dtype, ours.uncounted) == (theirs.phases, theirs.by_dtype, theirs.uncounted)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("make", [*ORDINARY, lbfgs, *RISKY_MODELS.values()])
def test_no_bit_of_the_training_changes(make: Callable[[], Step]) -> None:
    states = []
    for is_observed in (False, True):
        step = seeded(make)
        for _ in range(5):
            if is_observed:
                assert counted(ObservedStep, step).failure is None
            else:
                step()
        states.append(([each.clone() for each in step.model.parameters()], torch.get_rng_state()))  # type: ignore[attr-defined]
    (weights, random), (observed_weights, observed_random) = states
    assert all(map(torch.equal, weights, observed_weights))
    assert torch.equal(random, observed_random)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_in_inference_counts_what_runs() -> None:
    theirs, ours = (counted(kind, encoder(is_padded=False)) for kind in (LiveStep, ObservedStep))
    assert (ours.failure, ours.phases) == (None, theirs.phases)
    ours = counted(ObservedStep, encoder(is_padded=True))
    tokens = 4 + 2
    layer = tokens * (4 * 2 * 8 * 8 + 2 * 2 * 8 * 16)
    scores = 2 * 2 * 2 * 4 * 4 * 8  # two products for each of two samples: torch pads them for attention
    head = 2 * (2 * 4) * 8 * 3
    assert ours.phases.forward == 2 * (layer + scores) + head
    assert (ours.phases.backward, ours.phases.recompute, ours.uncounted) == (head, 0, ())


def test_a_fused_recurrent_layer_has_the_right_total_and_a_doubt() -> None:
    theirs, ours = (counted(kind, seeded(lstm)) for kind in (LiveStep, ObservedStep))
    assert ours.phases.total == theirs.phases.total
    assert ours.phases.forward == theirs.phases.forward
    assert ours.doubt == FUSED_GRADIENTS


class Linear(torch.autograd.Function):
    """Multiplies with a weight; saves its input, and multiplies again in the backward pass if `again` is set."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, weight: torch.Tensor, again: bool) -> torch.Tensor:
        ctx.save_for_backward(data, weight)
        ctx.again = again
        return (data @ weight).tanh()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        data, weight = ctx.saved_tensors
        if ctx.again:
            gradient = gradient * (1 - (data @ weight).tanh() ** 2)
        return gradient @ weight.T, data.T @ gradient, None


@pytest.mark.parametrize("again", [False, True])
def test_what_a_custom_function_computes_again_is_recomputation(again: bool) -> None:
    def make() -> Step:
        data = torch.randn(6, 6, requires_grad=True)
        return trained(nn.ParameterList([torch.randn(6, 6)]), lambda model: Linear.apply(data, model[0], again).sum())

    theirs, ours = (counted(kind, seeded(make)) for kind in (LiveStep, ObservedStep))
    assert replace(ours, before_calls=0) == theirs
    assert (ours.phases.recompute > 0) == again


def test_checkpointing_in_a_pass_with_a_graph_has_the_right_total_and_a_doubt() -> None:
    def make() -> Step:
        data = torch.randn(4, 6, requires_grad=True)

        def loss(model: nn.Module) -> torch.Tensor:
            [gradient] = torch.autograd.grad(model(data).sum(), data, create_graph=True)
            return gradient.square().sum()

        return trained(Checkpointed(use_reentrant=False), loss)

    theirs, ours = (counted(kind, seeded(make)) for kind in (LiveStep, ObservedStep))
    assert (ours.phases.total, ours.phases.forward) == (theirs.phases.total, theirs.phases.forward)
    assert ours.doubt == PASS_WITH_GRAPH


@pytest.mark.slow
def test_a_pause_is_not_counted() -> None:
    step = seeded(mlp)
    once = counted(ObservedStep, step)
    observed_step = ObservedStep("full")
    step()
    observed_step.set_paused(True)
    step()
    observed_step.set_paused(False)
    step()
    count = observed_step.end()
    assert count.failure is None
    assert count.phases.total == 2 * once.phases.total


def test_an_exception_in_the_step_ends_the_recording() -> None:
    def fail() -> None:
        seeded(mlp)()
        raise ValueError("in the step")

    with pytest.raises(ValueError, match="in the step"):
        counted(ObservedStep, fail)
    assert can_observe() is None


def test_ops_of_a_library_are_counted_by_their_parts_or_reported() -> None:
    @torch.library.custom_op("flopwatch_observed::product", mutates_args=())
    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left @ right

    with torch.library._scoped_library("flopwatch_observed", "FRAGMENT") as library:
        library.define("hidden(Tensor x) -> Tensor")
        library.impl("hidden", lambda x: torch.from_numpy(x.numpy() @ x.numpy()), "CPU")
        data = torch.randn(4, 4)
        count = counted(ObservedStep, lambda: product(data, torch.ops.flopwatch_observed.hidden(data)))
    assert count.phases.forward == 2 * 4 * 4 * 4
    assert count.uncounted == ("flopwatch_observed::hidden",)


CPU = [torch.profiler.ProfilerActivity.CPU]


def names_in(profiler: Any) -> list[str]:
    return [event.name for event in profiler.events()]


def in_new_process(test: str) -> None:
    """Run a test of this file in its own process, because an error in torch's profiler may end the process."""
    code = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); import test_observed as t; t.{test}()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Torch 2.13 prints the first for a profiler of the user, and the second if that has ended the recording.
    known = ("USDT:", "no active profiling session found")
    assert [line for line in done.stderr.splitlines() if not any(each in line for each in known)] == []


def user_profiles_before() -> None:
    step = seeded(mlp)
    with torch.profiler.profile(activities=CPU) as theirs:
        count = counted(ObservedStep, step)
    assert count.failure is not None
    assert "aten::addmm" in names_in(theirs)
    assert counted(ObservedStep, step).failure is None, "theirs has ended"
    assert "aten::addmm" in names_in(theirs)


def user_will_profile_again() -> None:
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=2)
    step = seeded(mlp)
    with torch.profiler.profile(activities=CPU, schedule=schedule, acc_events=True) as theirs:
        for _ in range(2):
            assert counted(ObservedStep, step).failure is not None, "it has recorded a step, and waits for the next"
            for _ in range(2):
                theirs.step()
                step()
            theirs.step()
    assert "aten::addmm" in names_in(theirs)


def user_accumulates_events() -> None:
    step = seeded(mlp)
    theirs = torch.profiler.profile(activities=CPU, acc_events=True)
    theirs.start()
    step()
    theirs.stop()
    theirs.start()
    assert counted(ObservedStep, step).failure is not None, "it records again, and keeps its earlier result"
    theirs.stop()
    assert names_in(theirs).count("aten::addmm") == 4


def user_profiles_as_in_old_releases() -> None:
    from torch.autograd import profiler_legacy

    step = seeded(mlp)
    with profiler_legacy.profile() as theirs:
        assert counted(ObservedStep, step).failure is not None
    assert [event.name for event in theirs.function_events].count("aten::addmm") == 2


def user_warms_up_before() -> None:
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    step = seeded(mlp)
    with torch.profiler.profile(activities=CPU, schedule=schedule) as theirs:
        assert counted(ObservedStep, step).failure is not None
        theirs.step()
        assert counted(ObservedStep, step).failure is not None
        theirs.step()
    assert "aten::addmm" in names_in(theirs)


def user_profiles_within() -> None:
    step, found = seeded(mlp), []

    def profiled() -> None:
        step()
        with torch.profiler.profile(activities=CPU) as theirs:
            step()
        step()
        found.extend(names_in(theirs))

    assert counted(ObservedStep, profiled).failure is not None
    assert found.count("aten::addmm") == 2
    assert counted(ObservedStep, step).failure is None


def user_goes_on_profiling() -> None:
    step = seeded(mlp)
    observed_step = ObservedStep("full")
    theirs = torch.profiler.profile(activities=CPU)
    theirs.start()
    step()
    assert observed_step.end().failure is not None
    step()
    theirs.stop()
    assert names_in(theirs).count("aten::addmm") == 4


def user_warms_up_within() -> None:
    step = seeded(mlp)
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    observed_step = ObservedStep("full")
    step()
    theirs = torch.profiler.profile(activities=CPU, schedule=schedule)
    theirs.start()
    step()
    assert observed_step.end().failure is not None
    theirs.step()
    step()
    theirs.step()
    theirs.stop()
    assert names_in(theirs).count("aten::addmm") == 2


def worker_is_forked_within() -> None:
    torch.set_num_threads(1)  # a forked process that runs parallel code waits for threads it does not have
    step = seeded(mlp)
    observed_step = ObservedStep("full")
    step()
    child = os.fork()
    if child == 0:
        with torch.profiler.profile(activities=CPU) as theirs:
            step()
        os._exit(names_in(theirs).count("aten::addmm") != 2)
    assert os.waitpid(child, 0)[1] == 0
    assert observed_step.end().failure is None


ALONE = [
    *("user_profiles_before", "user_will_profile_again", "user_accumulates_events", "user_warms_up_before"),
    *("user_profiles_as_in_old_releases", "user_profiles_within", "user_goes_on_profiling"),
    *("user_warms_up_within", "worker_is_forked_within"),
]


@pytest.mark.slow
@pytest.mark.parametrize("test", ALONE)
def test_the_profile_of_the_user_stays_whole(test: str) -> None:
    in_new_process(test)


@pytest.mark.slow
def test_observing_a_tiny_step_costs_less_than_20_times_the_dispatch_mode() -> None:
    """Print the time of a step: bare, under the dispatch mode, and observed, which is 5 times the mode's here."""
    step = seeded(llama)
    step()
    seconds: dict[str, list[float]] = {"bare": [], "LiveStep": [], "ObservedStep": []}
    for _ in range(9):
        for name, kind in (("bare", None), ("LiveStep", LiveStep), ("ObservedStep", ObservedStep)):
            begin = time.perf_counter()
            step() if kind is None else counted(kind, step)
            seconds[name].append(time.perf_counter() - begin)
    bare, mode, ours = (median(each) for each in seconds.values())
    print(f"\nbare {bare * 1e3:.1f} ms, dispatch mode {mode / bare:.2f} x, profiler {ours / bare:.2f} x")  # noqa: T201
    assert ours < 20 * mode
