"""State in hooks and in torch's own machinery: autograd functions, saved tensors, modes, parametrizations."""

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from testbeds.stateful.doors import STEPS
from testbeds.stateful.loops import rows, sgd, stateful, train
from testbeds.stateful.observed import Kept, called


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        called(self)
        return self.second(self.first(x).tanh()).pow(2).mean()


@stateful
def forward_hooks_that_record(run):
    """A forward hook keeps features and their number; the loss uses them."""
    model, features, shapes = Net(), [], []

    def record(module, args, out):
        features.append(out)
        shapes.append(tuple(out.shape))

    model.first.register_forward_hook(record)

    def loss_of(model, batch):
        loss = model(batch) + 0.1 * torch.cat(features).pow(2).mean()
        features.clear()
        return loss

    return Kept([model], [train(run, model, loss_of)], {"shapes": shapes})


@stateful
def backward_hooks_that_record(run):
    """A full backward hook records norms of gradients and scales them."""
    model, norms = Net(), []

    def scale(module, grad_input, grad_output):
        norms.append(grad_output[0].norm().item())
        return tuple(None if one is None else one / (1 + norms[-1]) for one in grad_input)

    model.second.register_full_backward_hook(scale)
    return Kept([model], [train(run, model)], {"norms": norms})


@stateful
def tensor_hooks(run):
    """Hooks of activations and of parameters collect gradients."""
    model, seen = Net(), {"hidden": [], "weight": []}
    model.second.weight.register_hook(lambda gradient: seen["weight"].append(gradient.norm().item()))

    def loss_of(model, batch):
        hidden = model.first(batch).tanh()
        hidden.register_hook(lambda gradient: seen["hidden"].append(gradient.abs().sum().item()))
        return model.second(hidden).pow(2).mean()

    return Kept([model], [train(run, model, loss_of)], seen)


@stateful
def hooks_of_graph_nodes(run):
    """Pre-hooks of autograd's nodes count."""
    model, counts = Net(), []

    def loss_of(model, batch):
        loss = model(batch)
        loss.grad_fn.register_prehook(lambda gradients: counts.append(len(gradients)))
        return loss

    return Kept([model], [train(run, model, loss_of)], {"counts": counts})


@stateful
def optimizer_in_backward(run):
    """Each parameter has its own optimizer, which steps in a hook of the backward pass."""
    model, steps = Net(), []
    optimizers = {one: torch.optim.Adam([one], lr=1e-3) for one in model.parameters()}

    def step_now(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()
        steps.append(tuple(parameter.shape))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
    run.watch(model)
    for number in range(STEPS):
        batch = rows(number)
        with run.step(batch) as step:
            loss = model(batch)
            loss.backward()
            step.log(loss=loss)
    return Kept([model], list(optimizers.values()), {"steps": steps})


@stateful
def saved_tensors_that_are_packed(run):
    """Saved-tensor hooks count what is packed and unpacked, and pack to numpy."""
    model, counts = Net(), {"packed": 0, "unpacked": 0}

    def pack(tensor):
        counts["packed"] += 1
        return tensor.detach().numpy().copy()

    def unpack(packed):
        counts["unpacked"] += 1
        return torch.from_numpy(packed)

    def loss_of(model, batch):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return model(batch)

    return Kept([model], [train(run, model, loss_of)], counts)


class Straight(torch.autograd.Function):
    """Rounds, and counts in its class."""

    forwards = 0
    backwards: list[float] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx, x):
        Straight.forwards += 1
        ctx.scale = 1 / Straight.forwards
        return x.round(decimals=1)

    @staticmethod
    def backward(ctx, gradient):
        Straight.backwards.append(ctx.scale)
        return gradient * ctx.scale


class Rounds(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x):
        called(self)
        return Straight.apply(self.layer(x)).pow(2).mean()


@stateful
def autograd_function_that_counts(run):
    """A custom autograd function counts in its class, and its gradient depends on the count."""
    model = Rounds()
    optimizer = train(run, model)
    return Kept([model], [optimizer], {"forwards": Straight.forwards, "backwards": Straight.backwards})


@stateful
def hooks_of_all_modules(run):
    """Global module hooks count the calls of every module."""
    from torch.nn.modules import module as of_torch

    names, model = [], Net()
    handles = [
        of_torch.register_module_forward_hook(lambda module, args, out: names.append(type(module).__name__)),
        of_torch.register_module_forward_pre_hook(lambda module, args: names.append("before")),
    ]
    optimizer = train(run, model)
    for handle in handles:
        handle.remove()
    return Kept([model], [optimizer], {"names": names})


@stateful
def hooks_of_the_optimizer(run):
    """Hooks before and after an optimizer's step count, and change its learning rate."""
    model, counts = Net(), [0, 0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def before(optimizer, args, kwargs):
        counts[0] += 1
        optimizer.param_groups[0]["lr"] = 1e-2 / counts[0]

    def after(optimizer, args, kwargs):
        counts[1] += 1

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    train(run, model, optimizer=optimizer)
    hooks = len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)
    return Kept([model], [optimizer], {"counts": counts, "hooks": hooks})


@stateful
def hooks_of_state_dicts(run):
    """Hooks count how often the state of the model and the optimizer is taken."""
    model, taken = Net(), []
    optimizer = sgd(model)
    model._register_state_dict_hook(lambda module, state, prefix, metadata: taken.append("model"))
    optimizer.register_state_dict_pre_hook(lambda optimizer: taken.append("optimizer"))
    train(run, model, optimizer=optimizer)
    return Kept([model], [optimizer], {"taken": list(taken)})


@stateful
def spectral_norm(run):
    """Spectral norm moves its vectors at each use of the weight."""
    model = Net()
    nn.utils.parametrizations.spectral_norm(model.first)
    return Kept([model], [train(run, model)])


class CountsFunctions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class CountsOps(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@stateful
def function_mode_of_the_loop(run):
    """The loop runs its forward passes in a mode that lists torch's functions."""
    model, mode = Net(), CountsFunctions()

    def loss_of(model, batch):
        with mode:
            return model(batch)

    return Kept([model], [train(run, model, loss_of)], {"names": mode.names})


@stateful
def dispatch_mode_of_the_loop(run):
    """The loop runs its forward passes in a dispatch mode that lists ops."""
    model, mode = Net(), CountsOps()

    def loss_of(model, batch):
        with mode:
            return model(batch)

    return Kept([model], [train(run, model, loss_of)], {"names": mode.names})


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.runs = 0

    def block(self, x):
        self.runs += 1
        return functional.dropout(self.layer(x).tanh(), 0.3)

    def forward(self, x):
        called(self)
        return self.head(checkpoint(self.block, x, use_reentrant=False)).pow(2).mean() / self.runs


@stateful
def checkpointing_that_counts(run):
    """A checkpointed block counts how often it runs, with dropout."""
    model = Recomputed()
    optimizer = train(run, model)
    return Kept([model], [optimizer], {"runs": model.runs})


class Tagged(torch.Tensor):
    """A tensor that counts the torch functions that are called on it, as fastai's and torchvision's do."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Tagged.calls += func.__name__ in ("linear", "mean", "pow", "relu", "tanh")
        return super().__torch_function__(func, types, args, kwargs or {})


@stateful
def tensors_of_a_subclass(run):
    """Batches are tensors of a class that counts the functions on it."""
    model = Net()
    optimizer = train(run, model, batch_of=lambda number: torch.randn(4, 8).as_subclass(Tagged))
    return Kept([model], [optimizer], {"calls": Tagged.calls})
