"""The check of torch's private names calls no code of the training, and no code of the training decides it."""

import pytest
import torch
from torch.nn.modules import module as torch_module

from flopwatch.torch_internals import why_not_countable
from flopwatch.torch_internals.autograd import engine_code
from flopwatch.torch_internals.modules import hook_tables

KINDS = ("parameter", "buffer", "module")


def looked_anew():
    """All that is looked for once per process, without what was found before."""
    return why_not_countable.__wrapped__(), hook_tables.__wrapped__(), engine_code.__wrapped__()


def test_a_backward_that_the_training_has_replaced_is_not_called(monkeypatch):
    before = looked_anew()

    def backward(self, retain_graph=False):
        pytest.fail("called")

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    assert looked_anew() == before
    assert before[0] is None
    assert before[2] is not None


def test_hooks_for_what_all_modules_register_are_not_called():
    before, called = looked_anew(), []
    register = [getattr(torch_module, f"register_module_{kind}_registration_hook") for kind in KINDS]
    handles = [each(lambda *args: called.append(args)) for each in register]
    try:
        assert looked_anew() == before
        assert called == []
    finally:
        for handle in handles:
            handle.remove()
