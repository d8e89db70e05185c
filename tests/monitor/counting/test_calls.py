"""Which calls of modules a step makes, and of what kind each is."""

import copy
import io
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from flopwatch.monitor.counting.calls import RootCalls
from flopwatch.monitor.counting.open_step import TrainedModel


@pytest.fixture
def calls():
    calls = RootCalls()
    calls.start()
    yield calls
    calls.stop()


class Named(nn.Module):
    """Takes anything."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, *more, **named):
        return self.layer(x)


def kinds(calls):
    return [kind for kind, _ in calls.take()]


def same(calls, module, first, second):
    """Whether two calls, each with (args, kwargs), are of one kind."""
    for args, kwargs in (first, second):
        module(*args, **kwargs)
    one, other = kinds(calls)
    return one is other


X = torch.zeros(4, 8)


def test_only_the_outermost_calls_are_recorded(calls):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Named())
    model(X)
    model(X)

    assert [kind.name for kind in kinds(calls)] == ["Sequential", "Sequential"]


def test_other_modules_are_recorded_beside_the_model(calls):
    nn.MSELoss()(Named()(X), X)

    assert [(kind.name, kind.has_parameters) for kind in kinds(calls)] == [("Named", True), ("MSELoss", False)]


def test_calls_with_other_sizes_are_of_another_kind_and_of_one_family(calls):
    model = Named()
    model(X)
    model(torch.zeros(5, 8))
    one, other = kinds(calls)

    assert one is not other
    assert (one.sizes, other.sizes) == ((4, 8), (5, 8))
    assert one.family == other.family


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (((X, True), {}), ((X, False), {})),
        (((X, None), {}), ((X, X), {})),
        (((X,), {"mask": X}), ((X,), {"other": X})),
        (((X, X.long()), {}), ((X, X.int()), {})),
        (((X, [X]), {}), ((X, [X, X]), {})),
        (((X, {"a": X}), {}), ((X, {"b": X}), {})),
        (((X, SimpleNamespace(a=X)), {}), ((X, SimpleNamespace(a=torch.zeros(3))), {})),
        (((X,), {}), ((X.clone().requires_grad_(),), {})),
    ],
    ids=["flag", "none", "name", "dtype", "list", "key", "object", "gradient"],
)
def test_flags_types_structure_and_gradients_make_another_kind(calls, first, second):
    assert not same(calls, Named(), first, second)


def test_numbers_make_another_kind_once_counts_have_shown_that_they_matter(calls):
    calls.kinds.reads_numbers = True

    assert not same(calls, Named(), ((X, 3), {}), ((X, 4), {}))


def test_grad_mode_training_mode_and_autocast_make_another_kind(calls):
    model = Named()
    model(X)
    with torch.no_grad():
        model(X)
    model.eval()(X)
    model.train()
    with torch.autocast("cpu", torch.bfloat16):
        model(X)

    assert len(set(kinds(calls))) == 4


def test_the_operations_that_autograd_records_in_a_call_are_counted(calls):
    Named()(X).relu()
    ((_, of_the_call),) = calls.take()

    assert of_the_call == 2, "the transposed weight and the product, but not the activation after it"


def test_calls_in_other_threads_and_in_backward_passes_are_not_of_the_step(calls):
    model = Named()
    thread = threading.Thread(target=model, args=(X,))
    thread.start()
    thread.join()
    torch.utils.checkpoint.checkpoint(model, X.clone().requires_grad_(), use_reentrant=False).sum().backward()

    assert len(kinds(calls)) == 1, "the call in the forward pass, and not the one that recomputes it"


def test_nothing_stays_on_the_modules_or_in_torch(calls):
    model = Named()
    model(X)
    calls.stop()

    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not torch_module._global_forward_pre_hooks


class CopiesItself(Named):
    def forward(self, x):
        self.copied, self.saved = [copy.deepcopy(self)], io.BytesIO()
        torch.save(self, self.saved)
        return super().forward(x)


def test_a_module_may_copy_and_save_itself_in_its_own_call(calls):
    model = CopiesItself()
    model(X)
    Named.forward(model.copied[0], X)

    assert len(kinds(calls)) == 2, "the call, and that of the copy's layer"


class Listener:
    def about_to_call(self):
        raise ValueError("of the listener")

    def called(self, *_):
        raise ValueError("of the listener")

    def returned(self, kind):
        raise ValueError("of the listener")


def test_an_error_of_the_listener_does_not_reach_the_training():
    calls = RootCalls(Listener())
    calls.start()
    try:
        Named()(X)
    finally:
        calls.stop()


def test_backward_passes_are_counted_for_four_of_the_parameters():
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6)))
    trained = TrainedModel(model)
    model(X).sum().backward()
    once = trained.backwards
    for _ in range(2):
        model(X).sum().backward()

    assert once == sum((1 << 12) ** part for part in range(4))
    assert trained.backwards == 3 * once
    trained.stop()
    model(X).sum().backward()
    assert trained.backwards == 3 * once
