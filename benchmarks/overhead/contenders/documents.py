"""The method of the documents flopwatch was built from, as they state it: torch's profiler, every so many steps.

One change: `activities=[CUDA]` is refused on a machine without CUDA, so the CPU's activities are recorded.
"""

from typing import Any

import torch
from torch import nn

from overhead.training_loop import Contender, Training

PEAK_FLOPS_PER_SECOND = 1e12
"""Stands in for `get_gpu_peak_flops()`, a table lookup."""


def documents(training: Training, every: int) -> Contender:
    size = training.size

    def step(number: int) -> None:
        training.step()
        if number % every == 0:
            calculate_mfu_with_profiler(training.model, size.batch_size, size.seq_len, step_time=0.1)

    return Contender(step)


def calculate_mfu_with_profiler(model: nn.Module, batch_size: int, seq_length: int, step_time: float) -> float:
    actual_flops = _measure_flops_with_profiler(model, batch_size, seq_length)
    actual_flops_per_second = actual_flops / step_time
    return min(actual_flops_per_second / PEAK_FLOPS_PER_SECOND, 1.0)


def _measure_flops_with_profiler(model: nn.Module, batch_size: int, seq_length: int) -> float:
    device = next(model.parameters()).device
    dummy_batch = _create_dummy_batch_for_profiling(batch_size, seq_length, device)
    model.eval()  # and never back to train(), as in the documents
    with (
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, with_flops=True, profile_memory=False
        ) as prof,
        torch.no_grad(),
    ):
        model(**dummy_batch)
    return float(sum(event.flops for event in prof.events() if event.flops > 0))


def _create_dummy_batch_for_profiling(batch_size: int, seq_length: int, device: torch.device) -> dict[str, Any]:
    return {"input_ids": torch.zeros(batch_size, seq_length, dtype=torch.long, device=device)}
