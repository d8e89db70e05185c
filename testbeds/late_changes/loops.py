"""Forty trainings that change after step 50, when few steps are still counted as they run.

Each is a function that makes a `Training`; its `loss` is told whether the change has happened.
"""

import os
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Recurrence = Literal["for ever", "two of five", "for a while"]
Logged = Literal["tensor", "number", "nothing"]


def rows() -> torch.Tensor:
    return torch.randn(6, 16)


@dataclass(frozen=True)
class Training:
    """What is trained.

    Attributes:
        model: It.
        loss: Of a batch, and whether the change has happened; None if it has set the gradients itself.
        batch: Makes one.
        with_weights: Other modules that are trained.
    """

    model: nn.Module
    loss: Callable[[Any, bool], torch.Tensor | None]
    batch: Callable[[], Any] = rows
    with_weights: tuple[nn.Module, ...] = ()


@dataclass(frozen=True)
class Loop:
    """A training and how its change comes.

    Attributes:
        make: Makes the training.
        logged: How the loop logs its loss.
        recurrence: Whether the change stays.
    """

    make: Callable[[], Training]
    logged: Logged = "tensor"
    recurrence: Recurrence = "for ever"

    @property
    def name(self) -> str:
        return self.make.__name__

    @property
    def what(self) -> str:
        return (self.make.__doc__ or "").strip().rstrip(".")

    def is_late(self, number: int, change: int) -> bool:
        """Whether the step of this number is one of the changed ones."""
        since = number - change
        if self.recurrence == "two of five":
            return since >= 0 and since % 5 in (0, 1)
        return since >= 0 and (self.recurrence == "for ever" or since < 40)


LOOPS: list[Loop] = []


def late(logged: Logged = "tensor", recurrence: Recurrence = "for ever"):
    """Add the training to the list."""

    def add(make):
        LOOPS.append(Loop(make, logged, recurrence))
        return make

    return add


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


def squares(y: torch.Tensor) -> torch.Tensor:
    return y.pow(2).mean()


# Products outside of the model


@late()
def a_new_loss_term():
    """A second term of the loss multiplies the outputs with each other."""
    model = small()

    def loss(x, is_late):
        y = model(x)
        return squares(y) + (0.1 * squares(y @ y.t()) if is_late else 0)

    return Training(model, loss)


@late("number")
def a_new_loss_term_logged_as_a_number():
    """The same, and the loss is logged by `loss.item()`."""
    return a_new_loss_term()


@late()
def a_bank_without_gradients():
    """Features are multiplied with a bank without gradients, outside of any module."""
    model, bank = small(), torch.randn(8, 64)

    def loss(x, is_late):
        y = model(x)
        with torch.no_grad():
            nearest = (y @ bank).argmax(1) if is_late else 0
        return squares(y) + 0 * torch.as_tensor(nearest).sum()

    return Training(model, loss)


@late("nothing", "two of five")
def a_bank_without_gradients_on_some_steps():
    """The same on two of five steps, and no loss is logged."""
    return a_bank_without_gradients()


@late()
def a_bank_that_grows():
    """From the change on the bank grows with each step."""
    model, bank = small(), [torch.randn(4, 8)]

    def loss(x, is_late):
        y = model(x)
        if is_late:
            bank[0] = torch.cat([y.detach(), bank[0]])
        (y.detach() @ bank[0].t()).max()
        return squares(y)

    return Training(model, loss)


@late("number")
def other_sizes_of_a_product():
    """The loss multiplies with a matrix that becomes wider; the number of operations stays."""
    model, matrices = small(), (torch.randn(8, 16), torch.randn(8, 80))

    def loss(x, is_late):
        return squares(model(x) @ matrices[is_late])

    return Training(model, loss)


@late("nothing")
def products_after_the_backward_pass():
    """After the backward pass gradients are compared by a product."""
    model = small()

    def loss(x, is_late):
        value = squares(model(x))
        value.backward()
        if is_late:
            (model[0].weight.grad @ model[0].weight.grad.t()).norm()

    return Training(model, loss)


@late()
def whitened_inputs():
    """The batch is whitened by products before the model sees it."""
    model = small()

    def loss(x, is_late):
        if is_late:
            x = x @ (x.t() @ x / len(x) + torch.eye(16))
        return squares(model(x))

    return Training(model, loss)


