"""A batch in micro-batches trains as the whole batch does: clipped per sample, summed, noise once."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from flopwatch.errors import UnsupportedError
from flopwatch.models.load import load_model
from flopwatch.sweep.trainers.batch import micro_batches, trial_batch
from flopwatch.sweep.trainers.protocol import TrainerSettings, load_trainer, run_step, step_parts
from flopwatch.sweep.worker.step_cost import count_step

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
ALL = ["standard", "dpsgd", "ghost", "fast"]
ROWS = 7


def model_and_batch(name):
    torch.manual_seed(0)
    model = load_model(name, device="cpu").double()
    batch = trial_batch(model, ROWS, 12, 0, "cpu")
    return model, {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}


def handed_to_the_optimizer(trainer_name, model, batch, size, **options):
    """The gradients AdamW gets in one step."""
    model = copy.deepcopy(model)
    options = {"noise_multiplier": 0.0, "max_grad_norm": 0.05, **options}
    settings = TrainerSettings(ROWS, CPU, options=options, micro_batch_size=size)
    trainer = load_trainer(trainer_name)(model, settings)
    seen = {}
    optimizer = getattr(trainer.optimizer, "original_optimizer", trainer.optimizer)
    take_step = optimizer.step

    def noting_step(*arguments):
        assert not seen, "the weights were changed twice in a step"
        seen.update({name: p.grad.clone() for name, p in model.named_parameters()})
        return take_step(*arguments)

    optimizer.step = noting_step
    run_step(step_parts(trainer, micro_batches(batch, size)))
    return torch.cat([gradient.flatten() for gradient in seen.values()])


@pytest.mark.parametrize(
    "size", [pytest.param(1, marks=pytest.mark.campaign), 3, pytest.param(6, marks=pytest.mark.campaign), 7]
)
@pytest.mark.parametrize("trainer", ALL)
@pytest.mark.parametrize("model_name", ["tiny", "resnet20-gn@8"])
def test_the_gradient_of_micro_batches_is_that_of_the_whole_batch(model_name, trainer, size):
    """Seven samples by three or six leave a last part of one."""
    model, batch = model_and_batch(model_name)
    whole = handed_to_the_optimizer(trainer, model, batch, None)

    assert (handed_to_the_optimizer(trainer, model, batch, size) - whole).norm() < 1e-6 * whole.norm()


def test_the_clipping_bound_bites_in_these_tests():
    model, batch = model_and_batch("tiny")

    assert handed_to_the_optimizer("dpsgd", model, batch, 3).norm() < 0.0501
    assert handed_to_the_optimizer("standard", model, batch, 3).norm() > 0.06


@pytest.mark.parametrize("trainer", ["dpsgd", "ghost", "fast"])
def test_noise_is_added_once_for_each_logical_batch(trainer):
    """Its standard deviation is multiplier x bound / batch: added with every part it would be sqrt(7) times that."""
    model, batch = model_and_batch("tiny")
    silent = handed_to_the_optimizer(trainer, model, batch, 1)
    noise = handed_to_the_optimizer(trainer, model, batch, 1, noise_multiplier=2.0) - silent

    assert float(noise.std()) == pytest.approx(2.0 * 0.05 / ROWS, rel=0.02)


@pytest.mark.parametrize("trainer", ALL)
def test_a_second_step_begins_without_the_first_ones_gradients(trainer):
    model, batch = model_and_batch("tiny")
    settings = TrainerSettings(ROWS, CPU, options={"noise_multiplier": 0.0, "lr": 0.0}, micro_batch_size=3)
    made = load_trainer(trainer)(model, settings)
    optimizer = getattr(made.optimizer, "original_optimizer", made.optimizer)
    sizes = []
    optimizer.register_step_pre_hook(lambda *_: sizes.append(sum(float(p.grad.norm()) for p in model.parameters())))
    for _ in range(3):
        run_step(step_parts(made, micro_batches(batch, 3)))

    assert sizes == pytest.approx([sizes[0]] * 3, rel=1e-9)


@pytest.mark.parametrize("trainer", ALL)
@pytest.mark.parametrize("model_name", ["tiny", pytest.param("resnet20-gn@8", marks=pytest.mark.campaign)])
def test_the_flops_of_a_step_in_parts_are_those_torch_counts_op_by_op(model_name, trainer):
    """Seven samples by four leave three, so no product degenerates and the whole batch's FLOPs are the same."""
    model, batch = model_and_batch(model_name)
    costs, by_torch = [], []
    for size in (None, 4):
        made = load_trainer(trainer)(copy.deepcopy(model), TrainerSettings(ROWS, CPU, micro_batch_size=size))
        run_step(step_parts(made, micro_batches(batch, size)))
        with FlopCounterMode(display=False) as mode:
            run_step(step_parts(made, micro_batches(batch, size)))
        by_torch.append(mode.get_total_flops())
        costs.append(count_step(made, load_model(model_name), batch, size=size))

    if model_name != "tiny":  # torch counts nothing for a CPU's fused attention
        assert [cost.hardware_flops for cost in costs] == by_torch
    assert costs[0].hardware_flops == costs[1].hardware_flops > 0
    assert costs[0].model_flops == costs[1].model_flops > 0


def test_replicas_exchange_gradients_once_for_each_step(tmp_path):
    model, batch = model_and_batch("tiny")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'ranks'}", rank=0, world_size=1)
    try:
        counts, gradients = [], []
        for size in (None, 2):
            replica = DistributedDataParallel(copy.deepcopy(model))
            exchanged = []

            def note(state, bucket, exchanged=exchanged):
                exchanged.append(bucket.index())
                done = torch.futures.Future()
                done.set_result(bucket.buffer())
                return done

            replica.register_comm_hook(None, note)
            made = load_trainer("standard")(replica, TrainerSettings(ROWS, CPU, micro_batch_size=size))
            made.optimizer.zero_grad = lambda: None
            run_step(step_parts(made, micro_batches(batch, size)))
            counts.append(len(exchanged))
            gradients.append(torch.cat([p.grad.flatten() for p in replica.parameters()]))
    finally:
        dist.destroy_process_group()

    assert counts[0] == counts[1] > 0
    assert torch.allclose(*gradients, rtol=1e-9)


def test_a_trainer_that_cannot_keep_gradients_is_told_so():
    class Mine:
        def __init__(self, model, settings): ...
        def forward(self, batch): ...
        def backward(self, loss): ...
        def update(self): ...

    parts = micro_batches({"x": torch.zeros(4, 2)}, 2)
    assert len(step_parts(Mine(nn.Linear(1, 1), None), parts[:1])) == 3
    with pytest.raises(
        UnsupportedError, match=r"Mine cannot use micro-batches, because it has no method accumulate\(\)"
    ):
        step_parts(Mine(nn.Linear(1, 1), None), parts)


def test_what_is_one_for_all_samples_goes_to_every_part():
    batch = {"x": torch.arange(5), "mask": torch.ones(1, 9), "names": list("abcde"), "scale": 2.0}
    first, second = micro_batches(batch, 3)

    assert (first["names"], second["names"]) == (["a", "b", "c"], ["d", "e"])
    assert first["mask"] is second["mask"] is batch["mask"]
    assert (second["x"].tolist(), second["scale"]) == ([3, 4], 2.0)
    with pytest.raises(UnsupportedError, match="lengths has 2 rows for 5 samples"):
        micro_batches({**batch, "lengths": torch.ones(2)}, 3)
