"""The private names of torch that flopwatch uses: this release has them all, and a missing one gives a clear error."""

import functools

import pytest
import torch

import flopwatch
from flopwatch import torch_internals
from flopwatch.errors import MeasurementError
from flopwatch.flops.tracing import counter


def test_this_release_of_torch_has_every_required_name():
    missing = [name for name, value in vars(torch_internals).items() if isinstance(value, functools.partial)]
    assert missing == []


def test_this_release_of_torch_has_every_optional_name():
    assert torch_internals.flex_attention_op is not None
    assert torch_internals.ENGINE_CODE is not None
    assert isinstance(torch_internals.recorded_operations(), int)
    assert not torch_internals.is_any_autocast_enabled()
    assert {type(op).__name__ for op in (torch_internals.GROUPED_MM, torch_internals.CTC_LOSS)} == {"OpOverloadPacket"}


def test_a_node_says_what_it_has_made():
    loss = (torch.ones(2, 3, requires_grad=True) @ torch.ones(3, 4)).sum()
    [(product, _)] = loss.grad_fn.next_functions
    assert [tuple(part.shape) for part in torch_internals.input_metadata(product)] == [(2, 4)]


def test_a_count_without_a_required_name_says_which_one_is_missing(monkeypatch):
    gone = torch_internals.required(torch, "_gone_since_3_0", "to attribute the backward pass to modules")
    monkeypatch.setattr(counter, "current_autograd_node", gone)
    with pytest.raises(MeasurementError, match=r"_gone_since_3_0.*attribute the backward pass"):
        flopwatch.count_flops(torch.nn.Linear(4, 2), torch.ones(3, 4))


def test_an_op_that_this_release_does_not_have_is_equal_to_no_op():
    assert torch_internals.aten_packet("_no_such_op") not in {torch_internals.GROUPED_MM, torch.ops.aten.mm}