@late("number")
def loss_weights_with_products():
    """Weights of the loss come from a product of prototypes instead of a constant."""
    model, prototypes = small(), torch.randn(6, 24)

    def loss(x, is_late):
        weights = (prototypes @ prototypes.t()).softmax(1)[0] if is_late else torch.full((6,), 1 / 6)
        return (weights * model(x).pow(2).mean(1)).sum()

    return Training(model, loss)


@late()
def other_order_of_factors():
    """Three factors are multiplied in the other order: as many operations, other sizes."""
    model, left, right = small(), torch.randn(8, 40), torch.randn(40, 4)

    def loss(x, is_late):
        y = model(x)
        return squares(y @ (left @ right) if is_late else (y @ left) @ right)

    return Training(model, loss)


@late("number")
def more_negative_samples():
    """A sampled softmax takes more negatives, a number of the loop."""
    model, table = small(), torch.randn(200, 8)

    def loss(x, is_late):
        negatives = table[: 120 if is_late else 20]
        return torch.logsumexp(model(x) @ negatives.t(), 1).mean()

    return Training(model, loss)


# The model's own size


class Slim(nn.Module):
    """A network of which the first `width()` units run."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 8)
        self.width = width

    def forward(self, x):
        width = self.width() if callable(self.width) else self.width
        hidden = functional.linear(x, self.first.weight[:width], self.first.bias[:width]).relu()
        return functional.linear(hidden, self.second.weight[:, :width], self.second.bias)


@late("number")
def width_by_an_attribute():
    """The model's width is an attribute."""
    model = Slim(32)

    def loss(x, is_late):
        model.width = 8 if is_late else 32
        return squares(model(x))

    return Training(model, loss)


@late("tensor", "two of five")
def width_by_an_attribute_on_some_steps():
    """The model's width is another one on two of five steps."""
    return width_by_an_attribute()


_width = 32


@late()
def width_by_a_global():
    """The model's width is a global."""
    model = Slim(lambda: _width)

    def loss(x, is_late):
        global _width
        _width = 12 if is_late else 32
        return squares(model(x))

    return Training(model, loss)


@late("nothing")
def width_by_a_closure():
    """The model's width is a variable of a function."""
    width = 32

    def current():
        return width

    model = Slim(current)

    def loss(x, is_late):
        nonlocal width
        width = 20 if is_late else 32
        return squares(model(x))

    return Training(model, loss)


@late("number")
def width_by_a_class():
    """The model's width is an attribute of another class."""

    class Settings:
        width = 32

    model = Slim(lambda: Settings.width)

    def loss(x, is_late):
        Settings.width = 16 if is_late else 32
        return squares(model(x))

    return Training(model, loss)


_of_context: ContextVar[int] = ContextVar("width", default=32)


@late("nothing")
def width_by_a_context_variable():
    """The model's width is a context variable."""
    model = Slim(_of_context.get)

    def loss(x, is_late):
        _of_context.set(24 if is_late else 32)
        return squares(model(x))

    return Training(model, loss)


@late("number")
def width_by_the_environment():
    """The model's width is an environment variable."""
    model = Slim(lambda: int(os.environ["TESTBED_WIDTH"]))

    def loss(x, is_late):
        os.environ["TESTBED_WIDTH"] = "8" if is_late else "32"
        return squares(model(x))

    return Training(model, loss)


@late()
def sliced_weights_by_functional_call():
    """`functional_call` with slices of the weights."""
    model = small()

    def loss(x, is_late):
        width, of = (8 if is_late else 32), dict(model.named_parameters())
        sliced = {"0.weight": of["0.weight"][:width], "0.bias": of["0.bias"][:width]}
        return squares(functional_call(model, sliced | {"2.weight": of["2.weight"][:, :width]}, (x,)))

    return Training(model, loss)


@late("number")
def a_layer_that_is_replaced():
    """Two layers of the model are replaced by wider ones, as when a network grows."""
    model = small()
    wide = [nn.Linear(16, 48), nn.Linear(48, 8)]
    narrow = [model[0], model[2]]

    def loss(x, is_late):
        model[0], model[2] = wide if is_late else narrow
        return squares(model(x))

    return Training(model, loss, with_weights=tuple(wide))


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.down = nn.ParameterDict({"x": torch.randn(2, 16), "y": torch.randn(12, 16)})
        self.up = nn.ParameterDict({"x": torch.zeros(16, 2), "y": torch.zeros(16, 12)})
        self.active = "x"

    def forward(self, x):
        return self.base(x) + x @ self.down[self.active].t() @ self.up[self.active].t()


