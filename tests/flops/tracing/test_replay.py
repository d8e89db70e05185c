"""A count in which equal layers are replayed is the count in which every layer runs, in every field."""

import dataclasses
import functools
import random
from types import SimpleNamespace

import peft
import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from flopwatch.flops import methods as by_trace
from flopwatch.flops.fit import fit_flops_law
from flopwatch.flops.methods import count_by_trace
from flopwatch.flops.tracing import repeated, replay
from flopwatch.flops.tracing.replay import ReplayMemory
from flopwatch.flops.tracing.tally import EventLog, Tally
from support.quick import VARIED, for_each
from testbeds.architectures import BY_NAME, causal_batch, text_sizes

pytestmark = pytest.mark.slow

LAYERS = 10
DEEPER = {"num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "depth"}


def counts(model, batch, *, attention="full", training=True, loss_fn=None):
    """The count with replay, made twice because the second trace trusts the first, without it, and the memory."""
    memory = ReplayMemory()
    options = {"attention": attention, "loss_fn": loss_fn, "training": training}
    torch.manual_seed(0)
    first = count_by_trace(model, batch, **options, memory=memory)
    torch.manual_seed(0)
    second = count_by_trace(model, batch, **options, memory=memory)
    torch.manual_seed(0)
    in_full = count_by_trace(model, batch, **options, replay=False)
    return first, second, in_full, memory


def assert_same(model, batch, *, replayed=None, **options):
    first, second, in_full, memory = counts(model, batch, **options)
    for count in (first, second):
        assert count == in_full
        assert list(count.by_module) == list(in_full.by_module)
    if replayed is not None:
        assert bool(memory.proven) == replayed
    return in_full, memory


def deep(config, layers):
    """The same settings with so many layers."""
    changed = {}
    for name, value in config.items():
        if name in DEEPER:
            value = layers
        elif name == "depths":
            value = [1, 2, 8, 1]
        elif name == "layer_types":
            value = [value[0], value[0], value[0], value[1]] * (layers // 4)
        elif name.endswith("config"):
            value = deep(value, layers)
        changed[name] = value
    return changed


ALL_LAYERS_RUN = {"segformer", "gpt_oss"}  # no six equal layers: blocks of different width, four layers of each kind


def built_deep(name):
    architecture = BY_NAME[name]
    return dataclasses.replace(architecture, config=lambda: deep(architecture.config(), layers=8)).build()


@for_each(in_ci=VARIED)
def test_a_replayed_count_is_the_full_one(architecture):
    name = architecture.name
    assert_same(built_deep(name), BY_NAME[name].batch(2, 24), replayed=name not in ALL_LAYERS_RUN)


@pytest.mark.parametrize(
    "name",
    ["gemma3", "t5", *(pytest.param(name, marks=pytest.mark.campaign) for name in ("gpt2", "deepseek_v3", "clip"))],
)
def test_a_replayed_count_of_causal_attention_is_the_full_one(name):
    assert_same(built_deep(name), BY_NAME[name].batch(2, 24), attention="causal", replayed=True)


def llama(**extra):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**text_sizes(**{"num_hidden_layers": LAYERS, **extra}))
    return transformers.LlamaForCausalLM(config).train()


BATCH = causal_batch(2, 16)


def test_few_layers_run(monkeypatch):
    runs = []
    forward = transformers.models.llama.modeling_llama.LlamaDecoderLayer.forward

    def counted(self, *args, **kwargs):
        runs.append(self)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaDecoderLayer, "forward", counted)
    model, memory = llama(), ReplayMemory()
    options = {"attention": "full", "loss_fn": None, "training": True, "memory": memory}

    count_by_trace(model, BATCH, **options)
    assert len(runs) == 4
    count_by_trace(model, causal_batch(3, 24), **options)
    assert len(runs) == 4 + 2


def test_frozen_layers_cost_what_they_cost():
    model = llama()
    for layer in model.model.layers[:4]:
        layer.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    in_full, _ = assert_same(model, BATCH, replayed=True)
    assert in_full.by_module["model.layers.3.mlp.up_proj"].backward == 0


@pytest.mark.parametrize("layers", [pytest.param(None, marks=pytest.mark.campaign), [1, 4]])
def test_adapters_on_all_or_some_layers(layers):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], layers_to_transform=layers)
    model = peft.get_peft_model(llama(), config)
    assert_same(model, BATCH, replayed=True)


@pytest.mark.parametrize(
    ("use_reentrant", "attention"),
    [(False, "full"), (True, "full"), pytest.param(False, "causal", marks=pytest.mark.campaign)],
)
def test_recomputed_layers_are_recomputed(use_reentrant, attention):
    model = llama(attention_dropout=0.1)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    in_full, _ = assert_same(model, BATCH, attention=attention)
    assert in_full.recompute_flops > in_full.forward_flops / 2


