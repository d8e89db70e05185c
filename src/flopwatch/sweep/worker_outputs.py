"""What a trial leaves for other tools: TensorBoard scalars and one Kineto trace."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from flopwatch.errors import MissingDependencyError
from flopwatch.optional import require
from flopwatch.sweep.assemble import STEPS
from flopwatch.trial_files import read_lines
from flopwatch.trial_records import Measured, TrialSpec


def write_trace(run_dir: Path, run_step: Callable[[], Any], device: torch.device) -> Path:
    """One step, with shapes and without stacks: a trace with stacks of a few steps has been seen to take 4 GB."""
    run_dir.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities, record_shapes=True) as profiler:
        run_step()
    path = run_dir / "step.pt.trace.json.gz"
    profiler.export_chrome_trace(str(path))
    return path


def write_scalars(run_dir: Path, trial_dir: Path, spec: TrialSpec, measured: Measured) -> None:
    """Step times and memory for TensorBoard; nothing where it is not installed."""
    try:
        writer_class = require("torch.utils.tensorboard", "tensorboard").SummaryWriter
    except MissingDependencyError:
        return
    with writer_class(str(run_dir)) as writer:
        for index, row in enumerate(read_lines(trial_dir / STEPS)):
            writer.add_scalar(f"{row['phase']}/step_seconds", row["seconds"], index)
            writer.add_scalar(f"{row['phase']}/samples_per_s", spec.batch_size / row["seconds"], index)
        for part, peak in measured.memory.by_phase.items():
            writer.add_scalar(f"memory_mib/{part}", peak / 2**20, 0)
        if measured.cost is not None and measured.cost.model_flops is not None:
            writer.add_scalar("flops/model", measured.cost.model_flops, 0)