@late("tensor", "two of five")
def another_adapter_on_some_steps():
    """Another adapter, of a higher rank, is active on two of five steps."""
    model = Adapted()

    def loss(x, is_late):
        model.active = "y" if is_late else "x"
        return squares(model(x))

    return Training(model, loss)


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.settings = {"stack": [{"depth": 4}]}

    def forward(self, x):
        for layer in self.layers[: self.settings["stack"][0]["depth"]]:
            x = x + layer(x).tanh()
        return x


@late()
def depth_in_a_nested_setting():
    """How many layers run stands deep in a dict of the model."""
    model = Deep()

    def loss(x, is_late):
        model.settings["stack"][0]["depth"] = 2 if is_late else 4
        return squares(model(x))

    return Training(model, loss)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 8)
        self.register_buffer("limit", torch.tensor(32))

    def forward(self, x):
        width = int(self.limit)
        hidden = functional.linear(x, self.first.weight[:width], self.first.bias[:width]).relu()
        return functional.linear(hidden, self.second.weight[:, :width], self.second.bias)


@late("number")
def width_in_a_buffer():
    """The model reads its width out of a buffer."""
    model = Counting()

    def loss(x, is_late):
        model.limit.fill_(8 if is_late else 32)
        return squares(model(x))

    return Training(model, loss)


@late("number")
def another_stride():
    """The stride of a convolution is changed."""
    model = nn.Sequential(nn.Conv1d(1, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool1d(1))

    def loss(x, is_late):
        model[0].stride = (2,) if is_late else (1,)
        return squares(model(x[:, None]))

    return Training(model, loss)


# Sizes of inputs that the batch does not show

CROP = [8]


class Cropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.layer, self.out = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 50)

    def forward(self, ids):
        return self.out(self.layer(self.embedding(ids[:, : CROP[0]])))


def ids() -> torch.Tensor:
    return torch.randint(50, (4, 32))


@late("number")
def crop_by_a_global():
    """A global says how much of each sequence runs, as in a curriculum."""
    model = Cropped()

    def loss(batch, is_late):
        CROP[0] = 16 if is_late else 8
        return squares(model(batch))

    return Training(model, loss, ids)


@late("tensor", "for a while")
def crop_by_a_global_for_a_while():
    """The same for forty steps, then as before."""
    return crop_by_a_global()


class Windowed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.keys = nn.Embedding(50, 16), nn.Linear(16, 48)
        self.window = 32

    def forward(self, ids):
        query, key, value = self.keys(self.embedding(ids)).chunk(3, -1)
        return functional.scaled_dot_product_attention(query, key[:, -self.window :], value[:, -self.window :])


@late("nothing")
def a_shorter_window_of_attention():
    """Attention sees fewer keys, by an attribute."""
    model = Windowed()

    def loss(batch, is_late):
        model.window = 8 if is_late else 32
        return squares(model(batch))

    return Training(model, loss, ids)


class Picks(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.block = nn.Linear(16, 1), nn.Linear(16, 16)
        self.share = 0.5

    def forward(self, x):
        chosen = self.router(x).squeeze(-1).topk(max(1, int(self.share * len(x)))).indices
        return x.index_add(0, chosen, self.block(x[chosen]))


@late()
def fewer_tokens_through_a_block():
    """A smaller share of the tokens goes through a block."""
    model = Picks()

    def loss(x, is_late):
        model.share = 0.2 if is_late else 0.5
        return squares(model(x))

    return Training(model, loss)


@late("number")
def a_part_of_the_batch():
    """The loop passes on a part of the batch it was given."""
    model = small()

    def loss(x, is_late):
        return squares(model(x[:2] if is_late else x))

    return Training(model, loss)


@late("nothing")
def smaller_batches_under_vmap():
    """Gradients of single samples by `vmap(grad)`, and only of a part of the batch."""
    model = small()

    def of_one(weights, x):
        return functional_call(model, weights, (x[None],)).pow(2).mean()

    def loss(x, is_late):
        weights = {name: value.detach() for name, value in model.named_parameters()}
        gradients = vmap(grad(of_one), (None, 0))(weights, x[:3] if is_late else x)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name].mean(0)

    return Training(model, loss)


# Other modules and more passes