def test_the_forward_pass_alone():
    assert_same(llama(), BATCH, training=False, replayed=True)


@pytest.mark.parametrize("wanted", [pytest.param(True, marks=pytest.mark.campaign), [2, 5]])
def test_hidden_states_are_asked_for(wanted):
    in_full, _ = assert_same(
        llama(),
        {**BATCH, "output_hidden_states": wanted},
        loss_fn=lambda out: sum(state.matmul(state.mT).sum() for state in out.hidden_states if state is not None),
    )
    assert in_full.by_op["bmm"].forward > 0


@pytest.mark.campaign
def test_router_logits_are_asked_for():
    config = transformers.Qwen3MoeConfig(
        **text_sizes(
            num_hidden_layers=LAYERS, head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48
        )
    )
    assert_same(transformers.Qwen3MoeForCausalLM(config).train(), {**BATCH, "output_router_logits": True})


def test_a_layer_that_is_called_many_times():
    config = transformers.AlbertConfig(**text_sizes(num_hidden_layers=LAYERS, embedding_size=32))
    assert_same(transformers.AlbertForMaskedLM(config).train(), BATCH)


class Stack(nn.Module):
    """Layers written by hand, called one after the other."""

    def __init__(self, make_layer, count=LAYERS, run=None):
        super().__init__()
        self.head = nn.Linear(8, 8)
        self.layers = nn.ModuleList(make_layer(number) for number in range(count))
        self.run = run

    def forward(self, x):
        x = self.head(x)
        if self.run:
            return self.run(self, x)
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class Layer(nn.Module):
    """A residual block; subclasses do something besides."""

    def __init__(self, layer_idx, **settings):
        super().__init__()
        self.layer_idx = layer_idx
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.__dict__.update(settings)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


INPUT = torch.randn(4, 8)


def test_plain_layers_are_replayed():
    assert_same(Stack(Layer), INPUT, replayed=True)


class EveryThird(Layer):
    def forward(self, x):
        return super().forward(x) if self.layer_idx % 3 == 1 else self.down(self.up(super().forward(x)))


class InList(Layer):
    def forward(self, x):
        return super().forward(super().forward(x)) if self.layer_idx in (3, 4) else super().forward(x)


class LooksUp(Layer):
    def forward(self, x):
        return super().forward(super().forward(x)) if self.config.types[self.layer_idx] else super().forward(x)


class RunsUpTo(Layer):
    def forward(self, x):
        for _ in range(self.layer_idx):
            x = self.down(self.up(x))
        return super().forward(x)


@pytest.mark.parametrize("layer", [EveryThird, InList, RunsUpTo])
def test_layers_that_go_by_their_number_all_run(layer):
    assert_same(Stack(layer), INPUT, replayed=False)


def test_layers_whose_shared_config_has_an_entry_each_are_told_apart():
    config = SimpleNamespace(types=[number in (3, 4) for number in range(LAYERS)])
    assert_same(Stack(functools.partial(LooksUp, config=config)), INPUT, replayed=True)


def test_without_the_guards_a_layer_that_goes_by_its_number_would_be_wrong(monkeypatch):
    """The guards are what keeps the count right: without them the same model is counted wrong."""
    monkeypatch.setattr(repeated, "_watch_indices", lambda kind: None)
    first, _, in_full, _ = counts(Stack(InList), INPUT)
    assert first.model_flops < in_full.model_flops


def test_without_their_entries_in_the_config_layers_would_be_wrong(monkeypatch):
    monkeypatch.setattr(repeated._EntriesPerLayer, "of", lambda *_: ())
    config = SimpleNamespace(types=[number in (3, 4) for number in range(LAYERS)])
    first, _, in_full, _ = counts(Stack(functools.partial(LooksUp, config=config)), INPUT)
    assert first.model_flops < in_full.model_flops


class WritesBuffer(Layer):
    def __init__(self, layer_idx):
        super().__init__(layer_idx)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class KeepsLoss(Layer):
    def forward(self, x):
        self.extra = self.up(x).square().sum()
        return super().forward(x)


class TossesCoin(Layer):
    def forward(self, x):
        return super().forward(x) if torch.rand(()) < 0.5 else x


class TossesPythonCoin(Layer):
    def forward(self, x):
        return super().forward(x) if random.random() < 0.5 else x


class CountsInSharedState(Layer):
    state = SimpleNamespace(calls=0)

    def __init__(self, layer_idx):
        super().__init__(layer_idx, shared=self.state)

    def forward(self, x):
        self.shared.calls += 1
        return super().forward(super().forward(x)) if self.shared.calls % 5 == 0 else super().forward(x)


