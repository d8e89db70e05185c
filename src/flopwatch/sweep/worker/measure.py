"""Measures a trial in phases (build, steps, memory, FLOPs, privacy, trace), and what of it depends on the device."""

import json
import os
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from flopwatch.clock import monotonic_seconds
from flopwatch.errors import InputError, MissingDependencyError
from flopwatch.files import open_for_lines, read_lines, write_json, write_line
from flopwatch.hardware import matmul_dtype, measure_peak, peak_flops
from flopwatch.hardware.device import find_device
from flopwatch.models.load import load_model
from flopwatch.optional import require
from flopwatch.records.flops import Peak
from flopwatch.records.trial import LABELS, Measured, MemoryUse, TrialSpec
from flopwatch.records.trial_files import MEASURED, STEPS, of_rank, run_folder
from flopwatch.records.what_ran import git_state
from flopwatch.sweep.host.environment import machine
from flopwatch.sweep.host.memory import mapped_data_bytes, resident
from flopwatch.sweep.host.processes import GPUS
from flopwatch.sweep.progress import Heartbeat, when_there_is_space
from flopwatch.sweep.trainers.batch import micro_batches, trial_batch
from flopwatch.sweep.trainers.builtin import enable_checkpointing
from flopwatch.sweep.trainers.privacy import declared_spent
from flopwatch.sweep.trainers.protocol import (
    StepPart,
    Trainer,
    TrainerSettings,
    declared_privacy,
    load_trainer,
    run_step,
    step_parts,
)
from flopwatch.sweep.worker.exception_outcome import message_of, result_or_error, traceback_of
from flopwatch.sweep.worker.rank_group import RankGroup, job_cost, job_memory, slowest_rows
from flopwatch.sweep.worker.step_cost import count_step

PARTS = ("forward", "backward", "optimizer")
CLEAR_REFS = Path("/proc/self/clear_refs")

_MOST_BEFORE_A_TRACE = 0.85
"""A trial whose steps used a larger share of its memory limit records no trace, which may need 10 % more than a step.
"""

_LEAST_RESET_BYTES = 64 << 20
"""A peak at most this far above the present size counts as reset, because the kernel's memory counters may lag."""


class HostLimitError(MemoryError):
    """The trial exceeded its limit of host memory."""


def measure_trial(trial_dir: Path, spec: TrialSpec, heartbeat: Heartbeat) -> None:
    """Run all phases of a trial, and write `measured.json` after each of them.

    In a trial with several processes each process runs all phases, and rank 0 writes the results of all of them.
    """
    trial = _TrialRun(trial_dir, spec, heartbeat)
    trial.build()
    trial.run_steps()
    trial.finish_steps()
    phases: dict[str, Callable[[], None]] = {"memory": trial.measure_memory, "flops": trial.count_flops}
    if spec.privacy:
        phases["privacy"] = trial.account_privacy
    if spec.trace:
        phases["trace"] = trial.record_trace
    for phase, action in phases.items():
        heartbeat.beat(phase)
        trial.attempt(phase, action)
        trial.save()
    if trial.ranks.rank == 0:
        trial.attempt("tensorboard", trial.write_scalars, needs_all_ranks=False)
    trial.save(is_done=True)


