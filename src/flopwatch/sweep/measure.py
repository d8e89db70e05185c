"""What is measured in a trial, phase by phase."""

import json
import os
import random
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

from flopwatch.hardware import matmul_dtype, measure_peak, peak_flops
from flopwatch.models.load import load_model
from flopwatch.records import Peak
from flopwatch.sweep.assemble import MEASURED, STEPS
from flopwatch.sweep.heartbeat import Heartbeat
from flopwatch.sweep.step_cost import count_step
from flopwatch.sweep.trainers.batch import trial_batch
from flopwatch.sweep.trainers.checkpointing import enable_checkpointing
from flopwatch.sweep.trainers.load import load_trainer
from flopwatch.sweep.trainers.micro_batches import micro_batches
from flopwatch.sweep.trainers.protocol import Trainer, TrainerSettings
from flopwatch.sweep.training_step import StepPart, run_step, step_parts
from flopwatch.sweep.worker_clock import peak_bytes, reset_peak, status_bytes, timed_step
from flopwatch.sweep.worker_environment import describe_worker
from flopwatch.sweep.worker_outputs import write_scalars, write_trace
from flopwatch.trial_files import write_json
from flopwatch.trial_records import Measured, MemoryUse, TrialSpec


def measure_trial(trial_dir: Path, spec: TrialSpec, heartbeat: Heartbeat) -> None:
    """All phases of one trial; everything known so far is in `measured.json` at any moment."""
    trial = _TrialRun(trial_dir, spec, heartbeat)
    trial.build()
    with (trial_dir / STEPS).open("w", buffering=1) as rows:
        trial.run_steps("warmup", spec.warmup_steps, rows)
        trial.run_steps("measure", spec.steps, rows)
    trial.measure_memory()
    trial.count_flops()
    if spec.trace:
        trial.record_trace()
    trial.save(is_done=True)


class _TrialRun:
    def __init__(self, trial_dir: Path, spec: TrialSpec, heartbeat: Heartbeat) -> None:
        self.trial_dir, self.spec, self._heartbeat = trial_dir, spec, heartbeat
        self.run_dir = trial_dir.parent.parent / "runs" / trial_dir.name
        self.device = _device(spec.device)
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        self.measured = Measured(memory=MemoryUse(baseline_bytes=status_bytes("VmRSS")))
        self.environment = describe_worker(self.device)
        self.trainer: Trainer
        self.batch: Mapping[str, Any]
        self._batches: list[Mapping[str, Any]]

    def build(self) -> None:
        self._heartbeat.beat("build")
        reset_peak(self.device)
        random.seed(self.spec.seed)
        torch.manual_seed(self.spec.seed)
        model = _model(self.spec, str(self.device))
        parameters = sum(parameter.numel() for parameter in model.parameters())
        spec = self.spec
        self.batch = trial_batch(model, spec.batch_size, spec.seq_len, spec.seed, self.device, spec.batch)
        self._batches = micro_batches(self.batch, spec.micro_batch_size)
        settings = TrainerSettings(spec.batch_size, self.device, spec.dtype, spec.options, spec.micro_batch_size)
        self.trainer = load_trainer(self.spec.trainer)(model, settings)
        self._note_memory("build")
        self.measured = replace(self.measured, parameters=parameters, extra=_positions(self.batch))
        self.save()

    def run_steps(self, phase: str, count: int, rows: TextIO) -> None:
        for step in range(count):
            self._heartbeat.beat(phase, step)
            seconds = timed_step(self._parts(), self.device)
            rows.write(json.dumps({"phase": phase, "step": step, **seconds}) + "\n")

    def _parts(self) -> list[StepPart]:
        return step_parts(self.trainer, self._batches)

    def measure_memory(self) -> None:
        """One step more, with the peak set back before each part; the whole run's peak is read first."""
        self._heartbeat.beat("memory")
        self.measured = replace(self.measured, memory=_whole_run(self.measured.memory, self.device))
        for name, part in self._parts():
            reset_peak(self.device)
            part()
            self._note_memory(name)
        memory = self.measured.memory
        if self.device.type == "cpu" and memory.rss_bytes is not None:  # this was a step like the others
            memory = replace(memory, rss_bytes=max([memory.rss_bytes, *memory.by_phase.values()]))
            self.measured = replace(self.measured, memory=memory)
        self.save()

    def _note_memory(self, part: str) -> None:
        peak = peak_bytes(self.device)
        if peak is not None:
            memory = self.measured.memory
            peak = max(peak, memory.by_phase.get(part, 0))  # a batch in micro-batches has several of each part
            self.measured = replace(self.measured, memory=replace(memory, by_phase={**memory.by_phase, part: peak}))

    def count_flops(self) -> None:
        self._heartbeat.beat("flops")
        size = self.spec.micro_batch_size
        cost = count_step(self.trainer, _model(self.spec, "meta"), self.batch, micro_batch_size=size)
        peak = _peak(self.device, self.spec.dtype)
        self.measured = replace(self.measured, cost=replace(cost, peak=peak.to_json() if peak else None))
        self.save()

    def record_trace(self) -> None:
        self._heartbeat.beat("trace")
        path = write_trace(self.run_dir, lambda: run_step(self._parts()), self.device)
        self.measured = replace(self.measured, trace=os.path.relpath(path, self.trial_dir.parent.parent))
        self.save()

    def save(self, *, is_done: bool = False) -> None:
        if is_done:
            write_scalars(self.run_dir, self.trial_dir, self.spec, self.measured)
        content = {"done": is_done, "measured": asdict(self.measured), "environment": self.environment}
        write_json(self.trial_dir / MEASURED, content)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    return torch.device(name)


def _model(spec: TrialSpec, device: str) -> nn.Module:
    model = load_model(spec.model, device=device)
    if spec.checkpointing:
        enable_checkpointing(model)
    return model


def _positions(batch: Mapping[str, Any]) -> dict[str, float]:
    ids = batch.get("input_ids")
    return {"positions_per_step": float(ids.numel())} if isinstance(ids, torch.Tensor) else {}


def _whole_run(memory: MemoryUse, device: torch.device) -> MemoryUse:
    if device.type == "cuda":
        counts = torch.cuda.memory_stats(device)
        memory = replace(
            memory,
            allocated_bytes=torch.cuda.max_memory_allocated(device),
            reserved_bytes=torch.cuda.max_memory_reserved(device),
            alloc_retries=counts.get("num_alloc_retries", 0),
            device_bytes=torch.cuda.get_device_properties(device).total_memory,
        )
    return replace(memory, rss_bytes=status_bytes("VmHWM"))


def _peak(device: torch.device, dtype: str) -> Peak | None:
    """The datasheet's; a CPU has none, so the best matmul seen on it is taken (and its kind says so)."""
    compute = matmul_dtype(device.type, {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32))
    known = peak_flops(device, compute)
    return known or (measure_peak(device, compute) if device.type == "cpu" else None)
