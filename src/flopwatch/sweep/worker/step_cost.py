"""Counts the FLOPs of a trainer's step: model FLOPs as in standard training, and the FLOPs that are executed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from flopwatch.errors import FlopwatchError
from flopwatch.flops.count import count_flops
from flopwatch.flops.tracing.counter import CountingMode
from flopwatch.flops.tracing.replica import ModuleStack, undisturbed
from flopwatch.records.flops import FlopCount
from flopwatch.records.trial import StepCost
from flopwatch.sweep.trainers.batch import micro_batches
from flopwatch.sweep.trainers.builtin import StandardTrainer, forward_inputs, own_loss, takes_labels
from flopwatch.sweep.trainers.protocol import Trainer, run_step, step_parts
from flopwatch.sweep.worker.exception_outcome import result_or_error
from flopwatch.text import cut, first_line
from flopwatch.torch_internals.autograd import compiled_original, is_compiled_function
from flopwatch.torch_internals.modules import compiled_call


def count_step(
    trainer: Trainer,
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    size: int | None = None,
    is_alone: bool = True,
) -> StepCost:
    """Count the FLOPs of one step; `supervisor/build_result.py` computes MFU and HFU from them.

    This runs one more real step, except for the standard trainer without micro-batches. After that step torch no longer
    compiles the trainer's model, so call this function after everything else is measured.

    `model` has the same architecture and may be on the meta device; it is not changed. `size` is that of the
    micro-batches, over which hardware FLOPs are summed. A process that is not alone cannot run another step by itself.
    """
    batches = micro_batches(batch, size)
    same = ("model_flops", "hardware_flops", "method", "attention", "coverage", "is_lower_bound", "notes")
    try:
        count = count_plain(model, batch)
        cost = StepCost(**{name: getattr(count, name) for name in same})
    except FlopwatchError as error:
        cost = StepCost(notes=(f"the model's FLOPs could not be counted: {cut(str(error))}",))
    if type(trainer) is StandardTrainer and len(batches) == 1:
        return cost
    cost = replace(cost, hardware_flops=None)
    if not is_alone:
        if type(trainer) is not StandardTrainer or cost.model_flops is None:
            return _noted(cost, "the hardware FLOPs of this trainer are not counted in a trial with several processes")
        return replace(cost, hardware_flops=sum(count_plain(model, part).hardware_flops for part in batches))
    executed, failure = result_or_error(partial(count_executed, trainer, batches))
    if failure is not None:
        return _noted(cost, f"the hardware FLOPs could not be counted: {first_line(failure, 300)}")
    if executed is None:
        return _noted(cost, "the hardware FLOPs are unknown, because the trainer's compiled code hides its ops")
    if executed.hardware_flops == 0:
        return _noted(cost, "the hardware FLOPs are unknown, because none of the trainer's ops could be observed")
    cost = replace(cost, hardware_flops=executed.hardware_flops)
    if ops := ", ".join(sorted({op.op for op in executed.uncounted})):
        cost = _noted(cost, f"the hardware FLOPs are a lower bound, because there is no formula for the ops {ops}")
    return replace(cost, is_lower_bound=cost.is_lower_bound or bool(ops))


def count_executed(trainer: Trainer, batches: Sequence[Mapping[str, Any]]) -> FlopCount | None:
    """The FLOPs of all ops of one step on the micro-batches, including the update; None if compiled code hides ops."""
    names = [*getattr(trainer, "__dict__", ()), *getattr(trainer, "__slots__", ())]
    if any(_is_compiled(getattr(trainer, name, None)) for name in names):
        return None
    mode = CountingMode(ModuleStack(), "full")
    devices = {value.device for value in batches[0].values() if isinstance(value, torch.Tensor)}
    with undisturbed(devices), mode:
        run_step(step_parts(trainer, batches))
    return mode.tally.as_count("step", "full")


def count_plain(model: nn.Module, batch: Mapping[str, Any]) -> FlopCount:
    """The FLOPs of one standard training step of the model, whichever trainer the trial uses."""
    on_meta = any(parameter.device.type == "meta" for parameter in model.parameters())
    tensors = {
        name: value.cpu() if on_meta and isinstance(value, torch.Tensor) else value for name, value in batch.items()
    }
    is_loss_apart = hasattr(model, "per_sample_losses") or ("labels" in batch and not takes_labels(model))
    loss_fn = (lambda output: own_loss(model, output, tensors)) if is_loss_apart else None
    return count_flops(model, forward_inputs(model, tensors), loss_fn=loss_fn)


def _noted(cost: StepCost, note: str) -> StepCost:
    return replace(cost, notes=(*cost.notes, note))


def _is_compiled(value: Any) -> bool:
    """Whether the value comes from `torch.compile(module)`, `module.compile()` or `torch.compile(function)`."""
    if is_compiled_function(value) or compiled_original(value) is not None:
        return True
    if not isinstance(value, nn.Module):
        return False
    return any(compiled_original(module) is not None or compiled_call(module) is not None for module in value.modules())