class _TrialRun:
    def __init__(self, trial_dir: Path, spec: TrialSpec, heartbeat: Heartbeat) -> None:
        self.trial_dir, self.spec, self._heartbeat, self.ranks = trial_dir, spec, heartbeat, RankGroup(spec)
        self.run_dir = run_folder(trial_dir.parent.parent, trial_dir.name)
        self.device = self.ranks.device(choose_device(spec.device))
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        before = resident("self")
        self.measured = Measured(memory=MemoryUse(baseline_bytes=before.now if before else None))
        self._has_all_steps = False
        self.environment = describe_worker(self.device)
        self.trainer: Trainer
        self.batch: Mapping[str, Any]
        self._batches: list[Mapping[str, Any]]

    def build(self) -> None:
        self._heartbeat.beat("build")
        is_peak_reset = reset_peak(self.device)
        random.seed(self.spec.seed)
        torch.manual_seed(self.spec.seed)
        spec, model = self.spec, _model(self.spec, str(self.device))
        parameters = sum(parameter.numel() for parameter in model.parameters())
        whole = trial_batch(model, spec.batch_size, spec.seq_len, spec.seed, self.device, spec.batch)
        self.batch, size = self.ranks.own_part(whole, spec.batch_size), spec.batch_size // self.ranks.size
        self._batches = micro_batches(self.batch, spec.micro_batch_size)
        settings = TrainerSettings(size, self.device, spec.dtype, spec.options, spec.micro_batch_size)
        self.trainer = load_trainer(self.spec.trainer)(self.ranks.distributed(model, self.device), settings)
        if is_peak_reset:
            self._note_memory("build")
        declared, ids = declared_privacy(self.trainer), whole.get("input_ids")
        positions = {"positions_per_step": float(ids.numel())} if isinstance(ids, torch.Tensor) else {}
        self.measured = replace(self.measured, parameters=parameters, extra=positions, declared_privacy=declared)
        self.save()

    def run_steps(self) -> None:
        own_steps = self.trial_dir / of_rank(STEPS, self.ranks.rank)
        own_steps.unlink(missing_ok=True)
        rows = when_there_is_space(lambda: open_for_lines(own_steps))
        for phase, count in (("warmup", self.spec.warmup_steps), ("measure", self.spec.steps)):
            for step in range(count):
                self._heartbeat.beat(phase, step)
                row = {"phase": phase, "step": step, **timed_step(self._parts(), self.device)}
                self._heartbeat.written(partial(write_line, rows, row))
        os.close(rows)
        if self.ranks.size > 1:
            # Rank 0 writes the step times of the slowest process, which determines how long a step takes.
            slowest = slowest_rows(self.ranks.gathered(list(read_lines(own_steps))))
            if self.ranks.rank == 0:
                text = "".join(json.dumps(row) + "\n" for row in slowest)
                self._heartbeat.written(lambda: own_steps.write_text(text))

    def _parts(self) -> list[StepPart]:
        return step_parts(self.trainer, self._batches)

    def finish_steps(self) -> None:
        """Record that all steps are measured, so that a later failure does not lose the step times and the memory.

        Raises HostLimitError if the trial exceeded its memory limit too briefly for its supervisor to notice.
        """
        self.measured = replace(self.measured, memory=with_peaks(self.measured.memory, self.device))
        held, limit = self.measured.memory.host_bytes, self.spec.limits.memory_bytes
        if held is not None and limit is not None and held - mapped_data_bytes("self") > limit:
            raise HostLimitError(
                f"the steps used {held / 2**20:,.0f} MiB of host memory, more than the limit of "
                f"{limit / 2**20:,.0f} MiB"
            )
        self._has_all_steps = True
        self.save()

    def attempt(self, phase: str, action: Callable[[], None], *, needs_all_ranks: bool = True) -> None:
        """Run a phase after the steps; if it fails, record the reason and go on, because the steps are measured."""
        try:
            action()
        except (Exception, SystemExit) as error:  # a trainer may raise anything, and the steps are measured
            if needs_all_ranks and self.ranks.size > 1:  # the other ranks wait for this rank in a collective
                raise
            text = traceback_of(error)
            result_or_error(lambda: sys.stderr.write(text))
            self._note_missing(phase, f"{type(error).__name__}: {message_of(error)[:300]}")

    def _note_missing(self, phase: str, why: str) -> None:
        self.measured = replace(self.measured, not_measured={**self.measured.not_measured, phase: why})

    def measure_memory(self) -> None:
        unknown = "the memory of each part is unknown, because this system cannot reset the peak"
        for name, part in self._parts():
            is_peak_reset = reset_peak(self.device)
            part()
            if is_peak_reset:
                self._note_memory(name)
            else:
                self._note_missing("memory", unknown)
        self.measured = replace(self.measured, memory=job_memory(self.ranks.gathered(self.measured.memory)))

    def _note_memory(self, part: str) -> None:
        peak = peak_bytes(self.device)
        if peak is not None:
            memory = self.measured.memory
            peak = max(peak, memory.by_phase.get(part, 0))  # the largest of all micro-batches
            self.measured = replace(self.measured, memory=replace(memory, by_phase={**memory.by_phase, part: peak}))

    def count_flops(self) -> None:
        size, is_alone = self.spec.micro_batch_size, self.ranks.size == 1
        cost = count_step(self.trainer, _model(self.spec, "meta"), self.batch, size=size, is_alone=is_alone)
        cost = job_cost(self.ranks.gathered(cost))
        peak = self.ranks.peak(self.device, lambda: device_peak(self.device, self.spec.dtype))
        self.measured = replace(self.measured, cost=replace(cost, peak=peak.to_json() if peak else None))

    def account_privacy(self) -> None:
        """Compute epsilon; after the steps, because the PRV accountant may take hundreds of megabytes."""
        spec, declared = self.spec, self.measured.declared_privacy
        spent = declared_spent(spec.privacy, spec.batch_size, declared, is_builtin=spec.trainer in LABELS)
        self.measured = replace(self.measured, privacy=spent)

    def record_trace(self) -> None:
        held, limit = self.measured.memory.host_bytes, self.spec.limits.memory_bytes
        if held is not None and limit is not None and held * self.ranks.size > _MOST_BEFORE_A_TRACE * limit:
            why = f"left out, because the steps used {held / 2**20:,.0f} MiB of the limit of {limit / 2**20:,.0f} MiB"
            self._note_missing("trace", why)
            return
        if self.ranks.rank > 0:  # only rank 0 records a trace, but its step needs all ranks
            run_step(self._parts())
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])
        # With shapes, but without stacks, because with them a few steps took 4 GB.
        with profile(activities=activities, record_shapes=True) as profiler:
            run_step(self._parts())
        path = self.run_dir / "step.pt.trace.json.gz"
        profiler.export_chrome_trace(str(path))
        self.measured = replace(self.measured, trace=os.path.relpath(path, self.trial_dir.parent.parent))

    def write_scalars(self) -> None:
        """Write TensorBoard's files, if it is installed. The trainer may have changed steps.jsonl or its writer."""
        try:
            writer_class = require("torch.utils.tensorboard", "tensorboard").SummaryWriter
        except MissingDependencyError:
            return
        with writer_class(str(self.run_dir)) as writer:
            for index, row in enumerate(read_lines(self.trial_dir / STEPS)):
                writer.add_scalar(f"{row['phase']}/step_seconds", row["seconds"], index)
                writer.add_scalar(f"{row['phase']}/samples_per_s", self.spec.batch_size / row["seconds"], index)
            for part, peak in self.measured.memory.by_phase.items():
                writer.add_scalar(f"memory_mib/{part}", peak / 2**20, 0)
            cost = self.measured.cost
            if cost is not None and cost.model_flops is not None:
                writer.add_scalar("flops/model", cost.model_flops, 0)

    def save(self, *, is_done: bool = False) -> None:
        if self.ranks.rank == 0:
            facts = {"done": is_done, "steps_done": self._has_all_steps}
            content = {**facts, "measured": asdict(self.measured), "environment": self.environment}
            self._heartbeat.written(lambda: write_json(self.trial_dir / MEASURED, content))


