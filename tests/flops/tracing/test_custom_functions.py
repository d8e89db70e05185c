"""Products that a custom autograd function computes again are executed, and needed only once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import flopwatch
from flopwatch.flops.tracing.custom_functions import MAY_RUN_AGAIN
from flopwatch.flops.tracing.live import LiveStep

ROWS, WIDTH, WORDS = 6, 8, 10
HEAD = 2 * ROWS * WIDTH * WORDS
"""The product of hidden states and the head's weight, or one of its two gradients."""
LAYER = 2 * ROWS * WIDTH * WIDTH

Phases = tuple[int, int, int]
"""Forward, backward, recomputation."""


def by_count_flops(method: Any) -> Callable[[nn.Module], Phases]:
    def count(model: nn.Module) -> Phases:
        counted = flopwatch.count_flops(model, torch.randn(ROWS, WIDTH), method=method)
        assert not {note for note in counted.notes if "custom autograd function" in note}
        return counted.forward_flops, counted.backward_flops, counted.recompute_flops

    return count


def as_it_runs(model: nn.Module) -> Phases:
    x = torch.randn(ROWS, WIDTH)
    step = LiveStep("full")
    model(x).sum().backward()
    counted = step.end()
    assert counted.failure is None
    assert counted.doubt is None
    return counted.phases.forward, counted.phases.backward, counted.phases.recompute


@pytest.fixture(
    params=[by_count_flops("trace"), by_count_flops("step"), as_it_runs], ids=["trace", "step", "as it runs"]
)
def phases(request: pytest.FixtureRequest) -> Callable[[nn.Module], Phases]:
    counted: Callable[[nn.Module], Phases] = request.param
    return counted


class WithHead(nn.Module):
    """A layer, so that hidden states need a gradient, and a loss of its own on a head's weight."""

    def __init__(self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], words: int = WORDS) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Parameter(torch.randn(words, WIDTH))
        self.loss = loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(self.layer(x), self.head)


def softmax_minus_target(logits: torch.Tensor) -> torch.Tensor:
    """The gradient of a cross entropy whose right answer is always the first word."""
    gradient = logits.float().softmax(-1)
    gradient[:, 0] -= 1
    return gradient


def cross_entropy(logits: torch.Tensor) -> torch.Tensor:
    return logits.logsumexp(-1).sum() - logits[:, 0].sum()


class ChunkedCrossEntropy(torch.autograd.Function):
    """Keeps no logits: the backward pass computes each chunk again, in the type that it is told, in one buffer."""

    CHUNK = 4

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.dtype = dtype
        loss = hidden.new_zeros(())
        buffer = hidden.new_empty((ChunkedCrossEntropy.CHUNK, len(weight)), dtype=dtype)
        for rows in hidden.split(ChunkedCrossEntropy.CHUNK):
            logits = torch.mm(rows.to(dtype), weight.to(dtype).t(), out=buffer[: len(rows)])
            loss += cross_entropy(logits)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        of_hidden, of_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for start in range(0, len(hidden), ChunkedCrossEntropy.CHUNK):
            rows = hidden[start : start + ChunkedCrossEntropy.CHUNK]
            # Another op than in the forward pass, on the same two factors.
            logits = functional.linear(rows.to(ctx.dtype), weight.to(ctx.dtype))
            gradient = softmax_minus_target(logits) * gradients[0]
            of_hidden[start : start + len(rows)] = gradient @ weight
            of_weight.addmm_(gradient.t(), rows)
        return of_hidden, of_weight, None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_chunked_loss_that_computes_its_logits_again_needs_them_once(phases: Any, dtype: torch.dtype) -> None:
    model = WithHead(lambda hidden, weight: ChunkedCrossEntropy.apply(hidden, weight, dtype))

    assert phases(model) == (LAYER + HEAD, LAYER + 2 * HEAD, HEAD)


