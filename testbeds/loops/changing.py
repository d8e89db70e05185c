"""Loops in which something changes on the way: sizes, depth, what is trained, the model itself."""

import copy

import peft
import torch
from torch import nn
from torch.nn import functional

from testbeds.loops.audit import STEPS, Audit
from testbeds.loops.models import WIDTH, Block, TinyGPT, cnn, ids, llama, mlp, sgd, text


def length_curriculum(audit: Audit) -> list[nn.Module]:
    """Sequences grow longer on the way."""
    model = llama()
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(STEPS):
        batch = text(2, 4 + 3 * (number // 4))
        with audit.step(batch) as step:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [model]


class Deepening(nn.Module):
    """Uses as many of its blocks as an attribute says."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.depth = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[: self.depth]:
            x = block(x)
        return x


def depth_curriculum(audit: Audit) -> list[nn.Module]:
    """`model.depth = 3` in the middle of the run."""
    model = Deepening()
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(STEPS):
        if number == 5:
            model.depth = 3
        x = torch.randn(2, 5, WIDTH)
        with audit.step(x):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [model]


def progressive_resizing(audit: Audit) -> list[nn.Module]:
    """Images grow larger on the way."""
    model = cnn()
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(STEPS):
        size = 6 + 4 * (number // 4)
        x, y = torch.randn(2, 3, size, size), torch.randint(0, 5, (2,))
        with audit.step((x, y)) as step:
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [model]


def unfreezing(audit: Audit) -> list[nn.Module]:
    """Only the head is trained at first, then everything."""
    model = TinyGPT()
    optimizer = sgd(model)
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    audit.watch(model)
    for number in range(STEPS):
        if number == 5:
            model.requires_grad_(True)
        x, y = ids(2, 6), ids(2, 6)
        with audit.step((x, y)) as step:
            _, loss = model(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [model]


def lora(audit: Audit) -> list[nn.Module]:
    """LoRA adapters of peft on a frozen model."""
    adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model = peft.get_peft_model(llama(), adapters)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad])
    audit.watch(model)
    for number in range(STEPS):
        batch = text(2, 5 + number % 2)
        with audit.step(batch) as step:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [model]


def lora_merged_on_the_way(audit: Audit) -> list[nn.Module]:
    """Adapters are merged into the weights in the middle of the run, and everything is trained from there on."""
    adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model = peft.get_peft_model(llama(), adapters)
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(STEPS):
        if number == 6:
            model = model.merge_and_unload().requires_grad_(True)
            optimizer = sgd(model)
            audit.monitor.set_model(model)
        batch = text(2, 5)
        with audit.step(batch):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [model]


def swapped_model(audit: Audit) -> list[nn.Module]:
    """A larger model takes over by `monitor.set_model`."""
    model = mlp(WIDTH, 8, 4)
    audit.watch(model)
    optimizer = sgd(model)
    for number in range(STEPS):
        if number == 5:
            model = mlp(WIDTH, 32, 4)
            optimizer = sgd(model)
            audit.monitor.set_model(model)
        x = torch.randn(6, WIDTH)
        with audit.step(x):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [model]


def swapped_without_a_word(audit: Audit) -> list[nn.Module]:
    """Another model is trained from the middle on, without `monitor.set_model`."""
    first = model = mlp(WIDTH, 8, 4)
    audit.watch(model)
    optimizer = sgd(model)
    for number in range(STEPS):
        if number == 5:
            model = mlp(WIDTH, 32, 4)
            optimizer = sgd(model)
        x = torch.randn(6, WIDTH)
        with audit.step(x):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [first, model]


def grown_layer(audit: Audit) -> list[nn.Module]:
    """A layer is replaced by a wider one in the middle of the run."""
    model = mlp(WIDTH, 8, 4)
    audit.watch(model)
    optimizer = sgd(model)
    for number in range(STEPS):
        if number == 5:
            model[0], model[2] = nn.Linear(WIDTH, 20), nn.Linear(20, 4)
            optimizer = sgd(model)
        x = torch.randn(6, WIDTH)
        with audit.step(x):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [model]


def mixture_of_shapes(audit: Audit) -> list[nn.Module]:
    """Another batch size and another length on every step."""
    model = llama()
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(STEPS):
        batch = text(1 + number % 3, 4 + number)
        with audit.step(batch) as step:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [model]


def dynamic_padding(audit: Audit) -> list[nn.Module]:
    """Rows of different lengths, padded to the longest of each batch."""
    model = llama()
    optimizer = sgd(model)
    audit.watch(model)
    for _ in range(STEPS):
        lengths = torch.randint(3, 10, (3,)).tolist()
        batch = text(3, max(lengths))
        for row, length in enumerate(lengths):
            batch["attention_mask"][row, length:] = 0
            batch["labels"][row, length:] = -100
        with audit.step(batch) as step:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [model]


class Tasks(nn.Module):
    """A shared body and a head for each task, chosen by name."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(WIDTH, 12, 6)
        self.heads = nn.ModuleDict({"colour": nn.Linear(6, 3), "shape": mlp(6, 20, 7)})

    def forward(self, x: torch.Tensor, task: str) -> torch.Tensor:
        return self.heads[task](self.body(x))


def several_tasks(audit: Audit) -> list[nn.Module]:
    """The name of the task is in the batch, and decides which head runs."""
    model = Tasks()
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(STEPS):
        batch = {"x": torch.randn(5, WIDTH), "task": ("colour", "shape", "shape")[number % 3]}
        with audit.step(batch) as step:
            loss = model(**batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [model]


class Repeating(nn.Module):
    """Runs its layer as often as the batch says, and another where a context is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None, times: int = 1) -> torch.Tensor:
        for _ in range(times):
            x = self.layer(x)
        return x if context is None else x + self.other(x * context).sum()


def number_in_the_batch(audit: Audit) -> list[nn.Module]:
    """A number in the batch says how often a layer runs."""
    model = Repeating()
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(STEPS):
        batch = {"x": torch.randn(4, WIDTH), "times": 1 + number % 3}
        with audit.step(batch):
            model(**batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [model]


def target_that_could_be_an_argument(audit: Audit) -> list[nn.Module]:
    """`for x, y in loader` with a model that could take `y`, and is not given it."""
    model = Repeating()
    optimizer = sgd(model)
    audit.watch(model)
    for _ in range(STEPS):
        x, y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
        with audit.step((x, y)):
            functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [model]


class Dropping(nn.Module):
    """Layers are left out at random."""

    def __init__(self, *, by_sample: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.by_sample = by_sample

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.by_sample:  # what is dropped is computed and thrown away
                keeps = (torch.rand(len(x), 1) < 0.7).to(x.dtype)
                x = x + keeps * layer(x)
            elif torch.rand(()) < 0.7:
                x = x + layer(x).tanh()
        return x + 0 * sum(weight.sum() for weight in self.parameters())


def _dropping(audit: Audit, *, by_sample: bool) -> list[nn.Module]:
    model = Dropping(by_sample=by_sample)
    optimizer = sgd(model)
    audit.watch(model)
    for _ in range(STEPS):
        x = torch.randn(5, WIDTH)
        with audit.step(x):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [model]


def layer_drop(audit: Audit) -> list[nn.Module]:
    """Layer drop: whole layers are left out by chance."""
    return _dropping(audit, by_sample=False)


def stochastic_depth(audit: Audit) -> list[nn.Module]:
    """Stochastic depth by sample, as timm does it: everything is computed, some is thrown away."""
    return _dropping(audit, by_sample=True)


class DrawnSize(nn.Module):
    """Works on a part of the features whose size is drawn, mostly a small one: as many operations, other products."""

    def __init__(self, *, drops: bool) -> None:
        super().__init__()
        self.body, self.layer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drops = drops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.drops and torch.rand(()) < 0.5:
            x = self.body(x).tanh()
        rows = 2 if torch.rand(()) < 0.7 else len(x)
        return self.layer(x[:rows]).sum() + x.sum() + 0 * self.body.weight.sum()


def _drawn_size(audit: Audit, *, drops: bool) -> list[nn.Module]:
    model = DrawnSize(drops=drops)
    optimizer = sgd(model)
    audit.watch(model)
    torch.manual_seed(_EQUAL_AT_FIRST)
    for _ in range(STEPS):
        x = torch.randn(5, WIDTH)
        with audit.step(x):
            model(x).square().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [model]


_EQUAL_AT_FIRST = 10
"""The first steps that are counted draw the same size, the steps between them another."""


def drawn_size(audit: Audit) -> list[nn.Module]:
    """The size of a product is drawn: nothing but the product itself shows it."""
    return _drawn_size(audit, drops=False)


def drawn_size_and_layer_drop(audit: Audit) -> list[nn.Module]:
    """A layer is left out by chance, which shows, and a size is drawn, which does not."""
    return _drawn_size(audit, drops=True)


class Experts(nn.Module):
    """A mixture of experts whose every expert takes the tokens that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(mlp(WIDTH, 6, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(x[token]) * weights[token, place, None])
        return out


def mixture_of_experts(audit: Audit) -> list[nn.Module]:
    """Tokens choose their experts: loads change, their sum does not."""
    model = Experts()
    optimizer = sgd(model)
    audit.watch(model)
    for _ in range(STEPS):
        x = torch.randn(9, WIDTH)
        with audit.step(x):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [model]


class EarlyExit(nn.Module):
    """Stops as soon as it is sure enough."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
            if x.detach().abs().mean() > 1.2:
                break
        return x


def early_exit(audit: Audit) -> list[nn.Module]:
    """How many layers run depends on the activations."""
    model = EarlyExit()
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(STEPS):
        x = torch.randn(5, WIDTH) * (0.5 + 0.3 * (number % 4))
        with audit.step(x):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [model]


def frozen_on_even_steps(audit: Audit) -> list[nn.Module]:
    """The body is trained on every second step only."""
    model = mlp(WIDTH, 16, 4)
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(STEPS):
        model[0].requires_grad_(number % 2 == 1)
        x = torch.randn(6, WIDTH)
        with audit.step(x):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [model]


def checkpointing_switched_on(audit: Audit) -> list[nn.Module]:
    """`gradient_checkpointing_enable()` in the middle of the run."""
    model = llama()
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(STEPS):
        if number == 5:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        batch = text(2, 6)
        with audit.step(batch):
            model(**batch, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [model]


def pruned(audit: Audit) -> list[nn.Module]:
    """A copy of the model with fewer blocks goes on, after `monitor.set_model`."""
    model = TinyGPT(blocks=3)
    audit.watch(model)
    optimizer = sgd(model)
    for number in range(STEPS):
        if number == 6:
            model = copy.deepcopy(model)
            del model.blocks[1]
            optimizer = sgd(model)
            audit.monitor.set_model(model)
        x, y = ids(2, 6), ids(2, 6)
        with audit.step((x, y)):
            model(x, y)[1].backward()
            optimizer.step()
            optimizer.zero_grad()
    return [model]