def with_kept_losses(stack, x):
    for layer in stack.layers:
        x = layer(x)
    return x.sum() + sum(layer.extra for layer in stack.layers)


@pytest.mark.parametrize(
    ("layer", "run"),
    [(WritesBuffer, None), (KeepsLoss, with_kept_losses), (TossesCoin, None), (TossesPythonCoin, None)],
)
def test_layers_that_do_more_than_map_inputs_to_outputs_all_run(layer, run):
    assert_same(Stack(layer, run=run), INPUT, replayed=False)


def test_layers_that_go_by_a_state_they_share_all_run():
    def run(stack, x):
        CountsInSharedState.state.calls = 0
        for layer in stack.layers:
            x = layer(x)
        return x.sum()

    assert_same(Stack(CountsInSharedState, run=run), INPUT, replayed=False)


def test_masks_made_anew_for_each_layer():
    class Masked(Layer):
        def forward(self, x, keep):
            return super().forward(x) + self.down(self.up(x[keep])).sum()

    def run(stack, x):
        for number, layer in enumerate(stack.layers):
            x = layer(x, torch.arange(len(x)) < (2 if number in (4, 5) else 3))
        return x.sum()

    assert_same(Stack(Masked, run=run), INPUT)


def test_a_hook_set_on_a_layer_in_the_forward_pass_fires():
    def run(stack, x):
        hook = stack.layers[4].register_forward_hook(lambda layer, _, out: layer.down(layer.up(out)))
        for layer in stack.layers:
            x = layer(x)
        hook.remove()
        return x.sum()

    assert_same(Stack(Layer, run=run), INPUT)


def test_losses_that_leave_a_layer_through_a_list_are_noticed():
    outside = []

    class Appends(Layer):
        def forward(self, x):
            outside.append(self.up(x).square().sum())
            return super().forward(x)

    def run(stack, x):
        outside.clear()
        for layer in stack.layers:
            x = layer(x)
        return x.sum() + sum(outside)

    assert_same(Stack(Appends, run=run), INPUT)


def test_a_list_that_is_passed_along_is_noticed():
    class Appends(Layer):
        def forward(self, x, states):
            states.append(self.up(x))
            return super().forward(x)

    def run(stack, x):
        states = []
        for layer in stack.layers:
            x = layer(x, states)
        return x.sum() + sum((state @ state.T).sum() for state in states)

    assert_same(Stack(Appends, run=run), INPUT, replayed=False)


class ReturnsLoss(Layer):
    def forward(self, x):
        return super().forward(x), self.up(x).square().sum()


def test_layers_that_return_a_loss_of_their_own():
    def run(stack, x):
        losses = []
        for layer in stack.layers:
            x, loss = layer(x)
            losses.append(loss)
        return x.sum() + sum(losses)

    assert_same(Stack(ReturnsLoss, run=run), INPUT, replayed=True)


def test_losses_that_count_for_some_layers_only():
    def run(stack, x):
        total = 0
        for number, layer in enumerate(stack.layers):
            x, loss = layer(x)
            total = total + (loss if number in (0, 4, 5, 6) else 0)
        return x.sum() + total

    assert_same(Stack(ReturnsLoss, run=run), INPUT)


def test_an_input_that_no_layer_uses_gets_no_gradient():
    class Ignores(Layer):
        def forward(self, x, other):
            return super().forward(x)

    def run(stack, x):
        other = stack.head(x)
        for layer in stack.layers:
            x = layer(x, other)
        return x.sum()

    in_full, _ = assert_same(Stack(Ignores, run=run), INPUT, replayed=True)
    assert in_full.by_module["head"].backward == 2 * 4 * 8 * 8  # the first call's weight, not the second's


def test_a_gradient_taken_inside_the_forward_pass():
    def run(stack, x):
        start = x.detach().requires_grad_()
        x = start
        for layer in stack.layers:
            x = layer(x)
        (slope,) = torch.autograd.grad(x.sum(), start, create_graph=True)
        return x.sum() + slope.square().sum()

    assert_same(Stack(Layer, run=run), INPUT, replayed=False)


@pytest.mark.parametrize("span", [1, 2, 3])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_layers_recomputed_in_groups(span, use_reentrant):
    def run(stack, x):
        for first in range(0, LAYERS, span):
            group = nn.Sequential(*stack.layers[first : first + span])
            x = checkpoint(group, x, use_reentrant=use_reentrant)
        return x.sum()

    in_full, _ = assert_same(Stack(Layer, run=run), INPUT)
    assert in_full.recompute_flops > 0