def test_a_chunked_loss_that_runs_twice_computes_its_logits_again_twice(phases: Any) -> None:
    def twice(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        losses = [ChunkedCrossEntropy.apply(part, weight, torch.float32) for part in (hidden, hidden * 2)]
        return losses[0] + losses[1]

    assert phases(WithHead(twice)) == (LAYER + 2 * HEAD, LAYER + 4 * HEAD, 2 * HEAD)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_chunked_loss_inside_a_checkpoint_runs_three_times(phases: Any, reentrant: bool) -> None:
    def loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return ChunkedCrossEntropy.apply(hidden * 2, weight, torch.float32)

    model = WithHead(lambda hidden, weight: checkpoint(loss, hidden, weight, use_reentrant=reentrant))

    assert phases(model) == (LAYER + HEAD, LAYER + 2 * HEAD, 2 * HEAD)


class GradientInForward(torch.autograd.Function):
    """As Liger does it: the forward pass computes the gradients with the logits at hand, the backward scales them."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        logits = hidden @ weight.t()
        gradient = softmax_minus_target(logits)
        ctx.save_for_backward(gradient @ weight, gradient.t() @ hidden)
        return cross_entropy(logits)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return tuple(gradients[0] * each for each in ctx.saved_tensors)


def test_gradients_that_the_forward_pass_computes_are_needed(phases: Any) -> None:
    assert phases(WithHead(GradientInForward.apply)) == (LAYER + 3 * HEAD, LAYER, 0)


class CheckpointByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        ctx.run = run
        ctx.save_for_backward(*inputs)
        with torch.no_grad():
            return run(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        inputs = [each.detach().requires_grad_() for each in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.run(*inputs)
        return None, *torch.autograd.grad(output, inputs, gradients)


def two_products(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    inner = functional.dropout(torch.relu(hidden @ weight.t()), 0.5)
    return inner @ weight


def test_a_checkpoint_written_by_hand_runs_again_without_calling_a_module(phases: Any) -> None:
    model = WithHead(lambda hidden, weight: CheckpointByHand.apply(two_products, hidden, weight))

    assert phases(model) == (LAYER + 2 * HEAD, LAYER + 4 * HEAD, 2 * HEAD)


def test_what_a_checkpoint_written_by_hand_keeps_may_be_a_copy(phases: Any) -> None:
    class Copying(CheckpointByHand):
        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            inputs = [each.clone().detach().requires_grad_() for each in ctx.saved_tensors]
            with torch.enable_grad():
                output = ctx.run(*inputs)
            return None, *torch.autograd.grad(output, inputs, gradients)

    model = WithHead(lambda hidden, weight: Copying.apply(two_products, hidden, weight))

    assert phases(model) == (LAYER + 2 * HEAD, LAYER + 4 * HEAD, 2 * HEAD)


def saves_nothing_but_inputs(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    ctx.save_for_backward(x, weight)
    return (x @ weight.t()).relu()


class ComputesAgain(torch.autograd.Function):
    forward = staticmethod(saves_nothing_but_inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, weight = ctx.saved_tensors
        gradient = gradients[0] * (x @ weight.t() > 0)
        return gradient @ weight, gradient.t() @ x


class Inherits(ComputesAgain):
    pass


class Decorated(ComputesAgain):
    forward = staticmethod(torch.amp.custom_fwd(saves_nothing_but_inputs, device_type="cuda"))


class SetsUpItsContext(ComputesAgain):
    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x @ weight.t()).relu()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)


@pytest.mark.parametrize("function", [ComputesAgain, Inherits, Decorated, SetsUpItsContext])
def test_a_forward_pass_is_recognised_however_it_is_written(phases: Any, function: Any) -> None:
    model = WithHead(function.apply)
    assert phases(model) == (LAYER + HEAD, LAYER + 2 * HEAD, HEAD)


class TraceOfABA(torch.autograd.Function):
    """tr(ABA): its gradients are (AB + BA)' for A and (AA)' for B.

    AB was multiplied before. BA and AA have the same factors in other roles and are needed.
    """

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return ((a @ b) * a.t()).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        a, b = ctx.saved_tensors
        return gradients[0] * (a @ b + b @ a).t(), gradients[0] * (a @ a).t()


def test_the_same_factors_in_another_role_are_needed(phases: Any) -> None:
    class Matrices(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return TraceOfABA.apply(self.a, self.b) + 0 * x.sum()  # type: ignore[no-any-return]

    product = 2 * WIDTH**3
    assert phases(Matrices()) == (product, 2 * product, product)


class Linear(torch.autograd.Function):
    """Its own double backward: that multiplies the weight as the forward pass did, with another factor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return LinearGradient.apply(gradients[0], *ctx.saved_tensors)


class LinearGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Any:
        ctx.save_for_backward(gradient, x, weight)
        return gradient @ weight, gradient.t() @ x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        gradient, _, weight = ctx.saved_tensors
        return gradients[0] @ weight.t(), None, gradient.t() @ gradients[0]


def test_a_double_backward_of_ones_own_is_needed(phases: Any) -> None:
    def penalty(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        hidden = hidden.detach().requires_grad_()
        (slope,) = torch.autograd.grad(Linear.apply(hidden, weight).square().sum(), hidden, create_graph=True)
        return slope.square().sum()

    forward, backward, recompute = phases(WithHead(penalty))

    # The layer gets no gradient. Forward and two gradients of the head; the loss's backward has four products more:
    # two of the slope's (to its incoming gradient and to the weight), and two of the logits that gradient came from.
    assert forward + backward == LAYER + (1 + 2 + 2 + 2) * HEAD
    assert recompute == 0


class Reversible(torch.autograd.Function):
    """y = x + f(p), and p is not kept but rebuilt: the sum is undone in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        shifted = x + 1
        ctx.save_for_backward(shifted * 2, weight)
        return torch.relu(shifted @ weight.t())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        doubled, weight = ctx.saved_tensors
        shifted = doubled / 2
        gradient = gradients[0] * ((shifted @ weight.t()) > 0)
        return gradient @ weight, gradient.t() @ shifted


@pytest.mark.parametrize("method", ["trace", "step"])
def test_a_factor_that_was_rebuilt_in_another_way_is_told(method: Any) -> None:
    count = flopwatch.count_flops(WithHead(Reversible.apply), torch.randn(ROWS, WIDTH), method=method)

    assert count.recompute_flops == HEAD
    assert MAY_RUN_AGAIN in count.notes


def test_a_step_with_a_factor_that_was_rebuilt_is_told() -> None:
    model, x = WithHead(Reversible.apply), torch.randn(ROWS, WIDTH)
    step = LiveStep("full")
    model(x).sum().backward()

    assert step.end().doubt == MAY_RUN_AGAIN


def test_a_forward_pass_that_goes_over_its_tiles_twice_needs_them_once(phases: Any) -> None:
    """As TRL's chunked divergence does: once for the normaliser, once for the loss."""

    class TwoRounds(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(hidden, weight)
            normaliser = (hidden @ weight.t()).logsumexp(-1, keepdim=True)
            return ((hidden @ weight.t()) - normaliser)[:, 0].sum()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            hidden, weight = ctx.saved_tensors
            gradient = -softmax_minus_target(hidden @ weight.t()) * gradients[0]
            return gradient @ weight, gradient.t() @ hidden

    assert phases(WithHead(TwoRounds.apply)) == (LAYER + HEAD, LAYER + 2 * HEAD, 2 * HEAD)
