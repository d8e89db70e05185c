"""The short way for common ops gives fake tensors what torch gives real ones: shape, strides, type, shared storage."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from flopwatch.flops.tracing import fakes
from flopwatch.flops.tracing import fakes as quick_fakes
from flopwatch.flops.tracing.fakes import Faker

aten = torch.ops.aten
PLAIN = torch.randn(2, 5, 6)
TURNED = torch.randn(2, 6, 5).transpose(1, 2)
ROW, COLUMN, NUMBER = torch.randn(6), torch.randn(5, 1), torch.tensor(2.0)
SQUARE, WIDE = torch.randn(5, 5), torch.randn(5, 7)
HALF = PLAIN.to(torch.bfloat16)
ONE_OP = [
    (aten.view.default, (PLAIN, [10, 6])),
    (aten.view.default, (PLAIN, [2, -1])),
    (aten.view.default, (TURNED, [1, 2, 5, 3, 2])),
    (aten.view.default, (torch.randn(1, 1, 4), [4])),
    (aten._unsafe_view.default, (PLAIN, [2, 30])),
    (aten.alias.default, (TURNED,)),
    (aten.clone.default, (TURNED,)),
    (aten.detach.default, (TURNED,)),
    (aten.expand.default, (COLUMN, [3, 5, 4])),
    (aten.mm.default, (SQUARE, WIDE)),
    (aten.mm.default, (SQUARE.t(), WIDE)),
    *((aten.addmm.default, (bias, SQUARE, WIDE)) for bias in (torch.randn(7), torch.randn(5, 7), torch.randn(5, 1))),
    (aten.addmm.default, (torch.randn(5), SQUARE, SQUARE.t())),
    (aten.bmm.default, (PLAIN, TURNED.transpose(1, 2))),
    (aten.permute.default, (PLAIN, [2, 0, 1])),
    (aten.select.int, (PLAIN, 1, -1)),
    (aten.slice.Tensor, (PLAIN, 2, 1, 5, 2)),
    (aten.t.default, (WIDE,)),
    (aten.transpose.int, (PLAIN, -1, 0)),
    (aten.unsqueeze.default, (TURNED, -1)),
    (aten._to_copy.default, (TURNED,)),
    *((op, (tensor,)) for op in (aten.neg.default, aten.silu.default, aten.rsqrt.default) for tensor in (PLAIN, HALF)),
    *((op, (one, other)) for op in (aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor)
      for one, other in ((PLAIN, PLAIN), (PLAIN, ROW), (COLUMN, PLAIN), (ROW, COLUMN), (NUMBER, PLAIN), (PLAIN, NUMBER),
                         (PLAIN, TURNED), (TURNED, PLAIN), (TURNED, TURNED), (TURNED, ROW), (HALF, ROW), (HALF, HALF),
                         (PLAIN, 2), (HALF, 2.5), (HALF, 2j), (HALF, NUMBER), (PLAIN, PLAIN[:, :1]))),
    *((op, (HALF, number)) for op in (aten.mul.Scalar, aten.div.Scalar, aten.pow.Tensor_Scalar)
      for number in (2, 0.5, 1j)),
    *((op, (PLAIN, other)) for op in (aten.tanh_backward.default, aten.gelu_backward.default)
      for other in (PLAIN, TURNED)),
    (aten.threshold_backward.default, (PLAIN, PLAIN, 0)),
]  # fmt: skip


@pytest.mark.parametrize(("op", "args"), ONE_OP, ids=lambda value: str(value) if callable(value) else "")
def test_an_op_gives_a_fake_what_it_gives_a_real_tensor(op, args):
    try:
        real = op(*args)
    except NotImplementedError as error:
        pytest.skip(f"this torch has no kernel for the type of the result: {error}")  # bfloat16 x 1j since 2.14
    fake = run_on_fakes(op, args)
    assert isinstance(fake, FakeTensor)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    assert fake.device.type == "cpu"


@pytest.mark.parametrize("tensor", [PLAIN, HALF])
@pytest.mark.parametrize("mask", [[True, True, True], [False, True, False]])
def test_layer_norm_and_its_statistics(tensor, mask):
    weight = ROW.to(tensor.dtype)
    real = aten.native_layer_norm.default(tensor, [6], weight, weight, 1e-5)
    fake = run_on_fakes(aten.native_layer_norm.default, (tensor, [6], weight, weight, 1e-5))
    assert [laid_out(each) for each in fake] == [laid_out(each) for each in real]
    args = (tensor, tensor, [6], *real[1:], weight, weight, mask)
    real = aten.native_layer_norm_backward.default(*args)
    fake = run_on_fakes(aten.native_layer_norm_backward.default, args)
    assert [each is None for each in fake] == [not wanted for wanted in mask]
    assert [laid_out(one) for one in fake if one is not None] == [laid_out(one) for one in real if one is not None]


@pytest.mark.parametrize("weight", [None, ROW.abs()])
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_the_loss_of_class_scores_with_real_targets(reduction, weight):
    scores, target = PLAIN[0], torch.tensor([1, 2, -100, 4, 5])
    faker = Faker()
    fake_scores, fake_weight = like(faker, scores), None if weight is None else like(faker, weight)
    real = aten.nll_loss_forward.default(scores, target, weight, reduction, -100)
    fake = faker.execute(aten.nll_loss_forward.default, (fake_scores, target, fake_weight, reduction, -100), {})
    assert [laid_out(each) for each in fake] == [laid_out(each) for each in real]
    backward = aten.nll_loss_backward.default
    wanted = backward(real[0], scores, target, weight, reduction, -100, real[1])
    got = faker.execute(backward, (fake[0], fake_scores, target, fake_weight, reduction, -100, fake[1]), {})
    assert laid_out(got) == laid_out(wanted)


@pytest.mark.parametrize("options", [{"dtype": torch.float16}, {"device": torch.device("cpu")}, {"non_blocking": True},
                                     {"memory_format": torch.contiguous_format, "dtype": torch.int64}])  # fmt: skip
def test_a_copy_of_another_type_or_layout(options):
    real, fake = aten._to_copy.default(TURNED, **options), run_on_fakes(aten._to_copy.default, (TURNED,), options)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    assert isinstance(fake, FakeTensor)


@pytest.mark.parametrize("op", [aten.alias.default, aten.detach.default, aten.t.default])
def test_a_view_shares_its_storage(op):
    faker = Faker()
    tensor = like(faker, SQUARE)
    view = faker.execute(op, (tensor,), {})
    assert view.untyped_storage()._cdata == tensor.untyped_storage()._cdata


def test_sizes_that_do_not_fit_raise():
    for op, args in ((aten.mm.default, (WIDE, WIDE)), (aten.view.default, (PLAIN, [7])),
                     (aten.addmm.default, (ROW, SQUARE, WIDE)), (aten.addmm.default, (ROW, WIDE, WIDE)),
                     (aten.native_layer_norm.default, (PLAIN, [5], ROW[:5], ROW[:5], 1e-5)),
                     (aten.view.default, (TURNED, [60])), (aten.add.Tensor, (PLAIN, SQUARE))):  # fmt: skip
        with pytest.raises(RuntimeError):
            run_on_fakes(op, args)


def test_common_ops_do_not_take_the_long_way(monkeypatch):
    monkeypatch.setattr(fakes.FakeTensorMode, "dispatch", lambda *_: pytest.fail("the fake mode was asked"))
    for op, args in ((aten.mm.default, (SQUARE, WIDE)), (aten.mul.Tensor, (PLAIN, ROW)), (aten.silu.default, (HALF,))):
        run_on_fakes(op, args)


def test_every_op_on_the_lists_is_tried_here_or_works_like_one_that_is():
    tried = {op for op, _ in ONE_OP}
    alike = {
        op for op in quick_fakes.ELEMENTWISE if len([a for a in op._schema.arguments if "Tensor" in str(a.type)]) == 1
    }
    assert tried >= quick_fakes.SHAPED_BY_TORCH
    assert tried | alike >= quick_fakes.ELEMENTWISE


@pytest.mark.parametrize("op", sorted(quick_fakes.ELEMENTWISE, key=str), ids=str)
def test_elementwise_ops_keep_type_and_shape(op):
    takes = [argument for argument in op._schema.arguments if not argument.kwarg_only]
    args = tuple(HALF if "Tensor" in str(a.type) else 2 for a in takes if not a.has_default_value())
    real = op(*args)
    fake = run_on_fakes(op, args)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def laid_out(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype


def run_on_fakes(op, args, options=None):
    faker = Faker()
    fake_args = tuple(like(faker, value) if isinstance(value, torch.Tensor) else value for value in args)
    return faker.execute(op, fake_args, options or {})


def like(faker, tensor):
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return FakeTensor(faker._mode, empty, torch.device("cpu"))