def _model(spec: TrialSpec, device: str) -> nn.Module:
    model = load_model(spec.model, device=device)
    if spec.checkpointing:
        enable_checkpointing(model)
    return model


def choose_device(name: str) -> torch.device:
    """The device of this name; `auto` is the accelerator if there is one.

    If the trial was given a GPU that torch does not find, measuring the CPU instead would be misleading.
    """
    if name != "auto":
        return torch.device(name)
    found = find_device()
    if found.type == "cpu" and (gpus := os.environ.get(GPUS)):
        raise InputError(f"the trial has GPU {gpus}, but torch finds no GPU; use device=cpu to measure the CPU")
    return found


def timed_step(parts: list[StepPart], device: torch.device) -> dict[str, float]:
    """Run the parts in order; return the seconds of the whole step, and of forward, backward and optimizer.

    On an accelerator, the parts are timed with events, because synchronising between them would slow the step down.
    """
    if device.type == "cpu":
        marks = [monotonic_seconds()]
        for _, part in parts:
            part()
            marks.append(monotonic_seconds())
        whole, seconds = marks[-1] - marks[0], [after - before for before, after in pairwise(marks)]
    else:
        torch.accelerator.synchronize()
        events = [torch.Event(device.type, enable_timing=True) for _ in range(len(parts) + 1)]
        began = monotonic_seconds()
        events[0].record()
        for (_, part), event in zip(parts, events[1:], strict=True):
            part()
            event.record()
        torch.accelerator.synchronize()
        whole = monotonic_seconds() - began
        seconds = [first.elapsed_time(second) / 1000 for first, second in pairwise(events)]
    # Added up by name, because a step with micro-batches has several forward and backward passes.
    found = {"seconds": whole, **dict.fromkeys(PARTS, 0.0)}
    for (name, _), value in zip(parts, seconds, strict=True):
        found[name] += value
    return found