def test_a_layer_that_differs_in_one_setting_only():
    class Repeats(Layer):
        def forward(self, x):
            for _ in range(self.times):
                x = super().forward(x)
            return x

    assert_same(Stack(lambda number: Repeats(number, times=2 if number == 7 else 1)), INPUT, replayed=True)


def test_layers_that_work_in_place():
    class InPlace(Layer):
        def forward(self, x):
            return x.add_(self.down(self.up(x.clone())))

    def run(stack, x):
        for layer in stack.layers:
            x = layer(x.clone())
        return x.sum()

    assert_same(Stack(InPlace, run=run), INPUT, replayed=False)


def test_layers_with_batch_norm():
    def block(_):
        return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())

    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(*map(block, range(LAYERS))))
    assert_same(model, torch.randn(2, 3, 8, 8), replayed=True)


def test_an_error_of_the_model_is_told_as_without_replay():
    def run(stack, x):
        for layer in stack.layers:
            x = layer(x)
        return x @ x

    messages = []
    for options in ({"memory": ReplayMemory()}, {"replay": False}):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            count_by_trace(Stack(Layer, run=run), INPUT, attention="full", loss_fn=None, training=True, **options)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_the_log_takes_all_that_a_tally_takes():
    """A method that a tally has and the log does not would count into the log's own sums, which nobody reads."""
    takes = {name for name, value in vars(Tally).items() if callable(value) and not name.startswith("_")}
    assert takes - {"as_count"} <= set(vars(EventLog))


def test_the_live_model_keeps_its_numbers():
    model = llama()
    count_by_trace(model, BATCH, attention="full", loss_fn=None, training=True)
    assert all(type(layer.self_attn.layer_idx) is int for layer in model.model.layers)


def test_random_layers_are_left_where_the_coins_put_them():
    """Layer drop in the model's loop: the same coins with and without replay."""

    def run(stack, x):
        for layer in stack.layers:
            if torch.rand(()) < 0.5:
                x = layer(x)
        return x.sum()

    assert_same(Stack(Layer, run=run), INPUT)


def test_replay_is_refused_once_per_model(monkeypatch):
    """After a refusal the model is traced in full at once."""
    monkeypatch.setattr(replay.Replay, "_prove", lambda *_: (_ for _ in ()).throw(replay.ReplayRefusedError("no")))
    _, _, _, memory = counts(llama(), BATCH)
    assert memory.is_refused


def test_a_law_looks_for_equal_layers_once_and_never_traces_in_full(monkeypatch):
    """One of its probes fails in the loss (labels shorter than the ids), which takes no trace in full to believe."""
    searches = []
    search = replay.equal_layers
    monkeypatch.setattr(replay, "equal_layers", lambda replica: searches.append(replica) or search(replica))
    in_full = count_by_trace(llama(), BATCH, attention="full", loss_fn=None, training=True, replay=False)
    monkeypatch.setattr(by_trace._Trace, "_in_full", lambda self: pytest.fail("traced in full"))
    law = fit_flops_law(llama(), BATCH)
    assert law.exact
    assert law.model_flops(*BATCH["input_ids"].shape) == in_full.model_flops
    assert len(searches) == 1


def test_an_error_in_unproven_layers_is_asked_of_a_full_trace(monkeypatch):
    def run(stack, x):
        for layer in stack.layers:
            x = layer(x)
        return x @ x

    asked = []
    monkeypatch.setattr(by_trace._Trace, "_in_full", lambda self: asked.append(self))
    model = Stack(Layer, run=run)
    with by_trace.unchanged(model):
        count_by_trace(model, INPUT, attention="full", loss_fn=None, training=True)
    assert asked


def test_layers_that_were_changed_all_the_same_are_looked_for_anew():
    """The first layer gets another matrix while nobody should change the model."""
    model, options = llama(), {"attention": "full", "loss_fn": None, "training": True}
    with by_trace.unchanged(model):
        before = count_by_trace(model, BATCH, **options)
        model.model.layers[0].mlp.act_fn = nn.Sequential(nn.Linear(*[model.config.intermediate_size] * 2))
        after = count_by_trace(model, BATCH, **options)
    assert after == count_by_trace(model, BATCH, **options, replay=False)
    assert after != before


def test_an_entry_per_layer_that_was_changed_all_the_same_is_noticed():
    """Of a layer in the middle, which does not run a second time."""
    config = SimpleNamespace(types=[False] * LAYERS)
    model, options = Stack(functools.partial(LooksUp, config=config)), {"attention": "full", "loss_fn": None}
    with by_trace.unchanged(model):
        before = count_by_trace(model, INPUT, training=True, **options)
        config.types[LAYERS // 2] = True
        after = count_by_trace(model, INPUT, training=True, **options)
    assert after == count_by_trace(model, INPUT, training=True, **options, replay=False)
    assert after != before