@late()
def an_extra_teacher():
    """A teacher joins without gradients."""
    model, teacher = small(), small().requires_grad_(False)

    def loss(x, is_late):
        with torch.no_grad():
            target = teacher(x) if is_late else torch.zeros(6, 8)
        return squares(model(x) - target)

    return Training(model, loss)


@late("number")
def a_wider_teacher():
    """The teacher is replaced by a wider one of the same class."""
    model = small()
    teachers = [nn.Sequential(nn.Linear(16, width), nn.Linear(width, 8)) for width in (8, 64)]

    def loss(x, is_late):
        with torch.no_grad():
            target = teachers[is_late](x)
        return squares(model(x) - target)

    return Training(model, loss)


@late("number")
def a_penalty_of_gradients():
    """A penalty by `autograd.grad` with a double backward pass."""
    model = small()

    def loss(x, is_late):
        value = squares(model(x))
        if not is_late:
            return value
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return value + 0.1 * squares(gradient)

    return Training(model, loss)


@late("nothing", "two of five")
def gradients_of_a_part():
    """`autograd.grad` of the last layer, on two of five steps."""
    model = small()

    def loss(x, is_late):
        value = squares(model(x))
        if is_late:
            torch.autograd.grad(value, model[2].weight, retain_graph=True)
        return value

    return Training(model, loss)


@late("number")
def a_second_pass_at_moved_weights():
    """Sharpness-aware: a second forward and backward pass."""
    model = small()

    def loss(x, is_late):
        if is_late:
            squares(model(x + 0.1)).backward()
            model.zero_grad()
        return squares(model(x))

    return Training(model, loss)


@late("nothing")
def a_forward_derivative():
    """A derivative in one direction by `torch.func.jvp`."""
    model = small()

    def loss(x, is_late):
        if is_late:
            jvp(model, (x,), (torch.ones_like(x),))
        return squares(model(x))

    return Training(model, loss)


@late("tensor", "for a while")
def a_look_at_other_data():
    """The model runs on other data without gradients within the step."""
    model = small()

    def loss(x, is_late):
        if is_late:
            with torch.no_grad():
                model(torch.ones(20, 16))
        return squares(model(x))

    return Training(model, loss)


# The backward pass


@late("number")
def a_frozen_layer():
    """The first layer is frozen."""
    model = small()

    def loss(x, is_late):
        model[0].requires_grad_(not is_late)
        return squares(model(x))

    return Training(model, loss)


_cuts = False


class Cuts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = small()

    def forward(self, x):
        hidden = self.layers[1](self.layers[0](x))
        return self.layers[2](hidden.detach() if _cuts else hidden)


@late()
def a_gradient_that_is_cut():
    """A global cuts the gradient in the middle of the model."""
    model = Cuts()

    def loss(x, is_late):
        global _cuts
        _cuts = is_late
        return squares(model(x))

    return Training(model, loss)


@late("number")
def checkpointing_switched_on():
    """A layer is recomputed in the backward pass."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)))

    def loss(x, is_late):
        hidden = model[0](x)
        return squares(checkpoint(model[1], hidden, use_reentrant=False) if is_late else model[1](hidden))

    return Training(model, loss)


@late()
def products_in_a_tensor_hook():
    """A hook of an activation multiplies its gradient."""
    model = small()

    def loss(x, is_late):
        y = model(x)
        if is_late:
            y.register_hook(lambda gradient: gradient @ torch.eye(8))
        return squares(y)

    return Training(model, loss)


@late("nothing")
def products_in_a_forward_hook():
    """A forward hook of a layer computes a Gram matrix by a flag."""
    model, flags = small(), {"on": False}

    def gram(module, args, out):
        if flags["on"]:
            flags["norm"] = (out.detach().t() @ out.detach()).norm()

    model[0].register_forward_hook(gram)

    def loss(x, is_late):
        flags["on"] = is_late
        return squares(model(x))

    return Training(model, loss)


class Doubles(torch.autograd.Function):
    """Its backward pass multiplies only if the class says so."""

    multiplies = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ torch.eye(8) if Doubles.multiplies else gradient.clone()


@late("number")
def products_in_an_autograd_function():
    """The backward pass of a custom function multiplies, by an attribute of its class."""
    model = small()

    def loss(x, is_late):
        Doubles.multiplies = is_late
        return squares(Doubles.apply(model(x)))

    return Training(model, loss)