def reset_peak(device: torch.device) -> bool:
    """Reset the peak of this process's memory; return False if that is impossible, for example with a read-only /proc.

    On a CPU, writing 5 to /proc/self/clear_refs makes the kernel reset its high-water mark (proc(5)).
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    before = resident("self")
    try:
        CLEAR_REFS.write_text("5")
    except OSError:
        return False
    after = resident("self")
    # Some kernels accept the write to clear_refs, but do not reset the peak.
    is_ignored = before and after and after.peak - after.now > _LEAST_RESET_BYTES and after.peak >= before.peak
    return not is_ignored


def peak_bytes(device: torch.device) -> int | None:
    """Peak memory since `reset_peak`: that of tensors on CUDA, else this process's resident memory; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    memory = resident("self")
    return memory.peak if memory else None


def with_peaks(memory: MemoryUse, device: torch.device) -> MemoryUse:
    if device.type == "cuda":
        counts = torch.cuda.memory_stats(device)
        memory = replace(
            memory,
            allocated_bytes=torch.cuda.max_memory_allocated(device),
            reserved_bytes=torch.cuda.max_memory_reserved(device),
            alloc_retries=counts.get("num_alloc_retries", 0),
            device_bytes=torch.cuda.get_device_properties(device).total_memory,
        )
    return replace(memory, host_bytes=peak_bytes(torch.device("cpu")), host_method="high_water")


def device_peak(device: torch.device, dtype: str) -> Peak | None:
    """The peak FLOP/s by the datasheet; for a CPU without one, the FLOP/s of the fastest matmul measured on it."""
    compute = matmul_dtype(device.type, {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32))
    known = peak_flops(device, compute)
    return known or (measure_peak(device, compute) if device.type == "cpu" else None)


def describe_worker(device: torch.device) -> dict[str, Any]:
    state = git_state(os.getcwd())
    found = {
        **machine(),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "git": None if state is None else f"{state['commit'][:12]}{'+' if state['dirty'] else ''}",
    }
    if device.type == "cuda":
        found["device_name"] = torch.cuda.get_device_name(device)
        found["cuda"] = torch.version.cuda
        # `clock_rate` fails without nvidia-ml-py or a working driver.
        found["clock_mhz"], _ = result_or_error(lambda: torch.cuda.clock_rate(device))
    return {name: value for name, value in found.items() if value is not None}
